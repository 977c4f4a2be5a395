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
