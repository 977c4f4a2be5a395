"""`edgespec help`: the help of a command, as `edgespec COMMAND --help` prints it."""

from __future__ import annotations

import click

from edgespec.cli.flags import EdgeCommand, refuse_unknown_command


@click.command("help", cls=EdgeCommand)
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of a command, or the list of commands.

    \b
    edgespec help infer
    edgespec help quantize draft
    """
    context = ctx.find_root()
    for word in words:
        group = context.command
        if not isinstance(group, click.Group):
            message = f"{context.command_path} has no commands below it"
            raise click.UsageError(f"{message}: edgespec help {context.info_name}", ctx)
        child = group.get_command(context, word)
        if child is None:
            refuse_unknown_command(group, context, word)
        context = click.Context(child, info_name=word, parent=context)
    click.echo(context.get_help())
