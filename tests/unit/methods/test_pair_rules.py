"""Whether a base and a draft fit: each size and each identity that must agree, by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgespec.methods import METHODS
from edgespec.methods.pair_rules import COMMON, mismatches
from edgespec.methods.sides import PLAIN_METHOD, BaseSide, DraftSide

METHOD = next(iter(METHODS))
BASE = BaseSide(vocab_size=100, hidden_size=64, num_layers=8)
DRAFT = DraftSide(
    method=METHOD,
    vocab_size=100,
    draft_vocab_size=40,
    hidden_size=64,
    target_hidden_size=64,
    num_aux_layers=3,
    aux_layer_ids=(2, 4, 8),
    own_embedding=False,
)


def topics(base: BaseSide, draft: DraftSide) -> list[str]:
    return [found.topic for rule in COMMON for found in rule(base, draft)]


def test_a_pair_that_fits_has_no_mismatch() -> None:
    assert list(mismatches(BASE, DRAFT)) == []


@pytest.mark.parametrize(
    ("changes", "topic"),
    [
        ({"vocab_size": 99}, "vocabulary"),
        ({"vocab_size": 101}, "vocabulary"),
        ({"target_hidden_size": 65}, "hidden size"),
        ({"hidden_size": 32}, "embedding"),
        ({"own_head": False}, "head"),
        ({"num_target_layers": 7}, "depth"),
        ({"aux_layer_ids": (2, 4, 9)}, "aux layers"),
        ({"aux_layer_ids": (0, 4, 8)}, "aux layers"),
        ({"mask_token_id": 100}, "mask token"),
        ({"mask_token_id": -1}, "mask token"),
    ],
)
def test_what_does_not_agree_is_told_by_its_topic(changes: dict[str, Any], topic: str) -> None:
    assert topics(BASE, replace(DRAFT, **changes)) == [topic]


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 32, "own_embedding": True},
        {"own_head": False, "draft_vocab_size": 100},
        {"num_target_layers": 8},
        {"mask_token_id": 99},
        {"mask_token_id": 0},
        {"aux_layer_ids": (1, 8)},
    ],
)
def test_what_a_draft_may_have_of_its_own_is_no_mismatch(changes: dict[str, Any]) -> None:
    assert topics(BASE, replace(DRAFT, **changes)) == []


@pytest.mark.parametrize(
    ("of_base", "of_draft", "fits"),
    [
        ({"identity": "a"}, {"base_identity": "a"}, True),
        ({"identity": "a"}, {}, True),
        ({}, {"base_identity": "a"}, True),
        ({"identity": "a"}, {"base_identity": "b"}, False),
        ({"identity": "q", "origin": "a"}, {"base_identity": "a"}, True),
        ({"identity": "q", "origin": "a"}, {"base_identity": "b", "base_origin": "a"}, True),
        ({"identity": "q", "origin": "b"}, {"base_identity": "a"}, False),
    ],
)
def test_a_draft_belongs_to_the_weights_it_was_exported_for_or_to_their_origin(
    of_base: dict[str, Any], of_draft: dict[str, Any], fits: bool
) -> None:
    found = topics(replace(BASE, **of_base), replace(DRAFT, **of_draft))
    assert found == ([] if fits else ["identity"])


def test_a_base_that_was_exported_for_another_method_is_refused() -> None:
    other = next(name for name in METHODS if name != METHOD)
    for method in (PLAIN_METHOD, other):
        assert topics(replace(BASE, method=method), DRAFT) == ["method"]
    assert topics(replace(BASE, method=METHOD), DRAFT) == []
