"""Pairs of which the base, the draft or both were quantised, each by itself: quantize -> export ->
build -> infer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts import file_names
from edgespec.cli.main import run
from edgespec.quantization.schemes import MADE
from tests import toys

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("needs_modelopt")]
TAPPED = ["--eagle-base", "--aux-layers", "1,2,3"]
SIZES = ["--num-samples", "2", "--calib-seq-len", "32"]
REQUESTS = {
    "temperature": 0.0,
    "max_generate_length": 16,
    "logit_bias": {"0": -100, "2": -100},
    "requests": [
        {"messages": [{"role": "user", "content": "one two three"}]},
        {"messages": [{"role": "user", "content": "the mill"}], "temperature": 0.8, "seed": 3},
    ],
}


class Shop:
    """A toy pair, its quantised forms and their exports, each made when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        sizes = {"hidden": 128, "intermediate": 256, "heads": 2, "head_dim": 64}
        base = toys.make_base(
            path / "base", "qwen3", layers=4, kv_heads=1, dtype="bfloat16", **sizes
        )
        toys.make_draft(path / "draft", base, "specforge", aux_layers=(1, 2, 3), dtype="bfloat16")

    def checkpoint(self, role: str, scheme: str) -> Path:
        """The checkpoint itself, or what quantize made of it with the original pair at hand."""
        out = self.path / (role if scheme == "plain" else f"{role}_{scheme}")
        if not out.exists():
            models = ["--model-dir" if role == "base" else "--draft-model-dir", self.path / role]
            verb = ["llm"] if role == "base" else ["draft", "--base-model-dir", self.path / "base"]
            call("quantize", *verb, *models, "--quantization", scheme, "--output-dir", out, *SIZES)
        return out

    def exported(self, role: str, scheme: str, made_for: str = "plain") -> Path:
        """A quantised draft finds its base by itself: its config.json names the directory."""
        out = self.path / "onnx" / f"{role}_{scheme}_{made_for}"
        if not out.exists():
            named = role == "draft" and (scheme, made_for) != ("fp8", "plain")
            base = ["--base-model-dir", self.checkpoint("base", made_for)] if named else []
            call(
                "export", self.checkpoint(role, scheme), out, *(TAPPED if role == "base" else base)
            )
        return out / "llm"


def call(*args: object) -> None:
    assert run([str(arg) for arg in args]) == 0


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("pairs"))


def answered(tmp_path: Path, base: Path, draft: Path) -> dict[str, object]:
    """Build both, the draft first, and answer with drafts; the summary of infer
    --check-lossless."""
    assert config(draft)["pair"]["base_identity"] is not None  # or shapes alone would decide
    asked, told = tmp_path / "input.json", tmp_path / "output.json"
    tmp_path.mkdir(exist_ok=True)
    asked.write_text(json.dumps(REQUESTS))
    for component in (draft, base):
        call(
            "build",
            "--onnx-dir",
            component,
            "--engine-dir",
            tmp_path / "engines",
            "--max-kv-cache-capacity",
            128,
            "--max-input-len",
            96,
        )
    call(
        "infer",
        "--engine-dir",
        tmp_path / "engines",
        "--input-file",
        asked,
        "--output-file",
        told,
        "--spec-decode",
        "--check-lossless",
        "--json",
    )
    found: dict[str, object] = json.loads(told.read_text())
    return found


def config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / file_names.CONFIG).read_text())
    return found


@pytest.mark.parametrize(
    ("base", "draft"),
    [
        ("plain", "fp8"),
        ("nvfp4", "fp8"),
        # Each scheme alone goes the same way in tests/parity
        *(pytest.param(scheme, scheme, marks=pytest.mark.deep) for scheme in MADE),
    ],
)
def test_any_mixture_of_plain_and_quantised_is_a_pair(
    shop: Shop, tmp_path: Path, base: str, draft: str
) -> None:
    found = answered(tmp_path, shop.exported("base", base), shop.exported("draft", draft))
    responses = found["responses"]
    assert isinstance(responses, list)
    assert [len(r["output_ids"]) for r in responses] == [16, 16]
    assert all(r["metrics"]["speculative_decoding"]["num_spec_steps"] > 0 for r in responses)


def test_a_draft_exported_for_a_quantised_base_goes_with_the_original_and_with_another_format(
    shop: Shop, tmp_path: Path
) -> None:
    draft = shop.exported("draft", "plain", made_for="fp8")
    assert (
        config(draft)["pair"]["base_quantized_from"]
        == config(shop.exported("base", "plain"))["identity"]
    )
    for scheme in ("plain", "fp8", "mxfp8"):
        answered(tmp_path / scheme, shop.exported("base", scheme), draft)


def test_the_quantised_base_records_its_original_beside_its_own_identity(shop: Shop) -> None:
    plain, quantised = config(shop.exported("base", "plain")), config(shop.exported("base", "fp8"))
    assert "quantized_from" not in plain
    assert quantised["quantized_from"] == plain["identity"] != quantised["identity"]


def test_another_base_is_refused_even_with_a_manifest_copied_beside_it(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden": 128, "intermediate": 256, "heads": 2, "head_dim": 64}
    other = toys.make_base(
        tmp_path / "other", "qwen3", layers=4, kv_heads=1, dtype="bfloat16", seed=9, **sizes
    )
    shutil.copy(shop.checkpoint("base", "fp8") / file_names.MANIFEST, other)
    call("export", other, tmp_path / "onnx", *TAPPED)
    assert "so it is not known what these weights were quantized from" in capsys.readouterr().out
    assert "quantized_from" not in config(tmp_path / "onnx" / "llm")
    limits = ["--max-kv-cache-capacity", 128, "--max-input-len", 96]
    call(
        "build",
        "--onnx-dir",
        tmp_path / "onnx" / "llm",
        "--engine-dir",
        tmp_path / "engines",
        *limits,
    )
    line = [
        "build",
        "--onnx-dir",
        shop.exported("draft", "plain"),
        "--engine-dir",
        tmp_path / "engines",
        *limits,
    ]
    assert run([str(arg) for arg in line]) == 3
    assert "another base checkpoint" in capsys.readouterr().err


def test_a_manifest_that_comes_later_makes_another_export(shop: Shop, tmp_path: Path) -> None:
    quantised = Path(shutil.copytree(shop.checkpoint("base", "fp8"), tmp_path / "fp8"))
    (quantised / file_names.MANIFEST).unlink()
    call("export", quantised, tmp_path / "onnx", *TAPPED, "--no-golden")
    assert "quantized_from" not in config(tmp_path / "onnx" / "llm")
    shutil.copy(shop.checkpoint("base", "fp8") / file_names.MANIFEST, quantised)
    line = ["export", str(quantised), str(tmp_path / "onnx"), *TAPPED, "--no-golden"]
    assert run(line) == 3  # the checkpoint has changed
