"""The rows of a report: what was measured of one way of decoding at one size.

Knows slices, passes and figures. The names are those of `runtime.metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from statistics import fmean
from typing import Any

from edgespec.benchmark.cases import PLAIN_VARIANT, Cell, DecodingVariant
from edgespec.benchmark.modes import DECODE, MODES, PREFILL, SERVED, SPECULATIVE, VERIFY
from edgespec.benchmark.passes import PassSize
from edgespec.benchmark.report_fields import ReportFields
from edgespec.benchmark.schedule import Turn
from edgespec.benchmark.serving.figures import Served
from edgespec.benchmark.slices import Slice
from edgespec.benchmark.statistics import Figure, as_dict, figure
from edgespec.runtime.loop.metrics import Pooled, RequestMetrics, ratio

OVER_PLAIN, OVER_ONE_ROW = "speed_over_plain", "cost_over_one_row"
PREDICTED = "predicted_speed_over_plain"
Figures = Mapping[str, Figure | None]
MEASURED: Mapping[str, Callable[[Slice], float | None]] = {
    "tokens_per_s": lambda s: s.tokens_per_s,
    "output_tokens_per_s": lambda s: s.output_tokens_per_s,
    "time_to_first_token_s": lambda s: s.time_to_first_token_s,
    "inter_token_latency_s": lambda s: s.inter_token_latency_s,
    "step_s": lambda s: s.step_s,
    "draft_s": lambda s: s.stage_s("draft"),
    "verify_s": lambda s: s.stage_s("verify"),
    "commit_s": lambda s: s.stage_s("commit"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """What was drafted and accepted, over all steps."""

    steps: int
    acceptance_length: float | None
    acceptance_rate: float | None
    per_position_acceptance: Sequence[float]
    conditional_acceptance: Sequence[float]
    drafted_per_step: float | None
    levels_per_step: float | None
    steps_without_drafts: int | None

    @classmethod
    def of(cls, whole: Slice) -> DraftCounts:
        """Of all runs pooled."""
        pool = Pooled(whole.metrics)
        levels = [level for depths in whole.depths for level in depths]
        drafted = sum(sum(request.per_step_drafted) for request in pool.requests)
        return cls(
            steps=pool.steps,
            acceptance_length=pool.acceptance_length,
            acceptance_rate=pool.acceptance_rate,
            per_position_acceptance=pool.per_position_acceptance,
            conditional_acceptance=conditional_acceptance(whole.metrics, whole.depths),
            drafted_per_step=ratio(drafted, pool.steps),
            levels_per_step=ratio(sum(levels), pool.steps),
            steps_without_drafts=levels.count(0),
        )


@dataclass(frozen=True)
class Row:
    """One row. `rows` counts those of a base pass, in the mode verify alone. `over_plain` is the
    speed over plain decoding pair by pair; in the mode verify a pass over the shortest one.
    `predicted` is what the cost model says of it. `served` is what the clients of a server saw, of
    which `cell.batch_size` asked at a time."""

    mode: str
    cell: Cell
    variant: DecodingVariant
    figures: Figures
    rows: int | None = None
    over_plain: Figure | None = None
    predicted: float | None = None
    speculation: DraftCounts | None = None
    answers: int = 0
    answers_equal_to_plain: int = 0
    prompt_tokens: float | None = None
    served: Served | None = None

    @classmethod
    def read(cls, fields: ReportFields) -> Row:
        """From a report. Raises BundleError."""
        mode, figures = fields.get("mode"), fields.section("figures")
        if mode not in (*MODES, *SERVED):
            raise fields.wrong("mode", f"one of {', '.join((*MODES, *SERVED))}")
        drafted = None if fields.get("speculation") is None else fields.section("speculation")
        return cls(
            **fields.values(cls) | {"mode": mode, "predicted": fields.real(PREDICTED)},
            cell=Cell(**fields.values(Cell)),
            variant=DecodingVariant.read(fields),
            figures={name: figures.figure(name) for name in figures.raw},
            over_plain=fields.figure(OVER_ONE_ROW if mode == VERIFY else OVER_PLAIN),
            speculation=None if drafted is None else DraftCounts(**drafted.values(DraftCounts)),
            served=None if fields.get("served") is None else Served.read(fields.section("served")),
        )

    def figure(self, name: str) -> Figure | None:
        """A figure by its name in a report."""
        return self.over_plain if name in (OVER_PLAIN, OVER_ONE_ROW) else self.figures.get(name)

    @property
    def key(self) -> dict[str, Any]:
        """What it measures."""
        own = {"mode": self.mode, **self.cell.to_dict(), "rows": self.rows}
        return own | self.variant.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
        over, is_pass = as_dict(self.over_plain), self.mode == VERIFY
        return {
            **self.key,
            "prompt_tokens": self.prompt_tokens,
            "figures": {name: as_dict(one) for name, one in self.figures.items()},
            OVER_PLAIN: None if is_pass else over,
            OVER_ONE_ROW: over if is_pass else None,
            PREDICTED: self.predicted,
            "speculation": None if self.speculation is None else asdict(self.speculation),
            "answers": self.answers,
            "answers_equal_to_plain": self.answers_equal_to_plain,
            "served": None if self.served is None else self.served.to_dict(),
        }


# ---- answers


@dataclass
class Collected:
    """The slices of one cell, by variant, as far as they were run."""

    cell: Cell
    mode: str = SPECULATIVE
    slices: dict[DecodingVariant, list[tuple[Turn, Slice]]] = field(default_factory=dict)

    def add(self, turn: Turn, run: Slice) -> None:
        """Take in one run."""
        self.slices.setdefault(turn.variant, []).append((turn, run))

    def plain(self) -> dict[tuple[int, int, int], Slice]:
        """The plain runs by their pair."""
        return {
            turn.pair: run
            for variant, runs in self.slices.items()
            if variant.plan is None
            for turn, run in runs
        }

    def rows(self, predict: Callable[[DecodingVariant, Cell, Slice], float | None]) -> list[Row]:
        """A row for each variant, plain first; `predict` gets all runs of one pooled."""
        order = sorted(self.slices, key=lambda variant: variant.plan is not None)
        return [self.row(variant, predict) for variant in order]

    def row(
        self,
        variant: DecodingVariant,
        predict: Callable[[DecodingVariant, Cell, Slice], float | None],
    ) -> Row:
        """The row of a variant."""
        runs = self.slices[variant]
        plain = self.plain()
        both = [(run, plain[turn.pair]) for turn, run in runs if turn.pair in plain]
        whole = pooled([run for _, run in runs])
        speculative = variant.plan is not None
        mode = self.mode if self.mode == PREFILL else SPECULATIVE if speculative else DECODE
        measured = PREFILL_FIGURES if mode == PREFILL else MEASURED
        return Row(
            mode=mode,
            cell=self.cell,
            variant=variant,
            figures={name: figure([of(s) for _, s in runs]) for name, of in measured.items()},
            over_plain=figure([over(a, b, mode) for a, b in both]) if speculative else None,
            predicted=predict(variant, self.cell, whole) if mode == SPECULATIVE else None,
            speculation=DraftCounts.of(whole) if mode == SPECULATIVE else None,
            answers=sum(len(run.responses) for _, run in runs),
            answers_equal_to_plain=sum(equal(a, b) for a, b in both),
            prompt_tokens=fmean(m.prompt_tokens for m in whole.metrics),
        )


PREFILL_FIGURES: Mapping[str, Callable[[Slice], float | None]] = {
    "prefill_tokens_per_s": lambda s: s.prefill_tokens_per_s,
    "time_to_first_token_s": lambda s: s.time_to_first_token_s,
}


def pooled(slices: Sequence[Slice]) -> Slice:
    """All answers as those of one slice, for what is summed over them."""
    return Slice(
        [response for part in slices for response in part.responses],
        [depths for part in slices for depths in part.depths],
        sum(part.wall_s for part in slices),
    )


def over(run: Slice, plain: Slice, mode: str) -> float | None:
    """The speed of a run over that of the plain one beside it."""
    of = attrgetter("prefill_tokens_per_s" if mode == PREFILL else "tokens_per_s")
    mine, its = of(run), of(plain)
    return None if mine is None or its is None else mine / its


def equal(run: Slice, plain: Slice) -> int:
    """How many answers are those of the plain run."""
    pairs = zip(run.responses, plain.responses, strict=True)
    return sum(mine.token_ids == its.token_ids for mine, its in pairs)


def conditional_acceptance(
    metrics: Sequence[RequestMetrics], depths: Sequence[Sequence[int]]
) -> list[float]:
    """For each position the share of accepted drafts among the steps that drafted so deep and
    accepted all before it; as far as that was ever so."""
    reached, accepted = dict[int, int](), dict[int, int]()
    for request, levels in zip(metrics, depths, strict=True):
        for kept, deepest in zip(request.per_step_accepted, levels, strict=True):
            for position in range(1, min(kept + 1, deepest) + 1):
                reached[position] = reached.get(position, 0) + 1
                accepted[position] = accepted.get(position, 0) + (kept >= position)
    return [accepted[position] / reached[position] for position in sorted(reached)]


# ---- passes


def pass_rows(times: Sequence[tuple[PassSize, float]]) -> list[Row]:
    """A row for each number of rows, behind each context, with its cost over the fewest rows of the
    same repeat."""
    places: dict[tuple[int, int], dict[int, list[float]]] = {}
    for size, seconds in times:
        place = places.setdefault((size.context, size.batch_size), {})
        place.setdefault(size.rows, []).append(seconds)
    rows = []
    for (context, batch_size), by_rows in places.items():
        least = by_rows[min(by_rows)]
        for count in sorted(by_rows):
            own = by_rows[count]
            over_least = figure([b / a for a, b in zip(least, own, strict=False)])
            figures = {"pass_s": figure(own)}
            over_one_row = over_least if min(by_rows) == 1 else None
            cell = Cell(context, 0, batch_size)
            rows.append(Row(VERIFY, cell, PLAIN_VARIANT, figures, count, over_one_row))
    return rows
