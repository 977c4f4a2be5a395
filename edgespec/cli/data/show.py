"""`edgespec data show`: strings into values; `edgespec.training.data` says what is learned."""

from __future__ import annotations

from pathlib import Path

import click

from edgespec.cli.flags import EdgeCommand
from edgespec.cli.paths import FILE, MODEL
from edgespec.cli.terminal import harmless, say
from edgespec.cli.train import check_installed


@click.command("show", cls=EdgeCommand)
@click.argument("source", type=FILE, metavar="FILE")
@click.option("--base-model", type=MODEL, metavar="DIR", required=True, help="The base.")
@click.option("--chat-template", type=FILE, help="A Jinja file instead of the base's template.")
@click.option("--count", type=click.IntRange(1), default=1, help="Conversations, from the first.")
@click.option("--seq-len", type=click.IntRange(3), default=2048, help="Tokens that training sees.")
def command(
    source: Path, base_model: str, chat_template: Path | None, count: int, seq_len: int
) -> None:
    """Paint what a draft learns of conversations with answer_only_loss.

    Learned text is green and underlined; where stdout is no terminal, and with NO_COLOR, it stands
    between >> and <<. Behind it: how much of the whole file is learned, cut or left out.

    \b
    edgespec data show chats.jsonl --base-model Qwen/Qwen3-0.6B
    """
    check_installed()
    import os
    import sys

    from edgespec.training import data
    from edgespec.training.job import template_of

    conversations = data.read_conversations(source)
    data.refuse_unanswered(conversations)
    _, template = template_of(base_model, chat_template)
    painted = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for where, messages in conversations.items[:count]:
        say(f"{where}:")
        for text, learned in data.learned_parts(template, messages, where):
            shown = harmless(text)
            if learned:
                shown = (
                    click.style(shown, fg="green", underline=True) if painted else f">>{shown}<<"
                )
            click.echo(shown, nl=False, color=painted)
        click.echo()
    rows = data.rows_of(conversations, template, seq_len, answers_only=True)
    share = rows.num_predicted / rows.num_tokens
    say(f"{len(rows.rows)} conversations, {rows.num_tokens} tokens, {share:.0%} of them learned")
    for number, what in (
        (rows.num_cut, f"are longer than {seq_len} tokens, and cut there"),
        (rows.num_dropped, f"have no answer within {seq_len} tokens"),
    ):
        if number:
            say(f"  {number} {what}")
