"""EAGLE-1 pairs: their checks, and the draft under teacher forcing."""

from __future__ import annotations

from edgespec.methods.eagle1 import NAME
from edgespec.pairing import acceptance_warnings, fit, tokens
from edgespec.pairing.check_result import Share
from edgespec.pairing.common import final_state, force_chain
from edgespec.pairing.readings import final_readings
from edgespec.pairing.row import PairingRow

__all__ = ["NAME", "PAIRING"]


def remedy(better: Share) -> str:
    del better
    return (
        "This version gives an EAGLE-1 draft the state after the norm, as it is defined; it was"
        " trained otherwise."
    )


PAIRING = PairingRow(
    checks=(
        ("tensors", fit.tensors),
        ("origin", fit.origin),
        ("made for", fit.made_for),
        ("tokenizer", tokens.tokenizer),
        ("vocabulary", fit.vocabulary),
        ("hidden size", final_state("an EAGLE-1 draft: it reads")),
        ("embedding", fit.embedding),
        ("head", fit.head),
        ("d2t", tokens.coverage),
        ("RoPE", acceptance_warnings.rope),
        ("quantization", acceptance_warnings.base_quantization),
        ("quantization", acceptance_warnings.draft_quantization),
    ),
    force=force_chain,
    readings=final_readings,
    remedy=remedy,
    reads_final=True,
)
