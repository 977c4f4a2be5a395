"""`edgespec data`: the group of its commands, which stand in the modules beside this one."""

from __future__ import annotations

import click

from edgespec.cli.data import convert, hidden_states, prepare, show, synthesize
from edgespec.cli.flags import EdgeGroup


@click.group("data", cls=EdgeGroup)
def command() -> None:
    """Make data that drafts learn from, and convert prompt sets for other benchmarks."""


command.add_command(prepare.command, "prepare")
command.add_command(synthesize.command, "synthesize")
command.add_command(show.command, "show")
command.add_command(hidden_states.command, "hidden-states")
command.add_command(convert.command, "convert")
