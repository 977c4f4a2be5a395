"""What measured costs mean, in plain sentences and as JSON: for `bench --explain`, `inspect`,
`infer` and `build`.

Knows the cost model and English. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import counted
from edgespec.runtime.costs.cost_model import Choice, CostModel, StepCosts, best_chain, break_even
from edgespec.runtime.costs.cost_profile import MEASURE_AGAIN, ONCE_MORE, CostProfile
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.measuring.speedup import MIN_STEPS, ms

ACCEPTANCES = (0.3, 0.5, 0.7, 0.9)
LEVELS = 8  # of chains, where no draft engine says how many it makes
SHOWN_ROWS = (2, 4, 8, 16, 32)
SHOWN_LEVELS = (1, 2, 3, 4, 6, 8)
NEXT_START = "The next infer, chat or run with drafts measures once more."


@dataclass(frozen=True, slots=True)
class Outlook:
    """What drafts are worth at one context and batch. `break_even` are acceptances of each position
    by the levels of a chain, from 1 on, None where it never pays; `best` has the best chain by
    acceptance."""

    context: int
    batch: int
    costs: StepCosts
    rows: tuple[int, ...]  # that were measured
    break_even: tuple[float | None, ...]
    best: dict[float, Choice]

    @classmethod
    def of(cls, profile: CostProfile, context: int, batch: int) -> Outlook:
        """That of a profile, between its points or beyond them too."""
        costs, levels = CostModel(profile).costs(context, batch, 1), levels_of(profile)
        return cls(
            context,
            batch,
            costs,
            tuple(sorted({time.rows for time in profile.base})),
            tuple(break_even(costs, count) for count in range(1, levels + 1)),
            {rate: best_chain(costs, [rate] * levels) for rate in ACCEPTANCES},
        )

    def row_factor(self, rows: int) -> float:
        """How many times as long as a plain step one over so many rows takes."""
        return self.costs.passes[rows] / self.costs.plain

    def draft_factor(self, levels: int) -> float:
        """What a chain of so many drafts takes to make, in plain steps: proposed, and one token
        observed."""
        return (self.costs.propose[levels] + self.costs.observe[1]) / self.costs.plain

    def to_dict(self) -> dict[str, Any]:
        """The keys of JSON; seconds, and speeds that of plain decoding being 1."""
        return {
            "context": self.context,
            "batch": self.batch,
            "plain_step_s": self.costs.plain,
            "step_s_by_rows": {str(n): self.costs.passes[n] for n in self.rows},
            "draft_s_by_levels": {
                str(n): self.costs.propose[n] + self.costs.observe[1]
                for n in range(1, len(self.break_even) + 1)
            },
            "break_even_acceptance": list(self.break_even),
            "best_chain": [
                {"acceptance": rate, "levels": best.levels, "over_plain": best.over_plain}
                for rate, best in self.best.items()
            ],
        }


def levels_of(profile: CostProfile) -> int:
    """The longest chain that is looked at: what was measured of the draft."""
    return max((time.levels for time in profile.propose if time.top_k == 1), default=LEVELS)


def outlooks(profile: CostProfile) -> list[Outlook]:
    """That of every context and batch that was measured, those of one sequence first."""
    places = sorted({(time.batch, time.context) for time in profile.base})
    return [Outlook.of(profile, context, batch) for batch, context in places]


def to_dict(profile: CostProfile) -> dict[str, Any]:
    """What --json prints of a profile: the measured times, and what they mean."""
    outlook = [one.to_dict() for one in outlooks(profile)]
    return profile.to_dict() | {"busy": profile.busy, "outlook": outlook}


# ---- sentences


def explained(profile: CostProfile) -> Iterator[str]:
    """What the costs of an engine directory mean, a sentence or two a line."""
    points = outlooks(profile)
    first, alone = points[0], [one for one in points if one.batch == points[0].batch]
    if profile.busy:
        yield f"{profile.busy[0].upper()}{profile.busy[1:]}. {MEASURE_AGAIN}"
    steps = [f"{ms(one.costs.plain)} behind {one.context} tokens" for one in alone]
    yield f"A plain step takes {listed(steps)}."
    for one in alone:
        if rows := rows_words(one):
            yield f"Behind {one.context} tokens, beside a plain step, {rows}."
    if profile.propose:
        yield f"{draft_words(profile, first)}."
    else:
        yield "No draft engine was measured: what follows is of drafts that cost nothing to make."
    for one in alone:
        yield f"Behind {one.context} tokens {pays_words(one)} {best_words(one)}"
    for one in points:
        if one.batch != first.batch:
            yield (
                f"With {one.batch} sequences at a time behind {one.context} tokens each a plain"
                f" step takes {ms(one.costs.plain)}, {pays_words(one)} {best_words(one)}"
            )


def rows_words(one: Outlook) -> str:
    """What further rows take."""
    sizes = [n for n in SHOWN_ROWS if n <= max(one.rows)]
    first, *others = [f"{n} rows" for n in sizes] or [""]
    parts = [f"{first} take {one.row_factor(sizes[0]):.2f} times as long"] if sizes else []
    parts += [f"{name} {one.row_factor(n):.2f}" for name, n in zip(others, sizes[1:], strict=True)]
    return listed(parts) if parts else ""


def draft_words(profile: CostProfile, one: Outlook) -> str:
    """What drafts take to make."""
    sizes = [n for n in (1, 4, 8) if n <= levels_of(profile)]
    made = [f"{counted(n, 'draft')} in {one.draft_factor(n):.2f}" for n in sizes]
    return (
        f"The draft ({profile.method}) makes {listed(made)} of a plain step's time, what it"
        " observes included"
    )


def pays_words(one: Outlook) -> str:
    """From which acceptance chains pay."""
    rates = [(n, one.break_even[n - 1]) for n in SHOWN_LEVELS if n <= len(one.break_even)]
    paying = [f"{n} from {100 * rate:.0f} %" for n, rate in rates if rate is not None]
    never = [str(n) for n, rate in rates if rate is None]
    if not paying:
        return "chains of drafts never pay."
    verb = "does" if len(never) == 1 else "do"
    tail = f"; {listed(never)} never {verb}" if never else ""
    return f"chains of drafts pay by the acceptance of each: {listed(paying)}{tail}."


def best_words(one: Outlook) -> str:
    """The best chain by acceptance."""
    parts = []
    for rate, best in one.best.items():
        drafts = counted(best.levels, "draft") if best.levels else "none"
        parts.append(f"at {100 * rate:.0f} % {drafts} ({best.over_plain:.2f}x)")
    return f"The best chain is {listed(parts)}."


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence, with "and" before the last one."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


# ---- for `build` and `inspect`


def built_line(profile: CostProfile, seconds: float, *, opens: bool = False) -> str:
    """What is said of a measurement. `opens`: engines open next, which say that the machine was
    busy."""
    one = outlooks(profile)[0]
    parts = [f"a plain step {ms(one.costs.plain)}"]
    parts += [f"{n} rows {one.row_factor(n):.2f} times that" for n in (4, 8) if n in one.rows]
    if profile.propose:
        levels = levels_of(profile)
        drafts = counted(levels, "draft")
        parts.append(f"{drafts} {ms(one.draft_factor(levels) * one.costs.plain)}")
    line = f"costs, behind {one.context} tokens: {', '.join(parts)} (measured in {seconds:.1f} s)"
    if opens or profile.busy is None or profile.attempts >= ONCE_MORE:
        return line
    return f"{line}; {profile.busy}. {NEXT_START}"


def table(profile: CostProfile) -> Iterator[str]:
    """The rows of `inspect`: a header, and a row for each context and batch."""
    points = outlooks(profile)
    sizes = [n for n in (4, 8, 16) if n <= max(points[0].rows)]
    levels = [n for n in (1, 4, 8) if n <= levels_of(profile)] if profile.propose else []
    names = ["tokens", "batch", "plain step", *(f"{n} rows" for n in sizes)]
    names += [*(counted(n, "draft") for n in levels), "pays from", "at 70 %"]
    return aligned([names, *(list(cells_of(one, sizes, levels)) for one in points)])


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The rows of a table in columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))


def cells_of(one: Outlook, sizes: Sequence[int], levels: Sequence[int]) -> Iterator[str]:
    """A row of the table: what rows and drafts cost, the lowest acceptance from which a chain pays,
    and the speed of the best one at 70 %."""
    yield from (str(one.context), str(one.batch), ms(one.costs.plain))
    yield from (f"{one.row_factor(n):.2f}" for n in sizes)
    yield from (f"{one.draft_factor(n):.2f}" for n in levels)
    rates = [rate for rate in one.break_even if rate is not None]
    yield f"{100 * min(rates):.0f} %" if rates else "never"
    yield f"{one.best[0.7].over_plain:.2f}x"


# ---- for `infer`


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the stored costs say of a run, at the acceptance that it had: seconds of its average
    step and of a plain one, for each sequence, and its speed over plain."""

    step_s: float
    plain_s: float
    over_plain: float

    @classmethod
    def of(
        cls, model: CostModel, drafted: Sequence[RequestMetrics], batch_size: int, top_k: int
    ) -> Prediction | None:
        """That of requests with drafts, whose levels had `top_k` nodes; None of too few steps."""
        step_s = plain_s = tokens = 0.0
        steps = sum(request.steps for request in drafted)
        for request in drafted:
            context = request.prompt_tokens
            for drafts, accepted in zip(
                request.per_step_drafted, request.per_step_accepted, strict=True
            ):
                costs = model.at(context, batch_size, top_k)
                levels = min(drafts, request.num_spec_tokens)
                step_s += costs.step(drafts + 1, levels, accepted + 1) if drafts else costs.plain
                plain_s += costs.plain
                tokens += accepted + 1
                context += accepted + 1
        if steps < MIN_STEPS or step_s <= 0:
            return None
        return cls(step_s / steps, plain_s / steps, tokens / steps * plain_s / step_s)

    def to_dict(self) -> dict[str, Any]:
        """Its keys in the `speedup` of a summary."""
        return {
            "predicted_over_plain": self.over_plain,
            "predicted_step_s": self.step_s,
            "predicted_plain_step_s": self.plain_s,
        }

    def line(self, measured: float | None) -> str:
        """One line, with the speed that was measured beside it."""
        beside = "" if measured is None else f"; measured: {measured:.2f}x"
        return (
            f"by the stored costs {self.over_plain:.2f}x plain decoding at this acceptance (a step"
            f" {ms(self.step_s)}, a plain one {ms(self.plain_s)}){beside}"
        )
