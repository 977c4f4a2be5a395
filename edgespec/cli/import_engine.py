"""`edgespec import`: `edgespec.backends.import_engine` does the work, this shows it."""

from __future__ import annotations

from pathlib import Path

import click

from edgespec.backends.base import Listeners
from edgespec.cli import environment
from edgespec.cli.build import lines_of, to_dict
from edgespec.cli.costs_flag import MEASURING, costs_line
from edgespec.cli.flags import EdgeCommand
from edgespec.cli.paths import DIRECTORY
from edgespec.cli.terminal import json_text, say


@click.command("import", cls=EdgeCommand)
@click.argument("directories", metavar="DIR...", type=DIRECTORY, nargs=-1, required=True)
@click.option(
    "--engine-dir",
    required=True,
    type=DIRECTORY,
    envvar=environment.ENGINE_DIR,
    show_envvar=True,
    help="Where the engines go; base and draft share one.",
)
@MEASURING
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    directories: tuple[Path, ...], engine_dir: Path, measure_costs: bool, as_json: bool
) -> None:
    """Take over engines that NVIDIA's own tool built from what build --emit-onnx wrote.

    DIR is such a directory, in which build.sh has left an engine. The engine is opened on this
    device and run on the golden inputs of its export, as after a build; one that does not reproduce
    their outputs is not kept. Nothing is compiled. The graph and its weights may have been removed.

    \b
    sh thor/base/build.sh && sh thor/draft/build.sh
    edgespec import thor/base thor/draft --engine-dir engines
    """
    from edgespec.backends.import_engine import import_engine
    from edgespec.cli.progress import Bars

    done = []
    for number, directory in enumerate(directories, start=1):
        with Bars() as bars:
            progress = Listeners(
                advance=bars.advance, prove=lambda passes: bars.start("golden outputs", passes)
            )
            built = import_engine(directory, engine_dir, progress)
        costs = None
        if number == len(directories):  # of all of them together
            costs = costs_line(engine_dir, measure=measure_costs)
        done.append(to_dict(built, costs))
        if not as_json:
            for line in lines_of(built, costs):
                say(line)
    if as_json:
        click.echo(json_text(done))
