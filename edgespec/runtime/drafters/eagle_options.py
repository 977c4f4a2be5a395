"""Which tree an EAGLE draft makes, by TensorRT-LLM's keys: a static one from choices (EAGLE-1,
arXiv 2401.15077), or a dynamic one (EAGLE-2, arXiv 2406.16858).

Knows the keys, their defaults, and what TensorRT-LLM checks. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from edgespec.errors import LimitError, OptionError, Spellings, counted
from edgespec.runtime.drafters.options import DrafterOptions, option
from edgespec.runtime.plans.plan import sizes_as
from edgespec.runtime.trees.static_tree import (
    CHOICES_SCHEMA,
    DEFAULT,
    MAX_DEPTH,
    MAX_NODES,
    NAMED,
    Choices,
    StaticPlan,
    checked_choices,
    num_non_leaves,
)
from edgespec.runtime.trees.tree import DraftPlan

NUM_EAGLE_LAYERS = 4
MAX_DRAFT_LEN = 63


@dataclass(frozen=True, kw_only=True)
class EagleKeys(DrafterOptions):
    """Which tree, by TensorRT-LLM's keys, which its scripts and its LLM API share."""

    eagle_choices: str | Sequence[Sequence[int]] | None = option(
        None,
        "A static tree: paths of ranks such as [[0], [1], [0, 0]], or a published one by its"
        " name, such as mc_sim_7b_63.",
        read=checked_choices,
        schema=CHOICES_SCHEMA,
    )
    use_dynamic_tree: bool = option(
        False, "Draft a tree as EAGLE-2 does, of the most probable nodes."
    )
    dynamic_tree_max_topK: int | None = option(  # noqa: N815  TensorRT-LLM's key
        None, "Children of a node of a dynamic tree.", low=1, high=MAX_NODES
    )
    num_eagle_layers: int | None = option(
        None, "Levels of the tree; choices must be as deep.", low=1, high=MAX_DEPTH
    )
    max_non_leaves_per_layer: int | None = option(
        None, "Nodes of a level that may have children; more are refused.", low=1, high=MAX_NODES
    )


@dataclass(frozen=True, kw_only=True)
class EagleOptions(EagleKeys):
    """The tree of a draft. Raises OptionError for choices that are no tree and for keys that
    exclude each other."""

    max_draft_len: int | None = option(
        None, "Nodes of the tree at most, without the root.", low=1, high=MAX_NODES
    )

    def __post_init__(self) -> None:
        DrafterOptions.__post_init__(self)
        if self.use_dynamic_tree and self.eagle_choices is not None:
            message = "`eagle_choices` and `use_dynamic_tree` exclude each other"
            remedy = "Give choices for a static tree, or `use_dynamic_tree` for EAGLE-2."
            raise OptionError(message, remedy)
        if self.use_dynamic_tree and self.dynamic_tree_max_topK is None:
            message = "`use_dynamic_tree` needs `dynamic_tree_max_topK`, the children of a node"
            raise OptionError(message, "Give it; 10 is usual.")
        if self.dynamic_tree_max_topK is not None and not self.use_dynamic_tree:
            message = "`dynamic_tree_max_topK` is for dynamic trees, and none was asked for"
            raise OptionError(message, "Give `use_dynamic_tree` too, or leave it out.")

    @property
    def spellings(self) -> Spellings:
        """The keys that say the sizes of a dynamic tree."""
        names = sizes_as("dynamic_tree_max_topK", "num_eagle_layers", "max_draft_len")
        return names if self.use_dynamic_tree else {}

    def plan(self, max_verify_tree_size: int, max_levels: int | None = None) -> DraftPlan:
        """The plan for a base that verifies so many nodes, and a draft of any number of levels.
        Raises LimitError for a tree that the other keys do not allow."""
        del max_levels
        if self.use_dynamic_tree:
            return self.dynamic_plan(max_verify_tree_size)
        return self.static_plan()

    def static_plan(self) -> StaticPlan:
        """The choices, or TensorRT-LLM's default."""
        given = cast(Choices | None, self.eagle_choices)
        plan = StaticPlan.of(given or NAMED[DEFAULT])
        whose = "the choices" if given else f"the default choices, {DEFAULT},"
        levels, most = self.num_eagle_layers, self.max_draft_len
        if levels is not None and plan.steps != levels:
            message = (
                f"{whose} are {counted(plan.steps, 'level')} deep, `num_eagle_layers` {levels}"
            )
            remedy = f"Give choices of depth {levels}, or `num_eagle_layers` {plan.steps}."
            raise LimitError(message, remedy)
        if most is not None and len(plan.choices) > most:
            nodes = len(plan.choices)
            message = f"{whose} have {counted(nodes, 'node')}, `max_draft_len` is {most}"
            remedy = f"Raise `max_draft_len` to {nodes}, or give choices of fewer nodes;"
            raise LimitError(message, f"{remedy} a chain of {most} is `spec_draft_step` {most}.")
        for depth, count in enumerate(num_non_leaves(plan.choices)):
            self.check_non_leaves(depth, count, max(num_non_leaves(plan.choices)))
        return plan

    def dynamic_plan(self, max_verify_tree_size: int) -> DraftPlan:
        """EAGLE-2's tree: min(N + N**2 (L-1), max_draft_len) nodes are verified, and the root."""
        assert self.dynamic_tree_max_topK is not None
        children, levels = self.dynamic_tree_max_topK, self.num_eagle_layers or NUM_EAGLE_LAYERS
        for depth in range(1, levels):
            self.check_non_leaves(depth, children, children)
        most = self.max_draft_len
        if most is None:
            most = min(MAX_DRAFT_LEN, max(1, max_verify_tree_size - 1))
        nodes = min(children + children**2 * (levels - 1), most)
        return DraftPlan(children, levels, 1 + nodes)

    def check_non_leaves(self, depth: int, count: int, needed: int) -> None:
        """Raises LimitError where a level has more nodes with children than allowed."""
        most = self.max_non_leaves_per_layer
        if most is not None and count > most:
            message = (
                f"the tree has {counted(count, 'node')} with children at depth {depth}, and"
                f" `max_non_leaves_per_layer` is {most}"
            )
            raise LimitError(message, f"Raise `max_non_leaves_per_layer` to {needed}.")
