"""What is to be measured: sizes crossed with each other, and the ways of decoding that are compared
at each.

Knows sizes, plans and names. Knows no engine that is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from edgespec.benchmark.report_fields import ReportFields
from edgespec.benchmark.synthetic import Dial
from edgespec.config.fields import shortened
from edgespec.errors import OptionError
from edgespec.methods.names import ADAPTIVE, FIXED, SpecPolicy
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan

PLAN_SIZES = ("top_k", "steps", "verify_size")


@dataclass(frozen=True, slots=True)
class Cell:
    """Prompts of `input_tokens` tokens, None where they are as long as their file has them, answers
    of `output_tokens`, `batch_size` at a time."""

    input_tokens: int | None
    output_tokens: int
    batch_size: int

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DecodingVariant:
    """A way of decoding: plain where `plan` is None; with drafts as the drafter makes them, or
    right as often as `dial` says."""

    plan: DraftPlan | None = None
    dial: Dial | None = None

    @classmethod
    def read(cls, fields: ReportFields) -> DecodingVariant:
        """Of a row of a report. Raises BundleError."""
        if fields.get("plan") is None:
            return PLAIN_VARIANT
        dial = fields.reals("synthetic_acceptance")
        plan = read_plan(fields.section("plan"), adaptive=fields.text("spec_policy") == ADAPTIVE)
        return cls(plan, Dial(dial) if dial else None)

    @property
    def policy(self) -> SpecPolicy | None:
        """Whether the plan is drafted as it is or as far as it pays; None for plain decoding."""
        if self.plan is None:
            return None
        return ADAPTIVE if self.plan.adaptive else FIXED

    def to_dict(self) -> dict[str, Any]:
        """As a report has it; all null for plain decoding."""
        return {
            "plan": None if self.plan is None else plan_dict(self.plan),
            "spec_policy": self.policy,
            "synthetic_acceptance": None if self.dial is None else [*self.dial.by_position],
        }


PLAIN_VARIANT = DecodingVariant()


def cells(
    input_tokens: Sequence[int | None], output_tokens: Sequence[int], batch_sizes: Sequence[int]
) -> list[Cell]:
    """All combinations, each once."""
    return [
        Cell(given, made, batch)
        for given in dict.fromkeys(input_tokens)
        for made in dict.fromkeys(output_tokens)
        for batch in dict.fromkeys(batch_sizes)
    ]


def variants(plans: Sequence[DraftPlan], dials: Sequence[Dial | None]) -> list[DecodingVariant]:
    """All combinations, each once."""
    crossed = product(dict.fromkeys(plans), dict.fromkeys(dials))
    return [DecodingVariant(plan, dial) for plan, dial in crossed]


def plan_dict(plan: DraftPlan) -> dict[str, Any]:
    """The sizes of a plan, and its paths of ranks where it is a static tree."""
    choices = (
        {"choices": [[*path] for path in plan.choices]} if isinstance(plan, StaticPlan) else {}
    )
    return {
        "kind": plan_kind(plan),
        **{name: getattr(plan, name) for name in PLAN_SIZES},
        **choices,
    }


def read_plan(fields: ReportFields, *, adaptive: bool) -> DraftPlan:
    """The plan of `plan_dict`. Raises BundleError."""
    sizes, kind = [fields.required_whole(name) for name in PLAN_SIZES], fields.required_text("kind")
    try:
        plan = (
            replace(StaticPlan.of(fields.get("choices")), adaptive=adaptive)
            if kind == "static tree"
            else (BlockPlan if kind == "block" else DraftPlan)(*sizes, adaptive=adaptive)
        )
    except OptionError as error:
        raise fields.refused(error.what) from None
    if plan_dict(plan) != fields.raw:
        raise fields.refused(f"no plan is {shortened(fields.raw)}")
    return plan


def plan_kind(plan: DraftPlan) -> str:
    """`static tree`, `block`, `tree` or `chain`."""
    if isinstance(plan, StaticPlan):
        return "static tree"
    if isinstance(plan, BlockPlan):
        return "block"
    return "chain" if plan.top_k == 1 else "tree"


def plan_words(plan: DraftPlan) -> str:
    """A plan as a table has it: `chain of 3`, `tree 4/4/16`."""
    kind = plan_kind(plan)
    if kind == "chain":
        return f"chain of {min(plan.steps, plan.verify_size - 1)}"
    if kind == "static tree":
        return f"static tree of {plan.verify_size}"
    return plan_sizes(plan)


def plan_sizes(plan: DraftPlan) -> str:
    """A plan by all its sizes: `chain 1/3/4`."""
    return f"{plan_kind(plan)} {plan.top_k}/{plan.steps}/{plan.verify_size}"
