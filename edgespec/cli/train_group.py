"""`edgespec train`: the group of its commands, and what is called without the name of one."""

from __future__ import annotations

import click

from edgespec.cli import train, train_vocab
from edgespec.cli.flags import RUN, DefaultGroup


@click.group("train", cls=DefaultGroup)
def command() -> None:
    """Train a draft for a base: edgespec train METHOD, or a recipe. `run` may be left out, and has all
    flags: edgespec train run --help.

    \b
    edgespec train eagle3 --base-model Qwen/Qwen3-0.6B --data chats.jsonl --output-dir draft
    edgespec train eagle3.yaml training.training_seq_len=1024 --output-dir draft
    edgespec train vocab --base-model Qwen/Qwen3-0.6B --data chats.jsonl --coverage 0.99 --output-file d2t.pt
    """


command.add_command(train.command, RUN)
command.add_command(train_vocab.command, "vocab")
