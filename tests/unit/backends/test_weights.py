"""What an engine says of its weights."""

from __future__ import annotations

import pytest
from edgespec.backends.weights import FP32, WeightFormat, are_few_bits


@pytest.mark.parametrize(
    ("weights", "few"),
    [
        (FP32.to_dict(), False),
        (WeightFormat("int4").to_dict(), True),
        (WeightFormat("int8", 0).to_dict(), True),
        ({"scheme": "int8_sq", "method": "as exported", "compute": "int8", "exact": True}, True),
        ({"scheme": "int4_awq", "method": "as exported", "block": 128}, True),
        (
            {
                "scheme": "fp8",
                "method": "as exported",
                "compute": "float32",
                "emulated": "emulated",
            },
            False,
        ),
        ({"scheme": "fp8, int8_sq", "method": "as exported", "compute": "float32, int8"}, False),
    ],
)
def test_huge_pages_are_for_weights_of_few_bits(weights: dict[str, object], few: bool) -> None:
    assert are_few_bits(weights) is few
