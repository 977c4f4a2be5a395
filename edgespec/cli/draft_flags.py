"""The flags that say how much is drafted, the same for `infer` and `chat`.

Knows flags; which methods draft chains or blocks stands in the table of methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from edgespec.contract import MAX_BLOCK_NODES
from edgespec.methods import METHODS

# TensorRT Edge-LLM's other names
ALIASES = {
    "--eagle": "--spec-decode",
    "--spec-verify-tree-size": "--spec-verify-size",
    "--eagle-verify-tree-size": "--spec-verify-size",
}


def titles(proposes: str) -> str:
    """The methods that make chains, trees or blocks, for a sentence."""
    return ", ".join(row.title for row in METHODS.values() if row.proposes == proposes)


TOP_K = (
    f"Candidates per node. 1 drafts a chain ({titles('chain')}: 1 only); {titles('block')}: at most"
    " 8."
)
STEP = f"Levels of the tree; {titles('block')}: 1."
VERIFY_SIZE = (
    f"Nodes per base pass, the root included; {titles('block')}: at most {MAX_BLOCK_NODES}."
)


def drafter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--drafter and --drafter-time-budget-ms."""
    for flag, settings in (
        (
            "--drafter-time-budget-ms",
            {
                "type": click.FloatRange(0, min_open=True),
                "help": (
                    "Milliseconds of each call of a drafter of your own; one that takes more pauses."
                    "  [default: 100]"
                ),
            },
        ),
        (
            "--drafter",
            {
                "metavar": "NAME|MODULE:CLASS",
                "help": (
                    "What drafts instead of a draft engine: a method that needs none, or a class of"
                    " your own, looked for in the working directory first (docs/own_drafter.md)."
                    " Implies --spec-decode."
                ),
            },
        ),
    ):
        command = click.option(flag, **settings)(command)
    return command


def take_drafter(ctx: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """What these flags mean for `Engine`, as its arguments; they are taken out of `values`. Raises
    click.UsageError for a budget without a drafter of one's own."""
    drafter, budget_ms = values.pop("drafter"), values.pop("drafter_time_budget_ms")
    if budget_ms is not None and (drafter is None or ":" not in drafter):
        what = "--drafter-time-budget-ms is for a drafter of your own"
        raise click.UsageError(f"{what}: --drafter MODULE:CLASS", ctx)
    found = {} if drafter is None else {"drafter": drafter}
    if budget_ms is not None:
        found["drafter_options"] = {"time_budget_ms": budget_ms}
    return found


def draft_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--spec-draft-top-k, --spec-draft-step and --spec-verify-size."""
    size = click.IntRange(1)
    for flag, text in (
        ("--spec-verify-size", VERIFY_SIZE),
        ("--spec-draft-step", STEP),
        ("--spec-draft-top-k", TOP_K),
    ):
        command = click.option(flag, type=size, help=text)(command)
    return command
