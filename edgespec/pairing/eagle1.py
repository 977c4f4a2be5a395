"""EAGLE-1 pairs: their checks, and the draft under teacher forcing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edgespec.methods.eagle1 import NAME
from edgespec.pairing import acceptance_warnings, fit, tokens
from edgespec.pairing.check_result import CheckResult, Share
from edgespec.pairing.common import final_state, force_chain
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import final_readings
from edgespec.pairing.row import PairingRow

__all__ = ["NAME", "PAIRING"]


def remedy(better: Share) -> str:
    del better
    return (
        "This version gives an EAGLE-1 draft the state after the norm, as it is defined; it was"
        " trained otherwise."
    )


def embedding(pair: Pair) -> Iterator[CheckResult]:
    """As for other drafts; published ones bring a copy of the base's, and weights are not read
    here."""
    for check in fit.embedding(pair):
        is_own = check.level == "ok" and pair.drafted()[1].own_embedding
        message = "the draft's own; export leaves it out where it equals the base's"
        yield replace(check, what=message) if is_own else check


PAIRING = PairingRow(
    checks=(
        ("tensors", fit.tensors),
        ("origin", fit.origin),
        ("made for", fit.made_for),
        ("tokenizer", tokens.tokenizer),
        ("vocabulary", fit.vocabulary),
        ("hidden size", final_state("an EAGLE-1 draft: it reads")),
        ("embedding", embedding),
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
