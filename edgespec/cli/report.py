"""What `infer` shows: a bar of tokens while it runs, then tables in the words of the field.

Knows how values look. What they mean stands in `runtime.metrics` and `runtime.profile`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from edgespec.cli import tables
from edgespec.cli.tables import print_table
from edgespec.cli.terminal import harmless, json_text, say
from edgespec.errors import counted
from edgespec.methods import METHODS
from edgespec.prompts import Request
from edgespec.runtime.acceptance.base import GUARANTEES
from edgespec.runtime.loop.generation import Chunk
from edgespec.runtime.loop.metrics import Pooled
from edgespec.runtime.requests.answers import Answer
from edgespec.runtime.requests.profile import RunStats, speedup, summary
from edgespec.runtime.trees.tree import DraftPlan

if TYPE_CHECKING:
    from edgespec.runtime.engine_request import Opened

MAX_DIFFERENCES = 10  # that are shown; output.json has all
MAX_POSITIONS = 8  # whose acceptance is shown; output.json has all
FOR_A_TREE = (
    "a verify size alone is a chain; for a tree add --spec-draft-top-k and --spec-draft-step"
)


def opened_line(opened: Opened, plan: DraftPlan) -> str:
    """How much an open engine drafts, by the plan of `tune` or else in the words of the flags."""
    engine, request = opened.engine, opened.request
    return engine.planner.tuned_line(plan) or plan_line(
        plan,
        chosen=not request.has_sizes,
        words=engine.drafting.words,
        could_be_tree=could_be_tree(request.sizes, engine.method),
        can_adapt=engine.planner.can_adapt,
    )


def plan_line(
    plan: DraftPlan,
    *,
    chosen: bool,
    words: str = "",
    could_be_tree: bool = False,
    can_adapt: bool = False,
) -> str:
    """How much is drafted, in the words of the flags; `words` are the method's own.

    `could_be_tree`: of the sizes only that of the verification was given, to a method with trees.
    `can_adapt`: the plan may be adaptive here, so that it is said where it is not.
    """
    kind = ("chain" if plan.top_k == 1 else "tree") + words
    sizes = f"top-k {plan.top_k}, {plan.depth_words}, verify size {plan.verify_size}"
    if plan.verify_size == 1:
        return (
            f"nothing is drafted: {sizes}, which is the pending token alone. Raise"
            " --spec-verify-size, or build the base with a larger --max-verify-tree-size"
        )
    if plan.adaptive:
        return f"drafting adaptively: {most_of(plan)}{words}, each step as far as that pays"
    hint = (
        "the default on a CPU"
        if chosen
        else FOR_A_TREE
        if could_be_tree and plan.top_k == 1
        else ""
    )
    hints = ", ".join(["fixed"] * can_adapt + [hint] * bool(hint))
    return f"drafting a {kind}: {sizes}" + (f" ({hints})" if hints else "")


def most_of(plan: DraftPlan) -> str:
    """The most that an adaptive plan drafts."""
    drafts = counted(plan.verify_size - 1, "draft")
    if plan.top_k == 1:
        return f"up to {drafts} in a chain"
    return f"up to {drafts} in a tree of top-k {plan.top_k}, {plan.depth_words}"


def could_be_tree(sizes: Sequence[int | None], method: str | None) -> bool:
    """Whether of --spec-draft-top-k, --spec-draft-step and --spec-verify-size the last alone was
    given to a method that drafts trees of any size."""
    top_k, steps, verify_size = sizes
    alone = verify_size is not None and top_k is None and steps is None
    return alone and method is not None and METHODS[method].proposes == "tree"


class TokenBar:
    """Requests done, each turn of one counted, and tokens made; on a terminal only."""

    def __init__(self, requests: Sequence[Request]) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("requests {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
        )
        self.progress = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        total = sum(1 + len(request.turns) for request in requests)
        self.task = self.progress.add_task("", total=total, tokens=0)
        self.tokens = 0

    def __enter__(self) -> TokenBar:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.progress.stop()

    def add(self, chunk: Chunk) -> None:
        """Counts a step's tokens."""
        self.tokens += len(chunk.token_ids)
        self.progress.update(self.task, tokens=self.tokens)

    def finish(self, count: int) -> None:
        """Sets how many turns are answered."""
        self.progress.update(self.task, completed=count)


def show(run: RunStats, *, as_json: bool, err: bool = False) -> None:
    """Prints the summary's table (or its JSON) on stdout, or with `err` on stderr, and failed
    requests on stderr."""
    figures = summary(run)
    if as_json:
        click.echo(json_text(figures), err=err)
    elif columns_of(figures):
        print_table(table(figures), err=err)
        for line in explained(run):
            say(line, err=err)
    show_failures(run.answers)


def show_end(run: RunStats, *, show_speculation: bool) -> None:
    """Prints failed requests on stderr, and that drafts are no better than chance; with
    `show_speculation` why drafts made the run slower, and what the stored costs say of it."""
    for line in speed_lines(run, costs=show_speculation):
        say(line, err=True)
    show_failures(run.answers)


def show_failures(answers: Sequence[Answer]) -> None:
    """Prints failed requests on stderr; see `failures`."""
    for line in failures(answers):
        say(line, err=True)


def explained(run: RunStats) -> Iterator[str]:
    """The lines below the table: how many answers differ and where, what is not explained first,
    and why drafts made the run slower."""
    text = summary(run).get("lossless", "")
    if ";" in text:
        yield f"lossless: {text}"
    differing = [(a, a.difference) for a in run.answers if a.difference]
    differing.sort(key=lambda pair: pair[1].explained)
    yield from first_of(f"{place_of(answer)}: {one.words}" for answer, one in differing)
    yield from quality_lines(run)
    pool = Pooled(run.drafted)
    if pool.steps_without_drafts:
        yield (
            f"nothing was drafted in {pool.steps_without_drafts} of"
            f" {counted(pool.steps, 'step')}: more requests ran at a time than max_concurrency or"
            " draft_len_schedule lets draft"
        )
    if pool.steps_paused:
        yield (
            f"adaptive drafting decoded plainly in {pool.steps_paused} of"
            f" {counted(pool.steps, 'step')}: drafts did not pay there"
        )
    yield from speed_lines(run)


def speed_lines(run: RunStats, *, costs: bool = True) -> Iterator[str]:
    """That drafts are no better than chance; with `costs` why they made the run slower, and what
    the stored costs say of it."""
    yield from [] if run.chance is None else run.chance.lines
    cost = speedup(run) if costs else None
    if cost is not None and cost.line is not None:
        yield cost.line
    if cost is not None and run.prediction is not None:
        yield run.prediction.line(cost.over_plain)


def quality_lines(run: RunStats) -> Iterator[str]:
    """The answers that are not the exact ones, the earliest difference first."""
    others = [
        (answer, quality, quality.first_difference)
        for answer in run.answers
        if (quality := answer.quality) is not None and quality.first_difference is not None
    ]
    others.sort(key=lambda row: row[2])
    yield from first_of(f"{place_of(answer)}: {quality.words}" for answer, quality, _ in others)


def first_of(lines: Iterable[str]) -> Iterator[str]:
    """The first lines, and how many more there are."""
    shown = [*lines]
    yield from shown[:MAX_DIFFERENCES]
    if (more := len(shown) - MAX_DIFFERENCES) > 0:
        yield f"{more} more in the output file"


def failures(answers: Sequence[Answer]) -> Iterator[str]:
    """Each error with the first turn that met it and how many more did, its remedy, and last how
    many were answered; nothing where none failed."""
    places: dict[tuple[str, str], list[Answer]] = {}
    for answer in answers:
        if answer.error is not None:
            places.setdefault((answer.error.what, answer.error.remedy), []).append(answer)
    for (message, remedy), failed in places.items():
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        yield f"{place_of(failed[0])}{more}: {message}"
        yield f"  {remedy}"
    if places:
        yield f"{sum(a.response is not None for a in answers)} of {len(answers)} answered"


def show_output(answers: Sequence[Answer]) -> None:
    """The answers' text on stdout; what the encoding lacks is escaped, and what would act on a
    terminal."""
    encoding = sys.stdout.encoding or "utf-8"
    for answer in answers:
        if answer.response is not None:
            text = answer.response.text.encode(encoding, "backslashreplace").decode(encoding)
            click.echo(f"--- {place_of(answer)} ({answer.response.finish_reason})")
            click.echo(harmless(text) if sys.stdout.isatty() else text, color=True)  # as it is


def place_of(answer: Answer) -> str:
    """The request's number, with that of the turn where it has further turns."""
    turn = f", turn {answer.turn}" if answer.request.turns else ""
    return f"request {answer.request.index}{turn}"


# ---- the summary

# A value of each column; an indented row only where it reads otherwise than the row above it.
ROWS = (
    ("tokens", "completion_tokens", "{}"),
    ("base passes after prefill", "base_passes_after_prefill", "{}"),
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("tokens/s of the whole run", "output_tokens_per_s", "{:.1f}"),
    ("time to first token", "time_to_first_token_s", "{:.3f} s"),
    ("  without queue time", "time_to_first_token_without_queue_s", "{:.3f} s"),
    ("inter-token latency", "inter_token_latency_s", "{:.4f} s"),
    ("  mean of requests", "inter_token_latency_mean_of_requests_s", "{:.4f} s"),
    ("acceptance length", "acceptance_length", "{:.2f}"),
    ("  mean of requests", "acceptance_length_mean_of_requests", "{:.2f}"),
    ("acceptance rate", "acceptance_rate", "{:.2f}"),
    ("  mean of requests", "acceptance_rate_mean_of_requests", "{:.2f}"),
    ("log-likelihood a token", "log_likelihood_per_token", "{:.3f}"),
)
INDENTED = "  "


def columns_of(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The values of plain and speculative decoding, as far as each was run; those of the run
    itself come last."""
    if (quality := figures.get("quality")) is not None:
        figures = figures | {
            "plain": figures["plain"]
            | {"log_likelihood_per_token": quality["exact_log_likelihood_per_token"]},
            "speculative": figures["speculative"]
            | {"log_likelihood_per_token": quality["log_likelihood_per_token"]},
        }
    names = [name for name in ("plain", "speculative") if name in figures]
    if not names or (figures["batch_size"] == 1 and figures["requests"] == 1):
        return {name: figures[name] for name in names}
    whole = {
        "plain": figures.get("check_output_tokens_per_s"),
        names[-1]: figures["output_tokens_per_s"],
    }
    return {name: figures[name] | {"output_tokens_per_s": whole[name]} for name in names}


def table(figures: dict[str, Any]) -> Table:
    """Plain beside speculative; acceptance length counts the bonus, not prefill's token."""
    columns = columns_of(figures)
    out = tables.columns("", *columns)
    above: list[str] = []
    for label, key, form in ROWS:
        values = [column.get(key) for column in columns.values()]
        cells = ["-" if value is None else form.format(value) for value in values]
        if any(value is not None for value in values) and not (
            label.startswith(INDENTED) and cells == above
        ):
            out.add_row(label, *cells)
        above = cells
    for label, cell in run_rows(figures):
        out.add_row(label, *[""] * (len(columns) - 1), cell)
    return out


def run_rows(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What there is one of: all that concerns the run."""
    if "speculative" in figures:
        rates = figures["speculative"]["per_position_acceptance"]
        shown = [f"{rate:.2f}" for rate in rates[:MAX_POSITIONS]]
        more = ["..."] if len(rates) > len(shown) else []
        yield "per-position acceptance", " ".join(shown + more) or "-"
    if "images" in figures:
        images = figures["images"]
        spent = f"read in {images['read_s']:.2f} s, {images['encoded']} encoded in"
        yield "images", f"{images['images']}, {counted(images['tokens'], 'token')}"
        yield "  time", f"{spent} {images['encode_s']:.2f} s"
    if figures["reused_tokens"]:
        prompts = figures["reused_tokens"] + figures["computed_tokens"]
        yield "reused prompt tokens", f"{figures['reused_tokens']} of {prompts}"
    for row in figures.get("acceptance", ()):
        if row["lossless"] != "tokens":
            count = f" ({counted(row['requests'], 'request')})" * (len(figures["acceptance"]) > 1)
            yield "acceptance", f"{row['rule']}: {GUARANTEES[row['lossless']]}{count}"
    if "lost_drafts" in figures:
        lost = ", ".join(f"{count} {why}" for why, count in figures["lost_drafts"].items())
        yield "lost drafts", lost
    if "quality" in figures:
        quality = figures["quality"]
        yield "identical answers", f"{quality['identical']} of {quality['compared']}"
        share = quality["agreement"]
        yield "tokens as in exact answers", "-" if share is None else f"{share:.1%}"
    yield "peak memory", f"{figures['peak_cpu_memory_mb']:.0f} MB"
    if "base_passes_saved" in figures:
        share = figures["base_passes_saved"]
        yield "base passes saved", "-" if share is None else f"{share:.0%}"
    if "lossless" in figures:
        yield "lossless", figures["lossless"].partition(";")[0]


# ---- the profile


def profile_table(profile: dict[str, Any]) -> Table:
    """A table of times by stage in ms, with each stage's share of the wall time."""
    wall_ms = 1000 * profile["edgespec"]["wall_s"]
    out = tables.columns("stage (wall ms)", "passes", "total", "mean", "median", "p95", "share")
    for stage in profile["stages"]:
        total, stats = stage["total_gpu_time_ms"], stage["gpu_time_stats"]
        times = (total, stats["mean_ms"], stats["median_ms"], stats["p95_ms"])
        out.add_row(
            stage["stage_id"],
            str(stage["total_runs"]),
            *map("{:.2f}".format, times),
            share(total, wall_ms),
        )
    rest = max(0.0, wall_ms - sum(stage["total_gpu_time_ms"] for stage in profile["stages"]))
    out.add_row("outside the stages", "", f"{rest:.2f}", "", "", "", share(rest, wall_ms))
    return out


def share(part: float, whole: float) -> str:
    """A part in per cent; `-` where the whole is 0."""
    return f"{part / whole:.1%}" if whole else "-"
