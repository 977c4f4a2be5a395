"""Claims about the tensors of quantized image encoders: the settings of other tools name modules as
their version of transformers does, and name Linears alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.layouts import rule_at
from edgespec.checkpoint.vision import vision_quantization
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError
from edgespec.graphs.completeness import check_complete
from edgespec.progress import Silent
from edgespec.quantize import modelopt
from edgespec.quantize.llm import Options, quantize_llm
from tests import shared
from tests.toys.vision import write_vlm

PREFIXES = {"qwen2_5_vl": "visual.", "qwen3_vl": "model.visual."}
families = pytest.mark.parametrize("family", PREFIXES)
Names = list[str]


@pytest.fixture
def rewritten(tmp_path: Path) -> Callable[[str, Callable[[Names], Names]], Checkpoint]:
    """A checkpoint whose encoder is quantized but for its attn.proj, with other exclusion lists."""

    def make(family: str, change: Callable[[Names], Names]) -> Checkpoint:
        path = Path(
            shutil.copytree(shared.made_once(("excluded", family), write(family)), tmp_path / "fp8")
        )
        for name, section, key in (
            ("hf_quant_config.json", "quantization", "exclude_modules"),
            ("config.json", "quantization_config", "ignore"),
        ):
            raw = json.loads((path / name).read_text())
            raw[section][key] = change(raw[section][key])
            (path / name).write_text(json.dumps(raw))
        return open_checkpoint(str(path))

    return make


def write(family: str) -> Callable[[Path], object]:
    def make(path: Path) -> None:
        base = shared.made_once(("vlm", family), lambda path: write_vlm(path, family))
        options = Options(None, visual_quantization="fp8", exclude=("*.attn.proj",))
        quantize_llm(str(base), path, options, Silent(), modelopt.Log())

    return make


def schemes(checkpoint: Checkpoint, prefix: str) -> dict[str, str | None]:
    """The scheme of each Linear of the first layer, by its name without the prefix."""
    model = detect(checkpoint)
    assert isinstance(model, ModelConfig)
    check_complete(checkpoint, model)
    assert model.vision is not None
    found = vision_quantization(checkpoint, model.vision)
    assert found is not None
    rules = {n: rule_at(checkpoint, found, f"{prefix}blocks.0.attn.{n}") for n in ("qkv", "proj")}
    return {name: rule and rule.scheme.name for name, rule in rules.items()}


@families
def test_exclusions_may_name_modules_as_another_transformers_does(
    family: str, rewritten: Callable[[str, Callable[[Names], Names]], Checkpoint]
) -> None:
    prefix = PREFIXES[family]
    other = next(p for p in PREFIXES.values() if p != prefix)

    def change(names: Names) -> Names:
        assert f"{prefix}blocks.0.attn.proj" in names
        return [f"{other}{n.removeprefix(prefix)}" if n.startswith(prefix) else n for n in names]

    assert schemes(rewritten(family, change), prefix) == {"qkv": "fp8", "proj": None}


@families
def test_exclusions_need_not_name_embeddings(
    family: str, rewritten: Callable[[str, Callable[[Names], Names]], Checkpoint]
) -> None:
    found = rewritten(family, lambda names: [n for n in names if "_embed" not in n])
    assert schemes(found, PREFIXES[family]) == {"qkv": "fp8", "proj": None}


def test_a_linear_that_no_exclusion_names_is_missed(
    rewritten: Callable[[str, Callable[[Names], Names]], Checkpoint],
) -> None:
    found = rewritten("qwen3_vl", lambda names: [n for n in names if "attn.proj" not in n])
    with pytest.raises(CheckpointError, match=r"declares model\.visual\.blocks\.0\.attn\.proj as"):
        schemes(found, "model.visual.")
