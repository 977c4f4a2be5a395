"""A draft in another layout: read, written under other names byte for byte, and read back.

Knows the order of the work; layouts stand in `table`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic
from edgespec.artifacts.outputs import refuse_overwriting
from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.detect import detect, detect_base, draft_beside, text_section
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.writing import TensorChunk, array_piece, write_safetensors
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import PairingError, UnsupportedModel
from edgespec.layouts.draft import Draft, Written
from edgespec.layouts.table import LAYOUTS, NAMED
from edgespec.methods import METHODS, BaseSide, DraftSide, mismatches, resolve_aux_layers
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.progress import Progress, Silent


@dataclass(frozen=True, slots=True)
class Exported:
    """A draft that was written."""

    directory: Path
    method: str
    layout: str
    file: str
    num_tensors: int
    num_bytes: int


def export_draft(
    source: str,
    out: Path,
    layout: str,
    base_dir: str | None,
    *,
    allow_pickle: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes a draft in a row of LAYOUTS. Without `base_dir` its base is what config.json records.

    Raises UnsupportedModel for what is no draft, is quantized, or cannot be said in that layout,
    PairingError for another base's, and OutputError where it cannot be written.
    """
    refuse_overwriting(out, (source, base_dir))
    atomic.refuse_occupied(out)
    draft = open_draft(source, base_dir, allow_pickle=allow_pickle)
    written = LAYOUTS[layout].written(draft, layout)
    pieces = pieces_of(draft, written)
    progress = progress or Silent()
    progress.start("write", sum(piece.num_bytes for piece in pieces))
    with atomic.writing(out), atomic.staged_directory(out) as staging:
        write_safetensors(staging / written.file, pieces, progress.advance)
        text = json.dumps(written.config, indent=2) + "\n"
        (staging / "config.json").write_text(text, encoding="utf-8")
        refuse_difference(draft, Checkpoint(staging), layout)
    return Exported(
        out, draft.config.method, layout, written.file, len(pieces),
        sum(piece.num_bytes for piece in pieces),
    )  # fmt: skip


def open_draft(source: str, base_dir: str | None, *, allow_pickle: bool = False) -> Draft:
    """A draft with its base, of which only the configuration is read."""
    checkpoint = open_checkpoint(source, allow_pickle=allow_pickle)
    config, own = detect(checkpoint), None
    if isinstance(config, ModelConfig):  # whose draft may stand beside it
        beside = (draft_beside(checkpoint, config, method) for method in NAMED)
        if (found := next((draft for draft in beside if draft is not None), None)) is not None:
            config, own = found, str(checkpoint.path)
    if isinstance(config, ModelConfig) or config.method not in NAMED:
        what = "a base" if isinstance(config, ModelConfig) else METHODS[config.method].draft_title
        known = ", ".join(METHODS[method].title for method in NAMED)
        raise UnsupportedModel(
            f"{checkpoint.place} is {what}.", f"Drafts that have several layouts: {known}."
        )
    if (quantization := read_quantization(checkpoint)) is not None:
        raise UnsupportedModel(
            f"{checkpoint.place} is quantized ({quantization.layout}).",
            "Write the original in that layout, and quantize what is written.",
        )
    name = base_dir or own or config.base_name
    if base_dir is None and not (name and Path(name).is_dir()):
        raise PairingError(
            f"the base of {checkpoint.place} is not known: its config.json records {name!r}.",
            "Pass `base_model_dir`: the ends of texts and the aux layers are those of the base.",
        )
    assert name is not None
    base = open_checkpoint(name, allow_pickle=allow_pickle)
    model = detect_base(base, "Pass `base_model_dir` with the base.")
    sides = BaseSide.of_checkpoint(model, str(base.place)), DraftSide.of_checkpoint(config)
    for mismatch in mismatches(*sides):
        raise PairingError(mismatch.what, mismatch.remedy or "Pass the base of this draft.")
    named, names = NAMED[config.method](checkpoint, config)
    if isinstance(config, BlockDraftConfig):
        names = names | {name: name for name in config.head_shapes}
    reads_layers = METHODS[config.method].base_output == "aux_hidden_states"
    layers = resolve_aux_layers(config, model.decoder.num_layers) if reads_layers else ()
    raw = checkpoint.config.get("transformer_layer_config", checkpoint.config)
    return Draft(
        checkpoint=named,
        config=config,
        names=names,
        top=checkpoint.config,
        raw=raw,
        d2t=read_d2t(checkpoint, config) if reads_vocabulary(config) else None,
        base=model,
        base_raw=text_section(base),
        base_name=str(Path(name).resolve()) if Path(name).is_dir() else name,
        aux_layers=layers,
    )


def reads_vocabulary(config: DraftConfig) -> bool:
    """Whether a draft has a vocabulary of its own."""
    return 0 < config.draft_vocab_size < config.vocab_size


def pieces_of(draft: Draft, written: Written) -> list[TensorChunk]:
    """The tensors of the file: those of the draft as they are, and arrays beside."""
    pieces = []
    for own, name in written.names.items():
        stored = draft.names[own]
        info = draft.checkpoint.tensors[stored]
        pieces.append(TensorChunk(name, info.dtype, info.shape, copied(draft.checkpoint, stored)))
    return pieces + [array_piece(name, array) for name, array in written.beside.items()]


def copied(checkpoint: Checkpoint, name: str) -> Callable[[Any], object]:
    """What writes the bytes of a tensor."""
    return lambda file: checkpoint.write_to(name, file)


def refuse_difference(draft: Draft, again: Checkpoint, layout: str) -> None:
    """Raises UnsupportedModel where what was written reads as another draft."""
    config = detect(again)
    assert isinstance(config, DraftConfig)
    ours, theirs = (comparable(one) for one in (draft.config, config))
    layers: tuple[int, ...] = draft.aux_layers
    if layers:
        layers = resolve_aux_layers(config, draft.base.decoder.num_layers)
    if ours != theirs or layers != draft.aux_layers:
        raise UnsupportedModel(
            f"the layout {layout} has no keys for this draft: it would be read as another.",
            "Choose another `format`.",
        )


# Fields of a configuration that say how it was spelled, and for which base
SPELLING = {
    *("layout", "base_name", "aux_layer_convention", "aux_layer_ids", "num_target_layers"),
    *("prefix", "declared_heads"),
}


def comparable(config: DraftConfig) -> dict[str, Any]:
    """What two spellings of one draft have alike."""
    names = (one.name for one in fields(config))
    return {name: getattr(config, name) for name in names if name not in SPELLING}
