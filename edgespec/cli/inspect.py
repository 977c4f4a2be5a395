"""`edgespec inspect`: `edgespec.pipeline.inspection` looks, this shows it as aligned text or as JSON."""

from __future__ import annotations

from pathlib import Path

import click

from edgespec.cli.flags import EdgeCommand
from edgespec.cli.paths import FILE
from edgespec.cli.terminal import json_text, report, say

REFUSED = 3


@click.command("inspect", cls=EdgeCommand)
@click.argument("path", metavar="PATH", type=FILE)
@click.option(
    "--layers",
    is_flag=True,
    help="List every Linear with its format and error, and every tensor of a file.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Compare hashes, which reads every file completely. Default: sizes only.",
)
@click.option("--json", "as_json", is_flag=True, help="Print all that is known as JSON.")
def command(path: Path, layers: bool, verify: bool, as_json: bool) -> int:
    """Say what is at PATH, and whether it is complete.

    PATH is a checkpoint (a base or a draft, quantized or not; a directory or a .gguf file), what
    edgespec export or build wrote, or one .safetensors file. Headers and JSON are read, no weights. What is damaged, half-written
    or beyond this version is reported with its remedy, and the exit code is 3.

    \b
    edgespec inspect qwen3-fp8 --layers
    edgespec inspect engines --verify
    """
    from edgespec.cli.summary import text_of
    from edgespec.pipeline.inspection import inspect

    inspection = inspect(path, verify=verify)
    if as_json:
        problems = [
            {"what": problem.what, "remedy": problem.remedy} for problem in inspection.problems
        ]
        shown = {
            "path": str(path),
            **inspection.to_dict(),
            "notes": inspection.notes,
            "problems": problems,
        }
        click.echo(json_text(shown))
    else:
        for line in text_of(inspection, layers=layers, verify=verify):
            say(line)
    for problem in inspection.problems:
        report(problem)
    return REFUSED if inspection.problems else 0
