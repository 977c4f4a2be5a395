"""Claims about runtime/plans.py: what is chosen fits what engines were built for, and remedies can
be followed."""

from __future__ import annotations

import pytest

from edgespec.backends.ort.backend import BACKEND
from edgespec.errors import LimitError
from edgespec.runtime.drafters.mtp import MtpLimits
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.tree import DraftPlan

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
        MtpLimits(60, 60, 1000).plan(1, 3, 7, HINTS)
    assert found.value.remedy == "Lower it to 4, or raise `spec_draft_step` to 6."
    with pytest.raises(LimitError, match="to 4 or less, or raise `spec_draft_step`"):
        TreeLimits(60, 60, 1000).plan(1, 3, 7, HINTS)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ((4, 3, 17), ["`spec_verify_size` 17", "16", "`max_verify_tree_size` 17"]),
        ((2, 2, 8), ["`spec_verify_size` 8", "7 nodes", "1 + K + (S-1)*K*K"]),
        ((1, 3, 5), ["`spec_verify_size` 5", "4 nodes"]),
        (
            (4, 4, 12),
            ["`spec_draft_top_k` 4", "`spec_draft_step` 4", "12", "`max_draft_tree_size` 16"],
        ),
        ((97, 1, 4), ["`spec_draft_top_k` 97"]),  # 96 tokens
    ],
)
def test_a_tree_beyond_what_can_be_is_refused_by_the_flag_to_change(
    plan: tuple[int, int, int], words: list[str]
) -> None:
    roomy = 200 if plan[0] == 97 else 12
    with pytest.raises(LimitError) as found:
        TreeLimits(16, roomy, 96).plan(*plan, HINTS)
    for word in words:
        assert word in f"{found.value.what} {found.value.remedy}"


@pytest.mark.parametrize("sizes", [(4, 3, 16), (4, 3, 12), (2, 2, 7), (12, 1, 13), (1, 12, 13)])
def test_a_tree_at_its_limit_is_taken(sizes: tuple[int, int, int]) -> None:
    assert TreeLimits(16, 12, 96).plan(*sizes, HINTS) == DraftPlan(*sizes)


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
        (DraftPlan(3, 3, 10), DraftPlan(3, 3, 11), "`max_verify_tree_size` 11"),
        (DraftPlan(3, 4, 10), DraftPlan(3, 5, 10), "`max_draft_tree_size` 15"),
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
