"""Output to a terminal: untrusted text without control characters, and errors with their remedy.

All text that is not ours passes through `harmless` before it is printed: names in a checkpoint,
an engine's config, what a library says of it, what a model writes. Knows characters and click.
"""

from __future__ import annotations

import json
import re

import click

from edgespec.cli.spellings import SPELLINGS
from edgespec.errors import EdgeSpecError, spelled

# C0 except \t and \n, DEL, C1; halves of surrogate pairs, which no encoding takes
CONTROL_CHARACTERS = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
} | {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}
# What JSON allows inside a string as it is
IN_JSON = re.compile("[\x7f-\x9f\ud800-\udfff]")


def harmless(text: str) -> str:
    """Returns a text with escaped control characters, for the output of models and file names."""
    return text.translate(CONTROL_CHARACTERS)


def json_text(value: object) -> str:
    """Returns a value as indented JSON in which no control character stands as it is."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def ours(text: str) -> str:
    """A message with parameters as flags and control characters escaped."""
    return harmless(spelled(text, SPELLINGS))


def say(text: str, *, err: bool = False) -> None:
    """Prints a line of ours on stdout, or on stderr with `err`."""
    click.echo(ours(text), err=err)


def report(error: EdgeSpecError) -> None:
    """Prints an error and its remedy to stderr."""
    say(f"error: {error.what}", err=True)
    if error.remedy:
        say(f"  {error.remedy}", err=True)
