"""`edgespec bench`: strings into values; `edgespec.benchmark` measures, compares and draws, and
`cli.bench_report` shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli import environment, trtllm
from edgespec.cli.config_file import (
    ConfigCommand,
    check_draft,
    config_options,
    configured,
    engine_arguments,
)
from edgespec.cli.draft_flags import (
    ALIASES,
    check_time_budget,
    draft_options_of,
    keys_of,
    plan_of,
    tree_of,
)
from edgespec.cli.edgellm import Missing
from edgespec.cli.flags import EdgeCommand, EdgeGroup
from edgespec.cli.infer import check_outputs
from edgespec.cli.lists import Counts, Names, Texts
from edgespec.cli.paths import DIRECTORY, FILE
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import json_text, say
from edgespec.cli.terminal import report as tell
from edgespec.errors import EdgeSpecError, LimitError, OutputError, noted

if TYPE_CHECKING:
    from edgespec.benchmark.cases import Variant
    from edgespec.benchmark.measure import Benchmark, Plan
    from edgespec.benchmark.report import Recorder
    from edgespec.benchmark.synthetic import Dial
    from edgespec.prompts import RequestFile
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.policy import SpecPolicy
    from edgespec.runtime.tree import DraftPlan

MODES = ("prefill", "decode", "verify", "speculative")  # those of benchmark.cases; a test compares
PREFILL, _, VERIFY, SPECULATIVE = MODES
POLICIES = ("adaptive", "fixed")
ROWS = (1, 2, 4, 8, 16, 32, 60)
TOKENS = 128  # of prompts and of answers, where nothing else is said and as many fit
RUN = "run"

# Names of llm_bench (OpenVINO, TensorRT Edge-LLM), trtllm-bench and vllm bench
THEIR_NAMES = {
    "--random-input-len": "--input-tokens",
    "--input-len": "--input-tokens",
    "--isl": "--input-tokens",
    "--past-kv-len": "--input-tokens",
    "--random-output-len": "--output-tokens",
    "--output-len": "--output-tokens",
    "--osl": "--output-tokens",
    "--infer-count": "--output-tokens",
    "--concurrency": "--batch-size",
    "--max-concurrency": "--batch-size",
    "--num-requests": "--num-prompts",
    "--dataset": "--prompts",
    "--dataset-path": "--prompts",
    "--prompt-file": "--prompts",
    "--speed-bench-category": "--category",
    "--num-warmups": "--warmup",
    "--num-iters-warmup": "--warmup",
    "--num-iters": "--repeats",
    "--iterations": "--repeats",
    "--output-json": "--json",
    "--report-json": "--json",
    "--verify-tree-size": "--rows",
}
THEIRS = {
    "--accept-rate": Missing(
        instead="there it is tokens a step; give the probability that a draft is right:"
        " --synthetic-acceptance 0.7"
    ),
    "--spec-synth-rates": Missing(instead="write --synthetic-acceptance 0.8:0.6:0.5"),
    "--dataset-name": Missing(instead="give the file: --prompts FILE.jsonl"),
    "--request-rate": Missing(
        instead="requests of a batch arrive together; leave it out", neutral=("inf",)
    ),
}


class BenchGroup(EdgeGroup):
    """The commands of `bench`; without the name of one it measures."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts `run` before the arguments of a measurement."""
        own = ("--help", "-h")
        if args and args[0] not in (*self.commands, *own):
            args = [RUN, *args]
        return super().parse_args(ctx, args)


@click.group("bench", cls=BenchGroup)
def command() -> None:
    """Measure engines on this machine: edgespec bench ENGINE_DIR. `run` may be left out, and has all
    flags: edgespec bench run --help.

    \b
    edgespec bench engines
    edgespec bench engines --spec-draft-step 1,2,3,4 --synthetic-acceptance 0,0.5,0.7,0.9 --json a.json
    edgespec bench compare a.json b.json
    edgespec bench draw a.json --pictures pictures
    """


def list_sizes(function: Any) -> Any:
    """The flags that say what drafts and how much, with lists of sizes."""
    return draft_options_of(Counts(), "LIST", function)


@command.command(
    RUN,
    cls=ConfigCommand,
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
@config_options
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
    metavar="FILE",
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
@click.option(
    "--input-file", type=FILE, metavar="FILE", help="Requests of infer's input.json instead."
)
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
    show_default=True,
    help="Requests at a time.",
)
@click.option(
    "--rows",
    type=Counts(),
    metavar="LIST",
    help=f"Rows of a pass (verify), the root included.  [default: {','.join(map(str, ROWS))}]",
)
@list_sizes
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
    "--spec-policy",
    "policies",
    type=Names(POLICIES),
    metavar="LIST",
    help=(
        "adaptive: each step drafts as far as it pays, up to the sizes; fixed: the sizes.  [default:"
        " what infer does]"
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
    show_default=True,
    help="Of random prompts, of sampling and of dialled acceptance.",
)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=None,
    help="Go on behind the end of an answer.  [default: for random prompts]",
)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Unmeasured runs of each way of decoding, beside the one that gives the plain answers.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Measured runs of each batch of prompts, plain and with drafts in turn.",
)
@click.option(
    "--json", "json_file", type=FILE, metavar="FILE", help="Write the report (docs/benchmark.md)."
)
@click.option("--picture", type=FILE, metavar="FILE", help="Draw all panels into a .png or .svg.")
@click.option(
    "--pictures", type=FILE, metavar="DIR", help="Draw each panel as PNG and SVG into a directory."
)
@click.option(
    "--measure-costs",
    is_flag=True,
    help=(
        "Measure again what steps cost here, and keep it beside the engines: by that drafts are"
        " chosen. Nothing else is measured without --mode."
    ),
)
@click.option(
    "--explain",
    is_flag=True,
    help=(
        "Say in sentences what the kept costs mean: from which acceptance on drafts pay, and the"
        " best chain. Nothing is measured without --mode."
    ),
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    engine_dir: Path | None,
    engine_flag: Path | None,
    modes: tuple[str, ...] | None,
    prompts: Path | None,
    categories: tuple[str, ...],
    input_file: Path | None,
    num_prompts: int | None,
    input_tokens: tuple[int, ...] | None,
    output_tokens: tuple[int, ...] | None,
    batch_sizes: tuple[int, ...],
    rows: tuple[int, ...] | None,
    drafter: str | None,
    drafter_time_budget_ms: float | None,
    spec_draft_top_k: tuple[int, ...] | None,
    spec_draft_step: tuple[int, ...] | None,
    spec_verify_size: tuple[int, ...] | None,
    synthetic_acceptance: tuple[str, ...] | None,
    policies: tuple[SpecPolicy, ...] | None,
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
    path = engine_of(ctx, engine_dir, engine_flag)
    sizes = (spec_draft_top_k, spec_draft_step, spec_verify_size)
    tree, keys, config = tree_of(ctx, sizes), keys_of(ctx), configured(ctx)  # type: ignore[arg-type]
    check_time_budget(ctx, drafter, drafter_time_budget_ms)
    if prompts is not None and input_file is not None:
        raise click.UsageError("--prompts and --input-file exclude each other", ctx)
    if categories and prompts is None:
        raise click.UsageError("--category chooses among --prompts: give a file", ctx)
    file = prompts or input_file
    if file is not None and input_tokens and (modes is None or VERIFY not in modes):
        what = "--input-tokens is the length of random prompts, and those of a file have their own"
        raise click.UsageError(what, ctx)
    wants_drafts = (
        drafter is not None or config.config is not None or any(sizes) or tree is not None
    )
    wants_drafts = wants_drafts or bool(synthetic_acceptance) or bool(policies)
    if modes is not None and SPECULATIVE not in modes and wants_drafts:
        raise click.UsageError(
            "what drafts, and how much, means nothing without the mode speculative", ctx
        )
    check_outputs((path, file), json_file, picture)
    check_pictures(picture, pictures)
    from edgespec.benchmark.prompts import PromptSource
    from edgespec.benchmark.slices import Runner
    from edgespec.benchmark.synthetic import Dial
    from edgespec.cli.progress import Bars
    from edgespec.runtime.engine import Engine

    if measure_costs:
        measure_again(path)
        if modes is None and not explain:
            return 0
    dials = [Dial.read(text) for text in synthetic_acceptance or ()]
    source = PromptSource(
        requests_of(prompts, input_file, categories, temperature, seed),
        sampling_of(temperature, seed),
        seed,
        num_prompts,
        categories,
    )
    steps = spec_draft_step[0] if spec_draft_step else None
    config, drafting = engine_arguments(
        config, keys, path, drafter=drafter, steps=steps, time_budget_ms=drafter_time_budget_ms
    )
    given = drafter is not None or config.config is not None
    with Engine(
        path,
        spec_decode=None if given else drafts_by(modes, wanted=wants_drafts),
        prefix_cache_bytes=0,
        **drafting,
    ) as engine:
        check_draft(engine, config.config)
        for note in (*config.notes, *engine.notes):
            say(note, err=True)
        if ignore_eos if ignore_eos is not None else file is None:
            engine.stop_ids = frozenset()
        plans, left_out = plans_of(engine, sizes, tree, policies)
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
        if modes is None and explain:
            say_costs(engine, plan)
            return 0
        with Stopper() as stopper, Bars() as bars:
            bench, recorder = started(Runner(engine, stopper), plan, bars, path, left_out)
            failed = finished(bench)
        report = recorder.report(bench, None if failed is None else failed.what)
        lines = [*sentences(engine, plan, report)] if explain else []
    problems = [] if failed is None else [failed]
    with noted(problems):
        keep(report, json_file, picture, pictures)
    from edgespec.cli import bench_report

    bench_report.show(report)
    for line in lines:
        say(line)
    for problem in problems[1:]:
        tell(problem)
    if problems:
        raise problems[0]
    return 0 if stopper.number is None else exit_code(stopper.number)


# ---- what is asked for


def engine_of(ctx: click.Context, engine_dir: Path | None, flag: Path | None) -> Path:
    """The engine directory, by the argument or by the flag. A first argument that is a key of a
    file leaves the flag."""
    if engine_dir is None and flag is None:
        raise click.UsageError("Missing argument 'ENGINE_DIR'", ctx)
    if engine_dir is not None and ctx.get_parameter_source("engine_flag") is not None:
        from click.core import ParameterSource

        if (
            flag is not None
            and ctx.get_parameter_source("engine_flag") is ParameterSource.COMMANDLINE
        ):
            raise click.UsageError("ENGINE_DIR and --engine-dir exclude each other", ctx)
    found = engine_dir or flag
    assert found is not None
    return found


def drafts_by(modes: Sequence[str] | None, *, wanted: bool) -> Any:
    """Whether the engine is opened with its draft, as Engine takes it."""
    if wanted or (modes is not None and SPECULATIVE in modes):
        return True
    return "auto" if modes is None or PREFILL in modes else False


def requests_of(
    prompts: Path | None,
    input_file: Path | None,
    categories: tuple[str, ...],
    temperature: float | None,
    seed: int,
) -> RequestFile | None:
    """The requests of a file; None for random prompts. Raises RequestError."""
    from edgespec.benchmark.prompts import refuse_own_drafts
    from edgespec.prompts import read_prompt_set, read_requests

    if prompts is not None:
        given = 0.0 if temperature is None else temperature
        return read_prompt_set(prompts, categories=categories, temperature=given, seed=seed)
    if input_file is None:
        return None
    found = read_requests(input_file, temperature=temperature, seed=seed)
    refuse_own_drafts(found)
    return found


def sampling_of(temperature: float | None, seed: int) -> Any:
    """How answers to random prompts are sampled."""
    from edgespec.prompts import SamplingParams

    return SamplingParams(temperature=temperature or 0.0, seed=seed)


def plans_of(
    engine: Engine,
    sizes: Sequence[tuple[int, ...] | None],
    tree: Any,
    policies: Sequence[SpecPolicy] | None,
) -> tuple[list[DraftPlan], list[str]]:
    """The plans of all combinations of sizes and policies, each once, and a line for each that
    cannot be. Raises LimitError where none can, and for a policy that this engine does not have."""
    if not engine.spec_decode:
        return [], []
    check_policies(engine, policies)
    found, errors = list[Any](), list[EdgeSpecError]()
    for policy in policies or (engine.spec_policy,):
        planner = replace(engine.planner, policy=policy)
        if tree is not None:
            found.append(replace(plan_of(engine, (), tree), adaptive=planner.adapts(sized=True)))
            continue
        for top_k in sizes[0] or (None,):
            for steps in sizes[1] or (None,):
                for verify_size in sizes[2] or (None,):
                    try:
                        found.append(planner.by_sizes(top_k, steps, verify_size))
                    except LimitError as error:
                        errors.append(error)
    if not found:
        raise errors[0]
    return list(dict.fromkeys(found)), [f"left out: {error.what}" for error in errors]


def check_policies(engine: Engine, policies: Sequence[str] | None) -> None:
    """Raises LimitError for adaptive drafting where nothing says what a step costs."""
    if "adaptive" in (policies or ()) and not (engine.can_adapt or engine.is_paced):
        why = engine.why_no_costs or "nothing is known of the cost of a drafter of your own"
        raise LimitError(f"--spec-policy adaptive: {why}", "Measure it: --measure-costs.")


def variants_of(engine: Engine, plans: Sequence[DraftPlan], dials: Sequence[Dial]) -> list[Variant]:
    """The ways of drafting. Raises LimitError for dialled acceptance by another accept rule than
    the exact one."""
    from edgespec.benchmark.cases import variants
    from edgespec.runtime.verify import EXACT

    if dials and engine.acceptance.rule != EXACT:
        what = f"--synthetic-acceptance is for the exact rule, and this is {engine.acceptance.rule}"
        raise LimitError(what, "Leave one of the two out.")
    return variants(plans, [*dials] or [None])


def measured(
    engine: Engine,
    *,
    modes: Sequence[str] | None,
    source: Any,
    input_tokens: Sequence[int] | None,
    output_tokens: Sequence[int] | None,
    batch_sizes: Sequence[int],
    rows: Sequence[int] | None,
    variants: list[Variant],
    repeats: int,
    warmup: int,
) -> Plan:
    """What to measure, checked against what the engines take. Raises LimitError."""
    from edgespec.benchmark.measure import Plan
    from edgespec.benchmark.passes import check_rows, fitting_rows
    from edgespec.benchmark.prompts import check_sizes

    capacity = engine.base.capacity
    usual = min(TOKENS, capacity // 2, *(c.limits.max_input_len for c in engine.configs.values()))
    contexts = tuple(input_tokens or (usual,))
    asked = tuple(modes or (MODES if variants else MODES[:-1]))
    if rows is None:
        rows = fitting_rows(engine, ROWS, contexts)
    elif VERIFY in asked:
        check_rows(engine, rows, contexts)
    plan = Plan(
        modes=asked,
        source=source,
        input_tokens=contexts if source.requests is None else (None,),
        contexts=contexts,
        output_tokens=tuple(output_tokens or (min(TOKENS, capacity - usual),)),
        batch_sizes=batch_sizes,
        rows=rows,
        variants=variants,
        prefill_plan=variants[0].plan if variants else None,
        repeats=repeats,
        warmup=warmup,
    )
    check_sizes(engine, [*plan.prefill_cells, *plan.cells])
    for _, batch_size in plan.pass_sizes:
        engine.limits.check_batch_size(batch_size)
    return plan


def started(
    runner: Any, plan: Plan, bars: Any, engine_dir: Path, notes: Sequence[str]
) -> tuple[Benchmark, Recorder]:
    """The run to be, and what makes its report."""
    from edgespec.benchmark.measure import Benchmark
    from edgespec.benchmark.report import Recorder

    return Benchmark(runner, plan, bars), Recorder(runner.engine, engine_dir, plan, notes)


def finished(bench: Benchmark) -> EdgeSpecError | None:
    """Runs it; returns what ended it too early, so that what was measured before is kept."""
    try:
        bench.run()
    except EdgeSpecError as error:
        return error
    return None


# ---- what steps cost


def measure_again(engine_dir: Path) -> None:
    """Measure what steps of these engines cost here, keep it, and say it in a line. Raises what
    opening and measuring raise."""
    from time import monotonic

    from edgespec.backends.base import Progress
    from edgespec.cli.progress import Bars
    from edgespec.runtime.cost_measure import measure_costs
    from edgespec.runtime.cost_words import built_line

    began = monotonic()
    with Bars() as bars:
        progress = Progress(start=lambda n: bars.start("costs", n), advance=bars.advance)
        found = measure_costs(engine_dir, progress=progress)
    say(built_line(found, monotonic() - began))


def say_costs(engine: Engine, plan: Plan) -> None:
    """Print what the kept costs mean. Raises LimitError where there are none."""
    if engine.costs is None:
        why = engine.why_no_costs or "nothing drafts"
        raise LimitError(f"--explain: {why}", "Measure it: --measure-costs.")
    for line in sentences(engine, plan, None):
        say(line)


def sentences(engine: Engine, plan: Plan, report: dict[str, Any] | None) -> Iterator[str]:
    """What the kept costs mean, and of a report how its figures compare with them."""
    from edgespec.benchmark.explanation import explained, of_rows

    if engine.costs is None:
        yield f"no prediction: {engine.why_no_costs or 'nothing drafts'}"
        return
    yield from explained(engine.costs, plan.contexts, plan.batch_sizes)
    if report is not None:
        yield from of_rows(report["rows"])


# ---- what comes of it


def check_pictures(picture: Path | None, pictures: Path | None) -> None:
    """Raises OptionError for a picture of another format, MissingDependency, OutputError."""
    if picture is None and pictures is None:
        return
    from edgespec.benchmark.pictures import check_installed, format_of

    if picture is not None:
        format_of(picture)
    check_installed()
    if pictures is not None and pictures.exists() and not pictures.is_dir():
        raise OutputError(f"{pictures} is a file", "Name a directory for the pictures.")


def keep(
    report: dict[str, Any], json_file: Path | None, picture: Path | None, pictures: Path | None
) -> None:
    """Write what was asked for. A report that cannot be written where it should is kept elsewhere.
    Raises OutputError."""
    if json_file is not None:
        write(report, json_file)
    if report["rows"]:
        draw_pictures(report, picture, pictures)


def write(report: dict[str, Any], path: Path) -> None:
    """Write the report; where that fails, into the directory for temporary files. Raises
    OutputError that says where it is."""
    from edgespec.benchmark.report import write_report
    from edgespec.prompts import stream_of

    try:
        if (stream := stream_of(path)) is not None:
            stream.write(f"{json_text(report)}\n".encode())
        else:
            write_report(path, report)
    except (OutputError, OSError) as error:
        elsewhere = kept_elsewhere(report)
        if elsewhere is None:
            raise
        what = error.what if isinstance(error, OutputError) else f"{path}: {error.strerror}"
        raise OutputError(what, f"The report is in {elsewhere}.") from error


def kept_elsewhere(report: dict[str, Any]) -> Path | None:
    """Where the report is among the temporary files; None where it cannot be written there
    either."""
    import tempfile

    from edgespec.benchmark.report import write_report

    try:
        path = Path(tempfile.mkdtemp(prefix="edgespec-bench-")) / "report.json"
        write_report(path, report)
    except (OutputError, OSError):
        return None
    return path


def draw_pictures(
    report: dict[str, Any], picture: Path | None, pictures: Path | None
) -> list[Path]:
    """Draw what was asked for; the files."""
    if picture is None and pictures is None:
        return []
    from edgespec.benchmark.pictures import draw_directory, draw_file

    files = []
    if picture is not None:
        draw_file(report, picture)
        files.append(picture)
    if pictures is not None:
        files += draw_directory(report, pictures)
    return files


# ---- reports that are there


@command.command("compare", cls=EdgeCommand)
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option(
    "--allow",
    "allowed",
    type=Texts(),
    multiple=True,
    metavar="NAME",
    help="Let runs differ in this, by the name that the refusal says; may be given repeatedly.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(before: Path, after: Path, allowed: tuple[tuple[str, ...], ...], as_json: bool) -> None:
    """Compare two reports of `bench --json`: is AFTER faster than BEFORE, or is it noise?

    Runs that are unlike are refused (exit 3), and each difference is named: another device or
    power mode, other threads, versions, engines, prompts or sizes. Each row gets the ratio of AFTER
    over BEFORE with its exact 95 % interval (Hodges-Lehmann, by the ranks of all pairs); faster or
    slower is said where 1 is outside. Plain decoding is the control: where it differs, the machine
    was not the same, and the speeds over plain are what counts.

    \b
    edgespec bench compare before.json after.json
    edgespec bench compare int8.json int4.json --allow engines
    """
    from edgespec.benchmark.compare import changes, refuse_unlike, unlike
    from edgespec.benchmark.report import read_report
    from edgespec.cli import bench_report

    mine, its = read_report(before), read_report(after)
    found = [*unlike(mine, its)]
    refuse_unlike(found, [name for names in allowed for name in names])
    rows = changes(mine, its)
    if as_json:
        differences = [
            {"name": one.name, "before": one.before, "after": one.after} for one in found
        ]
        value = {"allowed_differences": differences, "rows": [row.to_dict() for row in rows]}
        click.echo(json_text(value))
    else:
        bench_report.show_changes(rows, found)


@command.command("draw", cls=EdgeCommand)
@click.argument("report", type=FILE)
@click.option("--picture", type=FILE, metavar="FILE", help="Draw all panels into a .png or .svg.")
@click.option(
    "--pictures", type=FILE, metavar="DIR", help="Draw each panel as PNG and SVG into a directory."
)
@click.pass_context
def draw(ctx: click.Context, /, report: Path, picture: Path | None, pictures: Path | None) -> None:
    """Draw the pictures of a report of `bench --json`.

    Panels: the cost of a base pass over N rows, acceptance by position, and speed over plain decoding
    by the size of the draft and by acceptance, as far as the report has rows for them.

    \b
    edgespec bench draw report.json --pictures pictures
    """
    if picture is None and pictures is None:
        raise click.UsageError("give --picture FILE or --pictures DIR", ctx)
    from edgespec.benchmark.report import read_report

    check_outputs((report,), picture)
    check_pictures(picture, pictures)
    for path in draw_pictures(read_report(report), picture, pictures):
        say(str(path))
