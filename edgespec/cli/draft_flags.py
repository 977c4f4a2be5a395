"""The flags that say what drafts, and how much, the same for `infer`, `chat` and `run`.

Knows flags; which methods there are, and which draft chains or blocks, stands in the table of
methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import click

from edgespec.cli.paths import Text
from edgespec.contract import MAX_BLOCK_NODES
from edgespec.methods import METHODS, find_method

# TensorRT Edge-LLM's other names
ALIASES = {
    "--eagle": "--spec-decode",
    "--spec-verify-tree-size": "--spec-verify-size",
    "--eagle-verify-tree-size": "--spec-verify-size",
}


def titles(proposes: str) -> str:
    """The methods that make chains, trees or blocks, for a sentence."""
    return ", ".join(row.title for row in METHODS.values() if row.proposes == proposes)


LENGTH = "max_draft_len"  # an option of methods
DRAFTER = (
    "Draft with a method that needs no engine, also where there is a draft:"
    f" {', '.join(row.name for row in METHODS.values() if not row.needs_engine)}."
)
TOP_K = (
    f"Candidates per node. 1 drafts a chain ({titles('chain')}: 1 only); {titles('block')}: at most"
    " 8."
)
STEP = f"Levels of the tree; {titles('block')}: 1."
VERIFY_SIZE = (
    f"Nodes per base pass, the root included; {titles('block')}: at most {MAX_BLOCK_NODES}."
)


def engineless() -> list[str]:
    """The names of the methods that draft without an engine."""
    return [row.name for row in METHODS.values() if not row.needs_engine]


def drafter_named(text: str) -> str:
    """What --drafter names: a method that needs no engine, by its name or an alias. Raises
    click.BadParameter for anything else."""
    row, known = find_method(text), ", ".join(engineless())
    if row is None:
        raise click.BadParameter(f"there is no drafting method {text!r}. Known: {known}.")
    if row.needs_engine:
        raise click.BadParameter(
            f"{row.title} drafts with an engine of its own: build it beside the base, and give"
            f" --spec-decode. Without an engine: {known}."
        )
    return row.name


class DrafterName(Text):
    """What `drafter_named` reads."""

    name = "drafter"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The method's name."""
        return drafter_named(value)


def options_by_sizes(drafter: str | None, steps: int | None) -> dict[str, object] | None:
    """The options of a method that has a pool of drafts of one length: as long as
    --spec-draft-step says. None for other methods."""
    from edgespec.runtime.drafters.registry import DRAFTERS

    options = DRAFTERS[drafter].options if drafter in DRAFTERS else None
    if steps is None or options is None or LENGTH not in options.__dataclass_fields__:
        return None
    return {LENGTH: steps}


def wanted(spec_decode: bool | None, *, sized: bool) -> bool | Literal["auto"]:
    """Whether a chat or a run is to draft, by --spec-decode and whether sizes were given: without
    either, with whatever there is."""
    if spec_decode is None:
        return True if sized else "auto"
    return spec_decode


def draft_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--drafter, --spec-draft-top-k, --spec-draft-step and --spec-verify-size."""
    size = click.IntRange(1)
    for flag, text in (
        ("--spec-verify-size", VERIFY_SIZE),
        ("--spec-draft-step", STEP),
        ("--spec-draft-top-k", TOP_K),
    ):
        command = click.option(flag, type=size, help=text)(command)
    return click.option("--drafter", type=DrafterName(), metavar="NAME", help=DRAFTER)(command)
