"""A base and the MTP head in its checkpoint: their checks, and the head under teacher forcing."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.checkpoint.mtp import ROOT
from edgespec.methods.mtp import NAME
from edgespec.pairing import acceptance_warnings, fit, tokens
from edgespec.pairing.check_result import CheckResult, Share
from edgespec.pairing.common import force_chain
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import final_readings
from edgespec.pairing.row import PairingRow

__all__ = ["NAME", "PAIRING"]


def head(pair: Pair) -> Iterator[CheckResult]:
    """The head's tensors by names and shapes. What it shares with its base fits."""
    from edgespec.graphs.decoder import Decoder
    from edgespec.graphs.mtp import MtpDraft

    tensors = MtpDraft.open(Decoder.open(pair.base, pair.model)).table.stored
    message = f"an MTP head of {len(tensors)} tensors; embedding, lm_head and RoPE are the base's"
    yield CheckResult("ok", "head", message)


def head_quantization(pair: Pair) -> Iterator[CheckResult]:
    """What quantizing the head costs."""
    if not any(name.startswith(ROOT) for name in pair.base.tensors):
        return
    schemes = acceptance_warnings.schemes_of(pair.base)
    used = [name for name, linears in schemes.items() if any(m.startswith(ROOT) for m in linears)]
    cost = f"is {', '.join(used)}: a little less acceptance, the same output"
    message = f"the MTP head {cost if used else 'is not quantized'}"
    yield CheckResult("ok", "quantization", message)


def remedy(better: Share) -> str:
    del better
    return (
        "This version gives a head the state after the norm only; compare with the head of the"
        " original download."
    )


PAIRING = PairingRow(
    checks=(
        ("tensors", fit.tensors),
        ("head", head),
        ("tokenizer", tokens.tokenizer),
        ("quantization", acceptance_warnings.base_quantization),
        ("quantization", head_quantization),
    ),
    force=force_chain,
    readings=final_readings,
    remedy=remedy,
    reads_final=True,
)
