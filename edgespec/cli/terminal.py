"""What a terminal may be shown: texts of strangers' without what would act on it, and errors with
their remedy."""

from __future__ import annotations

import click

from edgespec.errors import EdgeSpecError

# C0 but \t and \n, DEL, C1.
ACTING = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


def harmless(text: str) -> str:
    """A text with its control characters spelt out. Models, templates and file names are
    strangers'."""
    return text.translate(ACTING)


def report(error: EdgeSpecError) -> None:
    """What happened and the remedy, on stderr."""
    click.echo(f"error: {harmless(error.what)}", err=True)
    if error.remedy:
        click.echo(f"  {harmless(error.remedy)}", err=True)
