"""Why drafts made a run faster or slower than plain decoding: what a step costs, and how many
tokens it must emit to pay.

Knows the metrics of requests decoded with drafts and plainly. Knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.errors import counted
from edgespec.runtime.loop.metrics import Pooled, RequestMetrics

MIN_STEPS = 16  # fewer say nothing of speed
CHECK = " {} measures whole requests."
CERTAIN = 0.95  # a run is called slower than plain steps timed by the way only below this ratio
DRAFTING, VERIFYING, ACCEPTANCE, HOST = "draft_cost", "verify_cost", "acceptance", "host_cost"


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step, on average; in a batch the sequences share it. `other` is what no stage
    counts: work of the host, and chunks of the prompts of others."""

    draft: float
    verify: float
    commit: float
    other: float

    @classmethod
    def of(cls, requests: list[RequestMetrics]) -> StepCost | None:
        """That of requests; None where none of them decoded a step."""
        pool = Pooled(requests)
        if not pool.steps or pool.decode_s <= 0:
            return None
        draft, verify, commit = (
            sum(getattr(r.stages, stage) for r in requests) / pool.steps
            for stage in ("draft", "verify", "commit")
        )
        other = max(0.0, pool.decode_s / pool.steps - draft - verify - commit)
        return cls(draft, verify, commit, other)

    @property
    def total(self) -> float:
        """The whole step."""
        return self.draft + self.verify + self.commit + self.other


@dataclass(frozen=True, slots=True)
class Speedup:
    """Steps with drafts beside plain ones; `plain` is None where none were measured. `by_the_way`:
    the plain ones are a few at the end of the run, and not whole requests. `nodes` are the most
    drafts of a step. `lossless`: all answers have the tokens of plain decoding.

    A step pays where it emits more tokens than plain steps of the same time:
    break-even acceptance length = step time / plain step time.
    """

    step: StepCost
    plain: StepCost | None
    acceptance_length: float
    levels: int  # the most drafts that a step could accept
    batch_size: int
    num_steps: int
    nodes: int
    by_the_way: bool = False
    lossless: bool = True

    @classmethod
    def of(
        cls,
        drafted: list[RequestMetrics],
        plain: list[RequestMetrics],
        batch_size: int,
        plain_step: StepCost | None = None,
    ) -> Speedup | None:
        """That of requests with drafts beside plain ones, or where there are none beside
        `plain_step`; None where no step was decoded, or too many sequences ran for any drafts."""
        pool, step = Pooled(drafted), StepCost.of(drafted)
        length = pool.acceptance_length
        if step is None or length is None or pool.steps_without_drafts == pool.steps:
            return None
        # A drafter may stay below its plan
        most = (min(r.num_spec_tokens, max(r.per_step_drafted, default=0)) for r in drafted)
        levels = max(most)
        nodes = max(max(r.per_step_drafted, default=0) for r in drafted)
        num_steps, measured = pool.steps, StepCost.of(plain)
        by_the_way = measured is None and plain_step is not None
        measured = plain_step if measured is None else measured
        lossless = all(r.lossless == "tokens" for r in drafted)
        sizes = (length, levels, batch_size, num_steps, nodes)
        return cls(step, measured, *sizes, by_the_way, lossless)

    @property
    def break_even(self) -> float | None:
        """The acceptance length from which drafts pay; None without plain steps."""
        return None if self.plain is None else self.step.total / self.plain.total

    @property
    def over_plain(self) -> float | None:
        """Speed of decoding, plain decoding being 1; None without plain steps."""
        return None if self.break_even is None else self.acceptance_length / self.break_even

    @property
    def overheads(self) -> dict[str, float]:
        """What makes a step longer than a plain one, by cause, in plain steps."""
        assert self.plain is not None
        step, plain = self.step, self.plain
        host = step.commit + step.other - plain.commit - plain.other
        seconds_of = {DRAFTING: step.draft, VERIFYING: step.verify - plain.verify, HOST: host}
        return {cause: seconds / plain.total for cause, seconds in seconds_of.items()}

    @property
    def slower_because(self) -> str | None:
        """The cause of a run that is slower than plain decoding; None where it is not, or where
        that is not known: of a few steps, and within what a few plain ones are uncertain by.

        Where accepting half of the drafts would do, too few are accepted. Where it would not, it is
        the largest part of what a step costs more.
        """
        if self.over_plain is None or self.num_steps < MIN_STEPS:
            return None
        if self.over_plain >= (CERTAIN if self.by_the_way else 1):
            return None
        assert self.break_even is not None
        if self.break_even <= 1 + self.levels / 2:
            return ACCEPTANCE
        overheads = self.overheads
        return max(overheads, key=lambda cause: overheads[cause])

    def to_dict(self) -> dict[str, Any]:
        """The `speedup` of the summary. Times in seconds; None for what was not measured."""
        return {
            "over_plain": self.over_plain,
            "step_s": self.step.total,
            "step_draft_s": self.step.draft,
            "step_verify_s": self.step.verify,
            "step_commit_s": self.step.commit,
            "step_other_s": self.step.other,
            "plain_step_s": None if self.plain is None else self.plain.total,
            "plain_steps_of": self.plain_steps_of,
            "break_even_acceptance_length": self.break_even,
            "slower_because": self.slower_because,
        }

    @property
    def plain_steps_of(self) -> str | None:
        """Where the plain steps were measured: in whole `requests`, or in a few steps at the `end`
        of the run; None where none were."""
        return None if self.plain is None else "end" if self.by_the_way else "requests"

    @property
    def line(self) -> str | None:
        """Why drafts made the run slower, in one line with the figures; None where they did not, or
        where nothing says so."""
        cause, step = self.slower_because, self.step
        if cause is None:
            return None
        assert self.plain is not None
        check = CHECK.format("`check_lossless`" if self.lossless else "`compare_quality`")
        about, tail = ("about ", check) if self.by_the_way else ("", "")
        return (
            f"slower than plain decoding ({about}{self.over_plain:.2f}x): a step takes"
            f" {ms(step.total)} (draft {ms(step.draft)}, verify {ms(step.verify)}, rest"
            f" {ms(step.commit + step.other)}), a plain one {ms(self.plain.total)}, so drafts pay"
            f" from an acceptance length of {self.break_even:.2f}, and it was"
            f" {self.acceptance_length:.2f}."
            f" {self.cause_words(cause)}{tail}"
        )

    def cause_words(self, cause: str) -> str:
        """A cause in a sentence, with its figure and what helps."""
        plain = self.plain
        assert plain is not None
        if cause == ACCEPTANCE:
            drafts = f"{counted(self.levels, 'draft')} of a step"
            if self.nodes > self.levels:
                drafts = f"{self.nodes} drafts of a tree of {counted(self.levels, 'level')}"
            return f"Too few of the {drafts} are accepted."
        share = f"{self.overheads[cause]:.1f} plain steps"
        if cause == DRAFTING:
            return f"Drafting alone takes {share}: the base is too small for this draft."
        if cause == HOST:
            return f"Work outside the engines takes {share}."
        if self.batch_size > 1:
            return (
                f"Verifying takes {share} more: {self.batch_size} requests at a time leave drafts"
                " no free arithmetic. Lower `batch_size` or `spec_verify_size`."
            )
        return f"Verifying takes {share} more: too many rows. Lower `spec_verify_size`."


def ms(seconds: float) -> str:
    """Milliseconds, with two digits where they are few."""
    return f"{1000 * seconds:.2f} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
