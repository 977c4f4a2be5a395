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


@pytest.mark.parametrize("verify_size", [1, 2, 5])
def test_a_verify_size_alone_makes_a_chain_of_at_least_one_level(verify_size: int) -> None:
    """One node is the root alone: nothing is drafted, and the plan is still one."""
    plan = TreeLimits(60, 60, 1000).plan(None, None, verify_size, HINTS)
    steps = HINTS.steps if verify_size == 1 else verify_size - 1
    assert plan == DraftPlan(1, steps, verify_size)


LIMITS = TreeLimits(max_verify_tree_size=10, max_draft_tree_size=12, draft_vocab_size=6)


@pytest.mark.parametrize(
    ("fits", "exceeds", "said"),
    [
        (DraftPlan(3, 3, 10), DraftPlan(3, 3, 11), "--max-verify-tree-size 11"),
        (DraftPlan(3, 4, 10), DraftPlan(3, 5, 10), "--max-draft-tree-size 15"),
        (DraftPlan(6, 2, 10), DraftPlan(7, 1, 8), "vocabulary"),
        (DraftPlan(2, 2, 7), DraftPlan(2, 2, 8), "only 7 nodes can exist"),
        (DraftPlan(1, 1, 1), DraftPlan(1, 0, 1), "at least 1"),
        (DraftPlan(1, 1, 1), DraftPlan(1, 1, 0), "at least 1"),
        (DraftPlan(1, 1, 1), DraftPlan(0, 1, 1), "at least 1"),
    ],
    ids=str,
)
def test_plans_are_taken_up_to_each_limit_and_not_beyond(
    fits: DraftPlan, exceeds: DraftPlan, said: str
) -> None:
    LIMITS.check(fits)
    with pytest.raises(LimitError, match=said):
        LIMITS.check(exceeds)


@pytest.mark.parametrize(
    ("limits", "top_k", "plan"),
    [
        (TreeLimits(60, 60), 10, DraftPlan(10, HINTS.steps, 60)),
        (TreeLimits(60, 20), 10, DraftPlan(10, 2, 60)),
        (TreeLimits(60, 5), 10, None),
        (TreeLimits(3, 60), 10, DraftPlan(10, 2, 3)),
        (TreeLimits(60), 2, DraftPlan(2, HINTS.steps, 3 + 4 * (HINTS.steps - 1))),
    ],
    ids=str,
)
def test_levels_that_were_left_open_fit_both_engines(
    limits: TreeLimits, top_k: int, plan: DraftPlan | None
) -> None:
    if plan is not None:
        assert limits.plan(top_k, None, None, HINTS) == plan
    else:
        with pytest.raises(LimitError, match="draft engine"):
            limits.plan(top_k, None, None, HINTS)
