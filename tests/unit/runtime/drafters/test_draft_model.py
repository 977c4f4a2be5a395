"""What a draft model keeps: of a tree, and of a prefix where its layers are recurrent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.runtime.drafters.draft_model import DraftModelDrafter


@pytest.mark.parametrize(("length", "kept"), [(3, True), (4, True), (5, False), (0, False)])
def test_a_state_is_kept_up_to_the_row_that_needs_no_token_after_it(
    length: int, *, kept: bool
) -> None:
    decoder = SimpleNamespace(
        recurrent=True,
        lanes=[SimpleNamespace(length=length)],
        snapshot=lambda lane, count: ("rows", count),
    )
    drafter: Any = SimpleNamespace(decoder=decoder)
    state: Any = DraftModelDrafter.snapshot(drafter, 0, 3)
    assert (state is not None) == kept
    if kept:
        assert state.rows == ("rows", length)


def test_the_row_of_a_pending_token_is_not_kept() -> None:
    """The call that reads the token anew gives the logits behind it."""
    kept: list[list[int]] = []
    drafter: Any = SimpleNamespace(
        state=lambda lane: SimpleNamespace(rows=[(-1, 7), (0, 8), (1, 9)]),
        decoder=SimpleNamespace(commit=lambda lane, path: kept.append(path.tolist())),
        forget_tree=lambda lane: None,
    )
    DraftModelDrafter.keep_accepted(drafter, 0, [7, 8, 9])
    assert kept == [[0, 1]]
