"""What rows of several methods have in common: checks of drafts with a checkpoint of their own, in
the order of the report, and of drafts that read the base's state after its last norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from edgespec.config import DraftConfig
from edgespec.pairing import acceptance_warnings, fit, tokens
from edgespec.pairing.check_result import CheckResult
from edgespec.pairing.pair import Pair
from edgespec.pairing.row import Check

if TYPE_CHECKING:
    from edgespec.graphs.decoder import Decoder
    from edgespec.pairing.forcing import Forced
    from edgespec.pairing.probe_text import ProbeText

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


def final_state(reads: str) -> Check:
    """The check of a draft that reads the state after the base's last norm; `reads` are draft and
    verb for a message, as in "an X draft: it reads". It refuses aux layers."""

    def check(pair: Pair) -> Iterator[CheckResult]:
        if pair.aux_layers is not None:
            message = f"`aux_layers` means nothing to {reads} the state after the last norm"
            yield CheckResult("refused", "hidden size", message, "Leave `aux_layers` out.")
            return
        _, config = pair.drafted()
        message = f"the state after the last norm, {config.target_hidden_size} wide as the base is"
        yield fit.refused(pair, "hidden size") or CheckResult("ok", "hidden size", message)

    return check


def force_chain(pair: Pair, base: Decoder, text: ProbeText) -> Forced:
    """A draft of one token a step over a text, all positions in one pass."""
    from edgespec.pairing.forcing import chain_forcing

    return chain_forcing(pair, base, text)
