"""Tables: how they look, and as wide as they need, so that no name is cut. Knows rich."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

MAX_WIDTH = 400  # characters


def columns(*headings: str, left: int = 1, title: str | None = None) -> Table:
    """A table without rows, of whose columns the first `left` have text and the others numbers."""
    out = Table(header_style="bold", box=None, pad_edge=False, title=title, title_justify="left")
    out.title_style = "bold"
    for number, heading in enumerate(headings):
        out.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    return out


def print_table(out: Table, *, err: bool = False) -> None:
    """Prints a table on stdout, or with `err` on stderr."""
    console = Console(file=sys.stderr if err else sys.stdout, markup=False, highlight=False)
    needed = console.measure(out, options=console.options.update(max_width=MAX_WIDTH)).maximum
    console.width = max(console.width, needed)
    console.print(out)
