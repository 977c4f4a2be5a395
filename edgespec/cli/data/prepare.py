"""`edgespec data prepare`: strings into values; `edgespec.data.prepare` does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgespec.cli.flags import EdgeCommand, refuse
from edgespec.cli.paths import FILE
from edgespec.cli.progress import Bars
from edgespec.cli.terminal import json_text, say
from edgespec.data.sources.table import SOURCES


class SourceName(click.ParamType):  # type: ignore[type-arg]
    """A source of the table, perhaps with the path of a local copy behind `=`."""

    name = "text"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Path | None]:
        """Name and path; click.BadParameter for a source that is not in the table."""
        if isinstance(value, tuple):
            return value
        name, equals, path = str(value).partition("=")
        if name not in SOURCES:
            self.fail(f"{name!r} is no source. Sources: {', '.join(SOURCES)}.", param, ctx)
        if equals and not path:
            self.fail(f"{value} has no path behind =", param, ctx)
        return name, Path(path) if equals else None


HELP = f"""Write conversations of published data sets as JSONL, of {", ".join(SOURCES)}.

    They are streamed from the hub (pip install 'edgespec[datasets]'), or read from the local copy at
    PATH, a file or a directory, in Parquet, JSONL or JSON. Duplicates are left out and counted.

    \b
    edgespec data prepare ultrachat --cap 20000 --exclude mt_bench.jsonl --output-file prompts.jsonl
    edgespec data prepare nemotron-v2=/data/nemotron --mode train --output-file chats.jsonl
    """


@click.command("prepare", cls=EdgeCommand, help=HELP)
@click.argument("sources", metavar="NAME[=PATH]...", type=SourceName(), nargs=-1, required=True)
@click.option("--output-file", type=FILE, required=True, help="JSONL; it must not exist yet.")
@click.option(
    "--mode",
    type=click.Choice(["generate", "train"]),
    default="generate",
    help="Prompts without answers, for synthesize; or whole conversations, tool calls too.",
)
@click.option("--full-conversations", is_flag=True, help="The same as --mode train.")
@click.option("--split", "splits", multiple=True, help="Instead of the source's usual splits.")
@click.option("--cap", type=click.IntRange(1), help="Records of a split, at most.")
@click.option(
    "--exclude",
    "benchmarks",
    type=FILE,
    multiple=True,
    help="Prompts of a benchmark, as JSONL with turns: conversations that quote one are left out.",
)
@click.option(
    "--augmentations",
    type=FILE,
    help="YAML in ModelOpt's form: adds a variant of each prompt. Not of multilingual ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    sources: tuple[tuple[str, Path | None], ...],
    output_file: Path,
    mode: str,
    full_conversations: bool,
    augmentations: Path | None,
    as_json: bool,
    **values: Any,
) -> None:
    """See HELP."""
    from edgespec.artifacts.outputs import refuse_overwriting
    from edgespec.data.prepare import Preparation, prepare
    from edgespec.data.variants import variants_of
    from edgespec.pipeline.recipe import read_config

    full = full_conversations or mode == "train"
    refuse({"`augmentations` are for prompts, which have no answers yet": augmentations and full})
    refuse_overwriting(output_file, (*values["benchmarks"], *(path for _, path in sources)))
    variants: list[Any] = []
    if augmentations is not None:
        variants = variants_of(read_config(augmentations), str(augmentations))
    asked = Preparation(dict(sources), full, variants=variants, **values)
    with Bars() as bars:
        found = prepare(asked, output_file, bars)
    if as_json:
        click.echo(json_text(found.to_dict()))
        return
    say(f"{output_file}: {sum(found.written.values()) + found.variants} conversations")
    for name, count in found.written.items():
        say(f"  {count} of {name}")
    if found.variants:
        say(f"  {found.variants} are variants")
    for why, count in found.left_out.items():
        say(f"  {count} left out: {why}")
    if not values["benchmarks"]:
        say(
            "note: no benchmark was named, `exclude`: drafts may learn what measures them", err=True
        )
