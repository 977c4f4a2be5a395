"""`edgespec infer`: strings into values; `runtime.file_runner` does the work, `cli.report` shows
it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.accept_flags import (
    accept_options,
    notes_of_rules,
    refuse_check,
    relaxed_note,
)
from edgespec.cli.costs_flag import measure_busy_again
from edgespec.cli.draft_flags import ALIASES
from edgespec.cli.engine_options import (
    EXACT,
    PREFIX_CACHE,
    SPEC_DECODE,
    draft_options,
    engine_dir_option,
    engine_options,
    opened,
    planned,
    refuse_without_drafts,
)
from edgespec.cli.exit_codes import FAILED, SOME_FAILED
from edgespec.cli.flags import refuse
from edgespec.cli.help_pages import PAGES, PagedCommand
from edgespec.cli.image_flags import IMAGE, beside, image_flags
from edgespec.cli.paths import FILE
from edgespec.cli.prompt_options import (
    CHAT_TEMPLATE,
    CHECK_LOSSLESS,
    COMPARE_QUALITY,
    TOKENIZER_DIR,
    check_tokenizer,
    sampling_options,
)
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.streams import require_stream
from edgespec.cli.terminal import json_text, say
from edgespec.compat import trtllm
from edgespec.compat.edgellm import FLAGS, switch
from edgespec.errors import OverwriteError, counted

if TYPE_CHECKING:
    from edgespec.cli.answer_stream import AnswerStream
    from edgespec.prompts import Journal, NoJournal, RequestFile
    from edgespec.runtime.engine_request import EngineRequest, Opened
    from edgespec.runtime.requests.file_runner import FileRun
    from edgespec.runtime.requests.profile import RunStats
    from edgespec.runtime.trees.tree import DraftPlan

STDIN = Path("-")
TWO_CHECKS = (
    "`check_lossless` and `compare_quality` exclude each other: a check is for rules that change no"
    " token"
)
IMAGE_IN_FILE = (
    "`image` goes with `prompt`; in a file an image is an item of a message (docs/images.md)"
)
SUMMARY_ALONE = "`json` prints the summary alone: leave `dump_output` and `dump_profile` out"
OF_REQUESTS = {
    "--enable-thinking": switch(
        'it is a key of requests: write "enable_thinking": true in the input file. edgespec chat and'
        " run have the flag"
    )
}


@click.command(
    "infer",
    cls=PagedCommand,
    page=PAGES["infer"],
    aliases={**ALIASES, **trtllm.ALIASES["infer"]},
    missing={**FLAGS["infer"], **trtllm.FLAGS["infer"], **OF_REQUESTS},
)
@engine_dir_option
@engine_options(image_flags, SPEC_DECODE, draft_options, accept_options, EXACT, PREFIX_CACHE)
@click.option(
    "--input-file",
    type=FILE,
    help="Requests: messages and sampling, as JSON; - reads them from stdin, as JSON or JSONL.",
)
@click.option(
    "--prompts",
    type=FILE,
    help="A JSONL prompt set with turns, such as MT-Bench's, instead of --input-file.",
)
@click.option(
    "--prompt",
    "texts",
    multiple=True,
    metavar="TEXT",
    help=(
        "Instead: one request with this text; may be given repeatedly. Without --output-file the"
        " answers go to stdout."
    ),
)
@click.option("--image", "named_images", **IMAGE)
@click.option(
    "--input-text",
    "raw_texts",
    multiple=True,
    metavar="TEXT",
    help="Instead: a text to be continued as it is, like --prompt TEXT --no-chat-template.",
)
@TOKENIZER_DIR
@CHAT_TEMPLATE
@click.option(
    "--no-chat-template",
    is_flag=True,
    help="Give the model each --prompt as it is, to be continued.",
)
@click.option(
    "--output-file",
    type=FILE,
    help=(
        "Write the responses and their metrics as JSON; - writes them to stdout, and the summary"
        " to stderr."
    ),
)
@click.option(
    "--batch-size",
    type=int,
    help="Requests at a time. This flag and those of sampling override the input file.",
)
@sampling_options(None)
@click.option(
    "--seed", type=int, help="Seed of every request. Default: the file's, or a random one."
)
@click.option("--num-logprobs", type=int, help="Candidates per token in the output, 0 to 50.")
@CHECK_LOSSLESS
@COMPARE_QUALITY
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=0,
    help="Run the first batch this many times beforehand, unmeasured.",
)
@click.option("--profile-output-file", type=FILE, help="Write times by stage as JSON.")
@click.option("--dump-profile", is_flag=True, help="Print times by stage.")
@click.option("--dump-output", is_flag=True, help="Print the text of the answers.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    engine_dir: Path,
    engine_request: EngineRequest,
    input_file: Path | None,
    prompts: Path | None,
    texts: tuple[str, ...],
    named_images: tuple[Path, ...],
    raw_texts: tuple[str, ...],
    tokenizer_dir: Path | None,
    chat_template: str | None,
    no_chat_template: bool,
    output_file: Path | None,
    check_lossless: bool,
    compare_quality: bool,
    warmup: int,
    profile_output_file: Path | None,
    dump_profile: bool,
    dump_output: bool,
    as_json: bool,
    **overrides: Any,
) -> int:
    """Answer the requests of --input-file, or of --prompt, with the engines of --engine-dir.

    With --spec-decode the output equals that of plain decoding, up to rounding; --check-lossless
    compares the two. Without the three sizes what suits the device is drafted. Ctrl-C ends the run
    after the current step and writes what was generated (exit 130).

    \b
    edgespec infer --engine-dir engines --input-file input.json --output-file output.json --spec-decode
    edgespec infer --engine-dir engines --prompt 'Why is the sky blue?' --spec-decode
    edgespec infer --engine-dir engines --prompt 'What is it?' --image ship.jpg --spec-decode
    \f
    With --spec-decode the output equals that of plain decoding, greedy and sampled: in float32
    token for token; with quantized weights or recurrent layers up to what kernels for one row and
    for many round differently. --check-lossless compares the two on the requests at hand, and
    measures the rounding where an answer differs. Without the three sizes a short chain is
    drafted: top-k 1, step 3, verify size 4, which suits CPUs (TensorRT Edge-LLM's 10, 6, 60 suit
    GPUs). A size left out follows from those given: with a verify size alone, a chain of one level
    less.

    A draft that makes blocks does so in one step: without sizes a chain of 8 nodes, the root
    included, or of its block if that is shorter. The verify size may go up to the block; with a
    top-k of 2 to 8 a tree of up to 128 nodes is made of the block. A draft that only makes chains
    has top-k 1 and verify size step + 1.

    A directory without a draft is served by methods that draft from the text itself. Suffix decoding
    is the default: it drafts what followed the same words before, as a tree of up to 60 nodes, as
    far as that pays, and nothing where nothing repeats.

    A second Ctrl-C stops at once. Finished responses are also kept in OUTPUT.partial.jsonl until the output is written,
    unless that is stdout or a device.

    \b
    edgespec infer --engine-dir engines --input-text 'Once upon' --max-output-len 100 --spec-decode
    edgespec infer --engine-dir engines --prompt 'Rewrite this function: ...' --drafter suffix
    edgespec infer --engine-dir engines --input-file - --output-file - < input.json | jq .responses
    edgespec infer --engine-dir engines --prompts mt_bench.jsonl --output-file answers.json --batch-size 4
    """
    from edgespec.prompts import stream_of

    if not engine_request.spec_decode:
        asked = {
            "`check_lossless` means": check_lossless,
            "`compare_quality` means": compare_quality,
        }
        refuse_without_drafts(asked)
    stream, alone = stream_of(output_file), output_file is None
    to_stdout = stream is not None and stream.number == 1
    also = as_json or dump_output
    flag = "`json`" if as_json else "`dump_output`"
    refuse(
        {
            TWO_CHECKS: check_lossless and compare_quality,
            "give one of `input_file`, `prompts`, `prompt` and `input_text`": (
                sum(map(bool, (input_file, prompts, texts, raw_texts))) != 1
            ),
            "`no_chat_template` goes with `prompt`": no_chat_template and not (texts or raw_texts),
            "`chat_template` and `no_chat_template` exclude each other": (
                (no_chat_template or raw_texts) and chat_template
            ),
            IMAGE_IN_FILE: named_images and not (texts or raw_texts),
            f"stdout has the responses: {flag} needs an output file": to_stdout and also,
            "give `output_file`: only `prompt` does without": alone and not (texts or raw_texts),
            f"stdout has the answers: {flag} needs `output_file`": alone and also,
            "`num_logprobs` needs `output_file`, where they go": (
                alone and overrides["num_logprobs"]
            ),
            SUMMARY_ALONE: as_json and (dump_output or dump_profile),
        }
    )
    if raw_texts:
        texts, no_chat_template = raw_texts, True
    check_tokenizer(engine_dir, tokenizer_dir)
    shown = None
    if output_file is None:
        require_stream("stdout")
        from edgespec.cli.answer_stream import AnswerStream

        shown = AnswerStream(len(texts), live=(overrides["batch_size"] or 1) == 1)
    rules = beside(engine_request.image_rules, input_file or prompts, named_images)
    engine_request = replace(engine_request, image_rules=rules)
    requests = asked_for(
        input_file, prompts, texts, overrides, named_images, template=not no_chat_template
    )
    if check_lossless:
        by_flag = engine_request.acceptance is not None
        source = None if by_flag or not engine_request.speculative_config else "speculative_config"
        refuse_check(requests.requests, engine_request.accepts, source)
    return respond(
        requests,
        engine_dir,
        engine_request,
        output_file=output_file,
        warmup=warmup,
        check_lossless=check_lossless,
        compare_quality=compare_quality,
        profile_output_file=profile_output_file,
        chat_template=chat_template,
        stream=shown,
        finish=lambda stats: show(
            stats,
            as_json=as_json,
            dump_profile=dump_profile,
            dump_output=dump_output,
            err=output_file is None or stream is not None,
        ),
    )


def asked_for(
    input_file: Path | None,
    prompts: Path | None,
    texts: tuple[str, ...],
    overrides: dict[str, Any],
    images: Sequence[Path],
    *,
    template: bool,
) -> RequestFile:
    """The requests of a file, of stdin, of a prompt set, or of the command line with its images,
    with the chat template or without."""
    from edgespec.prompts import read_prompt_set, read_requests, read_stdin, text_requests

    if texts:
        names = [*map(str, images)]
        return text_requests(texts, apply_chat_template=template, images=names, **overrides)
    if prompts is not None:
        return read_prompt_set(prompts, **overrides)
    assert input_file is not None
    return (
        read_stdin(**overrides) if input_file == STDIN else read_requests(input_file, **overrides)
    )


def respond(
    requests: RequestFile,
    engine_dir: Path,
    engine_request: EngineRequest,
    *,
    output_file: Path | None,
    finish: Callable[[RunStats], None],
    stream: AnswerStream | None = None,
    warmup: int = 0,
    check_lossless: bool = False,
    compare_quality: bool = False,
    profile_output_file: Path | None = None,
    chat_template: str | None = None,
) -> int:
    """Answer requests and return the exit code. `chat_template` is a name or a file instead of the
    model's own.

    Without an output file nothing is kept, and `stream` shows the answers. `finish` shows the
    summary.
    """
    from edgespec.prompts.template import named_template
    from edgespec.runtime.requests.file_runner import FileRun
    from edgespec.runtime.requests.profile import profile

    check_outputs((requests.path, engine_dir), output_file, profile_output_file)
    measure_busy_again(engine_dir, engine_request.spec_decode, engine_request.spec_policy)
    with opened(engine_request, engine_dir) as open_engine:
        engine, plan = open_engine.engine, planned(open_engine)
        if chat_template:
            engine.tokenizer.template = named_template(chat_template, engine_dir)
        notes = [*notes_of(open_engine, plan, requests)]
        requests = replace(requests, batch_size=min(requests.batch_size, engine.max_batch_size))
        with (
            journal_of(output_file) as journal,
            Stopper(lambda: kept_in(journal), lambda: is_in_line(stream)) as stopper,
        ):
            if journal.leftover:
                notes.append(
                    f"{journal.leftover} is from a run that was killed; it is left as it is"
                )
            for note in notes:
                warn(note)
            run = FileRun(engine, requests, plan, journal, stopping=stopper, warn=warn)
            for note in notes_of_rules(engine, run.rules(), len(requests.requests)):
                warn(note)
            for request in requests.requests if check_lossless else ():
                own = (
                    run.configs[request.index].acceptance if request.index in run.configs else None
                )
                if own is not None:
                    refuse_check([request], own, f"requests[{request.index}].speculative")
            answer(
                run,
                stream,
                warmup=warmup,
                check_lossless=check_lossless,
                compare_quality=compare_quality,
            )
        for note in engine.drafter_notes:
            warn(note)
    stats = run.stats()
    if profile_output_file:
        write_to(profile_output_file, profile(stats))
    if journal.path and (stopper() or run.fault):
        say(f"what was finished is in {output_file}", err=True)
    if run.fault:
        raise run.fault
    finish(stats)
    return outcome(
        stats, stopper.number, check_lossless=check_lossless, compare_quality=compare_quality
    )


def is_in_line(stream: AnswerStream | None) -> bool:
    """Whether answers go to a terminal and one is in the middle of a line."""
    return stream is not None and stream.screen.in_line


def journal_of(output: Path | None) -> Journal | NoJournal:
    """What keeps the responses until they are written."""
    from edgespec.prompts import Journal, NoJournal, StreamOutput, stream_of

    if output is None:
        return NoJournal()
    stream = stream_of(output)
    return Journal(output) if stream is None else StreamOutput(stream)


def warn(text: str) -> None:
    """Print a line on stderr."""
    say(text, err=True)


def notes_of(opened: Opened, plan: DraftPlan | None, requests: RequestFile) -> Iterator[str]:
    """The lines before a run: the plan, and what a user should know of engines and modes."""
    from edgespec.cli import report

    engine = opened.engine
    if plan is not None:
        yield report.opened_line(opened, plan)
    yield from opened.notes
    yield from smaller_batches(requests.batch_size, engine.max_batch_size)
    if plan is None:
        return
    asked = [
        request.rendering.enable_thinking
        for request in requests.requests
        if request.rendering.apply_chat_template and not request.disable_spec_decode
    ]
    thinking = engine.thinking_note(asked) or relaxed_note(engine, asked)
    if thinking is not None:
        yield thinking


def smaller_batches(asked: int, most: int) -> Iterator[str]:
    """A note where more requests at a time were asked for than the engines run."""
    if asked > most:
        yield (
            f"batch_size {asked}: these engines were built for {most} at a time, and no more run"
            f" together; build with --max-batch-size {asked} for more"
        )


def answer(
    run: FileRun,
    stream: AnswerStream | None,
    *,
    warmup: int,
    check_lossless: bool,
    compare_quality: bool = False,
) -> None:
    """Run it under a bar, or with the answers shown as they come, and write the output."""
    from edgespec.cli.report import TokenBar

    with TokenBar(run.requests.requests) if stream is None else stream.of(run) as progress:
        run.run(
            progress,
            warmup=warmup,
            check_lossless=check_lossless,
            compare_quality=compare_quality,
        )
    run.write()


def show(
    stats: RunStats, *, as_json: bool, dump_profile: bool, dump_output: bool, err: bool = False
) -> None:
    """Print the summary, and where asked for the times by stage and the answers' text; with `err`
    on stderr."""
    from edgespec.cli import report
    from edgespec.cli.tables import print_table
    from edgespec.runtime.requests.profile import profile

    report.show(stats, as_json=as_json, err=err)
    if dump_profile:
        print_table(report.profile_table(profile(stats)), err=err)
    if dump_output:
        report.show_output(stats.answers)


def check_outputs(inputs: Sequence[Path | None], *outputs: Path | None) -> None:
    """Raises OverwriteError where an output is an input or named twice, OutputError where it cannot
    be written; before any work."""
    from edgespec.artifacts.outputs import refuse_overwriting
    from edgespec.prompts import check_writable, stream_of

    places: list[object] = []
    for output in outputs:
        if output is None:
            continue
        stream = stream_of(output)
        if stream is not None:
            stream.check()
        else:
            refuse_overwriting(output, inputs)
            check_writable(output)
        if stream is None or stream.number is not None:
            places.append(os.path.realpath(output) if stream is None else stream.number)
    if len(places) != len(set(places)):
        raise OverwriteError(
            f"{outputs[0]} is to hold both the responses and the profile", "Give two files."
        )


def write_to(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file, or what stands for a stream; a link's target is replaced. Raises
    OutputError."""
    from edgespec.artifacts.atomic import writing
    from edgespec.artifacts.json_files import write_json
    from edgespec.prompts import stream_of

    if (stream := stream_of(path)) is not None:
        stream.write(f"{json_text(value)}\n".encode())
        return
    path = Path(os.path.realpath(path))
    with writing(path):
        write_json(path, value)


def kept_in(journal: Journal | NoJournal) -> str:
    """What the message of a second signal adds: where the finished responses are."""
    if journal.path is None:
        return ""
    return (
        f"; what was finished is in {journal.path}"
        if journal.num_lines
        else "; nothing was finished"
    )


def outcome(
    stats: RunStats,
    stopped_by: int | None,
    *,
    check_lossless: bool,
    compare_quality: bool = False,
) -> int:
    """The exit code, and on stderr what is behind it."""
    compares = check_lossless or compare_quality
    if compares and not any(a.plain for a in stats.answers):
        click.echo("nothing was compared: no request was answered with drafts", err=True)
    uncompared = sum(
        a.speculative and a.response is not None and a.plain is None for a in stats.answers
    )
    if compares and uncompared:
        say(
            f"not compared: {counted(uncompared, 'answer')}, whose plain run failed or was stopped",
            err=True,
        )
    for line in cut_by_capacity(stats):
        say(line, err=True)
    if any(a.difference is not None and not a.difference.explained for a in stats.answers):
        click.echo(
            "NOT lossless: a difference that rounding does not explain is a bug; please report it"
            " with the output",
            err=True,
        )
        return FAILED
    if stopped_by is not None:
        return exit_code(stopped_by)
    return SOME_FAILED if any(a.error for a in stats.answers) else 0


def cut_by_capacity(stats: RunStats) -> Iterator[str]:
    """How many answers ended because the KV cache was full; nothing where none did."""
    from edgespec.prompts import CAPACITY

    full = [
        answer.response
        for answer in stats.answers
        if answer.response is not None and answer.response.finish_reason == CAPACITY
    ]
    if full:
        # The last token needs no row of its own
        rows = max(len(response.prompt_ids) + len(response.token_ids) - 1 for response in full)
        yield (
            f"{len(full)} of {len(stats.answers)} answers ended early (finish_reason"
            f" {CAPACITY}): the KV cache holds {rows} tokens. Shorten the prompts, or build with a"
            " larger --max-kv-cache-capacity"
        )
