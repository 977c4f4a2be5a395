"""Claims about backends/engine_dir.py: which base and draft belong together, by what their exports
recorded."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.backends.engine_dir import check_pairing
from edgespec.contract import Role
from edgespec.errors import PairingError

BASE: dict[str, Any] = {
    "num_hidden_layers": 8,
    "vocab_size": 64,
    "hidden_size": 16,
    "graph": {"features": 48},
    "spec_decode_type": "eagle3",
    "eagle_hidden_state_layers": [2, 4, 5],
}
PAIR: dict[str, Any] = {
    "target_hidden_size": 16,
    "own_embedding": False,
    "tap_ids": [2, 4, 5],
    "num_taps": 3,
}
DRAFT: dict[str, Any] = {
    "spec_decode_type": "eagle3",
    "vocab_size": 64,
    "hidden_size": 16,
    "graph": {"base_features": 48},
}


def check(base: dict[str, Any], pair: dict[str, Any]) -> None:
    check_pairing(BASE | base, DRAFT | {"pair": PAIR | pair})


@pytest.mark.parametrize(
    "base", [{}, {"quantized_from": "original"}, {"quantized_from": "another"}]
)
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
        check(
            {"identity": "nvfp4", "quantized_from": "original"}, {"base_identity": "fp8"} | origin
        )


MTP_BASE = {key: value for key, value in BASE.items() if key != "eagle_hidden_state_layers"} | {
    "spec_decode_type": "mtp",
    "identity": "a",
    "graph": {"features": 16},
}
MTP_PAIR = PAIR | {"tap_ids": None, "num_taps": 1, "base_identity": "a"}
MTP = DRAFT | {"spec_decode_type": "mtp", "graph": {"base_features": 16}, "pair": MTP_PAIR}


def test_head_and_its_base_are_a_pair() -> None:
    check_pairing(MTP_BASE, MTP)


def test_head_of_another_base_is_refused() -> None:
    for built in (None, Role.BASE, Role.DRAFT):
        with pytest.raises(PairingError, match="different checkpoints") as found:
            check_pairing(MTP_BASE | {"identity": "b"}, MTP, built)
        assert "--base-model-dir" not in found.value.remedy  # which an export with --mtp refuses
        assert "--mtp" in found.value.remedy
        assert "another engine directory" in found.value.remedy


def test_only_a_draft_that_is_being_built_can_be_exported_for_the_other_base() -> None:
    pair, base = DRAFT | {"pair": PAIR | {"base_identity": "a"}}, BASE | {"identity": "b"}
    with pytest.raises(PairingError, match="the one in this engine directory") as found:
        check_pairing(base, pair, Role.DRAFT)
    assert found.value.remedy.startswith("Export the draft again with --base-model-dir")
    with pytest.raises(PairingError, match="than this one") as found:
        check_pairing(base, pair, Role.BASE)
    assert found.value.remedy.startswith("Use another engine directory for this base")


def test_every_refusal_of_a_pair_names_another_directory() -> None:
    base, pair = BASE | {"identity": "a"}, PAIR | {"base_identity": "a"}
    wrong: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (base | {"vocab_size": 65}, pair),
        (base | {"hidden_size": 17}, pair),
        (base | {"eagle_hidden_state_layers": [1, 4, 5]}, pair),
        (base | {"graph": {"features": 32}}, pair),
        (base, pair | {"base_identity": "b"}),
        (MTP_BASE, pair),
    ]
    for built in (None, Role.BASE, Role.DRAFT):
        for one, its in wrong:
            with pytest.raises(PairingError) as found:
                check_pairing(one, DRAFT | {"pair": its}, built)
            assert "se another engine directory" in found.value.remedy


def test_base_of_another_kind_is_refused_with_the_flag_that_would_fit() -> None:
    eagle = {"pair": PAIR | {"base_identity": "a"}}
    with pytest.raises(
        PairingError, match="an EAGLE-3 draft, the base was exported for an MTP head"
    ) as found:
        check_pairing(MTP_BASE, DRAFT | eagle)
    assert "--eagle-base" in found.value.remedy
    with pytest.raises(PairingError) as found:
        check_pairing(MTP_BASE, DRAFT | eagle, Role.BASE)
    assert found.value.remedy.startswith("Use another engine directory for this base")
    with pytest.raises(
        PairingError, match="an MTP head, the base was exported for an EAGLE-3 draft"
    ) as found:
        check_pairing(BASE | {"identity": "a"}, MTP)
    assert "--mtp" in found.value.remedy
