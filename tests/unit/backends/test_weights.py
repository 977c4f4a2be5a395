"""What an engine's config says of its weights: backends/engine_config.py and ort/options.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.engine_config import (
    FP32_WEIGHTS,
    EngineConfig,
    EngineFields,
    EngineWeights,
)
from edgespec.backends.ort.options import WeightFormat

CONFIG = Path(__file__).parents[2] / "golden" / "engines_base_config.json"
KEPT = {"method": "as exported"}
FORMATS = [WeightFormat(), *(WeightFormat("int4", b) for b in (32, 128)), WeightFormat("int8", 0)]


def read(keys: dict[str, Any]) -> EngineWeights:
    return EngineWeights.read(EngineFields(keys, "config.json"))


@pytest.mark.parametrize(
    ("weights", "low_bit"),
    [
        (FP32_WEIGHTS, False),
        (WeightFormat("int4").weights, True),
        (WeightFormat("int8", 0).weights, True),
        (read({"scheme": "int8_sq", "compute": "int8", "exact": True} | KEPT), True),
        (read({"scheme": "int4_awq", "block": 128} | KEPT), True),
        (read({"scheme": "fp8", "compute": "float32", "emulated": "emulated"} | KEPT), False),
        (read({"scheme": "fp8, int8_sq", "compute": "float32, int8"} | KEPT), False),
    ],
)
def test_low_bit_weights_are_those_that_kernels_read_quantized(
    weights: EngineWeights, low_bit: bool
) -> None:
    assert weights.is_low_bit is low_bit


@pytest.mark.parametrize("weights", [found.weights for found in FORMATS])
def test_weights_are_written_as_they_were_read(weights: EngineWeights) -> None:
    assert read(weights.to_dict()) == weights


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"scheme": "fp32"}, None),
        ({"scheme": "int4", "block": 32}, None),
        ({"scheme": "int4", "block": 128}, "its weights are int4 in blocks of 128"),
        ({"scheme": "int4_wo", "block": 64}, "its weights are int4_wo in blocks of 64"),
        ({"scheme": "int8", "compute": "int8", "exact": True}, None),
        ({"scheme": "int8_sq", "compute": "int8"}, "its weights are int8_sq"),
        ({"scheme": "fp8", "emulated": "emulated"}, "its fp8 is emulated"),
    ],
)
def test_engines_of_earlier_versions_are_exact_where_their_kernels_are(
    keys: dict[str, Any], why: str | None
) -> None:
    """They say `exact` only for an int8 GEMM."""
    assert read(keys | KEPT).why_not_exact == why


def test_a_backend_whose_float32_is_not_exact_says_so_on_disk() -> None:
    weights = EngineWeights(scheme="fp32", method="as exported", exact=False)
    assert weights.to_dict()["exact"] is False
    assert read(weights.to_dict()).why_not_exact == "its weights are fp32"


@pytest.mark.parametrize("weights", [WeightFormat("int4", 32).weights, FP32_WEIGHTS])
def test_an_engine_for_several_sequences_is_not_exact_whatever_its_weights(
    weights: EngineWeights,
) -> None:
    raw = json.loads(CONFIG.read_text()) | {"weights": weights.to_dict()}
    assert EngineConfig.from_dict(raw, "config.json").why_not_exact is None
    raw["builder_config"]["max_batch_size"] = 2
    found = EngineConfig.from_dict(raw, "config.json").why_not_exact
    assert found == "it was built for 2 sequences"
