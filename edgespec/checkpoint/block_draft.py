"""The tensors of a block draft under our own names, whatever its layout calls and fuses.

Knows names and rows. Knows no graphs.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import is_quantized
from edgespec.checkpoint.source import RowRange
from edgespec.config import AttentionSpec, layer_tensors
from edgespec.config.tensors import qkv_rows
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.methods.block_draft import FUSED, BlockDraftConfig, own_name

# What speculators keeps of the base beside the draft: the base's own are the same.
IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq", "t2d", "d2t")


def named_as_ours(checkpoint: Checkpoint, config: BlockDraftConfig) -> Checkpoint:
    """The same checkpoint with fc, hidden_norm, layers.0.self_attn.q_proj ..., norm; a fused Linear
    as its parts.

    Raises CheckpointError for two tensors of one name and for fused ones of another size,
    UnsupportedModel for a fused Linear that is quantized.
    """
    sources: dict[str, RowRange] = {}
    for stored in checkpoint.tensors:
        for name, rows in _parts(checkpoint, config, stored):
            if name in sources:
                raise CheckpointError(
                    f"{checkpoint.place} has {name!r} twice: {sources[name].name} and {stored}."
                )
            sources[name] = rows
    return checkpoint.renamed(sources)


def expected_tensors(config: BlockDraftConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything that a draft of this configuration holds, its vocabulary map
    apart."""
    hidden = config.decoder.hidden_size
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.aux_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i, layer in enumerate(config.decoder.layers):
        tensors |= layer_tensors(layer, hidden, f"layers.{i}")
    if config.own_embedding:
        tensors["embed_tokens.weight"] = (config.vocab_size, hidden)
    if config.own_head:
        tensors["lm_head.weight"] = (config.draft_vocab_size, hidden)
    return tensors


def _parts(
    checkpoint: Checkpoint, config: BlockDraftConfig, stored: str
) -> Iterator[tuple[str, RowRange]]:
    name = own_name(stored)
    module, _, part = name.rpartition(".")
    fused = next((key for key in FUSED if module.endswith(f".{key}")), None)
    if fused is None:
        yield name, RowRange(stored)
        return
    if is_quantized(checkpoint, stored.rpartition(".")[0]):
        raise UnsupportedModel(
            f"{checkpoint.place}: {module} is fused and quantized; this version reads fused Linears"
            " in float only.",
            "Give the draft as it was before quantizing, and quantize it with edgespec quantize"
            " draft.",
        )
    sizes = _sizes(config)[fused]
    shape = checkpoint.tensors[stored].shape
    if shape[:1] != (sum(sizes),):
        raise CheckpointError(
            f"tensor {stored!r} has the shape {list(shape)}; expected {sum(sizes)} rows."
        )
    start = 0
    for own, size in zip(FUSED[fused], sizes, strict=True):
        parent = module.removesuffix(fused.rpartition(".")[2])
        yield f"{parent}{own}.{part}", RowRange(stored, start, start + size)
        start += size


def _sizes(config: BlockDraftConfig) -> dict[str, tuple[int, ...]]:
    """Rows of what a fused Linear is made of."""
    layer = config.decoder.layers[0]
    assert isinstance(layer.mixer, AttentionSpec)
    inner = layer.mlp.intermediate_size
    return {"self_attn.qkv_proj": qkv_rows(layer.mixer), "mlp.gate_up_proj": (inner, inner)}
