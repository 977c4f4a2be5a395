"""The search: a sample on the user's prompts, all candidates in order by the cost model, and the
best few measured beside plain decoding.

Knows the order of the work. What is measured is kept in the journal as it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from edgespec.benchmark.cases import Cell
from edgespec.benchmark.prompts import PromptSource, in_batches
from edgespec.benchmark.slices import BenchPrompt, SliceRunner, window
from edgespec.progress import Progress
from edgespec.prompts import RequestFile, SamplingParams
from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.drafters.base import Tunable
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.engine import Engine
from edgespec.runtime.plans.policy import AdaptivePolicy
from edgespec.runtime.trees.tree import DraftPlan
from edgespec.tuning import contest
from edgespec.tuning.acceptance import by_depth_and_rank
from edgespec.tuning.candidates import Candidate, chains, of_text, static_trees, trees, wide_plan
from edgespec.tuning.contest import PLAIN, Measured, Speeds, Trial
from edgespec.tuning.journal import RUN, SAMPLE, TuneJournal
from edgespec.tuning.ranking import Ranked, in_order, to_measure, valued
from edgespec.tuning.replay import DraftedStep, adapted, replayed
from edgespec.tuning.sample import run, sampled
from edgespec.tuning.steps import SampledStep
from edgespec.tuning.text_drafts import simulated

ADAPTIVE_LENGTHS = (2, 3, 4, 6, 8)  # the most that chains which adapt may draft
ADAPTIVE_TREES = 2


@dataclass(frozen=True)
class TuneOptions:
    """How much is sampled and measured: `measure` candidates, `repeats` times each."""

    temperature: float = 0.0
    output_tokens: int = 64
    num_prompts: int = 12
    batch_size: int = 1
    measure: int = 4
    repeats: int = 6
    seed: int = 0


@dataclass
class Tuner:
    """Tunes an open engine whose costs are known. `runner.stopping` is asked after every step."""

    runner: SliceRunner
    requests: RequestFile
    options: TuneOptions
    journal: TuneJournal
    progress: Progress
    prompts: list[BenchPrompt] = field(default_factory=list)
    samples: dict[float, list[list[SampledStep]]] = field(default_factory=dict)
    ranked: list[Ranked] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    speeds: Speeds = field(default_factory=Speeds)
    winner: Measured | None = None

    @property
    def engine(self) -> Engine:
        """What is tuned."""
        return self.runner.engine

    @property
    def costs(self) -> CostModel:
        """What its steps cost."""
        assert self.engine.costs is not None
        return self.engine.costs

    def run(self) -> None:
        """All of it. Raises Interrupted, and the first error of a request."""
        self.progress.start("plain answers", 0)
        sampling = SamplingParams(temperature=self.options.temperature)
        source = PromptSource(self.requests, sampling, self.options.seed)
        self.prompts = source.conversations(self.runner, Cell(None, self.options.output_tokens, 1))
        if self.engine.draft_config is not None:
            for temperature in dict.fromkeys((0.0, self.options.temperature)):
                self.samples[temperature] = [*self.sample(temperature)]
        self.progress.start("candidates", 0)
        self.ranked = in_order(self.valued())
        rows = to_measure(self.ranked, self.options.measure)
        self.measure({row.candidate.key: row for row in rows})
        self.measured = [self.speeds.measured(row) for row in rows]
        self.winner = contest.winner(self.speeds, self.measured)

    # ---- the sample

    @cached_property
    def wide(self) -> DraftPlan:
        """The plan of the sample."""
        planner = self.engine.planner
        return wide_plan(planner.limits(), trees=not planner.wants_chains(planner.acceptance))

    @property
    def beams(self) -> bool:
        """Whether the drafter goes on with the best nodes of a level, and not with all."""
        return type(self.wide) is DraftPlan

    @property
    def tries(self) -> Sequence[Mapping[str, Any]]:
        """Options of a drafter with an engine; the first one drafts as much as there is."""
        default = self.engine.drafting.default
        if self.engine.method is None or default is None:
            return ()
        return DRAFTERS[self.engine.method].tries if isinstance(default.drafter, Tunable) else ()

    @property
    def whole(self) -> tuple[tuple[str, Any], ...]:
        """The options of the sample."""
        return tuple(sorted(self.tries[0].items())) if self.tries else ()

    def sample(self, temperature: float) -> Iterator[list[SampledStep]]:
        """The steps of each prompt, from the journal where they are there."""
        self.progress.start(f"acceptance at temperature {temperature:g}", len(self.prompts))
        for prompt in self.prompts:
            yield self.steps(replace(prompt, sampling=at(prompt, temperature)), self.whole)
            self.progress.advance(1)

    def steps(self, prompt: BenchPrompt, options: tuple[tuple[str, Any], ...]) -> list[SampledStep]:
        """The sampled steps of one prompt."""
        key = f"{prompt.number} {prompt.sampling.temperature} {options}"
        kept = self.journal.get(SAMPLE, key)
        if kept is not None:
            return [SampledStep.of_list(step) for step in kept]
        steps = sampled(self.engine, prompt, self.wide, options, self.runner.stopping)
        self.journal.put(SAMPLE, key, [step.to_list() for step in steps])
        return steps

    @property
    def context(self) -> int:
        """Tokens before a step, on average."""
        answered = self.options.output_tokens / 2
        return int(fmean(len(prompt.ids) for prompt in self.prompts) + answered)

    # ---- by the cost model

    def acceptance(self, temperature: float) -> list[list[float]]:
        """[depth][rank] in the sample at a temperature; empty where there is none."""
        answers = self.samples.get(temperature)
        if answers is None:
            return []
        return by_depth_and_rank((s for steps in answers for s in steps), self.wide.top_k)

    def valued(self) -> Iterator[Ranked]:
        """All candidates with their predictions."""
        if self.samples and any(self.samples[self.options.temperature]):
            yield from self.own()
        yield from self.of_text()

    def own(self) -> Iterator[Ranked]:
        """Those of the engine's own drafter."""
        limits = self.engine.planner.limits()
        answers = self.samples[self.options.temperature]
        steps = [step for answer in answers for step in answer]
        batch, most = self.options.batch_size, self.engine.config.limits.verify_tree_size
        plans = [*chains(limits, self.wide.steps)]
        if self.wide.top_k > 1:
            rates = self.acceptance(self.options.temperature)
            plans += trees(limits, self.wide)
            plans += static_trees(limits, rates, self.costs, self.context, batch, most)
        fixed = [self.fixed(plan, steps) for plan in plans]
        yield from fixed
        if self.engine.planner.can_adapt and not self.tries:
            for row in adaptable(fixed):
                yield self.adaptive(row, answers)
        for tried in self.tries[1:]:
            yield self.tried(tuple(sorted(tried.items())))

    def fixed(self, plan: DraftPlan, steps: Sequence[SampledStep]) -> Ranked:
        """A fixed plan."""
        assert self.engine.method is not None
        candidate = Candidate(self.engine.method, plan, options=self.whole)
        costs = self.costs.at(self.context, self.options.batch_size, plan.top_k)
        return valued(candidate, replayed(steps, plan, beams=self.beams), costs)

    def adaptive(self, row: Ranked, answers: Sequence[Sequence[SampledStep]]) -> Ranked:
        """The adaptive twin of a fixed plan: what the policy would make of the sample. For a batch,
        whose sequences draft together, no less than the plan itself and plain decoding."""
        twin, plan = row.candidate.twin, row.candidate.twin.plan
        if self.options.batch_size > 1:
            return replace(row, candidate=twin, over_plain=max(1.0, row.over_plain))
        costs = self.costs.at(self.context, 1, plan.top_k)
        budgeted = bool(answers) and self.gives_probs
        steps = adapted(
            answers,
            plan,
            AdaptivePolicy(self.costs),
            row.prior,
            budgeted=budgeted,
            beams=self.beams,
        )
        return replace(valued(twin, steps, costs), prior=row.prior)

    @property
    def gives_probs(self) -> bool:
        """Whether the drafter says how probable it holds its drafts."""
        answers = self.samples[self.options.temperature]
        return any(step.probs is not None for steps in answers for step in steps)

    def tried(self, options: tuple[tuple[str, Any], ...]) -> Ranked:
        """Other options of the engine's own drafter, which are sampled by themselves."""
        assert self.engine.method is not None
        prompts = [replace(p, sampling=at(p, self.options.temperature)) for p in self.prompts]
        sampled_steps = [step for prompt in prompts for step in self.steps(prompt, options)]
        levels = self.wide.steps
        steps = [DraftedStep(len(step.parents), levels, len(step.path)) for step in sampled_steps]
        costs = self.costs.at(self.context, self.options.batch_size, self.wide.top_k)
        return valued(Candidate(self.engine.method, self.wide, options=options), steps, costs)

    def of_text(self) -> Iterator[Ranked]:
        """Methods without an engine, held against the plain answers."""
        costs = self.costs.at(self.context, self.options.batch_size)
        for candidate in of_text(self.engine):
            draft = self.engine.drafting.of(candidate.method, dict(candidate.options) or None)
            assert draft is not None
            steps, own_s = simulated(draft.drafter, candidate.plan, self.prompts)
            self.engine.forget_answers()
            if not steps:
                continue
            free = [replace(step, levels=0) for step in steps]  # costs are of the engine's own
            yield valued(candidate, free, costs, own_s * self.options.batch_size)

    # ---- measured

    def measure(self, rows: Mapping[str, Ranked]) -> None:
        """The best few and plain decoding in turn, from the journal where a run is there. A run
        is all prompts: how they differ from each other is no noise."""
        order = [*contest.turns(self.options.repeats, [*rows])]
        self.progress.start("measured", len(order))
        for key in (PLAIN, *rows):  # warm-up
            if any(self.journal.get(RUN, name_of(t)) is None for t in order if t.key == key):
                self.speed(self.prompts[: self.options.batch_size], rows.get(key))
        for turn in order:
            kept = self.journal.get(RUN, name_of(turn))
            if kept is None:
                kept = [self.speed(self.prompts, rows.get(turn.key))]
                self.journal.put(RUN, name_of(turn), kept)
            self.speeds.of[turn] = kept[0]
            self.progress.advance(1)

    def speed(self, prompts: Sequence[BenchPrompt], row: Ranked | None) -> float | None:
        """Tokens a second of one run, over all its batches. An adaptive plan begins with the
        acceptance of the sample, as it will."""
        candidate, prior = (None, None) if row is None else (row.candidate, row.prior)
        tokens, seconds = 0, 0.0
        for batch in in_batches(prompts, self.options.batch_size):
            answers, _ = run(self.engine, batch, candidate, self.runner.stopping, prior)
            own = window(answers.metrics)
            tokens, seconds = tokens + own[0], seconds + own[1]
        return tokens / seconds if seconds else None


def at(prompt: BenchPrompt, temperature: float) -> SamplingParams:
    """The sampling of a prompt at a temperature."""
    return replace(prompt.sampling, temperature=temperature)


def name_of(turn: Trial) -> str:
    """A run's name in a journal."""
    return f"{turn.repeat} {turn.key}"


def adaptable(fixed: Sequence[Ranked]) -> list[Ranked]:
    """The fixed plans whose adaptive twins are looked at: chains and blocks of several lengths, and
    the best trees."""

    def length(plan: DraftPlan) -> int:
        return min(plan.steps, plan.verify_size - 1)

    narrow = [row for row in fixed if row.candidate.plan.top_k == 1]
    longest = max((length(row.candidate.plan) for row in narrow), default=0)
    lengths = {*ADAPTIVE_LENGTHS, longest}
    wide = sorted(
        (row for row in fixed if row.candidate.plan.top_k > 1), key=lambda row: -row.over_plain
    )
    chosen = [row for row in narrow if length(row.candidate.plan) in lengths]
    return chosen + wide[:ADAPTIVE_TREES]
