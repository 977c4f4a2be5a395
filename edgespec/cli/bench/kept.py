"""What all measurements of `bench` have in common: flags, the report, its tables and pictures.

Knows files. What is measured stands in `run` and `serve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.paths import FILE
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.terminal import json_text, say
from edgespec.cli.terminal import report as tell
from edgespec.errors import EdgeSpecError, OutputError, noted

if TYPE_CHECKING:
    from edgespec.benchmark.measure import Benchmark
    from edgespec.benchmark.report import Recorder, Report
    from edgespec.benchmark.serving.measure import ServeBenchmark

WARMUP = click.option(
    "--warmup",
    type=click.IntRange(0),
    default=1,
    help="Unmeasured runs of each way of decoding.",
)
REPEATS = click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    help="Measured runs of each batch of prompts, plain and with drafts in turn.",
)
JSON = click.option(
    "--json",
    "json_file",
    type=FILE,
    help="Write the report (docs/benchmark.md); - is stdout, and the tables go to stderr.",
)
PICTURE = click.option("--picture", type=FILE, help="Draw all panels into a .png or .svg.")
PICTURES = click.option(
    "--pictures", type=FILE, metavar="DIR", help="Draw each panel as PNG and SVG into a directory."
)


def check_pictures(
    inputs: Sequence[Path | None], picture: Path | None, pictures: Path | None
) -> None:
    """Raises OptionError for a picture of another format, MissingDependency, OutputError, and
    OverwriteError for a directory in one of the inputs."""
    if picture is None and pictures is None:
        return
    from edgespec.artifacts.outputs import refuse_overwriting
    from edgespec.benchmark.pictures import check_installed, format_of

    if picture is not None:
        format_of(picture)
    check_installed()
    if pictures is not None:
        refuse_overwriting(pictures, inputs)
        if pictures.exists() and not pictures.is_dir():
            raise OutputError(f"{pictures} is a file", "Name a directory for the pictures.")


def recorded(
    bench: Benchmark | ServeBenchmark, recorder: Recorder
) -> tuple[Report, EdgeSpecError | None]:
    """Runs it; what was measured, and what ended it too early."""
    failed = None
    try:
        bench.run()
    except EdgeSpecError as error:
        failed = error
    return recorder.report(bench, None if failed is None else failed.what), failed


def finish(
    report: Report,
    failed: EdgeSpecError | None,
    stopper: Stopper,
    json_file: Path | None,
    picture: Path | None,
    pictures: Path | None = None,
    lines: Sequence[str] = (),
) -> int:
    """Writes and shows what was measured, `lines` last; the exit code. Raises what ended it."""
    from edgespec.cli.bench import tables

    problems = [] if failed is None else [failed]
    with noted(problems):
        keep(report, json_file, picture, pictures)
    err = to_stdout(json_file)  # stdout has the report alone
    tables.show(report, err=err)
    for line in lines:
        say(line, err=err)
    for problem in problems[1:]:
        tell(problem)
    if problems:
        raise problems[0]
    return 0 if stopper.number is None else exit_code(stopper.number)


def keep(
    report: Report, json_file: Path | None, picture: Path | None, pictures: Path | None
) -> None:
    """Write what was asked for. Raises OutputError."""
    if json_file is not None:
        write(report, json_file)
    if report.rows:
        draw_pictures(report, picture, pictures)


def to_stdout(path: Path | None) -> bool:
    """Whether the report goes to stdout."""
    from edgespec.prompts import stream_of

    stream = stream_of(path)
    return stream is not None and stream.number == 1


def write(report: Report, path: Path) -> None:
    """Write the report; where that fails, into the directory for temporary files. Raises
    OutputError that says where it is."""
    from edgespec.benchmark.report import write_report
    from edgespec.prompts import stream_of

    try:
        if (stream := stream_of(path)) is not None:
            stream.write(f"{json_text(report.to_dict())}\n".encode())
        else:
            write_report(path, report)
    except (OutputError, OSError) as error:
        message = error.what if isinstance(error, OutputError) else f"{path}: {error.strerror}"
        raise OutputError(message, kept_elsewhere(report)) from error


def kept_elsewhere(report: Report) -> str:
    """Where the report is among the temporary files; or that it is not there either."""
    import tempfile

    from edgespec.benchmark.report import write_report

    try:
        path = Path(tempfile.mkdtemp(prefix="edgespec-bench-")) / "report.json"
        write_report(path, report)
    except (OutputError, OSError):
        return "Name another file."
    return f"The report is in {path}."


def draw_pictures(report: Report, picture: Path | None, pictures: Path | None) -> list[Path]:
    """Draw what was asked for; the files."""
    from edgespec.benchmark.pictures import draw_directory, draw_file

    files = []
    if picture is not None:
        draw_file(report, picture)
        files.append(picture)
    if pictures is not None:
        files += draw_directory(report, pictures)
    return files
