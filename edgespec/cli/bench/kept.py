"""What `bench` leaves: the report and its pictures.

Knows files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.cli.terminal import json_text
from edgespec.errors import OutputError

if TYPE_CHECKING:
    from edgespec.benchmark.report import Report


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
