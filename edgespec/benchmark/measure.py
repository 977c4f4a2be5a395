"""A whole run: each cell with its prompts, plain decoding and all variants in turn, and passes over
rows.

Knows what is to be measured and in which order. What becomes of it stands in `rows` and `report`;
what was measured before an interruption is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from edgespec.benchmark.cases import Cell, DecodingVariant, cells
from edgespec.benchmark.modes import DECODE, PREFILL, SPECULATIVE, VERIFY
from edgespec.benchmark.passes import PassSize, timed_passes
from edgespec.benchmark.prediction import Step, predicted_speed
from edgespec.benchmark.prompts import PromptSource
from edgespec.benchmark.rows import Collected, Row, conditional_acceptance, pass_rows
from edgespec.benchmark.schedule import turns
from edgespec.benchmark.slices import BenchPrompt, Interrupted, Slice, SliceRunner
from edgespec.progress import Progress
from edgespec.runtime.engine import Engine
from edgespec.runtime.trees.tree import DraftPlan


@dataclass(frozen=True)
class BenchPlan:
    """What to measure. `input_tokens` are lengths of random prompts, None for those of a file, and
    `contexts` those behind which passes are timed. `variants` are those with drafts; `prefill_plan`
    drafts in the mode prefill, None: nothing does."""

    modes: Sequence[str]
    source: PromptSource
    input_tokens: Sequence[int | None]
    output_tokens: Sequence[int]
    batch_sizes: Sequence[int]
    contexts: Sequence[int] = ()
    rows: Sequence[int] = ()
    variants: Sequence[DecodingVariant] = ()
    prefill_plan: DraftPlan | None = None
    repeats: int = 3
    warmup: int = 1

    @property
    def cells(self) -> list[Cell]:
        """The sizes at which answers are decoded."""
        if DECODE not in self.modes and SPECULATIVE not in self.modes:
            return []
        return cells(self.input_tokens, self.output_tokens, self.batch_sizes)

    @property
    def prefill_cells(self) -> list[Cell]:
        """The sizes at which prompts are read, one at a time."""
        return cells(self.input_tokens, [1], [1]) if PREFILL in self.modes else []

    @property
    def pass_sizes(self) -> list[tuple[int, int]]:
        """Contexts and batch sizes at which passes are timed."""
        if VERIFY not in self.modes:
            return []
        return [(context, batch) for context in self.contexts for batch in self.batch_sizes]


@dataclass
class Benchmark:
    """Runs a plan on an open engine. `runner.stopping` is asked after every step."""

    runner: SliceRunner
    plan: BenchPlan
    progress: Progress
    collected: list[Collected] = field(default_factory=list)
    passes: list[tuple[PassSize, float]] = field(default_factory=list)
    complete: bool = False

    @property
    def engine(self) -> Engine:
        """What is measured."""
        return self.runner.engine

    def run(self) -> None:
        """All of it; ends early, with what there is, once it is to stop."""
        try:
            for cell in self.plan.prefill_cells:
                own = self.plan.prefill_plan
                self.measure(cell, PREFILL, [] if own is None else [DecodingVariant(own)])
            for context, batch_size in self.plan.pass_sizes:
                self.time_passes(context, batch_size)
            for cell in self.plan.cells:
                drafting = SPECULATIVE in self.plan.modes
                self.measure(cell, SPECULATIVE, self.plan.variants if drafting else [])
        except Interrupted:
            return
        self.complete = True

    def measure(self, cell: Cell, mode: str, variants: Sequence[DecodingVariant]) -> None:
        """One cell: plain answers to all prompts, which say what is right, the warm-up, and then
        measured turns. Raises Interrupted."""
        self.progress.start(f"{mode} {words(cell)}: plain answers", 0)
        groups = self.plan.source.groups(self.runner, cell)
        for variant in (*variants, DecodingVariant()) if variants else ():
            for _ in range(self.plan.warmup):
                self.run_slice(groups[0], variant)
        collected = Collected(cell, mode)
        self.collected.append(collected)
        order = [*turns(self.plan.repeats, len(groups), variants)]
        self.progress.start(f"{mode} {words(cell)}", len(order))
        for turn in order:
            collected.add(turn, self.run_slice(groups[turn.group], turn.variant))
            self.progress.advance(1)

    def run_slice(self, prompts: Sequence[BenchPrompt], variant: DecodingVariant) -> Slice:
        """One run, unless it is to stop. Raises Interrupted."""
        if self.runner.stopping():
            raise Interrupted
        return self.runner.run(prompts, variant)

    def time_passes(self, context: int, batch_size: int) -> None:
        """Passes behind one context. Raises Interrupted."""
        plan = self.plan
        rows, repeats = [*plan.rows], plan.repeats * PASSES_A_REPEAT
        self.progress.start(
            f"passes behind {context} tokens, batch {batch_size}", len(rows) * repeats
        )
        timed = timed_passes(
            self.engine,
            (context, batch_size),
            rows,
            repeats,
            warmup=max(plan.warmup, 1),
            stopping=self.runner.stopping,
        )
        for timing in timed:
            self.passes.append(timing)
            self.progress.advance(1)
        if self.runner.stopping():
            raise Interrupted

    def rows(self) -> Iterator[Row]:
        """What was measured so far."""
        prefill = [collected for collected in self.collected if collected.mode == PREFILL]
        others = [collected for collected in self.collected if collected.mode != PREFILL]
        for collected in prefill:
            yield from collected.rows(self.predicted)
        yield from pass_rows(self.passes)
        for collected in others:
            yield from collected.rows(self.predicted)

    def predicted(self, variant: DecodingVariant, cell: Cell, whole: Slice) -> float | None:
        """What the cost model says of a variant; `whole` are all of its answers."""
        metrics = whole.metrics
        return predicted_speed(
            self.engine.costs,
            variant,
            cell,
            prompt_tokens=fmean(m.prompt_tokens for m in metrics),
            steps=steps_made(whole),
            acceptance=conditional_acceptance(metrics, whole.depths),
        )


def steps_made(whole: Slice) -> list[Step]:
    """All steps of all sequences."""
    return [
        Step(levels, drafted, accepted + 1)
        for m, depths in zip(whole.metrics, whole.depths, strict=True)
        for levels, drafted, accepted in zip(
            depths, m.per_step_drafted, m.per_step_accepted, strict=True
        )
    ]


PASSES_A_REPEAT = 5  # a pass is short: so many are timed for each repeat of answers


def words(cell: Cell) -> str:
    """A cell in the line of a bar."""
    prompt = "" if cell.input_tokens is None else f"{cell.input_tokens} + "
    return f"{prompt}{cell.output_tokens} tokens, batch {cell.batch_size}"
