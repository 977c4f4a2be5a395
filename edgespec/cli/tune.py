"""`edgespec tune`: strings into values; `edgespec.tuning` does the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.flags import EdgeCommand, refuse
from edgespec.cli.image_flags import image_flags, take_images
from edgespec.cli.infer import check_outputs
from edgespec.cli.lists import Names
from edgespec.cli.paths import DIRECTORY, FILE
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import json_text, say
from edgespec.errors import LimitError

if TYPE_CHECKING:
    from edgespec.prompts import ImageItem, Request, RequestFile
    from edgespec.runtime.engine_request import EngineRequest
    from edgespec.tuning.report import FormatsReport, TuneReport
    from edgespec.tuning.tuner import TuneOptions, Tuner

JSONL = (".jsonl", ".ndjson", ".parquet")
WEIGHTS = ("int4", "int8", "fp32", "bf16", "fp16")
HEADINGS = "predicted", "measured", "interval    ", "nodes", "tokens a step", "tokens/s"
SHOWN = 3  # candidates of each method that were not measured


@click.command("tune", cls=EdgeCommand)
@click.argument("engine_dir", type=DIRECTORY, metavar="ENGINE_DIR")
@click.option(
    "--prompts",
    type=FILE,
    multiple=True,
    required=True,
    help=(
        "Prompts like those that are to be fast: a set as MT-Bench and SPEED-Bench have them, JSONL"
        " or Parquet, or infer's input.json; may be given repeatedly."
    ),
)
@image_flags
@click.option(
    "--num-prompts",
    type=click.IntRange(1),
    default=12,
    help="Requests that are taken, from all over the files.",
)
@click.option(
    "--output-tokens",
    type=click.IntRange(8),
    default=64,
    help="Tokens of an answer, at most.",
)
@click.option("--batch-size", type=click.IntRange(1), default=1)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, help="0 is greedy.")
@click.option("--seed", type=int, default=0, help="Of sampled answers.")
@click.option(
    "--measure",
    type=click.IntRange(1, 16),
    default=4,
    help="Candidates that are measured, the best by the cost model.",
)
@click.option(
    "--repeats",
    type=click.IntRange(6),
    default=6,
    help="Measurements of each candidate on all prompts; with fewer than 6 noise is not told.",
)
@click.option(
    "--draft-onnx",
    type=DIRECTORY,
    metavar="DIR",
    help="The exported draft, to be built and measured in each of --draft-weights.",
)
@click.option(
    "--draft-weights",
    type=Names(WEIGHTS),
    metavar="NAMES",
    help="Formats of the draft's weights, with commas, such as int4,int8,fp32.",
)
@click.option(
    "--install",
    is_flag=True,
    help="Build the draft in the fastest of --draft-weights into ENGINE_DIR.",
)
@click.option(
    "--output",
    type=FILE,
    metavar="FILE.yaml",
    help="Write the winner as a file for --config of infer, chat and run, and leave ENGINE_DIR as it is.",
)
@click.option(
    "--journal",
    type=FILE,
    help="Keep what was measured here until the end.  [default: in ENGINE_DIR]",
)
@click.option("--picture", type=FILE, help="Draw the frontier, as PNG or SVG.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    engine_dir: Path,
    prompts: tuple[Path, ...],
    draft_onnx: Path | None,
    draft_weights: tuple[str, ...] | None,
    install: bool,
    output: Path | None,
    journal: Path | None,
    picture: Path | None,
    as_json: bool,
    seed: int,
    **values: Any,
) -> int:
    """Find what drafts are fastest with the engines of ENGINE_DIR on your prompts.

    First it measures how often drafts are accepted, by depth and rank. Then the cost model ranks
    chains, dynamic trees, static trees that are fitted to that acceptance, blocks, methods that
    need no draft, and each of them as far as it pays. The best few are measured in turn with plain
    decoding. The fastest, or a simpler one that is as fast up to 3 %, is kept beside
    the engines: infer, chat and run take it where no sizes are given, until an engine is built
    again. Where nothing is faster than plain decoding, that is the result.

    Ctrl-C keeps what was measured (exit 130); the same command goes on with it.

    \b
    edgespec tune engines --prompts mt_bench.jsonl
    edgespec tune engines --prompts chat.jsonl --prompts code.jsonl --picture frontier.svg
    edgespec tune engines --prompts mt_bench.jsonl --temperature 0.7 --output tuned.yaml
    edgespec tune engines --prompts mt_bench.jsonl --draft-onnx onnx-draft/llm --draft-weights int4,int8,fp32
    """
    half = (draft_onnx is None) != (draft_weights is None)
    refuse(
        {
            "`draft_onnx` and `draft_weights` go together": half,
            "`install` is for `draft_onnx` and `draft_weights`": install and not draft_onnx,
            "`output` and `journal` are for one format of the draft": (
                draft_onnx and (output or journal)
            ),
        }
    )
    check_outputs((*prompts, engine_dir, draft_onnx), output, journal, picture)
    if picture is not None:
        from edgespec.benchmark.pictures import check_installed, format_of

        format_of(picture)
        check_installed()
    from edgespec.backends.engine_dir import TUNE_JOURNAL, finished_engines
    from edgespec.benchmark.slices import Interrupted
    from edgespec.tuning.report import TuneReport
    from edgespec.tuning.tuner import TuneOptions

    finished_engines(engine_dir)
    engine_request = request_of(values, prompts, engine_dir)
    options = TuneOptions(seed=seed, **values)
    requests = requests_of(prompts, options)
    place = journal or engine_dir / TUNE_JOURNAL
    with Stopper() as stopper:
        search = Search(requests, options, engine_request, stopper)
        report: TuneReport | FormatsReport
        try:
            if draft_onnx is None or draft_weights is None:
                report = search.tuned(engine_dir, place, output)
            else:
                report = search.formats(engine_dir, draft_onnx, draft_weights, install)
        except Interrupted:
            kept = f"what was measured is in {place}; the same command goes on with it"
            kept = "of several formats nothing is kept" if draft_onnx else kept
            say(f"stopped: {kept}", err=True)
            assert stopper.number is not None
            return exit_code(stopper.number)
    if as_json:
        click.echo(json_text(report.to_dict()))
    elif isinstance(report, TuneReport):
        show(report)
    else:
        for row in report.formats:
            say(f"{row.weights}: {row.report.line}")
        say(report.line)
    if picture is not None:
        from edgespec.tuning.frontier import draw_frontier

        whole = report if isinstance(report, TuneReport) else report.formats[0].report
        draw_frontier(whole, picture)
    return 0


def requests_of(files: Sequence[Path], options: TuneOptions) -> RequestFile:
    """The requests of all files that are taken, as many of each part. Raises RequestError."""
    from edgespec.benchmark.prompts import refuse_own_drafts
    from edgespec.prompts import Request, read_prompt_set, read_requests

    given: dict[str, Any] = {"temperature": options.temperature, "seed": options.seed}
    each = -(-options.num_prompts // len(files))
    first, taken = None, list[Request]()
    for path in files:
        read: Any = read_prompt_set if path.suffix in JSONL else read_requests
        requests: RequestFile = read(path, **given)
        refuse_own_drafts(requests)
        first = first or requests
        taken += [anchored(request, path) for request in spread(requests.requests, each)]
    assert first is not None
    chosen = enumerate(taken[: options.num_prompts])
    return replace(first, requests=tuple(replace(request, index=i) for i, request in chosen))


def request_of(values: dict[str, Any], files: Sequence[Path], engine_dir: Path) -> EngineRequest:
    """How engines are opened, by the flags of images, which are taken out of `values`. Files beside
    each of `files` may be read, and drafts in other formats are tried in a directory without the
    encoder of `engine_dir`."""
    from edgespec.runtime.engine_request import EngineRequest
    from edgespec.runtime.vision.image_prompts import beside

    images = take_images(values, files[0])
    rules = images["image_rules"]
    roots = (*rules.roots, *(path.absolute().parent for path in files if path.is_file()))
    return EngineRequest(
        spec_decode=True,
        prefix_cache_bytes=0,
        tuned=False,
        multimodal_engine_dir=images["multimodal_engine_dir"] or beside(engine_dir),
        image_rules=replace(rules, roots=roots),
    )


def anchored(request: Request, file: Path) -> Request:
    """A request of a file whose relative paths of images begin at the file's directory, wherever
    the requests of others begin. What is not there is left as it is."""
    from edgespec.prompts import ImageItem, Message

    def of_file(part: str | ImageItem) -> str | ImageItem:
        if isinstance(part, str) or part.kind != "path":
            return part
        path = file.absolute().parent / part.source
        return ImageItem(str(path)) if path.is_file() else part

    messages = tuple(
        Message.of(m.role, map(of_file, m.parts)) if m.parts else m for m in request.messages
    )
    return replace(request, messages=messages)


def spread(requests: Sequence[Any], count: int) -> list[Any]:
    """`count` of them, from all over."""
    count = min(count, len(requests))
    return [requests[i * len(requests) // count] for i in range(count)]


def check_costs(engine_dir: Path, batch_size: int, *, goes_on: bool) -> None:
    """Measure what steps cost where that is not known or in doubt, and say so; a search that
    `goes_on` keeps what it began with. Raises LimitError for a batch that the engines do not take,
    and what measuring raises."""
    from edgespec.cli.costs_flag import measure_again
    from edgespec.runtime.engine_request import EngineRequest
    from edgespec.runtime.measuring.cost_measure import doubt

    request = EngineRequest(spec_decode=True, prefix_cache_bytes=0, tuned=False)
    with request.open(engine_dir) as opened:
        engine = opened.engine
        engine.limits.check_batch_size(batch_size)
        known = engine.costs is not None
        why = None if known and goes_on else doubt(engine)
    if why is not None:
        say(f"{why}: measuring", err=True)
        measure_again(engine_dir, err=True, again=known)


@dataclass(frozen=True)
class Search:
    """What all searches of a command have in common. Each raises Interrupted where the stopper
    ends it."""

    requests: RequestFile
    options: TuneOptions
    engine_request: EngineRequest
    stopper: Stopper

    def run(self, engine_dir: Path, place: Path) -> tuple[Tuner, TuneReport]:
        """The search in one directory, its journal in `place`."""
        from edgespec.benchmark.slices import SliceRunner
        from edgespec.cli.progress import Bars
        from edgespec.tuning.journal import TuneJournal
        from edgespec.tuning.report import TuneReport, bound_to
        from edgespec.tuning.tuner import Tuner

        began = monotonic()
        check_costs(engine_dir, self.options.batch_size, goes_on=place.exists())
        with self.engine_request.open(engine_dir) as opened:
            engine = opened.engine
            if engine.costs is None:
                message = f"what steps cost here is not known: {engine.why_no_costs}"
                remedy = f"Measure it: edgespec bench {engine_dir} --measure-costs."
                raise LimitError(message, remedy)
            of = bound_to(engine, engine_dir, self.requests, self.options)
            with TuneJournal(place, of) as journal, Bars() as bars:
                if journal.other:
                    say(f"{place} is of other engines, prompts or options: begun anew", err=True)
                if journal.resumed:
                    say(f"going on with {journal.resumed} measurements of {place}", err=True)
                runner = SliceRunner(engine, self.stopper)
                tuner = Tuner(runner, self.requests, self.options, journal, bars)
                tuner.run()
            return tuner, TuneReport.of(tuner, engine_dir, monotonic() - began)

    def tuned(self, engine_dir: Path, place: Path, output: Path | None) -> TuneReport:
        """Tune one directory and keep the plan, in `output` where that is given."""
        from edgespec.runtime.opening.tuned_plan import write_tuned
        from edgespec.tuning.report import config_of, tuned_plan

        tuner, report = self.run(engine_dir, place)
        if output is None:
            write_tuned(engine_dir, tuned_plan(tuner, engine_dir))
        elif tuner.winner is not None:
            write_yaml(output, config_of(tuner.winner.row.candidate))
        tuner.journal.remove()
        kept = None if output is not None and tuner.winner is None else output or engine_dir
        return replace(report, kept=kept)

    def formats(
        self, engine_dir: Path, draft_onnx: Path, weights: Sequence[str], install: bool
    ) -> FormatsReport:
        """Tune the draft in each format of weights, and with `install` build the one whose own
        drafts are fastest."""
        from edgespec.backends.engine_dir import TUNE_JOURNAL
        from edgespec.cli.costs_flag import measure_again
        from edgespec.runtime.opening.tuned_plan import write_tuned
        from edgespec.tuning import draft_formats
        from edgespec.tuning.report import FormatSearch, FormatsReport, tuned_plan

        backend, rows, plans = draft_formats.check(engine_dir, weights), list[FormatSearch](), {}
        for name in weights:
            say(f"the draft in {name}", err=True)
            with draft_formats.with_draft(engine_dir, draft_onnx, name, backend) as directory:
                tuner, report = self.run(directory, directory / TUNE_JOURNAL)
                rows.append(FormatSearch.of(name, report))
                plans[name] = tuned_plan(tuner, directory)
        rows.sort(key=lambda row: -row.over_plain)
        best = rows[0].weights
        if install:
            draft_formats.build_draft(engine_dir, engine_dir, draft_onnx, best, backend)
            measure_again(engine_dir, err=True)
            write_tuned(engine_dir, draft_formats.bound_again(engine_dir, plans[best]))
        return FormatsReport(rows, install)


def write_yaml(path: Path, value: dict[str, Any]) -> None:
    """Write a file for --config, whole or not at all. Raises OutputError."""
    import yaml

    from edgespec.artifacts.atomic import replace_file, writing

    with writing(path):
        replace_file(path, yaml.safe_dump(value, sort_keys=False).encode())


# ---- what is shown


def show(report: TuneReport) -> None:
    """Print the result."""
    from edgespec.cli.tables import print_table

    for temperature, rates in report.acceptance.items():
        if rates:
            best = " ".join(f"{depth[0]:.2f}" for depth in rates)
            whole = " ".join(f"{sum(depth):.2f}" for depth in rates)
            by_depth = f"acceptance by depth, temperature {temperature}"
            say(f"{by_depth}: best rank {best}; any {whole}")
    print_table(table(report))
    say(f"{report.line}  ({report.candidates} candidates, {report.seconds:.0f} s)")
    if report.kept is not None:
        say(f"kept in {report.kept}")


def table(report: TuneReport) -> Any:
    """Measured candidates first, then the best of the others."""
    from edgespec.cli.tables import columns
    from edgespec.tuning.contest import Measured

    out = columns("", *HEADINGS)
    speed = "-" if report.plain is None else f"{report.plain.median:.1f}"
    out.add_row("plain", "1.00", "1.00", "", "1", "1.00", speed)
    rows, count = [*report.measured], Counter[str]()
    measured = {row.row.candidate.words for row in rows}
    for row in report.ranked:
        candidate = row.candidate
        if candidate.words not in measured and count[candidate.method] < SHOWN:
            count[candidate.method] += 1
            rows.append(Measured(row))
    for one in rows:
        row, over, tokens = one.row, one.over_plain, one.tokens_per_s
        ends = None if over is None else over.interval
        out.add_row(
            row.candidate.words,
            f"{row.over_plain:.2f}",
            "-" if over is None else f"{over.median:.2f}",
            "" if ends is None else f"{ends.low:.2f} to {ends.high:.2f}",
            f"{row.nodes:.1f}",
            f"{row.tokens:.2f}",
            "-" if tokens is None else f"{tokens.median:.1f}",
        )
    return out
