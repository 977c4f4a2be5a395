"""EAGLE-1 pairs: their checks, and the draft under teacher forcing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgespec.methods.eagle1 import NAME
from edgespec.pairing import acceptance_warnings, fit, tokens
from edgespec.pairing.check_result import CheckResult, Share
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import AS_STATED, Reading
from edgespec.pairing.row import PairingRow

if TYPE_CHECKING:
    from edgespec.graphs.decoder import Decoder
    from edgespec.pairing.forcing import Forced, Ids

__all__ = ["NAME", "PAIRING"]


def hidden_state(pair: Pair) -> Iterator[CheckResult]:
    """Yields ok where the draft reads hidden states as wide as the base's are, else refused; so are
    aux layers, which it does not read."""
    if pair.aux_layers is not None:
        what = (
            "--aux-layers means nothing to an EAGLE-1 draft: it reads the state after the last norm"
        )
        yield CheckResult("refused", "hidden size", what, "Leave --aux-layers out.")
        return
    _, config = pair.drafted()
    what = f"the state after the last norm, {config.target_hidden_size} wide as the base is"
    yield fit.refused(pair, "hidden size") or CheckResult("ok", "hidden size", what)


def readings(pair: Pair) -> tuple[Reading, ...]:
    """The state after the base's last norm, and the one before it."""
    last = pair.model.decoder.num_layers
    return Reading(AS_STATED), Reading("from before the base's last norm", (last,))


def remedy(better: Share) -> str:
    del better
    return (
        "This version gives an EAGLE-1 draft the state after the norm, as it is defined; it was"
        " trained otherwise."
    )


def force(pair: Pair, base: Decoder, tokens: Ids) -> Forced:
    """The draft over the tokens [T], all positions in one pass."""
    from edgespec.pairing.forcing import chain_forcing

    return chain_forcing(pair, base, tokens)


PAIRING = PairingRow(
    checks=(
        ("tensors", fit.tensors),
        ("origin", fit.origin),
        ("made for", fit.made_for),
        ("tokenizer", tokens.tokenizer),
        ("vocabulary", fit.vocabulary),
        ("hidden size", hidden_state),
        ("embedding", fit.embedding),
        ("head", fit.head),
        ("d2t", tokens.coverage),
        ("RoPE", acceptance_warnings.rope),
        ("quantization", acceptance_warnings.base_quantization),
        ("quantization", acceptance_warnings.draft_quantization),
    ),
    force=force,
    readings=readings,
    remedy=remedy,
    reads_final=True,
)
