"""`edgespec bench`: the group of its commands, and what is called without the name of one.

Knows their names. What they do stands in the modules beside this one.
"""

from __future__ import annotations

import click

from edgespec.cli.bench import reports, run, serve
from edgespec.cli.flags import RUN, DefaultGroup


@click.group("bench", cls=DefaultGroup)
def command() -> None:
    """Measure engines on this machine: edgespec bench ENGINE_DIR. `run` may be left out, and has all
    flags: edgespec bench run --help.

    \b
    edgespec bench engines
    edgespec bench engines --spec-draft-step 1,2,3,4 --synthetic-acceptance 0,0.5,0.7,0.9 --json a.json
    edgespec bench compare a.json b.json
    edgespec bench draw a.json --pictures pictures
    edgespec bench serve engines --prompts mt_bench.jsonl
    """


command.add_command(run.command, RUN)
command.add_command(reports.compare, "compare")
command.add_command(reports.draw, "draw")
command.add_command(serve.command, "serve")
