"""`edgespec bench run`: strings into values; `edgespec.benchmark` measures, `cli.bench.tables` shows
it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.benchmark.modes import MODES, SPECULATIVE, VERIFY
from edgespec.cli import environment
from edgespec.cli.bench.asked import (
    ROWS,
    drafts_by,
    engine_of,
    measured,
    plans_of,
    requests_of,
    sampling_of,
    variants_of,
)
from edgespec.cli.bench.kept import (
    JSON,
    PICTURE,
    PICTURES,
    REPEATS,
    WARMUP,
    check_pictures,
    finish,
    recorded,
)
from edgespec.cli.costs_flag import measure_again
from edgespec.cli.draft_flags import ALIASES, draft_options_of, is_given
from edgespec.cli.engine_options import SIZES, engine_options, opened
from edgespec.cli.flags import refuse
from edgespec.cli.help_pages import PAGES, PagedCommand
from edgespec.cli.image_flags import beside, image_flags
from edgespec.cli.infer import check_outputs
from edgespec.cli.lists import Counts, Names, Texts
from edgespec.cli.paths import DIRECTORY, FILE
from edgespec.cli.signals import Stopper
from edgespec.cli.terminal import say
from edgespec.compat import trtllm
from edgespec.compat.bench_tools import THEIR_NAMES, THEIRS
from edgespec.methods.names import POLICIES

if TYPE_CHECKING:
    from edgespec.runtime.engine_request import EngineRequest


def list_sizes(function: Any) -> Any:
    """The flags that say what drafts and how much, with lists of sizes."""
    return draft_options_of(Counts(), Names(POLICIES), function, "LIST")


@click.command(
    "run",
    cls=PagedCommand,
    page=PAGES["bench run"],
    aliases={**ALIASES, **trtllm.OF_DRAFTS, **THEIR_NAMES},
    missing={**trtllm.SPECULATIVE, **THEIRS},
)
@click.argument("engine_dir", type=DIRECTORY, required=False)
@click.option(
    "--engine-dir",
    "engine_flag",
    type=DIRECTORY,
    envvar=environment.ENGINE_DIR,
    show_envvar=True,
    help="What edgespec build made, instead of the first argument.",
)
@click.option(
    "--mode",
    "modes",
    type=Names(MODES),
    metavar="LIST",
    help=(
        f"What to measure, of {', '.join(MODES)}: reading prompts, plain decoding, a base pass over"
        " N rows, decoding with drafts.  [default: all that the directory can]"
    ),
)
@click.option(
    "--prompts",
    type=FILE,
    help=(
        "Prompts as JSONL with turns (MT-Bench, SPEED-Bench), or Parquet (SPEED-Bench).  [default:"
        " random ids]"
    ),
)
@click.option(
    "--category",
    "categories",
    multiple=True,
    metavar="NAME",
    help="Of --prompts those of this category or sub-category; may be given repeatedly.",
)
@click.option("--input-file", type=FILE, help="Requests of infer's input.json instead.")
@click.option(
    "--num-prompts",
    type=click.IntRange(1),
    help="Take the first N of a file, or make N random ones.  [default: all; two batches]",
)
@click.option(
    "--input-tokens",
    type=Counts(),
    metavar="LIST",
    help="Tokens of random prompts.  [default: 128]",
)
@click.option(
    "--output-tokens",
    type=Counts(2),
    metavar="LIST",
    help="Tokens of an answer, at most.  [default: 128]",
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=Counts(),
    metavar="LIST",
    default="1",
    help="Requests at a time.",
)
@click.option(
    "--rows",
    type=Counts(),
    metavar="LIST",
    help=f"Rows of a pass (verify), the root included.  [default: {','.join(map(str, ROWS))}]",
)
@click.option(
    "--synthetic-acceptance",
    type=Texts(),
    metavar="LIST",
    help=(
        "Let drafts be right with this probability, 0.7, or by position, 0.8:0.6:0.5, all work of"
        " the draft included.  [default: as they are]"
    ),
)
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    help="0 is greedy.  [default: 0, or that of --input-file]",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**63 - 1),
    default=0,
    help="Of random prompts, of sampling and of dialled acceptance.",
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=None,
    help="Go on behind the end of an answer.  [default: for random prompts]",
)
@WARMUP
@REPEATS
@JSON
@PICTURE
@PICTURES
@click.option(
    "--measure-costs",
    is_flag=True,
    help=(
        "Measure again what steps cost here, and keep it beside the engines: by that drafts are"
        " chosen. Nothing else is measured where these flags are alone."
    ),
)
@click.option(
    "--explain",
    is_flag=True,
    help=(
        "Say in sentences what the kept costs mean: from which acceptance on drafts pay, and the"
        " best chain. Nothing is measured where it is alone."
    ),
)
@engine_options(list_sizes, image_flags)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    engine_dir: Path | None,
    engine_flag: Path | None,
    engine_request: EngineRequest,
    modes: tuple[str, ...] | None,
    prompts: Path | None,
    categories: tuple[str, ...],
    input_file: Path | None,
    num_prompts: int | None,
    input_tokens: tuple[int, ...] | None,
    output_tokens: tuple[int, ...] | None,
    batch_sizes: tuple[int, ...],
    rows: tuple[int, ...] | None,
    synthetic_acceptance: tuple[str, ...] | None,
    temperature: float | None,
    seed: int,
    ignore_eos: bool | None,
    warmup: int,
    repeats: int,
    json_file: Path | None,
    picture: Path | None,
    pictures: Path | None,
    measure_costs: bool,
    explain: bool,
    **lists: Any,
) -> int:
    """Measure the engines of ENGINE_DIR on this machine.

    Lists, with commas, are crossed. Plain decoding and each way of drafting run in turn, a batch of
    answers each, so that a machine whose speed drifts is fair to all; the speed over plain is that
    of two runs next to each other: the median, and its exact 95 % interval by ranks, from 6 runs
    on. Prompts are random ids unless a file is given; those of a file are asked turn by turn.

    \b
    prefill      tokens/s and time to first token, by the length of prompts
    decode       plain decoding
    verify       a base pass over N rows: what verifying a draft of N nodes costs
    speculative  decoding with drafts; acceptance is real, or dialled by --synthetic-acceptance

    Ctrl-C ends the run after the current step; what is done is shown and written (exit 130).

    \b
    edgespec bench engines --mode prefill --input-tokens 128,512,2048
    edgespec bench engines --mode verify --rows 1,2,4,8,16 --input-tokens 128,2048
    edgespec bench engines --prompts mt_bench.jsonl --spec-draft-step 2,3,4 --json report.json
    edgespec bench engines --synthetic-acceptance 0,0.5,0.7,0.9 --batch-size 1,4 --picture speed.png
    edgespec bench engines --measure-costs --explain
    """
    path, file = engine_of(ctx, engine_dir, engine_flag), prompts or input_file
    given, is_sized = engine_request.names_drafter, engine_request.is_sized
    wants_drafts = any((given, is_sized, synthetic_acceptance, is_given(ctx, "spec_policy")))
    refuse(
        {
            "`prompts` and `input_file` exclude each other": prompts and input_file,
            "`category` chooses among `prompts`: give a file": categories and not prompts,
            OF_RANDOM: file and input_tokens and VERIFY not in (modes or ()),
            WITHOUT_DRAFTS: wants_drafts and SPECULATIVE not in (modes or MODES),
            NO_PICTURES: (picture or pictures) and not {VERIFY, SPECULATIVE} & {*(modes or MODES)},
        }
    )
    check_outputs((path, file), json_file, picture)
    check_pictures((path, file), picture, pictures)
    from edgespec.benchmark.measure import Benchmark
    from edgespec.benchmark.prompts import PromptSource
    from edgespec.benchmark.report import Recorder
    from edgespec.benchmark.slices import SliceRunner
    from edgespec.benchmark.synthetic import Dial
    from edgespec.cli.bench import tables
    from edgespec.cli.progress import Bars

    # Where nothing else is asked for, costs are measured or explained, and no more
    measures = any(is_given(ctx, name) for name in ctx.params if name not in OF_COSTS)
    if measure_costs:
        measure_again(path)
        if not measures and not explain:
            return 0
    dials = [Dial.read(text) for text in synthetic_acceptance or ()]
    source = PromptSource(
        requests_of(prompts, input_file, categories, temperature, seed),
        sampling_of(temperature, seed),
        seed,
        num_prompts,
        categories,
    )
    engine_request = replace(
        engine_request,
        spec_decode=None if given else drafts_by(modes, wanted=wants_drafts),
        tuned=True,
        spec_policy=None,
        image_rules=beside(engine_request.image_rules, file),
    )
    with opened(engine_request, path) as open_engine:
        engine = open_engine.engine
        for note in open_engine.notes:
            say(note, err=True)
        if ignore_eos if ignore_eos is not None else file is None:
            engine.stop_ids = frozenset()
        plans, left_out = plans_of(
            engine,
            [lists.get(name) for name in SIZES],
            engine_request.tree,
            lists.get("spec_policy"),
        )
        for note in left_out:
            say(note, err=True)
        plan = measured(
            engine,
            modes=modes,
            source=source,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            batch_sizes=batch_sizes,
            rows=rows,
            variants=variants_of(engine, plans, dials),
            repeats=repeats,
            warmup=warmup,
        )
        if explain and not measures:
            tables.say_costs(engine)
            return 0
        with Stopper() as stopper, Bars() as bars:
            bench = Benchmark(SliceRunner(engine, stopper), plan, bars)
            recorder = Recorder.of(engine, path, plan, left_out)
            report, failed = recorded(bench, recorder)
        lines = [*tables.sentences(engine, report)] if explain else []
    return finish(report, failed, stopper, json_file, picture, pictures, lines)


OF_COSTS = frozenset(("engine_dir", "engine_flag", "drafter", "measure_costs", "explain"))
OF_RANDOM = "`input_tokens` is the length of random prompts, and those of a file have their own"
WITHOUT_DRAFTS = "what drafts, and how much, means nothing without the mode speculative"
NO_PICTURES = "pictures are drawn of the modes verify and speculative"
