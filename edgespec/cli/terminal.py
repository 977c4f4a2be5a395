"""Output to a terminal: untrusted text without control characters, and errors with their remedy.

Knows characters and click.
"""

from __future__ import annotations

import click

from edgespec.errors import EdgeSpecError

# C0 except \t and \n, DEL, C1
CONTROL_CHARACTERS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


def harmless(text: str) -> str:
    """Returns a text with escaped control characters, for the output of models and file names."""
    return text.translate(CONTROL_CHARACTERS)


def report(error: EdgeSpecError) -> None:
    """Prints an error and its remedy to stderr."""
    click.echo(f"error: {harmless(error.what)}", err=True)
    if error.remedy:
        click.echo(f"  {harmless(error.remedy)}", err=True)
