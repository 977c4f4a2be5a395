"""`quantize draft` of a DSpark draft rounds its layers, and leaves its heads, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends.build import build
from edgespec.checkpoint.block_draft import named_as_ours
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from edgespec.methods.dspark import DSparkConfig
from edgespec.quantize import draft, modelopt
from edgespec.quantize.llm import Options
from tests import toys
from tests.unit.quantize.test_llm import HIDDEN, INNER, VOCAB, Told

LIMITS = Limits(
    max_input_len=32, max_kv_cache_capacity=64, max_verify_tree_size=8, max_draft_tree_size=8
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair") / "base"
    return toys.make_base(path, "qwen3", layers=6, hidden=HIDDEN, intermediate=INNER, vocab=VOCAB)


def config_of(path: Path) -> tuple[Checkpoint, DSparkConfig]:
    checkpoint = Checkpoint(path)
    config = detect(checkpoint)
    assert isinstance(config, DSparkConfig)
    return named_as_ours(checkpoint, config), config


@pytest.mark.usefixtures("needs_modelopt")
@pytest.mark.parametrize(
    ("quantization", "keys"),
    [
        ("fp8", {"layout": "deepspec"}),
        pytest.param("mxfp8", {"layout": "deepspec", "kind": "gated"}, marks=pytest.mark.deep),
        ("int4_awq", {"layout": "specforge", "kind": "rnn", "contained": True}),
        pytest.param("fp8", {"layout": "modelopt"}, marks=pytest.mark.deep),
        ("int8_sq", {"layout": "speculators", "draft_vocab": 96}),
    ],
    ids=str,
)
def test_layers_are_rounded_and_heads_are_not(
    base: Path, tmp_path: Path, quantization: str, keys: dict[str, Any]
) -> None:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": INNER, "block_size": 7}
    path, out = toys.make_dspark(tmp_path / "draft", base, **(sizes | keys)), tmp_path / "out"
    options = Options(quantization, num_samples=2, calib_seq_len=32)
    draft.quantize_draft(str(base), str(path), out, options, Told(), modelopt.Log())
    (before, config), (after, found) = config_of(path), config_of(out)
    assert (found.heads, found.block_size) == (config.heads, 7)
    for name in config.head_shapes:
        np.testing.assert_array_equal(before.read(name), after.read(name))
    quantized = read_quantization(after)
    assert quantized is not None
    rounded = [name for name in before.tensors if name.endswith("_proj.weight")]
    rounded = [name for name in rounded if name not in config.head_shapes]
    assert len(rounded) == 2 * 7
    for name in rounded:
        weight = read_weight(after, quantized, name.removesuffix(".weight"))
        assert weight is not None
        assert weight.scheme.name == quantization
    said = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    if "exclude_modules" in said:
        assert {"fc", "markov_head.markov_w2"} <= set(said["exclude_modules"])
    done = export(str(out), tmp_path, ExportOptions(base_model_dir=str(base)))
    assert build(done.directory, tmp_path / "engine", LIMITS).golden_cosine is not None
