"""`edgespec bench`: the group of its commands, and what is called without the name of one.

Knows their names. What they do stands in the modules beside this one.
"""

from __future__ import annotations

import click

from edgespec.cli.bench import reports, run
from edgespec.cli.flags import EdgeGroup

RUN = "run"


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


command.add_command(run.command, RUN)
command.add_command(reports.compare, "compare")
command.add_command(reports.draw, "draw")
