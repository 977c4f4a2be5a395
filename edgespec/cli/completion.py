"""`edgespec completion`: the script by which a shell completes commands, flags and values."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from edgespec.cli.environment import COMPLETING
from edgespec.cli.flags import EdgeCommand

SHELLS = ("bash", "zsh", "fish")


@click.command("completion", cls=EdgeCommand)
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, flags and values in a shell.

    \b
    bash, in ~/.bashrc:  eval "$(edgespec completion bash)"
    zsh, in ~/.zshrc:    eval "$(edgespec completion zsh)"
    fish:                edgespec completion fish > ~/.config/fish/completions/edgespec.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # one of the choices
    script = kind(ctx.find_root().command, {}, "edgespec", COMPLETING)
    click.echo(script.source_template % script.source_vars())  # `source` would start a bash
