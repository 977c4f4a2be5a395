"""Claims about backends/engine_dir.py: which base and draft belong together, by what their exports recorded."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.backends.engine_dir import check_pairing
from edgespec.errors import PairingError

BASE: dict[str, Any] = {"num_hidden_layers": 8, "vocab_size": 64, "hidden_size": 16, "graph": {"features": 48},
                        "eagle_hidden_state_layers": [2, 4, 5]}  # fmt: skip
PAIR: dict[str, Any] = {"target_hidden_size": 16, "own_embedding": False, "tap_ids": [2, 4, 5], "num_taps": 3}
DRAFT: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "graph": {"base_features": 48}}


def check(base: dict[str, Any], pair: dict[str, Any]) -> None:
    check_pairing(BASE | base, DRAFT | {"pair": PAIR | pair})


@pytest.mark.parametrize("base", [{}, {"quantized_from": "original"}, {"quantized_from": "another"}])
@pytest.mark.parametrize("pair", [{}, {"base_quantized_from": "original"}])
def test_the_base_that_a_draft_was_exported_for_is_its_own_whatever_is_known_of_origins(
    base: dict[str, Any], pair: dict[str, Any]
) -> None:
    check({"identity": "fp8"} | base, {"base_identity": "fp8"} | pair)


@pytest.mark.parametrize(
    ("base", "pair"),
    [
        ({"identity": "nvfp4", "quantized_from": "original"}, {"base_identity": "original"}),
        ({"identity": "original"}, {"base_identity": "fp8", "base_quantized_from": "original"}),
        ({"identity": "any"}, {"base_identity": None}),
    ],
)
def test_other_weights_of_one_origin_are_a_pair(base: dict[str, Any], pair: dict[str, Any]) -> None:
    check(base, pair)


@pytest.mark.parametrize("origin", [{}, {"base_quantized_from": "third"}])
def test_another_base_is_refused(origin: dict[str, Any]) -> None:
    with pytest.raises(PairingError, match="another base checkpoint"):
        check({"identity": "nvfp4", "quantized_from": "original"}, {"base_identity": "fp8"} | origin)
