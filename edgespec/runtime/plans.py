"""How much to draft: what a pair of engines can take, and what is chosen where the user gave no
sizes.

Knows limits and arithmetic. Knows no engine library and no search.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.backends.engine_config import EngineConfig
from edgespec.contract import MAX_BLOCK_NODES, tree_pool_size
from edgespec.errors import LimitError
from edgespec.methods.dflash import DFlashSpec
from edgespec.runtime.tree import BlockPlan, DraftPlan, full_tree_size

CPU_PLAN = DraftPlan(
    top_k=1, steps=3, verify_size=4
)  # more rows cost more than they bring on a CPU
GUIDE_VERIFY_SIZE = 60
# A block costs one draft pass however long it is, so more than EAGLE's chain; on a CPU each further
# row of the base's pass costs nearly in full from about here on (decision 0003)
CPU_BLOCK = 8
MAX_BLOCK_TOP_K = 8


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What base and draft were built for."""

    max_verify_tree_size: int
    max_draft_tree_size: int
    draft_vocab_size: int
    kind: str = "eagle3"

    @classmethod
    def of(cls, base: EngineConfig, draft: EngineConfig) -> PlanLimits:
        """From the configs of the two engines."""
        own, component = draft.limits.max_draft_tree_size, draft.component
        assert own is not None
        assert component.draft_vocab_size is not None
        assert component.method is not None
        verify = base.limits.verify_tree_size
        return cls(verify, own, component.draft_vocab_size, component.method)

    def plan(self, top_k: int | None, steps: int | None, verify_size: int | None) -> DraftPlan:
        """The values given, and others chosen to go with them; LimitError where it cannot be."""
        k = CPU_PLAN.top_k if top_k is None else top_k
        if steps is None:
            chain = k == 1 and verify_size is not None and verify_size > 1
            verified = self.max_verify_tree_size - 1
            fitting = max(1, min(CPU_PLAN.steps, verified, self.max_draft_tree_size // max(k, 1)))
            steps = verify_size - 1 if chain and verify_size else fitting
        if verify_size is None:
            verify_size = min(
                GUIDE_VERIFY_SIZE, self.max_verify_tree_size, tree_pool_size(k, steps)
            )
        plan = DraftPlan(k, steps, verify_size)
        self.check(plan)
        return plan

    def check(self, plan: DraftPlan) -> None:
        k, s, n = plan.top_k, plan.steps, plan.verify_size
        if min(k, s, n) < 1:
            raise LimitError(
                f"draft top-k {k}, step {s} and verify size {n} must be at least 1", "Raise it."
            )
        if self.kind == "mtp" and k != 1:
            what = (
                f"--spec-draft-top-k {k}: an MTP head drafts a chain, one token a step, and no"
                " trees"
            )
            raise LimitError(what, "Set it to 1, or leave it out.")
        if n > tree_pool_size(k, s):
            what = (
                f"--spec-verify-size {n}: with top-k {k} and step {s} only {tree_pool_size(k, s)}"
                " nodes can exist"
            )
            remedy = "That is 1 + K + (S-1)*K*K. Lower the verify size, or raise top-k or step."
            if self.kind == "mtp":
                remedy = f"Lower it to {s + 1}, or raise --spec-draft-step to {n - 1}."
            raise LimitError(what, remedy)
        if n > self.max_verify_tree_size:
            what = (
                f"--spec-verify-size {n} exceeds the {self.max_verify_tree_size} that the base"
                " engine was built for"
            )
            raise LimitError(what, f"Lower it, or build the base with --max-verify-tree-size {n}.")
        if k * s > self.max_draft_tree_size:
            most = self.max_draft_tree_size
            what = (
                f"--spec-draft-top-k {k} times --spec-draft-step {s} exceeds the {most} of the"
                " draft engine"
            )
            raise LimitError(
                what, f"Lower them, or build the draft with --max-draft-tree-size {k * s}."
            )
        if k > self.draft_vocab_size:
            raise LimitError(f"--spec-draft-top-k {k} exceeds the draft's vocabulary", "Lower it.")


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """What base and draft were built for, where the draft makes blocks (DFlash)."""

    max_verify_tree_size: int
    block_size: int
    draft_vocab_size: int

    @classmethod
    def of(cls, base: EngineConfig, draft: EngineConfig) -> BlockLimits:
        """From the configs of the two engines."""
        spec, vocab_size = draft.component.spec, draft.component.draft_vocab_size
        assert isinstance(spec, DFlashSpec)
        assert vocab_size is not None
        return cls(base.limits.verify_tree_size, spec.block_size, vocab_size)

    def plan(self, top_k: int | None, steps: int | None, verify_size: int | None) -> BlockPlan:
        """A chain of one block, or with a top-k above 1 a tree; LimitError where it cannot be."""
        if steps not in (None, 1):
            what = f"--spec-draft-step {steps}: a DFlash draft makes its block in one step"
            raise LimitError(
                what, "Set it to 1, or leave it out; --spec-verify-size says how much is drafted."
            )
        k = 1 if top_k is None else top_k
        if verify_size is None:
            wanted = CPU_BLOCK if k == 1 else GUIDE_VERIFY_SIZE
            most = min(wanted, self.max_verify_tree_size)
            verify_size = full_tree_size(max(k, 1), self.block_size - 1, most)
        plan = BlockPlan(k, max(1, min(self.block_size, verify_size) - 1), verify_size)
        self.check(plan)
        return plan

    def check(self, plan: DraftPlan) -> None:
        k, n, block = plan.top_k, plan.verify_size, self.block_size
        if min(k, n, plan.steps) < 1:
            raise LimitError(f"draft top-k {k} and verify size {n} must be at least 1", "Raise it.")
        if k > MAX_BLOCK_TOP_K:
            what = (
                f"--spec-draft-top-k {k}: trees of a DFlash draft have at most {MAX_BLOCK_TOP_K}"
                " children a node"
            )
            raise LimitError(
                what, f"Set it to 1 for a chain, or to 2 to {MAX_BLOCK_TOP_K} for a tree."
            )
        if k > self.draft_vocab_size:
            raise LimitError(f"--spec-draft-top-k {k} exceeds the draft's vocabulary", "Lower it.")
        if n > MAX_BLOCK_NODES:
            what = (
                f"--spec-verify-size {n}: trees of a DFlash draft have at most {MAX_BLOCK_NODES}"
                " nodes"
            )
            raise LimitError(what, f"Set it to {MAX_BLOCK_NODES} or less.")
        if n > self.max_verify_tree_size:
            what = (
                f"--spec-verify-size {n} exceeds the {self.max_verify_tree_size} that the base"
                " engine was built for"
            )
            raise LimitError(what, f"Lower it, or build the base with --max-verify-tree-size {n}.")
        if plan.steps > block - 1:
            what = (
                f"a plan of {plan.steps} levels; the draft makes blocks of {block}, the pending"
                " token included"
            )
            raise LimitError(what, f"Draft at most {block - 1} levels.")
        if n > (most := full_tree_size(k, block - 1, n)):
            what = (
                f"--spec-verify-size {n}: with top-k {k} the draft's blocks of {block} make {most}"
                " nodes at most"
            )
            raise LimitError(
                what,
                f"Set it to {most} or less" + (", or raise --spec-draft-top-k." if k == 1 else "."),
            )
