"""What `infer` shows: a bar of tokens while it runs, then one table in the words of the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from edgespec.prompts import Request
from edgespec.runtime.answers import Answer
from edgespec.runtime.engine import Chunk
from edgespec.runtime.metrics import Pooled
from edgespec.runtime.tree import DraftPlan


def plan_line(plan: DraftPlan, *, chosen: bool) -> str:
    kind = "chain" if plan.top_k == 1 else "tree"
    sizes = f"top-k {plan.top_k}, step {plan.steps}, verify size {plan.verify_size}"
    return f"drafting a {kind}: {sizes}" + (" (the default on a CPU)" if chosen else "")


class TokenBar:
    """Requests done and tokens made, on a terminal only."""

    def __init__(self, requests: Sequence[Request]) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("request {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
        )
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.progress.add_task("", total=len(requests), tokens=0)
        self.tokens = 0

    def __enter__(self) -> TokenBar:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def add(self, chunk: Chunk) -> None:
        self.tokens += len(chunk.token_ids)
        self.progress.update(self.task, tokens=self.tokens)

    def finish(self, count: int) -> None:
        self.progress.update(self.task, completed=count)


def show(answers: Sequence[Answer], *, spec_decode: bool, as_json: bool) -> None:
    """The table on stdout (or its JSON), failed requests on stderr."""
    if as_json:
        click.echo(json.dumps(summary(answers, spec_decode=spec_decode), indent=2))
    else:
        Console(file=sys.stdout).print(table(answers, spec_decode=spec_decode))
    for found in answers:
        if found.error:
            click.echo(f"request {found.request.index}: {found.error.what}", err=True)
            click.echo(f"  {found.error.remedy}", err=True)


def summary(answers: Sequence[Answer], *, spec_decode: bool) -> dict[str, Any]:
    """Speculative figures over the requests that drafted, plain ones over those decoded plainly.

    With --check-lossless both columns, and what was saved, are over the requests that ran both ways.
    """
    checked = [a for a in answers if a.plain]
    drafted = [a.response.metrics for a in checked or answers if a.response and a.speculative]
    plainly = [a.plain.metrics for a in checked if a.plain]
    if not spec_decode:
        plainly = [a.response.metrics for a in answers if a.response]
    out: dict[str, Any] = {
        "requests": len(answers),
        "failed": sum(a.error is not None for a in answers),
        "without_drafts": sum(a.request.disable_spec_decode for a in answers) if spec_decode else len(answers),
    }
    if plainly:
        out["plain"] = figures(Pooled(plainly), speculative=False)
    if drafted:
        out["speculative"] = figures(Pooled(drafted), speculative=True)
    if checked:
        out["base_passes_saved"] = saved(Pooled(drafted), Pooled(plainly))
        out["lossless"] = verdict(answers)
    return out


def figures(pool: Pooled, *, speculative: bool) -> dict[str, Any]:
    """Pooled over all requests; times in seconds, the time to first token a mean over requests."""
    out: dict[str, Any] = {
        "completion_tokens": sum(r.completion_tokens for r in pool.requests),
        "base_passes_after_prefill": pool.steps,
        "tokens_per_s": pool.tokens_per_s,
        "time_to_first_token_s": pool.time_to_first_token,
        "inter_token_latency_s": pool.inter_token_latency,
    }
    if speculative:
        out |= {
            "acceptance_length": pool.acceptance_length,
            "acceptance_rate": pool.acceptance_rate,
            "per_position_acceptance": pool.per_position_acceptance,
        }
    return out


def saved(done: Pooled, plain: Pooled) -> float | None:
    """Share of the plain run's base passes that speculation did without."""
    return 1 - done.steps / plain.steps if plain.steps else None


def verdict(answers: Sequence[Answer]) -> str:
    differing = [a.difference for a in answers if a.difference]
    if not differing:
        return "yes"
    ties = sum(d.near_tie for d in differing)
    return f"yes, but for {ties} near-ties" if ties == len(differing) else f"NO: {len(differing) - ties} differences"


ROWS = (
    ("tokens", "completion_tokens", "{}"),
    ("base passes after prefill", "base_passes_after_prefill", "{}"),
    ("tokens/s", "tokens_per_s", "{:.1f}"),
    ("time to first token", "time_to_first_token_s", "{:.3f} s"),
    ("inter-token latency", "inter_token_latency_s", "{:.4f} s"),
    ("acceptance length", "acceptance_length", "{:.2f}"),
    ("acceptance rate", "acceptance_rate", "{:.2f}"),
)


def table(answers: Sequence[Answer], *, spec_decode: bool) -> Table:
    """Plain beside speculative as far as each was run; acceptance length counts the bonus, not prefill's token."""
    found = summary(answers, spec_decode=spec_decode)
    columns = [name for name in ("plain", "speculative") if name in found]
    out = Table(show_header=True, header_style="bold", box=None, pad_edge=False)
    for heading in ("", *columns):
        out.add_column(heading, justify="left" if not heading else "right")
    for label, key, form in ROWS:
        cells = [found[name].get(key) for name in columns]
        if any(cell is not None for cell in cells):
            out.add_row(label, *(("-" if cell is None else form.format(cell)) for cell in cells))
    last = [""] * (len(columns) - 1)
    if "speculative" in found:
        rates = found["speculative"]["per_position_acceptance"]
        out.add_row("per-position acceptance", *last, " ".join(f"{rate:.2f}" for rate in rates) or "-")
    if "lossless" in found:
        share = found["base_passes_saved"]
        out.add_row("base passes saved", *last, "-" if share is None else f"{share:.0%}")
        out.add_row("lossless", *last, found["lossless"])
    return out
