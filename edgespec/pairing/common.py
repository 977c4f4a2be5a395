"""The checks that every draft with a checkpoint of its own shares, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.config import DraftConfig
from edgespec.pairing import acceptance_warnings, fit, tokens
from edgespec.pairing.row import Check

StatedLayers = Callable[[DraftConfig], tuple[int, ...] | None]


def common_checks(
    stated: StatedLayers, draft_quantization: Check = acceptance_warnings.draft_quantization
) -> tuple[tuple[str, Check], ...]:
    """`stated` are the aux layers in the numbering of the draft's file; None: it names none."""
    return (
        ("tensors", fit.tensors),
        ("origin", fit.origin),
        ("made for", fit.made_for),
        ("tokenizer", tokens.tokenizer),
        ("vocabulary", fit.vocabulary),
        ("hidden size", fit.hidden_size),
        ("aux layers", lambda pair: fit.aux_layers(pair, stated)),
        ("embedding", fit.embedding),
        ("head", fit.head),
        ("d2t", tokens.coverage),
        ("RoPE", acceptance_warnings.rope),
        ("quantization", acceptance_warnings.base_quantization),
        ("quantization", draft_quantization),
    )
