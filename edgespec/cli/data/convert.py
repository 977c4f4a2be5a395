"""`edgespec data convert`: prompt sets in the forms of other benchmarks. Knows strings and files."""

from __future__ import annotations

from pathlib import Path

import click

from edgespec.cli.flags import EdgeCommand
from edgespec.cli.infer import check_outputs
from edgespec.cli.paths import FILE
from edgespec.cli.terminal import say
from edgespec.prompts.convert import FORMS, SETS, command_line, converted


@click.command("convert", cls=EdgeCommand)
@click.argument("name", type=click.Choice(list(SETS)))
@click.argument("prompts", type=FILE, metavar="FILE")
@click.option("--to", "form", type=click.Choice(list(FORMS)), required=True, help="The program.")
@click.option("--output-file", type=FILE, default="-", help="Where to write it; - is stdout.")
def command(name: str, prompts: Path, form: str, output_file: Path) -> None:
    """Write the prompts of FILE, JSONL with turns, as another benchmark reads them, and say on stderr
    how that is called.

    genai-perf sends one turn, so that mt_bench is refused there. sharegpt gets empty answers: its
    readers need --sharegpt-output-len.

    \b
    edgespec data convert humaneval question.jsonl --to genai-perf --output-file humaneval.jsonl
    edgespec data convert mt_bench question.jsonl --to aiperf --output-file mt_bench.jsonl
    """
    from edgespec.artifacts import atomic
    from edgespec.prompts import read_prompt_set, stream_of

    check_outputs((prompts,), output_file)
    data = converted(read_prompt_set(prompts), name, form).encode()
    stream = stream_of(output_file)
    if stream is not None:
        stream.write(data)
    else:
        with atomic.writing(output_file):
            atomic.replace_file(output_file.resolve(), data)
    say(command_line(form, "FILE" if stream is not None else str(output_file)), err=True)
