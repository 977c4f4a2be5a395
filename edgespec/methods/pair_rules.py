"""Whether a base and a draft fit: the rules that hold for every method, and the walk over all.

Knows sizes and identities. Each rule is pure; callers choose which mismatches are errors, and what
their user can do about one.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.config.values import NOT_STATED
from edgespec.methods.sides import PLAIN_METHOD, BaseSide, DraftSide, Mismatch, PairRule
from edgespec.methods.table import METHODS


def mismatches(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """Every mismatch of a pair: the common rules first, then those of the draft's method."""
    method = METHODS[draft.method]
    for rule in (*(COMMON if method.reads_base else OF_WEIGHTS), *method.pair_rules):
        yield from rule(base, draft)


def same_method(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """An exported base emits what one method reads."""
    if base.method is None or base.method == draft.method:
        return
    reads = "no draft" if base.method == PLAIN_METHOD else METHODS[base.method].draft_title
    message = f"the draft is {METHODS[draft.method].draft_title}, the base was exported for {reads}"
    yield Mismatch("method", message)


def same_weights(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """A draft belongs to the weights that it was exported for, or to others of the same origin."""
    if base.identity is None or draft.base_identity in (None, base.identity):
        return
    if (draft.base_origin or draft.base_identity) != (base.origin or base.identity):
        yield Mismatch("identity", "the draft was exported for another base checkpoint")


def vocabulary(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """Base and draft count the same tokens."""
    if draft.vocab_size not in (NOT_STATED, base.vocab_size):
        message = (
            f"the draft's vocabulary has {draft.vocab_size} tokens, that of {base.name} has "
            f"{base.vocab_size}"
        )
        yield Mismatch("vocabulary", message)


def hidden_size(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """The draft reads hidden states of the base's hidden size."""
    if draft.target_hidden_size != base.hidden_size:
        message = (
            f"the draft reads hidden states of width {draft.target_hidden_size}, the hidden size "
            f"of {base.name} is {base.hidden_size}"
        )
        yield Mismatch("hidden size", message)


def embedding(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """A draft without an embedding of its own shares the base's, which must have its width."""
    if draft.own_embedding or draft.hidden_size == base.hidden_size:
        return
    message = (
        f"the draft shares the base's embedding, of width {base.hidden_size}, and is itself of "
        f"width {draft.hidden_size}"
    )
    remedy = "This draft's checkpoint lacks its own embed_tokens.weight; get the whole checkpoint."
    yield Mismatch("embedding", message, remedy)


def head(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """A draft without an lm_head of its own shares the base's, which must have its shape."""
    wanted = (draft.draft_vocab_size or base.vocab_size, draft.hidden_size)
    there = (base.vocab_size, base.hidden_size)
    if draft.own_head or wanted == there:
        return
    message = f"this draft has no lm_head and needs one of shape {wanted}; the base's is {there}"
    yield Mismatch("head", message)


def depth(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """A draft is trained for a base of one depth, and reads layers that it has."""
    layers, read = base.num_layers, draft.aux_layer_ids or ()
    if draft.num_target_layers not in (None, layers):
        message = (
            f"the draft was trained for a base of {draft.num_target_layers} layers, {base.name} "
            f"has {layers} layers"
        )
        yield Mismatch("depth", message)
    if any(not 1 <= layer <= layers for layer in read):
        message = (
            f"the draft reads hidden_states {', '.join(map(str, read))}, {base.name} has {layers} "
            "layers"
        )
        yield Mismatch("aux layers", message)


def mask_token(base: BaseSide, draft: DraftSide) -> Iterator[Mismatch]:
    """A draft that fills masks takes the mask's embedding from the base."""
    if draft.mask_token_id is None or 0 <= draft.mask_token_id < base.vocab_size:
        return
    message = (
        f"the draft's mask token is {draft.mask_token_id}, the vocabulary of {base.name} has "
        f"{base.vocab_size} tokens"
    )
    yield Mismatch("mask token", message)


# Of a draft that is a model of its own: its pairing is its tokenizer, which is compared at export
OF_WEIGHTS: tuple[PairRule, ...] = (same_weights,)
COMMON: tuple[PairRule, ...] = (
    same_method,
    *OF_WEIGHTS,
    vocabulary,
    hidden_size,
    embedding,
    head,
    depth,
    mask_token,
)
