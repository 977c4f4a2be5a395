"""`edgespec data hidden-states`: parses the flags, runs `edgespec.training.dumping`, and says what it
takes first.

Knows flags and words.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.flags import EdgeCommand
from edgespec.cli.paths import DIRECTORY, FILE, MODEL
from edgespec.cli.progress import Steps
from edgespec.cli.terminal import json_text, say
from edgespec.cli.train import check_installed, recipe_of
from edgespec.errors import OptionError, counted

if TYPE_CHECKING:
    from edgespec.training.dumping import DumpSizes, Source

OFFLINE = "data.offline_data_path"


@click.command("hidden-states", cls=EdgeCommand)
@click.argument("what", metavar="METHOD|RECIPE.yaml")
@click.argument("key_values", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--base-model", type=MODEL, metavar="DIR", help="The base that the draft is for.")
@click.option("--data", type=FILE, help='JSONL with "messages", whose answers are the base\'s own.')
@click.option("--output-dir", type=DIRECTORY, metavar="DIR", help="Where the dump goes.")
@click.option("--init", type=MODEL, metavar="DRAFT", help="The draft that training goes on from.")
@click.option(
    "--engine-dir",
    type=DIRECTORY,
    metavar="DIR",
    help="Take the states of this engine of the base, quantized as it serves.",
)
@click.option(
    "--topk-logits",
    type=click.IntRange(1, 4096),
    metavar="K",
    help="Keep the base's best K logits instead of its last state.  [engines: 128]",
)
@click.option(
    "--max-disk", type=click.FloatRange(0, min_open=True), metavar="GB", help="Refuse a larger one."
)
@click.option("--rank", type=click.IntRange(0), default=0, help="Which of several processes.")
@click.option("--world-size", type=click.IntRange(1), default=1, help="How many there are.")
@click.option("--dry-run", is_flag=True, help="Only say what it takes.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    what: str,
    key_values: tuple[str, ...],
    init: str | None,
    engine_dir: Path | None,
    topk_logits: int | None,
    max_disk: float | None,
    rank: int,
    world_size: int,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Write the hidden states that a training would read of its base, once, to files that
    edgespec train reads by data.offline_data_path: the base's layers are then not loaded.

    METHOD, recipe and keys are those of edgespec train. What it takes on disk is said first. Shards
    are written whole, and the same command goes on where it was stopped; with --world-size several
    processes share the work. The held-out prompts are answered too.

    \b
    edgespec data hidden-states eagle3 --base-model Qwen/Qwen3-0.6B --data chats.jsonl --output-dir dump
    edgespec train eagle3 data.offline_data_path=dump --base-model Qwen/Qwen3-0.6B --output-dir draft
    """
    recipe = recipe_of(what, key_values, {**flags, "minutes": None})
    if recipe[OFFLINE] is not None:
        raise OptionError(f"{OFFLINE} names a dump, and one is to be made.", "Remove the key.")
    check_installed()
    with Steps() as steps:
        steps.step("read")
        from edgespec.pipeline.engine_states import USUAL_TOP, EngineSource
        from edgespec.training.dumping import Part, Plan, TorchSource, dump, refuse_size
        from edgespec.training.job import open_job

        part = Part(rank, world_size)
        job = open_job(recipe, init, steps, steps.note, occupied=True)
        top = topk_logits or (0 if engine_dir is None else USUAL_TOP)
        plan = Plan.of(job, top, part)
        sizes = plan.sizes()
        steps.note(size_words(sizes, world_size))
        refuse_size(plan, sizes, None if max_disk is None else round(max_disk * 1e9))
        if not dry_run:
            steps.step("dump")
            source: Source = (
                TorchSource(job) if engine_dir is None else EngineSource(engine_dir, job)
            )
            try:
                written = dump(plan, source)
            finally:
                source.close()
    if as_json:
        click.echo(json_text({**asdict(sizes), "directory": str(job.out)}))
    elif not dry_run:
        say(f"{job.out}: {counted(written, 'shard')} written, {len(plan.shards) - 1} in all")


def size_words(sizes: DumpSizes, world_size: int) -> str:
    """What a dump takes."""
    text = (
        f"{sizes.num_conversations} conversations, {sizes.num_tokens} tokens of"
        f" {sizes.token_bytes} bytes: {sizes.total_bytes / 1e9:.3g} GB"
    )
    if world_size > 1:
        text += f", {sizes.own_bytes / 1e9:.3g} GB of this rank"
    return text + f"; {sizes.left_bytes / 1e9:.3g} GB are to be written"
