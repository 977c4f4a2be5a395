"""A base and its Medusa heads: their checks, and the first head under teacher forcing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.medusa import NAME, MedusaConfig, heads_in_words
from edgespec.pairing import acceptance_warnings, fit, tokens
from edgespec.pairing.check_result import CheckResult, Share
from edgespec.pairing.common import final_state
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import Reading, final_readings
from edgespec.pairing.row import PairingRow

if TYPE_CHECKING:
    from edgespec.graphs.decoder import Decoder
    from edgespec.graphs.medusa import MedusaHeads
    from edgespec.pairing.probe_text import ProbeText

__all__ = ["NAME", "PAIRING"]

Ids = NDArray[np.int64]


def heads(pair: Pair) -> Iterator[CheckResult]:
    """How many heads there are; a warning where config.json says another number."""
    _, config = pair.drafted()
    assert isinstance(config, MedusaConfig)
    message = heads_in_words(config)
    if config.declared_heads in (None, config.num_heads):
        yield CheckResult("ok", "heads", message)
        return
    remedy = "All heads of the file are used; correct config.json to be rid of this."
    yield CheckResult("warning", "heads", message, remedy)


def vocabulary(pair: Pair) -> Iterator[CheckResult]:
    """Yields ok where heads and base have the same vocabulary, else refused."""
    message = f"{pair.model.vocab_size} tokens in both"
    yield fit.refused(pair, "vocabulary") or CheckResult("ok", "vocabulary", message)


def remedy(better: Share) -> str:
    del better
    return (
        "This version gives Medusa heads the state that the base's lm_head reads, as they are"
        " defined; these were trained otherwise."
    )


@dataclass(frozen=True)
class FirstHead:
    """The first head alone: the hidden state of each position, for the token two behind it."""

    graph: MedusaHeads
    ids: Ids
    count: int  # tokens of the text
    correct: None = None  # its graph's logits are all that drafts

    def positions(self) -> Ids:
        """[T-1]: all but the first, for which there is no hidden state before it."""
        return np.arange(1, self.count)

    def passes(
        self, hidden_states: NDArray[Any], reading: Reading
    ) -> list[dict[str, NDArray[Any]]]:
        """One pass over all positions; hidden_states [T, H]."""
        del reading
        rows = np.arange(self.count - 1, dtype=np.int64)
        given = np.ascontiguousarray(hidden_states[None, :-1])
        return [{"base_hidden": given, "gather_idx": rows[None]}]


def force(pair: Pair, base: Decoder, text: ProbeText) -> FirstHead:
    """The first head over a text, all positions in one pass."""
    from edgespec.graphs.medusa import MedusaHeads, checked

    checkpoint, config = pair.drafted()
    graph = replace(MedusaHeads.open(checkpoint, checked(config), base), num_heads=1)
    return FirstHead(graph, np.arange(graph.shape.vocab_size), len(text))


PAIRING = PairingRow(
    checks=(
        ("tensors", fit.tensors),
        ("heads", heads),
        ("origin", fit.origin),
        ("made for", fit.made_for),
        ("tokenizer", tokens.tokenizer),
        ("vocabulary", vocabulary),
        ("hidden size", final_state("Medusa heads: they read")),
        ("head", fit.head),
        ("quantization", acceptance_warnings.base_quantization),
        ("quantization", acceptance_warnings.draft_quantization),
    ),
    force=force,
    readings=final_readings,
    remedy=remedy,
    reads_final=True,
)
