"""`edgespec infer`: strings into values; `runtime.file_runner` does the work, `cli.report` shows
it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import environment
from edgespec.cli.draft_flags import ALIASES, draft_options
from edgespec.cli.edgellm import FLAGS
from edgespec.cli.flags import EdgeCommand
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import say
from edgespec.errors import RequestError

if TYPE_CHECKING:
    from edgespec.prompts import Journal, RequestFile
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.file_runner import FileRun
    from edgespec.runtime.profile import RunStats
    from edgespec.runtime.tree import DraftPlan

FILE = click.Path(path_type=Path)
MIB = 2**20
FAILED, SOME_FAILED = 1, 5


@click.command("infer", cls=EdgeCommand, aliases=ALIASES, missing=FLAGS["infer"])
@click.option(
    "--engine-dir",
    required=True,
    type=click.Path(path_type=Path),
    envvar=environment.ENGINE_DIR,
    show_envvar=True,
    help="What edgespec build made.",
)
@click.option(
    "--input-file", type=FILE, metavar="FILE", help="Requests: messages and sampling, as JSON."
)
@click.option(
    "--prompts",
    type=FILE,
    metavar="FILE",
    help="A JSONL prompt set with turns, such as MT-Bench's, instead of --input-file.",
)
@click.option(
    "--output-file",
    required=True,
    type=FILE,
    metavar="FILE",
    help="Write the responses and their metrics as JSON.",
)
@click.option(
    "--spec-decode",
    is_flag=True,
    help="Decode speculatively, with the base and the draft of the engine directory.",
)
@draft_options
@click.option(
    "--batch-size",
    type=int,
    help="Requests at a time. This flag and those below, to --num-logprobs, override the input file.",
)
@click.option("--max-generate-length", type=int, help="Tokens per answer, at most.")
@click.option("--temperature", type=float, help="0 is greedy.")
@click.option("--top-k", type=int, help="0 is off.")
@click.option("--top-p", type=float, help="1 is off.")
@click.option("--min-p", type=float, help="0 is off.")
@click.option("--repetition-penalty", type=float, help="1 is off.")
@click.option(
    "--seed", type=int, help="Seed of every request. Default: the file's, or a random one."
)
@click.option("--num-logprobs", type=int, help="Candidates per token in the output, 0 to 50.")
@click.option(
    "--check-lossless",
    is_flag=True,
    help="Decode each request plainly too and compare token for token.",
)
@click.option(
    "--exact",
    is_flag=True,
    help=(
        "Drafts leave every bit as it is: fp32, int4 in blocks of 32, or int8 GEMM"
        " (int8_sq, int8_token, --weight-block 0); chains only, one request at a time. Not for"
        " bases with recurrent layers (Qwen3.5)."
    ),
)
@click.option(
    "--prefix-cache-mb",
    type=click.IntRange(0),
    default=256,
    show_default=True,
    envvar=environment.PREFIX_CACHE_MB,
    show_envvar=True,
    help=(
        "Memory for KV rows of system prompts and turns, reused by prompts that begin alike; 0 is"
        " off."
    ),
)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=0,
    help="Run the first batch this many times beforehand, unmeasured.",
)
@click.option(
    "--profile-output-file", type=FILE, metavar="FILE", help="Write times by stage as JSON."
)
@click.option("--dump-profile", is_flag=True, help="Print times by stage.")
@click.option("--dump-output", is_flag=True, help="Print the text of the answers.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    engine_dir: Path,
    input_file: Path | None,
    prompts: Path | None,
    output_file: Path,
    spec_decode: bool,
    spec_draft_top_k: int | None,
    spec_draft_step: int | None,
    spec_verify_size: int | None,
    check_lossless: bool,
    exact: bool,
    prefix_cache_mb: int,
    warmup: int,
    profile_output_file: Path | None,
    dump_profile: bool,
    dump_output: bool,
    as_json: bool,
    **overrides: Any,
) -> int:
    """Answer the requests of --input-file with the engines of --engine-dir.

    With --spec-decode the output equals that of plain decoding, greedy and sampled: in float32
    token for token, with quantized weights or recurrent layers up to the margin that is printed;
    --check-lossless compares the two on the requests at hand. Without the three sizes a short chain is
    drafted: top-k 1, step 3, verify size 4, which suits CPUs (TensorRT Edge-LLM's 10, 6, 60 suit
    GPUs). A size left out follows from those given: with a verify size alone, a chain of one level
    less.

    A draft that makes blocks does so in one step: without sizes a chain of 8 nodes, the root
    included, or of its block if that is shorter. The verify size may go up to the block; with a
    top-k of 2 to 8 a tree of up to 128 nodes is made of the block. A draft that only makes chains
    has top-k 1 and verify size step + 1.

    Ctrl-C ends the run after the current step and writes what was generated (exit 130); a second
    one stops at once. Finished responses are also kept in OUTPUT.partial.jsonl until the output is written.

    \b
    edgespec infer --engine-dir engines --input-file input.json --output-file output.json --spec-decode
    edgespec infer --engine-dir engines --prompts mt_bench.jsonl --output-file answers.json --batch-size 4
    """
    sizes = (spec_draft_top_k, spec_draft_step, spec_verify_size)
    if not spec_decode and (check_lossless or any(sizes)):
        flag = "--check-lossless" if check_lossless else "the sizes of drafts"
        raise click.UsageError(f"{flag} means nothing without --spec-decode", ctx)
    if (input_file is None) == (prompts is None):
        raise click.UsageError("give either --input-file or --prompts", ctx)
    if as_json and (dump_output or dump_profile):
        raise click.UsageError(
            "--json prints the summary alone: leave --dump-output and --dump-profile out", ctx
        )
    from edgespec.prompts import Journal, read_prompt_set, read_requests
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.file_runner import FileRun

    requests = (
        read_requests(input_file, **overrides)
        if input_file
        else read_prompt_set(prompts or "", **overrides)
    )
    check_outputs(requests, output_file, profile_output_file)
    with Engine(
        engine_dir, spec_decode=spec_decode, exact=exact, prefix_cache_bytes=prefix_cache_mb * MIB
    ) as engine:
        plan = engine.plan(*sizes) if spec_decode else None
        engine.check_batch_size(requests.batch_size)
        notes = notes_of(engine, plan, requests, chosen=not any(sizes))
        with Journal(output_file) as journal, Stopper(lambda: kept_in(journal)) as stopper:
            if journal.leftover:
                notes.append(
                    f"{journal.leftover} is from a run that was killed; it is left as it is"
                )
            for note in notes:
                warn(note)
            run = FileRun(engine, requests, plan, journal, stopping=stopper, warn=warn)
            answer(run, warmup=warmup, check_lossless=check_lossless)
    stats = run.stats()
    if profile_output_file:
        write_profile(profile_output_file, stats)
    if stopper() or run.fault:
        say(f"what was finished is in {output_file}", err=True)
    if run.fault:
        raise run.fault
    show(stats, as_json=as_json, dump_profile=dump_profile, dump_output=dump_output)
    return outcome(stats, stopper.number, check_lossless=check_lossless)


def warn(text: str) -> None:
    """Print a line on stderr."""
    say(text, err=True)


def notes_of(
    engine: Engine, plan: DraftPlan | None, requests: RequestFile, *, chosen: bool
) -> list[str]:
    """The lines before a run: the plan, and what a user should know of engines and modes."""
    from edgespec.cli import report

    if plan is None:
        return [*engine.notes]
    asked = [
        request.enable_thinking
        for request in requests.requests
        if request.apply_chat_template and not request.disable_spec_decode
    ]
    thinking = engine.thinking_note(asked)
    line = report.plan_line(plan, chosen=chosen, words=engine.drafter_words)
    return [line, *engine.notes, *([thinking] if thinking else [])]


def answer(run: FileRun, *, warmup: int, check_lossless: bool) -> None:
    """Run it under a bar, and write the output."""
    from edgespec.cli.report import TokenBar

    with TokenBar(run.requests.requests) as bar:
        run.run(bar, warmup=warmup, check_lossless=check_lossless)
    run.write()


def show(stats: RunStats, *, as_json: bool, dump_profile: bool, dump_output: bool) -> None:
    """Print the summary, and where asked for the times by stage and the answers' text."""
    from edgespec.cli import report
    from edgespec.runtime.profile import profile

    report.show(stats, as_json=as_json)
    if dump_profile:
        report.show_profile(profile(stats))
    if dump_output:
        report.show_output(stats.answers)


def check_outputs(requests: RequestFile, *outputs: Path | None) -> None:
    """Raises RequestError where an output is the input or named twice, OutputError where it cannot
    be written; before any work."""
    from edgespec.prompts import check_writable

    for output in outputs:
        if output is None:
            continue
        if output.exists() and output.samefile(requests.path):
            raise RequestError(
                f"{output} is the input file", "Give another file for what is written."
            )
        check_writable(output)
    given = [os.path.realpath(output) for output in outputs if output]
    if len(given) != len(set(given)):
        raise RequestError(
            f"{given[0]} is to hold both the responses and the profile", "Give two files."
        )


def kept_in(journal: Journal) -> str:
    """What the message of a second signal adds: where the finished responses are."""
    return (
        f"; what was finished is in {journal.path}"
        if journal.num_lines
        else "; nothing was finished"
    )


def write_profile(path: Path, stats: RunStats) -> None:
    """Write profile.json; a link's target is replaced, not the link. Raises OutputError."""
    from edgespec.bundle import write_json, writing
    from edgespec.runtime.profile import profile

    path = Path(os.path.realpath(path))  # what a link means, not the link
    with writing(path):
        write_json(path, profile(stats))


def outcome(stats: RunStats, stopped_by: int | None, *, check_lossless: bool) -> int:
    """The exit code, and on stderr what is behind it."""
    if check_lossless and not any(a.plain for a in stats.answers):
        click.echo("nothing was compared: no request was answered with drafts", err=True)
    uncompared = sum(
        a.speculative and a.response is not None and a.plain is None for a in stats.answers
    )
    if check_lossless and uncompared:
        say(f"not compared: {uncompared} answers, whose plain run failed or was stopped", err=True)
    if any(a.difference is not None and not a.difference.near_tie for a in stats.answers):
        click.echo(
            "NOT lossless: a difference beyond a near-tie is a bug; please report it with the"
            " output",
            err=True,
        )
        return FAILED
    if stopped_by is not None:
        return exit_code(stopped_by)
    return SOME_FAILED if any(a.error for a in stats.answers) else 0
