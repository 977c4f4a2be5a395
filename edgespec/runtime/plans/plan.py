"""How much to draft: what base and drafter can take, and what is chosen where the user gave no
sizes.

Knows limits and arithmetic. Knows no engine library, no method and no search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from edgespec.backends.base import PlanHints
from edgespec.contract import tree_pool_size
from edgespec.errors import LimitError, Spellings, counted
from edgespec.runtime.trees.static_tree import StaticPlan, num_non_leaves
from edgespec.runtime.trees.tree import DraftPlan

GUIDE_VERIFY_SIZE = 60


class Sizes(NamedTuple):
    """How much to draft, as `Engine.plan` takes it; None is left to it."""

    top_k: int | None = None
    steps: int | None = None
    verify_size: int | None = None


NO_SIZES = Sizes()


class PlanLimits(Protocol):
    """What a base and a drafter can take; a method's row in DRAFTERS makes it."""

    @property
    def max_levels(self) -> int | None:
        """Levels that the draft has by its make, such as heads; None where it goes on and on."""

    def plan(
        self, top_k: int | None, steps: int | None, verify_size: int | None, hints: PlanHints
    ) -> DraftPlan:
        """The values given, and others chosen to go with them and with the device; LimitError
        where it cannot be."""

    def check(self, plan: DraftPlan) -> None:
        """LimitError for a plan that base and drafter cannot do."""


class TreeSpec(Protocol):
    """A tree that is asked for by a method's own options; they make the plan. `spellings` are how
    its user says the sizes that errors name."""

    @property
    def spellings(self) -> Spellings:
        """By parameter; empty where the names are the same."""

    def plan(self, max_verify_tree_size: int, max_levels: int | None = None) -> DraftPlan:
        """The plan for a base that verifies so many nodes and a draft of so many levels, None for
        any number. Raises OptionError and LimitError."""


SMALLEST_TREE = StaticPlan.of([[0]])


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """For drafters that make chains and trees level by level. Sizes are nodes, the root included;
    None where the drafter itself has no limit."""

    max_verify_tree_size: int
    max_draft_tree_size: int | None = None
    draft_vocab_size: int | None = None
    static_trees: bool = False  # whether the drafter makes the tree of a StaticPlan

    @property
    def max_levels(self) -> int | None:
        """None: each level follows from the one before."""
        return None

    def plan(
        self, top_k: int | None, steps: int | None, verify_size: int | None, hints: PlanHints
    ) -> DraftPlan:
        """The values given, and others chosen to go with them and with the device; LimitError
        where it cannot be."""
        k = 1 if top_k is None else top_k
        if steps is None:
            steps = self.chosen_steps(k, verify_size, hints)
        if verify_size is None:
            pool = tree_pool_size(k, steps)
            verify_size = min(GUIDE_VERIFY_SIZE, self.max_verify_tree_size, pool)
        plan = DraftPlan(k, steps, verify_size)
        self.check(plan)
        return plan

    def chosen_steps(self, top_k: int, verify_size: int | None, hints: PlanHints) -> int:
        """Levels where none were given: those of a chain that fills the verify size, or what suits
        the device as far as it fits."""
        if top_k == 1 and verify_size is not None and verify_size > 1:
            return verify_size - 1
        most = min(hints.steps, self.max_verify_tree_size - 1)
        if self.max_draft_tree_size is not None:
            most = min(most, self.max_draft_tree_size // max(top_k, 1))
        return max(1, most)

    def check(self, plan: DraftPlan) -> None:
        """LimitError for a plan that base and drafter cannot do."""
        if isinstance(plan, StaticPlan):
            return self.check_static(plan)
        k, s, n = plan.top_k, plan.steps, plan.verify_size
        if min(k, s, n) < 1:
            raise LimitError(
                f"draft top-k {k}, step {s} and verify size {n} must be at least 1", "Raise it."
            )
        if n > tree_pool_size(k, s):
            message = (
                f"`spec_verify_size` {n}: with top-k {k} and step {s} only {tree_pool_size(k, s)}"
                " nodes can exist, 1 + K + (S-1)*K*K"
            )
            raise LimitError(message, self.fewer_nodes(plan))
        if n > self.max_verify_tree_size:
            raise exceeds_base(n, self.max_verify_tree_size)
        self.check_draft(plan)

    def check_draft(self, plan: DraftPlan) -> None:
        """Raises LimitError for a plan beyond the drafter's own limits."""
        k, s, most = plan.top_k, plan.steps, self.max_draft_tree_size
        if most is not None and k == 1 and s > most:
            message = f"`spec_draft_step` {s} exceeds the {most} of the draft engine"
            remedy = f"Set it to {most} or less, or build the draft with `max_draft_tree_size` {s}."
            raise LimitError(message, remedy)
        if most is not None and k * s > most:
            message = (
                f"`spec_draft_top_k` {k} times `spec_draft_step` {s} exceeds the {most} of the"
                " draft engine"
            )
            raise LimitError(
                message, f"Lower them, or build the draft with `max_draft_tree_size` {k * s}."
            )
        if self.draft_vocab_size is not None and k > self.draft_vocab_size:
            raise LimitError(f"`spec_draft_top_k` {k} exceeds the draft's vocabulary", "Lower it.")

    def check_static(self, plan: StaticPlan) -> None:
        """Raises LimitError for a static tree that base and drafter cannot do."""
        if not self.static_trees:
            raise no_static_trees()
        if plan.verify_size > self.max_verify_tree_size:
            message = f"the static tree has {plan.verify_size} nodes, the root included"
            raise exceeds_base(plan.verify_size, self.max_verify_tree_size, message)
        below, most = sum(num_non_leaves(plan.choices)[1:]), self.max_draft_tree_size
        rows = max(below, plan.steps)  # drafts of an accepted path are read in one call
        if most is not None and rows > most:
            message = (
                f"the static tree has {counted(below, 'node')} with children below its root, on"
                f" {counted(plan.steps, 'level')}, and the draft engine was built for {most}"
            )
            raise LimitError(message, f"Build the draft with `max_draft_tree_size` {rows}.")
        if self.draft_vocab_size is not None and plan.top_k > self.draft_vocab_size:
            message = (
                f"the static tree has the rank {plan.top_k - 1}, and the draft's vocabulary"
                f" {self.draft_vocab_size} tokens"
            )
            raise LimitError(message, "Leave nodes of such ranks out.")

    def fewer_nodes(self, plan: DraftPlan) -> str:
        """The remedy for a verify size that the tree cannot fill."""
        most = tree_pool_size(plan.top_k, plan.steps)
        return f"Set `spec_verify_size` to {most} or less, or raise `spec_draft_step`."


def sizes_as(width: str, length: str, nodes: str) -> Spellings:
    """Other names for the sizes of a plan, of which `nodes` counts drafts alone: spec_verify_size
    counts the root too."""

    def drafts(number: str) -> str:
        to, _, size = number.rpartition(" ")
        shown = f"`{nodes}`{to} {int(size) - 1}" if size else f"`{nodes}`"
        return shown if to or not size else f"{shown} ({size} nodes with the root)"

    return {
        "spec_draft_top_k": f"`{width}`",
        "spec_draft_step": f"`{length}`",
        "spec_verify_size": drafts,
    }


def exceeds_base(size: int, most: int, asked: str | None = None) -> LimitError:
    """The error for a verify size above the base's; `asked` says what it is where no flag does."""
    shorten = "Take a smaller tree"
    if asked is None:
        shorten = f"Set `spec_verify_size` to {most} or less"
    asked = f"`spec_verify_size` {size}" if asked is None else f"{asked}, which"
    message = f"{asked} exceeds the {most} that the base engine was built for"
    return LimitError(message, f"{shorten}, or build the base with `max_verify_tree_size` {size}.")


def no_static_trees() -> LimitError:
    """The error for choices where the drafter makes its trees by itself."""
    message = "a static tree was asked for, and this drafter makes none"
    remedy = "Leave it out; `spec_draft_step`, or `spec_verify_size` for blocks, says how much is"
    return LimitError(message, f"{remedy} drafted.")
