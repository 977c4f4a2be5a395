"""The options of prompts, sampling and checks that several commands have.

Knows flags alone. What a value may be is checked where it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from edgespec.cli.flags import refuse
from edgespec.cli.paths import DIRECTORY, JsonText
from edgespec.prompts import SamplingParams
from edgespec.prompts.named_templates import NAMED_TEMPLATES

SAMPLING: tuple[tuple[str, type | JsonText, str], ...] = (
    ("--max-generate-length", int, "Tokens per answer, at most."),
    ("--temperature", float, "0 is greedy."),
    ("--top-k", int, "0 is off."),
    ("--top-p", float, "1 is off."),
    ("--min-p", float, "0 is off."),
    ("--repetition-penalty", float, "1 is off."),
    (
        "--guided",
        JsonText(),
        "The answer's form: a JSON schema, or an object with regex, choice, grammar or json_object.",
    ),
)
CHAT_TEMPLATE = click.option(
    "--chat-template",
    metavar="NAME|FILE",
    help=f"Instead of the model's template: one of {', '.join(NAMED_TEMPLATES)}, or a Jinja file.",
)
CHECK_LOSSLESS = click.option(
    "--check-lossless",
    is_flag=True,
    help="Decode each request plainly too and compare token for token.",
)
COMPARE_QUALITY = click.option(
    "--compare-quality",
    is_flag=True,
    help=(
        "Decode each request plainly too, with the same seed, and report what the accept rule"
        " costs: the tokens that agree, and the log-likelihood a token by the base."
    ),
)
# Of scripts for TensorRT-LLM: engines bring their tokenizer, and this one must be the same
TOKENIZER_DIR = click.option("--tokenizer-dir", type=DIRECTORY, hidden=True)


def sampling_options(
    defaults: SamplingParams | None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of SAMPLING; without `defaults` they are what the requests say."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        for flag, kind, text in reversed(SAMPLING):
            default = getattr(defaults, flag.removeprefix("--").replace("-", "_"), None)
            option = click.option(flag, type=kind, default=default, help=text)
            command = option(command)
        return command

    return decorated


def check_tokenizer(engine_dir: Path, given: Path | None) -> None:
    """Raises click.UsageError where the tokenizer.json of a directory is not that of the engines,
    or there is none to compare."""
    if given is None:
        return
    from edgespec.artifacts import file_names

    name = file_names.TOKENIZER
    ours, theirs = engine_dir / name, given / name
    there, rest = theirs.is_file(), "Leave the flag out: engines bring their tokenizer."
    alike = not there or not ours.is_file() or ours.read_bytes() == theirs.read_bytes()
    why = f"its {name} is not the one that the engines were made with. {rest}"
    missing = f"it has no {name} to compare with that of the engines. {rest}"
    label = f"`tokenizer_dir` {given}"
    refuse({f"{label}: {missing}": not there, f"{label}: {why}": not alike})
