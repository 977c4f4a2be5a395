"""`edgespec build`: strings into values, then the backend's `build` does the work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from edgespec.backends.weights import BLOCKS, BY_ROW, FP32, WeightFormat
from edgespec.cli.flags import EdgeCommand
from edgespec.contract import Limits, Role

if TYPE_CHECKING:
    from edgespec.backends.ort.build import Built

DEFAULTS = Limits()
ALIASES = {"--eagle-base": "--spec-base", "--eagle-draft": "--spec-draft"}
DIRECTORY = click.Path(path_type=Path)


@click.command("build", cls=EdgeCommand, aliases=ALIASES)
@click.option(
    "--onnx-dir",
    required=True,
    type=DIRECTORY,
    help="What edgespec export wrote: an llm, base or draft.",
)
@click.option(
    "--engine-dir",
    required=True,
    type=DIRECTORY,
    help="Where the engine goes; base and draft share one.",
)
@click.option(
    "--spec-base", is_flag=True, help="Say that this is the base; checked against its config.json."
)
@click.option(
    "--spec-draft",
    is_flag=True,
    help="Say that this is the draft; checked against its config.json.",
)
@click.option(
    "--max-batch-size",
    default=DEFAULTS.max_batch_size,
    show_default=True,
    help="Sequences at a time.",
)
@click.option(
    "--max-input-len", default=DEFAULTS.max_input_len, show_default=True, help="Prompt tokens."
)
@click.option(
    "--max-kv-cache-capacity",
    default=DEFAULTS.max_kv_cache_capacity,
    show_default=True,
    help="Prompt and answer.",
)
@click.option(
    "--max-verify-tree-size",
    default=DEFAULTS.max_verify_tree_size,
    show_default=True,
    help="Nodes a base pass; with a DFlash draft at most 128 are used.",
)
@click.option(
    "--max-draft-tree-size",
    default=DEFAULTS.max_draft_tree_size,
    show_default=True,
    help="Draft top-k times step; a DFlash draft: at least its block.",
)
@click.option(
    "--weights",
    type=click.Choice(["fp32", "int8", "int4"]),
    default="fp32",
    show_default=True,
    help="What the weights of matrix products become, rounded to nearest on this machine.",
)
@click.option(
    "--weight-block",
    type=click.Choice([str(block) for block in BLOCKS]),
    help=(
        "Weights that share a scale: 128 (the default) is faster and smaller, 32 is closer, and"
        " exact in int4. 0, for int8 alone: a whole channel, and products of integers; exact and by"
        " far the fastest for many rows, but coarser where activations have outliers."
    ),
)
@click.option(
    "--share-embedding/--no-share-embedding",
    default=True,
    show_default=True,
    help=(
        "With int8 or int4 in blocks, let a tied head's weights be the embedding too, instead of a"
        " file of its own."
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    onnx_dir: Path,
    engine_dir: Path,
    spec_base: bool,
    spec_draft: bool,
    weights: str,
    weight_block: str | None,
    share_embedding: bool,
    as_json: bool,
    **limits: int,
) -> None:
    """Build the engine of an exported directory for this machine (ONNX Runtime on the CPU).

    The finished engine is run on the golden inputs that the export stored; one that does not
    reproduce their outputs is not kept. With --weights int8 or int4 the outputs must point the same
    way (cosine), and speculation is lossless up to what kernels for one row and for many round
    differently: a margin that is measured and told. An engine is bound to the ONNX Runtime version
    and the CPU that built it.

    \b
    edgespec build --onnx-dir onnx/base/llm  --engine-dir engines --spec-base
    edgespec build --onnx-dir onnx/draft/llm --engine-dir engines --spec-draft
    """
    if spec_base and spec_draft:
        raise click.UsageError(
            "--spec-base and --spec-draft exclude each other", click.get_current_context()
        )
    if weights == "fp32" and weight_block:
        raise click.UsageError(
            "--weight-block means nothing with --weights fp32", click.get_current_context()
        )
    if weights != "int8" and weight_block == str(BY_ROW):
        raise click.UsageError(
            "--weight-block 0 is for --weights int8", click.get_current_context()
        )
    from edgespec.backends.ort.build import build
    from edgespec.cli.progress import Bars

    with Bars() as bars:
        built = build(
            onnx_dir,
            engine_dir,
            Limits(**limits),
            spec_base=spec_base,
            spec_draft=spec_draft,
            weight_format=replace(
                format_of(weights, weight_block), share_embedding=share_embedding
            ),
            start=lambda total: bars.start("engine", total),
            advance=bars.advance,
        )
    if as_json:
        shown = {
            "role": built.role.value,
            "engine": str(built.engine),
            "bytes": built.size_bytes,
            "golden_difference": built.golden_difference,
            "golden_cosine": built.golden_cosine,
            "weights": dict(built.weights),
            "seconds": built.seconds,
            "notes": [*built.notes, *unused(built.role)],
        }
        click.echo(json.dumps(shown, indent=2))
        return
    click.echo(
        f"{built.role.value}: {built.engine} ({built.size_bytes / 1e6:.1f} MB,"
        f" {built.seconds:.1f} s)"
    )
    for note in (checked(built), *built.notes, *unused(built.role)):
        click.echo(f"  {note}")


def format_of(weights: str, block: str | None) -> WeightFormat:
    size = int(block or FP32.block)
    match weights:
        case "int4":
            return WeightFormat("int4", size)
        case "int8":
            return WeightFormat("int8", size)
    return FP32


def checked(built: Built) -> str:
    """What the golden outputs said."""
    if built.golden_difference is None:
        return "no golden outputs to check with"
    if built.golden_cosine is not None:
        return f"golden outputs approached (cosine {built.golden_cosine:.4f})"
    return f"golden outputs reproduced (largest difference {built.golden_difference:.1e})"


def unused(role: Role) -> list[str]:
    """Tree sizes that were given and belong to another role: both may be passed to every build."""
    owners = {
        "max_verify_tree_size": (Role.BASE, Role.LLM),
        "max_draft_tree_size": (Role.DRAFT,),
    }
    given = click.get_current_context().get_parameter_source
    return [
        f"--{name.replace('_', '-')} is for the {roles[0].value} and not used here"
        for name, roles in owners.items()
        if role not in roles and given(name) is ParameterSource.COMMANDLINE
    ]
