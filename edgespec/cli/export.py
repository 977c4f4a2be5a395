"""`edgespec export`: strings into values, then `export.components` does the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.flags import EdgeCommand
from edgespec.cli.paths import DIRECTORY, MODEL
from edgespec.cli.terminal import json_text, say
from edgespec.compat import trtllm
from edgespec.compat.edgellm import FLAGS
from edgespec.errors import PairingError, flag_of

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


Command = Callable[..., None]
BLOCK_METHODS = ("dflash", "jetspec", "dspark")


def block_options(method: str, title: str) -> Callable[[Command], Command]:
    """The flags of one method of block drafts."""

    def add(command: Command) -> Command:
        options = [
            click.option(
                f"--{method}-base",
                is_flag=True,
                help=f"Export the base of the {title} draft in --{method}-draft-dir.",
            ),
            click.option(
                f"--{method}-draft",
                is_flag=True,
                help=(
                    f"Export the {title} draft in --{method}-draft-dir, to OUT/{method}_draft;"
                    " MODEL is its base."
                ),
            ),
            click.option(
                f"--{method}-draft-dir",
                type=MODEL,
                metavar="DRAFT",
                help=f"The {title} draft for MODEL: a directory or a hub id.",
            ),
        ]
        for option in reversed(options):
            command = option(command)
        return command

    return add


@click.command(
    "export",
    cls=EdgeCommand,
    aliases={f"--{method}-tree-base": f"--{method}-base" for method in BLOCK_METHODS},
    missing={**FLAGS["export"], **trtllm.FLAGS["export"]},
)
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
@block_options("dflash", "DFlash")
@block_options("jetspec", "JetSpec")
@block_options("dspark", "DSpark")
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
@click.option(
    "--skip-visual",
    is_flag=True,
    help="Leave out the image encoder of a vision-language model, and with it all images.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    model: str,
    out: Path,
    eagle_base: bool,
    eagle1_base: bool,
    medusa_base: bool,
    mtp: bool,
    draft_model: bool,
    base_model_dir: str | None,
    aux_layers: tuple[int, ...] | None,
    allow_pickle: bool,
    no_golden: bool,
    skip_visual: bool,
    as_json: bool,
    **blocks: bool | str | None,
) -> None:
    """Write the ONNX graph of MODEL, a directory, a GGUF file or a hub id, to OUT/llm; that of a
    block draft to OUT/dflash_draft, OUT/jetspec_draft or OUT/dspark_draft, and that of a draft
    model to OUT/draft_model. The image encoder of a vision-language model goes to OUT/visual.

    An EAGLE-1, EAGLE-3, DFlash, JetSpec or DSpark draft and Medusa heads are detected automatically,
    in each of their published layouts. Base and EAGLE draft need different OUT directories. Weights
    keep the checkpoint's type. Code in a checkpoint is never run.

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
    asked = [BlockFlags.read(method, blocks) for method in BLOCK_METHODS]
    bases = {"eagle3": eagle_base, "eagle1": eagle1_base, "medusa": medusa_base, "mtp": mtp}
    bases |= {flags.method: flags.base for flags in asked}
    if draft_model and (other := next((flags for flags in asked if flags.draft_dir), None)):
        flag = f"--{other.method}-draft-dir"
        message = f"--draft-model makes MODEL itself the draft, and {flag} names another one"
        raise PairingError(message, "Leave one of the two out.")
    block = check_draft_flags(asked, base_model_dir, aux_layers)
    base_for = chosen_base(bases)
    from edgespec.cli.progress import Bars
    from edgespec.export.components import ExportOptions, export

    options = ExportOptions(
        base_for=base_for,
        draft_for=block.method if block and block.draft else None,
        as_draft="draft_model" if draft_model else None,
        draft_dir=block.draft_dir if block else None,
        base_model_dir=base_model_dir,
        aux_layers=aux_layers,
        allow_pickle=allow_pickle,
        golden=not no_golden,
        skip_visual=skip_visual,
    )
    with Bars() as bars:
        result = export(model, out, options, bars)
    show(result, as_json)


def chosen_base(bases: Mapping[str, bool]) -> str | None:
    """The method whose base is exported. Raises PairingError for more than one."""
    from edgespec.methods import METHODS

    chosen = [method for method, wanted in bases.items() if wanted]
    if len(chosen) > 1:
        flags = " and ".join(flag_of(METHODS[method].export_param or "") for method in chosen)
        message = f"{flags} exclude each other: a base emits what one method reads"
        raise PairingError(message, "Export once for each method, to different OUT directories.")
    return chosen[0] if chosen else None


@dataclass(frozen=True, slots=True)
class BlockFlags:
    """The flags of one method of block drafts."""

    method: str
    base: bool
    draft: bool
    draft_dir: str | None

    @classmethod
    def read(cls, method: str, values: Mapping[str, bool | str | None]) -> BlockFlags:
        """From the values of all flags by their parameters' names."""
        base, draft = (bool(values[f"{method}_{name}"]) for name in ("base", "draft"))
        path = values[f"{method}_draft_dir"]
        return cls(method, base, draft, None if path is None else str(path))

    @property
    def given(self) -> bool:
        """Whether any of them is on the line."""
        return self.base or self.draft or self.draft_dir is not None


def check_draft_flags(
    asked: Sequence[BlockFlags], base_model_dir: str | None, aux_layers: tuple[int, ...] | None
) -> BlockFlags | None:
    """The flags of the one block draft that is asked for; None: there is none. --X-draft-dir goes
    with one of its two flags, and they go with it alone. Raises PairingError."""
    given = [flags for flags in asked if flags.given]
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(f"--{flags.method}-draft-dir" for flags in given)
        message = f"{names} exclude each other: a base emits what one draft reads"
        raise PairingError(message, "Export once for each draft, to different OUT directories.")
    (flags,) = given
    name = f"--{flags.method}-draft" if flags.draft else f"--{flags.method}-base"
    if flags.draft_dir is None:
        message = (
            f"{name} needs --{flags.method}-draft-dir: the draft declares which layers it reads"
        )
        remedy = f"Pass --{flags.method}-draft-dir with the directory or hub id of the draft."
        raise PairingError(message, remedy)
    if flags.draft == flags.base:
        both = f"--{flags.method}-base and --{flags.method}-draft"
        message = f"--{flags.method}-draft-dir goes with one of {both}"
        raise PairingError(message, "Pass the one whose component is to be written.")
    if base_model_dir or aux_layers:
        message = (
            f"{name} goes with --{flags.method}-draft-dir alone: MODEL is the base, and the draft"
            " names its layers"
        )
        raise PairingError(message, "Leave --base-model-dir and --aux-layers out.")
    return flags


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
