"""`edgespec train vocab`: strings into values; `edgespec.training.vocabulary` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgespec.cli.flags import EdgeCommand, refuse
from edgespec.cli.paths import FILE, MODEL
from edgespec.cli.terminal import json_text, say
from edgespec.cli.train import check_installed

SHARES = (0.9, 0.95, 0.98, 0.99, 0.995, 0.999)


@click.command("vocab", cls=EdgeCommand)
@click.option("--base-model", type=MODEL, metavar="DIR", required=True, help="The base.")
@click.option("--data", type=FILE, required=True, help="What the draft is trained on.")
@click.option("--size", type=click.IntRange(1), help="Tokens of the draft.")
@click.option(
    "--coverage",
    type=click.FloatRange(0, 1, min_open=True),
    help="Instead: as many tokens as have this share of the answers.",
)
@click.option("--chat-template", type=FILE, help="A Jinja file instead of the base's template.")
@click.option(
    "--output-file", type=FILE, help="The vocabulary: ModelOpt's d2t.pt, or NAME.safetensors."
)
@click.option("--picture", type=FILE, help="The share by the number of tokens, as x.png or x.svg.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    base_model: str,
    data: Path,
    size: int | None,
    coverage: float | None,
    chat_template: Path | None,
    output_file: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Choose the tokens of a draft: the most frequent of the answers, and those that end them.

    The size for a target is rounded up to a multiple of 8. A recipe takes the file as
    data.draft_vocab_cache, with its size as draft_vocab_size. A token of the base that is not in it
    can never be drafted.

    \b
    edgespec train vocab --base-model base --data chats.jsonl --coverage 0.99 --output-file d2t.pt
    edgespec train vocab --base-model base --data chats.jsonl --size 32000 --picture coverage.svg
    """
    refuse({"give one of `size` and `coverage`": (size is None) == (coverage is None)})
    check_installed()
    from edgespec.artifacts.outputs import refuse_overwriting
    from edgespec.pipeline.vocabulary_picture import draw_coverage, format_of
    from edgespec.training import data as conversations
    from edgespec.training import vocabulary
    from edgespec.training.job import template_of

    for path in (output_file, picture):
        if path is not None:
            refuse_overwriting(path, (base_model, data, chat_template))
    if picture is not None:
        format_of(picture)
    chats = conversations.read_conversations(data)
    conversations.refuse_unanswered(chats)
    model, template = template_of(base_model, chat_template)
    rows = conversations.rows_of(chats, template, model.max_position, answers_only=True)
    vocab_size = model.vocab_size
    refuse({f"`size` is above the {vocab_size} tokens of the base": size and size > vocab_size})
    counts, ends = vocabulary.token_counts(rows, vocab_size), model.eos_token_ids
    shares = vocabulary.coverage(counts, ends)
    chosen = size or vocabulary.size_for(shares, coverage or 1.0)
    if output_file is not None:
        ids = vocabulary.most_frequent(counts, chosen, ends)
        vocabulary.write_vocabulary(output_file, ids)
    if picture is not None:
        draw_coverage(shares, chosen, picture)
    found: dict[str, Any] = {
        "size": chosen,
        "coverage": float(shares[chosen - 1]),
        "tokens_seen": int((counts > 0).sum()),
        "tokens_of_answers": int(counts.sum()),
        "sizes": {str(share): vocabulary.size_for(shares, share) for share in SHARES},
    }
    if as_json:
        click.echo(json_text(found))
        return
    say(f"{chosen} tokens have {found['coverage']:.2%} of the answers"
        f" ({found['tokens_of_answers']} tokens, {found['tokens_seen']} different ones)")  # fmt: skip
    for share, needed in found["sizes"].items():
        say(f"  {float(share):6.1%}  {needed}")
