"""TensorRT-LLM's keys for EAGLE's trees: what they ask for, and what it refuses."""

from __future__ import annotations

import pytest

from edgespec.errors import LimitError, OptionError
from edgespec.runtime.drafters.block_drafter import BlockLimits
from edgespec.runtime.drafters.eagle_options import EagleOptions
from edgespec.runtime.drafters.mtp import MtpLimits
from edgespec.runtime.plans.plan import TreeLimits
from edgespec.runtime.trees.static_tree import NAMED, StaticPlan
from edgespec.runtime.trees.tree import DraftPlan

TREE = [[0], [1], [0, 0], [1, 0], [0, 0, 0]]


def test_without_choices_the_tree_is_tensorrt_llms() -> None:
    assert EagleOptions().plan(64) == StaticPlan.of(NAMED["mc_sim_7b_63"])
    assert EagleOptions(num_eagle_layers=4, max_draft_len=63, max_non_leaves_per_layer=10).plan(64)


@pytest.mark.parametrize("given", [TREE, str(TREE), tuple(map(tuple, TREE))])
def test_choices_are_the_tree(given: object) -> None:
    plan = EagleOptions(eagle_choices=given).plan(64)  # type: ignore[arg-type]
    assert plan == StaticPlan.of(TREE)
    assert (plan.steps, plan.verify_size) == (3, 6)


@pytest.mark.parametrize(
    ("keys", "said", "remedy"),
    [
        ({"num_eagle_layers": 4}, "3 levels deep, `num_eagle_layers` 4", "`num_eagle_layers` 3"),
        ({"num_eagle_layers": 2}, "3 levels deep, `num_eagle_layers` 2", "choices of depth 2"),
        ({"max_draft_len": 4}, "5 nodes, `max_draft_len` is 4", "`max_draft_len` to 5"),
        (
            {"max_non_leaves_per_layer": 1},
            "2 nodes with children at depth 1, and `max_non_leaves_per_layer` is 1",
            "`max_non_leaves_per_layer` to 2",
        ),
    ],
)
def test_choices_that_the_other_keys_do_not_allow_are_refused(
    keys: dict[str, int], said: str, remedy: str
) -> None:
    with pytest.raises(LimitError) as found:
        EagleOptions(eagle_choices=TREE, **keys).plan(64)  # type: ignore[arg-type]
    assert said in found.value.what
    assert remedy in found.value.remedy


def test_default_choices_are_named_where_none_were_given() -> None:
    """Of one who asks for a length alone: there is a chain of it."""
    with pytest.raises(LimitError) as found:
        EagleOptions(max_draft_len=4).plan(64)
    assert "the default choices, mc_sim_7b_63, have 63 nodes" in found.value.what
    assert "`spec_draft_step` 4" in found.value.remedy
    with pytest.raises(LimitError, match=r"the default choices, .* 4 levels deep"):
        EagleOptions(num_eagle_layers=3).plan(64)


def test_choices_are_taken_up_to_each_limit() -> None:
    keys = {"num_eagle_layers": 3, "max_draft_len": 5, "max_non_leaves_per_layer": 2}
    assert EagleOptions(eagle_choices=TREE, **keys).plan(64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("top_k", "levels", "most", "drafts"),
    [
        (10, 4, None, 63),  # of 10 + 300
        (10, 4, 40, 40),
        (2, 4, None, 14),  # 2 + 3 * 4
        (2, 4, 63, 14),
        (2, 4, 13, 13),
        (3, 1, None, 3),
        (10, None, 500, 310),  # 4 levels by default
        (1, 5, None, 5),
    ],
)
def test_a_dynamic_tree_verifies_as_many_nodes_as_tensorrt_llm(
    top_k: int, levels: int | None, most: int | None, drafts: int
) -> None:
    options = EagleOptions(
        use_dynamic_tree=True,
        dynamic_tree_max_topK=top_k,
        num_eagle_layers=levels,
        max_draft_len=most,
    )
    assert options.plan(64) == DraftPlan(top_k, levels or 4, drafts + 1)


def test_only_a_length_that_was_not_given_shrinks_to_what_the_base_verifies() -> None:
    left_open = EagleOptions(use_dynamic_tree=True, dynamic_tree_max_topK=10)
    assert left_open.plan(16).verify_size == 16
    given = EagleOptions(use_dynamic_tree=True, dynamic_tree_max_topK=10, max_draft_len=20)
    plan = given.plan(16)
    with pytest.raises(LimitError, match="`max_verify_tree_size` 21"):
        TreeLimits(16, 60).check(plan)


def test_a_dynamic_tree_keeps_to_the_non_leaves_too() -> None:
    options = EagleOptions(
        use_dynamic_tree=True, dynamic_tree_max_topK=10, max_non_leaves_per_layer=9
    )
    with pytest.raises(LimitError, match="10 nodes with children at depth 1"):
        options.plan(64)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"eagle_choices": TREE, "use_dynamic_tree": True, "dynamic_tree_max_topK": 4},
            "exclude each other",
        ),
        ({"use_dynamic_tree": True}, "needs `dynamic_tree_max_topK`"),
        ({"dynamic_tree_max_topK": 4}, "is for dynamic trees"),
        ({"eagle_choices": [[1, 0]]}, r"\[1\] is not in the tree"),
        ({"eagle_choices": "mc_sim"}, "mc_sim"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        EagleOptions(**keys)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "said", "remedy"),
    [
        (
            TreeLimits(5, 60, 96, static_trees=True),
            "6 nodes, the root included",
            "`max_verify_tree_size` 6",
        ),
        (
            TreeLimits(6, 2, 96, static_trees=True),
            "3 nodes with children",
            "`max_draft_tree_size` 3",
        ),
        (TreeLimits(6, 3, 1, static_trees=True), "the rank 1", "Leave nodes of such ranks out"),
    ],
)
def test_engines_refuse_a_static_tree_beyond_them(
    limits: TreeLimits, said: str, remedy: str
) -> None:
    TreeLimits(6, 3, 2, static_trees=True).check(StaticPlan.of(TREE))
    with pytest.raises(LimitError) as found:
        limits.check(StaticPlan.of(TREE))
    assert said in found.value.what
    assert remedy in found.value.remedy


def test_a_draft_engine_has_room_for_the_longest_path_of_a_static_tree() -> None:
    """A path that was accepted is read in one call, with the token behind it: in a batch these rows
    must fit behind a lane that is full."""
    narrow = StaticPlan.of([[0], [0, 0], [0, 0, 0]])
    TreeLimits(6, 3, static_trees=True).check(narrow)
    with pytest.raises(LimitError, match=r"3 levels, .* built for 2\nBuild.*tree_size` 3"):
        TreeLimits(6, 2, static_trees=True).check(narrow)


def test_a_static_tree_may_have_more_nodes_than_a_dynamic_one() -> None:
    """Of two children everywhere a dynamic tree of three levels has 2 + 4 + 4, this one 2 + 4 +
    8."""
    full = [[a] for a in (0, 1)] + [[a, b] for a in (0, 1) for b in (0, 1)]
    full += [[*node, c] for node in full[2:] for c in (0, 1)]
    TreeLimits(15, 6, static_trees=True).check(StaticPlan.of(full))


@pytest.mark.parametrize(
    "limits", [TreeLimits(64, 60, 96), MtpLimits(64, 60, 96), BlockLimits(64, 8, 96)]
)
def test_drafters_that_make_their_own_trees_refuse_choices(
    limits: TreeLimits | BlockLimits,
) -> None:
    with pytest.raises(LimitError, match="a static tree was asked for"):
        limits.check(StaticPlan.of(TREE))
