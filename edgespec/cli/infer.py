"""`edgespec infer`: strings into values; `runtime.answers` does the work, `cli.report` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.flags import INTERRUPTED, EdgeCommand
from edgespec.errors import RequestError

if TYPE_CHECKING:
    from edgespec.prompts import RequestFile
    from edgespec.runtime.answers import Answer
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.tree import DraftPlan

FILE = click.Path(path_type=Path)
ALIASES = {
    "--eagle": "--spec-decode",
    "--spec-verify-tree-size": "--spec-verify-size",
    "--eagle-verify-tree-size": "--spec-verify-size",
}
FAILED, SOME_FAILED = 1, 5


@click.command("infer", cls=EdgeCommand, aliases=ALIASES)
@click.option("--engine-dir", required=True, type=click.Path(path_type=Path), help="What edgespec build made.")
@click.option(
    "--input-file", required=True, type=FILE, metavar="FILE", help="Requests: messages and sampling, as JSON."
)
@click.option(
    "--output-file", required=True, type=FILE, metavar="FILE", help="Where the responses and their metrics go, as JSON."
)
@click.option("--spec-decode", is_flag=True, help="Draft and verify; the engine directory holds base and draft.")
@click.option("--spec-draft-top-k", type=click.IntRange(1), help="Candidates a node; 1 is a chain.")
@click.option("--spec-draft-step", type=click.IntRange(1), help="Levels of the tree.")
@click.option("--spec-verify-size", type=click.IntRange(1), help="Nodes a base pass, the root included.")
@click.option("--max-generate-length", type=click.IntRange(1), help="Override the file's.")
@click.option("--check-lossless", is_flag=True, help="Decode each request plainly too and compare token for token.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def command(
    ctx: click.Context, engine_dir: Path, input_file: Path, output_file: Path, spec_decode: bool,
    spec_draft_top_k: int | None, spec_draft_step: int | None, spec_verify_size: int | None,
    max_generate_length: int | None, check_lossless: bool, as_json: bool,
) -> int:  # fmt: skip
    """Answer the requests of --input-file with the engines of --engine-dir.

    With --spec-decode the output equals that of plain decoding, greedy and sampled; --check-lossless proves it on the
    requests at hand. Without the three sizes a short chain is drafted: top-k 1, step 3, verify size 4, what a CPU
    is served by (the guide's 10, 6, 60 are for a GPU). A size left out follows from those given: with a verify size
    alone, a chain of one level less.

    \b
    edgespec infer --engine-dir engines --input-file input.json --output-file output.json --spec-decode
    """
    sizes = (spec_draft_top_k, spec_draft_step, spec_verify_size)
    if not spec_decode and (check_lossless or any(sizes)):
        flag = "--check-lossless" if check_lossless else "the sizes of drafts"
        raise click.UsageError(f"{flag} means nothing without --spec-decode", ctx)
    from edgespec import prompts
    from edgespec.cli import report
    from edgespec.runtime.engine import Engine

    requests = prompts.read_requests(input_file, max_generate_length=max_generate_length)
    refuse_batches(requests)
    if output_file.exists() and output_file.samefile(input_file):
        raise RequestError(f"--output-file {output_file} is the input file", "Give another file for the responses.")
    prompts.check_writable(output_file)
    with Engine(engine_dir, spec_decode=spec_decode) as engine:
        plan = engine.plan(*sizes) if spec_decode else None
        if plan:
            click.echo(report.plan_line(plan, chosen=not any(sizes)), err=True)
        for note in engine.notes:
            click.echo(note, err=True)
        answers, stopped = run(engine, requests, plan, check_lossless)
    from edgespec.runtime.answers import to_dict

    prompts.write_output(output_file, str(input_file), [to_dict(a) for a in answers])
    if stopped is not None:
        interrupted = isinstance(stopped, KeyboardInterrupt)
        click.echo(f"{'interrupted: ' if interrupted else ''}what was finished is in {output_file}", err=True)
        if interrupted:
            return INTERRUPTED
        raise stopped
    report.show(answers, spec_decode=spec_decode, as_json=as_json)
    if check_lossless and not any(a.plain for a in answers):
        click.echo("nothing was compared: no request was answered with drafts", err=True)
    if any(a.difference is not None and not a.difference.near_tie for a in answers):
        click.echo("NOT lossless: a difference beyond a near-tie is a bug; please report it with the output", err=True)
        return FAILED
    return SOME_FAILED if any(a.error for a in answers) else 0


def refuse_batches(requests: RequestFile) -> None:
    if requests.batch_size > 1:
        what = f"{requests.path}: batch_size {requests.batch_size}; this version runs one sequence at a time"
        raise RequestError(what, "Set batch_size to 1: the requests are answered one after the other.")


def run(
    engine: Engine, requests: RequestFile, plan: DraftPlan | None, check_lossless: bool
) -> tuple[list[Answer], BaseException | None]:
    """The answers in order, and what stopped the run early, if anything: the rest are then marked as cancelled."""
    from edgespec.cli.report import TokenBar
    from edgespec.runtime.answers import Answer, answer

    answers: list[Answer] = []
    with TokenBar(requests.requests) as bar:
        try:
            for request in requests.requests:
                answers.append(answer(engine, request, plan, check_lossless=check_lossless, observe=bar.add))
                bar.finish(len(answers))
        except (KeyboardInterrupt, Exception) as stop:
            left = requests.requests[len(answers) :]
            return answers + [Answer(request, cancelled=True) for request in left], stop
    return answers, None
