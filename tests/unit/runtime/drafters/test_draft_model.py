"""What a draft model with recurrent layers keeps of a prefix: the whole state or nothing."""

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
