"""`edgespec export`: strings into values, then `export.components` does the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli import trtllm
from edgespec.cli.edgellm import FLAGS
from edgespec.cli.flags import EdgeCommand
from edgespec.cli.paths import DIRECTORY, MODEL
from edgespec.cli.terminal import json_text, say
from edgespec.errors import PairingError

if TYPE_CHECKING:
    from edgespec.export.components import Exported


def layer_list(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> tuple[int, ...] | None:
    """The callback of --aux-layers: `2,14,25` as integers, None without the flag. Raises
    click.BadParameter."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a list of layer indices such as 2,14,25", ctx, param
        ) from None


@click.command("export", cls=EdgeCommand, missing={**FLAGS["export"], **trtllm.FLAGS["export"]})
@click.argument("model", metavar="MODEL", type=MODEL)
@click.argument("out", metavar="OUT", type=DIRECTORY)
@click.option(
    "--eagle-base",
    is_flag=True,
    help="Export the base of an EAGLE-3 draft: its graph also emits the aux hidden states.",
)
@click.option(
    "--eagle1-base",
    is_flag=True,
    help=(
        "Export the base of an EAGLE-1 or EAGLE-2 draft: its graph also emits the state after its"
        " last norm."
    ),
)
@click.option(
    "--medusa-base",
    is_flag=True,
    help=(
        "Export the base of Medusa heads: its graph also emits the state after its last norm. Heads"
        " in its own checkpoint go to OUT/medusa_draft."
    ),
)
@click.option(
    "--dflash-base", is_flag=True, help="Export the base of the DFlash draft in --dflash-draft-dir."
)
@click.option(
    "--dflash-tree-base", is_flag=True, help="The same as --dflash-base: every base verifies trees."
)
@click.option(
    "--dflash-draft",
    is_flag=True,
    help="Export the DFlash draft in --dflash-draft-dir, to OUT/dflash_draft; MODEL is its base.",
)
@click.option(
    "--dflash-draft-dir",
    type=MODEL,
    metavar="DRAFT",
    help="The DFlash draft for MODEL: a directory or a hub id.",
)
@click.option(
    "--mtp",
    is_flag=True,
    help=(
        "Export a base and the MTP head in its checkpoint, to OUT/llm and OUT/mtp_draft (Qwen3.5)."
    ),
)
@click.option(
    "--draft-model",
    is_flag=True,
    help=(
        "Export MODEL, a whole model, as a draft for the larger one in --base-model-dir, to"
        " OUT/draft_model. Both have the same tokenizer."
    ),
)
@click.option(
    "--base-model-dir",
    type=MODEL,
    metavar="BASE",
    help=(
        "For a draft: the base that it drafts for, for pairing and for weights that it shares."
        " Default: what its config records, if that is a directory."
    ),
)
@click.option(
    "--aux-layers",
    callback=layer_list,
    metavar="I,J,K",
    help=(
        "Aux layers as hidden_states indices (0 is the embedding), instead of EAGLE-3's 2, L//2, L-3"
        " or the draft's own."
    ),
)
@click.option(
    "--allow-pickle", is_flag=True, help="Also read pickled weights (.bin, .pt), with weights_only."
)
@click.option(
    "--no-golden",
    is_flag=True,
    help="Skip the golden inputs and outputs that build checks engines with.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    model: str,
    out: Path,
    eagle_base: bool,
    eagle1_base: bool,
    medusa_base: bool,
    mtp: bool,
    dflash_base: bool,
    dflash_tree_base: bool,
    dflash_draft: bool,
    dflash_draft_dir: str | None,
    draft_model: bool,
    base_model_dir: str | None,
    aux_layers: tuple[int, ...] | None,
    allow_pickle: bool,
    no_golden: bool,
    as_json: bool,
) -> None:
    """Write the ONNX graph of MODEL, a directory or a hub id, to OUT/llm; that of a DFlash draft to
    OUT/dflash_draft, and that of a draft model to OUT/draft_model.

    An EAGLE-1, EAGLE-3 or DFlash draft and Medusa heads are detected automatically, in each of
    their published layouts. Base and EAGLE draft need different OUT directories. Weights keep the checkpoint's type. Code in a
    checkpoint is never run.

    \b
    edgespec export Qwen/Qwen3-8B onnx/base --eagle-base
    edgespec export Tengyunw/qwen3_8b_eagle3 onnx/draft --base-model-dir Qwen/Qwen3-8B
    edgespec export lmsys/vicuna-7b-v1.3 onnx/base --eagle1-base --allow-pickle
    edgespec export yuhuili/EAGLE-Vicuna-7B-v1.3 onnx/draft --base-model-dir lmsys/vicuna-7b-v1.3 --allow-pickle
    edgespec export lmsys/vicuna-7b-v1.3 onnx --medusa-base --allow-pickle
    edgespec export FasterDecoding/medusa-vicuna-7b-v1.3 onnx --base-model-dir lmsys/vicuna-7b-v1.3 --allow-pickle
    edgespec export Qwen/Qwen3.5-4B onnx --mtp
    edgespec export Qwen/Qwen3-8B onnx/base --dflash-base --dflash-draft-dir z-lab/Qwen3-8B-DFlash-b16
    edgespec export z-lab/Qwen3-8B-DFlash-b16 onnx/draft --base-model-dir Qwen/Qwen3-8B
    edgespec export Qwen/Qwen3-0.6B onnx/draft --draft-model --base-model-dir Qwen/Qwen3-8B
    """
    dflash_base = dflash_base or dflash_tree_base
    bases = {
        "eagle3": eagle_base,
        "eagle1": eagle1_base,
        "medusa": medusa_base,
        "mtp": mtp,
        "dflash": dflash_base,
    }
    check_draft_flags(dflash_base, dflash_draft, dflash_draft_dir, base_model_dir, aux_layers)
    base_for = chosen_base(bases)
    if draft_model and dflash_draft_dir:
        what = (
            "--draft-model makes MODEL itself the draft, and --dflash-draft-dir names another one"
        )
        raise PairingError(what, "Leave one of the two out.")
    from edgespec.cli.progress import Bars
    from edgespec.export.components import ExportOptions, export

    options = ExportOptions(
        base_for=base_for,
        draft_for="dflash" if dflash_draft else None,
        as_draft="draft_model" if draft_model else None,
        draft_dir=dflash_draft_dir,
        base_model_dir=base_model_dir,
        aux_layers=aux_layers,
        allow_pickle=allow_pickle,
        golden=not no_golden,
    )
    with Bars() as bars:
        result = export(model, out, options, bars)
    if dflash_tree_base:
        note = "--dflash-tree-base is --dflash-base here: every base verifies trees"
        result = replace(result, notes=(*result.notes, note))
    show(result, as_json)


def chosen_base(bases: Mapping[str, bool]) -> str | None:
    """The method whose base is exported. Raises PairingError for more than one."""
    from edgespec.methods import METHODS

    chosen = [method for method, wanted in bases.items() if wanted]
    if len(chosen) > 1:
        flags = " and ".join((METHODS[method].export_flag or "").split()[0] for method in chosen)
        what = f"{flags} exclude each other: a base emits what one method reads"
        raise PairingError(what, "Export once for each method, to different OUT directories.")
    return chosen[0] if chosen else None


def check_draft_flags(
    dflash_base: bool,
    dflash_draft: bool,
    draft_dir: str | None,
    base_model_dir: str | None,
    aux_layers: tuple[int, ...] | None,
) -> None:
    """--dflash-draft-dir goes with one of its two flags, and they go with it alone. Raises
    PairingError."""
    flag = "--dflash-draft" if dflash_draft else "--dflash-base"
    asked = dflash_draft or dflash_base
    if draft_dir is None:
        if not asked:
            return
        what = f"{flag} needs --dflash-draft-dir: the draft declares which layers it reads"
        remedy = "Pass --dflash-draft-dir with the directory or hub id of the draft."
        raise PairingError(what, remedy)
    if not asked or (dflash_draft and dflash_base):
        what = "--dflash-draft-dir goes with one of --dflash-base and --dflash-draft"
        raise PairingError(what, "Pass the one whose component is to be written.")
    if base_model_dir or aux_layers:
        what = (
            f"{flag} goes with --dflash-draft-dir alone: MODEL is the base, and the draft names its"
            " layers"
        )
        raise PairingError(what, "Leave --base-model-dir and --aux-layers out.")


def show(result: Exported, as_json: bool) -> None:
    """Print what was written."""
    if as_json:
        click.echo(json_text(as_dict(result)))
        return
    for part in (result, *result.beside):
        size = sum(entry["bytes"] for entry in part.files.values())
        say(f"{part.role}: {part.directory} ({size / 1e6:.1f} MB)")
        for note in part.notes:
            say(f"  {note}")


def as_dict(part: Exported) -> dict[str, object]:
    """A component for --json; what was written beside it stands in it."""
    out = {
        "directory": str(part.directory),
        "role": part.role,
        "files": part.files,
        "notes": part.notes,
    }
    return out | ({"beside": [as_dict(other) for other in part.beside]} if part.beside else {})
