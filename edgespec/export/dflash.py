"""DFlash pairs on their way out: what a base must emit for a draft, and whether the two can be a
pair.

Knows configurations. Knows no graphs; `components` writes what is decided here.
"""

from __future__ import annotations

from typing import Any

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.config import ModelConfig
from edgespec.contract import GraphShape
from edgespec.errors import PairingError, UnsupportedModel
from edgespec.export.sidecars import decoder_keys
from edgespec.methods.dflash import THINKING, DFlashConfig

_OTHER_BASE = "Name the base that this draft was trained for, or the draft of this base."


def open_draft(draft_dir: str, *, allow_pickle: bool) -> tuple[Checkpoint, DFlashConfig]:
    """The draft named by --dflash-draft-dir."""
    draft = open_checkpoint(draft_dir, allow_pickle=allow_pickle)
    found = detect(draft)
    if not isinstance(found, DFlashConfig):
        what = f"--dflash-draft-dir {draft.path} holds no DFlash draft"
        raise PairingError(what, "Give the directory of the draft; the base is MODEL.")
    return draft, found


def check_pair(config: DFlashConfig, model: ModelConfig, base: Checkpoint) -> None:
    """Refuse what cannot be a pair: other vocabulary, other width, other depth."""
    layers, hidden = model.decoder.num_layers, model.decoder.hidden_size
    if config.vocab_size != model.vocab_size:
        what = (
            f"the draft's vocabulary has {config.vocab_size} tokens, the one of {base.path}"
            f" {model.vocab_size}"
        )
        raise PairingError(what, _OTHER_BASE)
    if config.target_hidden_size != hidden:
        what = (
            f"the draft reads taps {config.target_hidden_size} wide, the hidden size of {base.path}"
            f" is {hidden}"
        )
        raise PairingError(what, _OTHER_BASE)
    if config.num_target_layers not in (None, layers):
        what = (
            f"the draft was trained for a base of {config.num_target_layers} layers, {base.path}"
            f" has {layers}"
        )
        raise PairingError(what, _OTHER_BASE)
    if any(not 1 <= layer <= layers for layer in config.aux_layer_ids):
        outputs = ", ".join(str(layer - 1) for layer in config.aux_layer_ids)
        what = f"the draft reads the outputs of layers {outputs}, {base.path} has {layers} layers"
        raise PairingError(what, _OTHER_BASE)
    if list(config.aux_layer_ids) != sorted(set(config.aux_layer_ids)):
        what = (
            "the draft names its layers out of order or twice:"
            f" {[layer - 1 for layer in config.aux_layer_ids]}"
        )
        raise UnsupportedModel(what, "Get the draft again: fc reads them in ascending order.")
    if not config.own_embedding and config.decoder.hidden_size != hidden:
        what = (
            f"the draft borrows the base's embedding, {hidden} wide, and is itself"
            f" {config.decoder.hidden_size} wide"
        )
        raise PairingError(
            what,
            "This draft's checkpoint lacks its own embed_tokens.weight; get the whole checkpoint.",
        )
    if not 0 <= config.mask_token_id < model.vocab_size:
        what = (
            f"the draft's mask token is {config.mask_token_id}, the vocabulary of {base.path} ends"
            " before"
        )
        raise PairingError(what, _OTHER_BASE)


def layer_ids(config: DFlashConfig) -> list[int]:
    """The layers whose outputs are tapped, as the authors' configurations count them."""
    return [layer - 1 for layer in config.aux_layer_ids]


def block_keys(config: DFlashConfig) -> dict[str, Any]:
    """The keys of the mirrored tool's `dflash_config`."""
    return {
        "target_layer_ids": layer_ids(config),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
    }


def base_config(config: dict[str, Any], block: DFlashConfig) -> dict[str, Any]:
    """config.json of a base that emits what a DFlash draft reads, from the one of a base with
    taps."""
    config = {key: value for key, value in config.items() if key != "eagle_hidden_state_layers"}
    return config | {"spec_decode_type": block.method, "dflash_config": block_keys(block)}


def draft_config(
    checkpoint: Checkpoint,
    config: DFlashConfig,
    shape: GraphShape,
    base: Checkpoint | None,
    model: ModelConfig | None,
    base_quantized_from: str | None,
) -> dict[str, Any]:
    """config.json of a draft. `pair` is what it asks of its base; null where the draft does not
    say."""
    root = {"base_quantized_from": base_quantized_from} if base_quantized_from else {}
    masks = {"windows": list(config.windows), "causal": list(config.causal)}
    return {
        "model": "DFlash",
        "spec_decode_type": config.method,
        "engine_role": shape.role.value,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        **decoder_keys(config.decoder),
        "base_model_hidden_size": shape.base_features,
        "identity": checkpoint.identity(),
        "dflash_config": block_keys(config) | masks,
        "pair": {
            "base_identity": base.identity() if base else None,
            **root,
            "base_name": config.base_name,
            "tap_ids": list(config.aux_layer_ids),
            "num_taps": len(config.aux_layer_ids),
            "target_hidden_size": config.target_hidden_size,
            "num_target_layers": config.num_target_layers,
            "own_embedding": config.own_embedding,
            "enable_thinking": THINKING.get(model.architecture) if model else None,
        },
        "graph": shape.as_dict(),
    }


def draft_notes(config: DFlashConfig, base: Checkpoint | None) -> tuple[str, ...]:
    notes = [f"DFlash draft, {config.layout} layout: blocks of {config.block_size}"]
    if config.base_name:
        notes.append(f"it says that it was made for {config.base_name}")
    notes.append(f"taps: hidden_states {', '.join(map(str, config.aux_layer_ids))}")
    if base is None:
        notes.append(
            "no --base-model-dir: the pairing is checked by its shapes at build, not by the base's"
            " identity"
        )
    return tuple(notes)
