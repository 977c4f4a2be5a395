"""What the passes of a pair read: the base's by its layers, the draft's by its tensors.

Knows which tensors of a draft a pass reads. Reads headers alone.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edgespec.checkpoint.layouts import logical_shapes, read_quantization
from edgespec.checkpoint.names import PREDICTION_HEADS
from edgespec.config.model_cost import ExpertsWork, PairWork, PassWork
from edgespec.methods import METHODS
from edgespec.pairing.pair import Pair

NOT_READ, EXPERTS, HEAD = ("embed_tokens", "d2t", "t2d"), ".experts.", "lm_head"


def work_of(pair: Pair) -> PairWork:
    """The work of a pair. Raises CheckpointError for damaged headers."""
    model, config, row = pair.model, pair.config, METHODS[pair.method]
    base = PassWork.of(model.decoder, model.vocab_size * model.decoder.hidden_size)
    draft = draft_of(pair)
    if row.of_model is not None:
        return PairWork(base, draft, "model")
    if row.proposes.startswith("block"):
        slots = getattr(config, "block_size", None)
        return PairWork(base, draft, "block", None if slots is None else slots - 1)
    if config is not None and not config.decoder.layers:
        return PairWork(base, draft, "heads", getattr(config, "num_heads", None))
    return PairWork(base, draft, "levels")


def draft_of(pair: Pair) -> PassWork:
    """What a pass of the draft reads: all matrices of its own but embeddings, and an lm_head."""
    config, tied = pair.config, METHODS[pair.method].of_model is not None
    layers = config.decoder.layers if config is not None else ()
    experts = (layers or pair.model.decoder.layers)[-1].mlp.experts
    shapes = tensors_of(pair)
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) > 1}
    routed = sum(size for name, size in sizes.items() if EXPERTS in name)
    dense = sum(sizes.values()) - routed
    own = any(HEAD in name for name in shapes)
    own = own or (config is not None and config.own_head and not tied)
    cache = PassWork.of(config.decoder, 0) if config is not None and layers else PassWork(0, 0)
    return replace(
        cache,
        dense=dense,
        head=0 if own else head_of(pair),
        experts=(ExpertsWork(experts.count, experts.per_token, routed // experts.count),)
        if experts is not None and routed
        else (),
    )


def tensors_of(pair: Pair) -> dict[str, tuple[int, ...]]:
    """The draft's own tensors that a pass reads, by name, as they were before they were
    quantized."""
    source = pair.draft or pair.base
    shapes = logical_shapes(source, read_quantization(source))
    bare = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    if source.path == pair.base.path:
        begins = METHODS[pair.method].tensors_in_base or PREDICTION_HEADS
        bare = {name: shape for name, shape in bare.items() if name.startswith(begins)}
    return {name: s for name, s in bare.items() if not any(part in name for part in NOT_READ)}


def head_of(pair: Pair) -> int:
    """Elements of an lm_head that is the base's, or the draft's own embedding."""
    config, model = pair.config, pair.model
    if config is None:
        return model.vocab_size * model.decoder.hidden_size
    tied = METHODS[pair.method].of_model is not None
    hidden = config.decoder.hidden_size if tied else model.decoder.hidden_size
    return (config.draft_vocab_size or model.vocab_size) * hidden
