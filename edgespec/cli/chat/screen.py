"""Where answers and notes of a chat go.

Knows terminals, their colors and what they may be shown. Knows nothing of answers.
"""

from __future__ import annotations

import os
from typing import TextIO

import click

from edgespec.cli.terminal import harmless, ours


class Screen:
    """Answers go to `out`, notes to stderr."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.is_terminal = self.out.isatty()
        self.in_line = False  # whether a terminal's line of the answer has not ended
        self.has_colors = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def show(self, text: str, *, accepted: bool = False) -> None:
        """Writes text of an answer; with `accepted` in the color of accepted drafts. Characters
        that the encoding lacks are escaped."""
        encoding = self.out.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        if self.is_terminal:
            text = harmless(text)
        if text:
            self.in_line = self.is_terminal and not text.endswith("\n")
        if text and accepted and self.is_terminal and self.has_colors:
            text = click.style(text, fg="green")
        self.out.write(text)
        self.out.flush()

    def note(self, text: str) -> None:
        """Writes a note that is not the model's on stderr; click removes the style where that is no
        terminal."""
        text = ours(text)
        click.echo(click.style(text, dim=True) if self.has_colors else text, err=True)

    def line(self, text: str, *, marked: bool) -> None:
        """Writes one line of a picture on stderr, in the color of accepted drafts if marked."""
        style = {"fg": "green"} if marked else {"dim": True}
        text = harmless(text)
        click.echo(click.style(text, **style) if self.has_colors else text, err=True)
