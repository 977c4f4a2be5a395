"""The drafting plans of an open engine: what is chosen where sizes are left open, and which plans
base, drafter and accept rule take; what a request drafts with.

Knows the engine's config, what may draft, and what the engine was opened with. The arithmetic of
sizes is in `plans`, that of each method in its row of DRAFTERS.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from edgespec.backends.base import PlanHints
from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import (
    EdgeSpecError,
    LimitError,
    OptionError,
    RequestError,
    command,
    counted,
    in_terms_of,
)
from edgespec.methods.names import ADAPTIVE, FIXED, POLICIES, SpecPolicy
from edgespec.runtime.acceptance.verify import ACCEPT_RULES, EXACT, AcceptOptions, acceptance_of
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.opening.drafting import Drafting, Options
from edgespec.runtime.opening.speculation import Speculation
from edgespec.runtime.opening.tuned_plan import TunedPlan
from edgespec.runtime.plans.plan import SMALLEST_TREE, PlanLimits, TreeSpec
from edgespec.runtime.plans.policy import MOST
from edgespec.runtime.plans.schedules import Gates
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import PLAIN, DraftPlan, Plain

RequestPlan = DraftPlan | Speculation | Plain | None


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes and checks plans. `hints` say how much to draft where the engine runs; `acceptance` is
    its accept rule, `speculation` how it was asked to draft, and `gates` what limits its drafts.
    `policy` says whether plans are adaptive: None is where no sizes are given and `can_adapt`, as
    costs are known and the method leaves the decision to others; else `why_no_costs`. `tuned` has
    the plan of the engine's own drafter where no sizes are given.

    Errors name the sizes as `by_sizes` has them, and those of a speculation or a tree by its
    spellings.
    """

    config: EngineConfig
    hints: PlanHints
    drafting: Drafting
    exact: bool
    acceptance: AcceptOptions
    speculation: Speculation | None = None
    policy: SpecPolicy | None = None
    can_adapt: bool = False
    tuned: TunedPlan | None = None
    why_no_costs: str | None = None
    gates: Gates | None = None

    # ---- of a request

    def drafts_of(
        self, plan: RequestPlan, acceptance: AcceptOptions | None = None
    ) -> dict[str, Any]:
        """What a request's `plan` means, as fields of a GenerationRequest: None is `by_sizes()`
        where something drafts, or what suits an accept rule of the request's own. Raises
        RequestError, LimitError or OptionError."""
        if isinstance(plan, Speculation):
            return self.drafts_by(plan, acceptance)
        if plan is None:
            planner = self if acceptance is None else replace(self, acceptance=acceptance)
            return {"plan": None if self.drafting.default is None else planner.by_sizes()}
        if not isinstance(plan, DraftPlan | Plain):
            message = f"plan is of type {type(plan).__name__}"
            remedy = (
                "Give engine.plan(...), a decoding config such as edgespec.AutoDecodingConfig(...),"
                " edgespec.PLAIN for no drafts, or leave it out."
            )
            raise RequestError(message, remedy)
        return {"plan": None if plan is PLAIN else plan}

    def drafts_by(
        self, asked: Speculation, acceptance: AcceptOptions | None = None
    ) -> dict[str, Any]:
        """What a request's own speculation means, as fields of a GenerationRequest; `acceptance` is
        an accept rule that was given beside it. Raises LimitError."""
        fields: dict[str, Any] = {"plan": self.by_speculation(asked, acceptance)}
        fields["schedule"] = asked.schedule
        if asked.drafter is not None:
            fields |= {"drafter": asked.drafter, "drafter_options": asked.options}
        if acceptance is not None or asked.acceptance is not None:
            fields["acceptance"] = acceptance or asked.acceptance
        return fields

    def gates_for(self, request: GenerationRequest) -> Gates | None:
        """What limits a request's drafts: its own schedule or the engine's, and how well the drafts
        of the engine's own drafter were accepted."""
        own = self.gates
        if request.drafter is not None or own is None:
            return None if request.schedule is None else Gates(request.schedule)
        return Gates(request.schedule or own.schedule, own.acceptance)

    def check_adaptive(self, policy: SpecPolicy | None) -> None:
        """Raises LimitError for adaptive drafting where nothing says what a step costs here."""
        if policy != ADAPTIVE or self.can_adapt or self.drafting.is_paced:
            return
        if self.drafting.method is None:
            message = "spec_policy adaptive: nothing is known of the cost of a drafter of your own"
            raise LimitError(message, "Leave it out, or set it to fixed.")
        message = f"spec_policy adaptive: {self.why_no_costs}"
        measure = command("bench", self.drafting.engine_dir, measure_costs=True)
        raise LimitError(message, f"Measure it: {measure}.")

    # ---- plans

    def by_sizes(
        self,
        top_k: int | None = None,
        steps: int | None = None,
        verify_size: int | None = None,
        *,
        drafter: str | Drafter | None = None,
    ) -> DraftPlan:
        """The plan of the sizes that were given, the others chosen to go with them; with none that
        that the engine was asked for, where it was. Raises LimitError where it cannot be."""
        asked = self.speculation if drafter is None else None
        if asked is not None and (top_k, steps, verify_size) == (None, None, None):
            return self.by_speculation(asked, self.acceptance)
        open_sizes = drafter is None and (top_k, steps, verify_size) == (None, None, None)
        if open_sizes and (tuned := self.by_tuning()) is not None:
            return tuned
        if top_k is None and self.wants_chains(self.acceptance):
            top_k = 1
        adaptive = drafter is None and self.adapts(sized=any((top_k, steps, verify_size)))
        hints = MOST if adaptive else self.hints
        plan = self.limits(drafter).plan(top_k, steps, verify_size, hints)
        self.check_chain(plan)
        self.check_acceptance(self.acceptance, plan)
        return replace(plan, adaptive=adaptive)

    def by_tuning(self) -> DraftPlan | None:
        """The tuned plan, adaptive as it was measured unless the policy says otherwise; None where
        there is none, or where only chains will do and it is none."""
        tuned = None if self.tuned is None else self.tuned.plan
        if tuned is None or (tuned.top_k != 1 and self.wants_chains(self.acceptance)):
            return None
        asked = tuned.adaptive if self.policy is None else self.policy == ADAPTIVE
        limits, plan = self.limits(), tuned
        if type(tuned) is DraftPlan:  # the method may have plans of its own kind
            plan = limits.plan(tuned.top_k, tuned.steps, tuned.verify_size, self.hints)
        limits.check(plan)
        return replace(plan, adaptive=self.can_adapt and asked)

    def tuned_line(self, plan: DraftPlan) -> str | None:
        """What is said of the plan that `tune` found; None of any other."""
        return self.tuned.line if self.tuned is not None and plan == self.by_tuning() else None

    def adapts(self, *, sized: bool) -> bool:
        """Whether a plan of the engine's own drafter is adaptive, where sizes were given or not."""
        if self.policy is None:
            return self.can_adapt and not sized
        return self.can_adapt and self.policy == ADAPTIVE

    def by_speculation(
        self, asked: Speculation, acceptance: AcceptOptions | None = None
    ) -> DraftPlan:
        """The plan of a speculation, for an accept rule or its own. Raises LimitError, in its
        spellings, where it cannot be."""
        acceptance = acceptance or asked.acceptance or self.acceptance
        drafter = cast(str | Drafter | None, asked.drafter)
        limits = self.limits(drafter, None if drafter is None else asked.options)
        try:
            with in_terms_of(asked.spellings):
                plan = self.within(limits, asked, acceptance)
                self.check_acceptance(acceptance, plan)
        except LimitError as error:
            raise LimitError(f"{asked.label}: {error.what}", error.remedy) from error
        return plan

    def within(
        self, limits: PlanLimits, asked: Speculation, acceptance: AcceptOptions
    ) -> DraftPlan:
        """`by_speculation`, within limits that are known."""
        if asked.tree is not None:
            return self.of_tree(asked.tree, limits, acceptance)
        top_k, steps, verify_size = asked.sizes
        adaptive = asked.drafter is None and self.adapts(sized=any(asked.sizes))
        if top_k is None and self.wants_chains(acceptance):
            top_k = 1
        plan = limits.plan(top_k, steps, verify_size, MOST if adaptive else self.hints)
        self.check_chain(plan)
        return replace(plan, adaptive=adaptive)

    def by_tree(self, tree: TreeSpec) -> DraftPlan:
        """The plan of a tree that is asked for otherwise than by its three sizes, such as a static
        one. Raises LimitError where it cannot be."""
        return self.of_tree(tree, self.limits(), self.acceptance)

    def of_tree(self, tree: TreeSpec, limits: PlanLimits, acceptance: AcceptOptions) -> DraftPlan:
        """`by_tree`, within limits and for an accept rule that are known."""
        with in_terms_of(tree.spellings):
            try:
                plan = tree.plan(self.config.limits.verify_tree_size, limits.max_levels)
            except EdgeSpecError:
                limits.check(SMALLEST_TREE)  # what a drafter does not make at all is said first
                raise
            limits.check(plan)
            self.check_chain(plan)
            self.check_acceptance(acceptance, plan)
        return replace(plan, adaptive=self.adapts(sized=True))

    def limits(self, drafter: str | Drafter | None = None, options: Options = None) -> PlanLimits:
        """What base and drafter can take; LimitError where nothing drafts."""
        draft = self.drafting.of(drafter, options)
        if draft is None:
            message = "a drafting plan was asked for, and this engine was opened without its draft"
            raise LimitError(message, "Open it with spec_decode=True, or decode without a plan.")
        return draft.limits(self.config)

    def check(
        self,
        plan: DraftPlan,
        acceptance: AcceptOptions,
        drafter: str | Drafter | None,
        options: Options,
    ) -> None:
        """Raises LimitError for a plan that base, drafter or accept rule do not take."""
        self.limits(drafter, options).check(plan)
        self.check_chain(plan)
        self.check_acceptance(acceptance, plan)

    def wants_chains(self, acceptance: AcceptOptions) -> bool:
        """Whether only chains will do, so that no tree is chosen where the user named none."""
        return self.exact_chains or ACCEPT_RULES[acceptance.rule].chains_only

    @property
    def exact_chains(self) -> bool:
        """Whether drafts are to leave every bit as it is, and only chains do."""
        return self.exact and not self.config.weights.is_bitwise

    def check_chain(self, plan: DraftPlan) -> None:
        """Raises LimitError for a tree where only chains are exact."""
        if self.exact_chains and plan.top_k != 1:
            message, remedy = branches(plan)
            raise LimitError(
                f"{message}, and only chains are exact", f"{remedy}, or leave `exact` out."
            )

    def check_acceptance(self, asked: AcceptOptions, plan: DraftPlan) -> None:
        """Raises RequestError for a rule that is in no table, LimitError for one that does not go
        with the plan or the engine."""
        acceptance_of(asked)
        row = ACCEPT_RULES[asked.rule]
        if self.exact and asked.rule != EXACT:
            message = (
                f"{row.title} is not what plain decoding gives bit for bit, and `exact` asks for it"
            )
            raise LimitError(message, "Leave one of the two out.")
        if row.chains_only and plan.top_k != 1:
            message, remedy = branches(plan)
            message = f"{row.title} is for chains, and {message}"
            raise LimitError(message, f"{remedy}, or take another accept rule.")


def branches(plan: DraftPlan) -> tuple[str, str]:
    """What makes a plan one of trees, and how to draft a chain instead, as parts of sentences."""
    if isinstance(plan, StaticPlan):
        size = counted(len(plan.choices), "node")
        return f"the static tree of {size} branches", "Give choices without branches, or none"
    return f"`spec_draft_top_k` {plan.top_k} drafts trees", "Set `spec_draft_top_k` to 1"


def check_policy(spec_policy: object) -> None:
    """Raises OptionError for a policy that there is none of."""
    if spec_policy not in (None, *POLICIES):
        message = f"spec_policy is {spec_policy!r:.60}"
        raise OptionError(message, f"Give {ADAPTIVE!r} or {FIXED!r}, or leave it out.")
