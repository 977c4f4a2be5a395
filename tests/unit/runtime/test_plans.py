"""Claims about runtime/plans.py: what is chosen fits what engines were built for, and remedies can
be followed."""

from __future__ import annotations

import pytest

from edgespec.backends.ort.backend import BACKEND
from edgespec.errors import LimitError
from edgespec.runtime.drafters.mtp import HeadLimits
from edgespec.runtime.plans import TreeLimits
from edgespec.runtime.tree import DraftPlan

HINTS = BACKEND.plan_hints


@pytest.mark.parametrize(
    ("verified", "plan"), [(1, (1, 1, 1)), (2, (1, 1, 2)), (3, (1, 2, 3)), (60, (1, 3, 4))]
)
def test_a_chosen_chain_drafts_no_more_than_is_verified(
    verified: int, plan: tuple[int, int, int]
) -> None:
    assert TreeLimits(verified, 60, 1000).plan(None, None, None, HINTS) == DraftPlan(*plan)


def test_a_head_s_remedy_is_no_tree() -> None:
    with pytest.raises(LimitError) as found:
        HeadLimits(60, 60, 1000).plan(1, 3, 7, HINTS)
    assert found.value.remedy == "Lower it to 4, or raise --spec-draft-step to 6."
    with pytest.raises(LimitError, match="raise top-k or step"):
        TreeLimits(60, 60, 1000).plan(1, 3, 7, HINTS)
