"""`edgespec verify`: `runtime.verification` checks, this shows a check a line or JSON, and writes
the result file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.engine_options import engine_dir_option
from edgespec.cli.flags import EdgeCommand
from edgespec.cli.image_flags import image_flags, take_images
from edgespec.cli.paths import DIRECTORY, FILE
from edgespec.cli.terminal import json_text, say
from edgespec.errors import GoldenMismatch

if TYPE_CHECKING:
    from edgespec.prompts import RequestFile
    from edgespec.runtime.checks.verification import Verification

RESULT = Path("verify.json")
OUTCOME_WIDTH, ENGINE_WIDTH = 10, 7


@click.command("verify", cls=EdgeCommand)
@engine_dir_option
@click.option(
    "--onnx-dir",
    "onnx_dirs",
    multiple=True,
    type=DIRECTORY,
    help=(
        "An export that an engine was built from, whose golden outputs it must reproduce; may be"
        " given repeatedly."
    ),
)
@click.option(
    "--input-file",
    type=FILE,
    help="Requests to decode with drafts and without, instead of the built-in ones.",
)
@click.option(
    "--output-file",
    type=FILE,
    default=RESULT,
    help="Write the results as JSON: attach this file to a bug report.",
)
@image_flags
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    engine_dir: Path,
    onnx_dirs: tuple[Path, ...],
    input_file: Path | None,
    output_file: Path,
    as_json: bool,
    **images: Any,
) -> int:
    """Check the engines of a directory on this device, as they run here.

    Each engine is compared with the golden outputs of its export (--onnx-dir), its calls must write
    their own rows of the cache and no others, and tokens with drafts must be those without. An
    engine that was built for this machine on another one has its golden outputs beside it, and is
    proven this way. Kernels, times and memory are measured.

    Each line is a check: passed, failed, or not run, with the reason. Times are medians of a few
    runs of one engine alone, and no benchmark. The exit code is 3 where a check failed; an engine
    that the library cannot open is one. The result file has versions, device, hashes and figures,
    and no paths of this machine.

    \b
    edgespec verify --engine-dir engines --onnx-dir out/llm --onnx-dir out/draft
    edgespec verify --engine-dir engines --output-file thor.json
    """
    from edgespec.artifacts.atomic import writing
    from edgespec.artifacts.json_files import write_json
    from edgespec.artifacts.outputs import refuse_overwriting
    from edgespec.prompts import check_writable
    from edgespec.runtime.checks.verification import verify

    inputs = [engine_dir, *onnx_dirs, *([input_file] if input_file else [])]
    refuse_overwriting(output_file, inputs)
    check_writable(output_file)
    verification = verify(
        engine_dir,
        onnx_dirs,
        requests_of(input_file),
        lambda check: say(f"checking {check}", err=True),
        take_images(images, input_file),
    )
    report = verification.to_dict()
    with writing(output_file):
        write_json(output_file, report)
    if as_json:
        click.echo(json_text(report))
    else:
        for line in lines_of(verification, report):
            say(line)
        say(f"written to {output_file}", err=True)
    return GoldenMismatch.exit_code if report["failed"] else 0


def requests_of(path: Path | None) -> RequestFile | None:
    """The requests of --input-file. Raises RequestError."""
    from edgespec.prompts import read_requests

    return None if path is None else read_requests(path)


def lines_of(verification: Verification, report: dict[str, Any]) -> list[str]:
    """The table: outcome, engine and check, memory, and the summary last."""
    lines = [
        f"{finding.outcome.value:{OUTCOME_WIDTH}}{name:{ENGINE_WIDTH}}{finding.check}:"
        f" {finding.detail}"
        for name, finding in verification.findings
    ]
    for engine in verification.engines:
        sizes = engine.description["memory_bytes"]
        words = ", ".join(f"{name.replace('_', ' ')} {n / 1e6:.1f}" for name, n in sizes.items())
        lines.append(f"{'':{OUTCOME_WIDTH}}{engine.role.value:{ENGINE_WIDTH}}memory: {words} MB")
    peak = f"the process took {verification.peak_bytes / 1e6:.0f} MB at most"
    counts = f"{report['passed']} passed, {report['failed']} failed, {report['not_run']} not run"
    return [*lines, f"{counts}; {peak}"]
