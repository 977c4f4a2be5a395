"""What a draft model and its base must have in common, and what makes drafts of little use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from edgespec.checkpoint.names import EMBEDDING, expected_tensors
from edgespec.checkpoint.vocabulary import compared_tokenizers, read_tokens
from edgespec.config import ModelConfig
from edgespec.errors import PairingError, counted
from edgespec.methods.draft_model import NAME, DraftModelConfig
from edgespec.pairing import acceptance_warnings, fit
from edgespec.pairing.check_result import CheckResult, Share
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import AS_STATED, Reading
from edgespec.pairing.row import PairingRow

if TYPE_CHECKING:
    from edgespec.export.stepwise import Correct, Feeds
    from edgespec.graphs.assembly import DecoderGraph
    from edgespec.graphs.decoder import Decoder
    from edgespec.pairing.forcing import Array, EmbeddingRows, Forced, Ids
    from edgespec.pairing.probe_text import ProbeText

__all__ = ["NAME", "PAIRING"]

USUAL_SHARE = 1 / 2  # of the base's parameters: a larger draft seldom pays for itself


def model_of(pair: Pair) -> ModelConfig:
    """The draft as the model that it is."""
    _, config = pair.drafted()
    assert isinstance(config, DraftModelConfig)
    return config.model


def aux_layers(pair: Pair) -> Iterator[CheckResult]:
    """Nothing, unless --aux-layers was given: a draft model reads none."""
    if pair.aux_layers is not None:
        message = "`aux_layers` means nothing to a draft model, which reads no hidden states"
        yield CheckResult("refused", "aux layers", message, "Leave `aux_layers` out.")


def tokenizer(pair: Pair) -> Iterator[CheckResult]:
    """Every id means the same token to both. Raises PairingError with the first that does not."""
    draft, _ = pair.drafted()
    compared = compared_tokenizers(pair.base, draft)
    if compared is None:
        yield CheckResult("ok", "tokenizer", "the same tokenizer.model in both")
        return
    yield CheckResult(
        "ok", "tokenizer", f"{compared.both} ids compared, each means the same to both"
    )
    for ids, who, consequence in (
        (compared.base_alone, "draft", "they are never drafted"),
        (compared.draft_alone, "base", "they are never proposed, or rejected"),
    ):
        if ids:
            ids_lacking = (
                f"the {who}'s tokenizer lacks {counted(len(ids), 'token')}, from {ids[0]} on"
            )
            remedy = f"Nothing breaks: {consequence}."
            yield CheckResult("warning", "tokenizer", ids_lacking, remedy)
    of_base, of_draft = read_tokens(pair.base), read_tokens(draft)
    if of_base is not None and of_draft is not None and of_base.cutting != of_draft.cutting:
        message = "the ids mean the same, and text is cut into them in another way"
        yield CheckResult(
            "warning", "tokenizer", message, "The base's way is the one that is used."
        )


def vocabulary(pair: Pair) -> Iterator[CheckResult]:
    """The rows of the two embeddings, which may be padded to different sizes."""
    base, draft = pair.model.vocab_size, model_of(pair).vocab_size
    if base == draft:
        yield CheckResult("ok", "vocabulary", f"{base} rows in both")
        return
    message = (
        f"{base} rows in the base, {draft} in the draft: the first {min(base, draft)} are shared"
    )
    tokens = read_tokens(pair.base)
    highest = max(tokens.strings, default=0) if tokens is not None else 0
    if highest < draft:
        yield CheckResult("ok", "vocabulary", f"{message}, and the others are padding")
        return
    remedy = "An answer gets no drafts from the first such token on."
    message = f"{message}; the base's tokenizer has ids up to {highest}"
    yield CheckResult("warning", "vocabulary", message, remedy)


def special_tokens(pair: Pair) -> Iterator[CheckResult]:
    """The tokens that end an answer should be those of the draft too: it drafts them then."""
    base, draft = pair.model.eos_token_ids, model_of(pair).eos_token_ids
    unknown = [token for token in base if token not in draft]
    if unknown and draft:
        message = (
            f"an answer of the base ends at {listed(base)}, one of the draft at {listed(draft)}"
        )
        remedy = "Take a draft that was tuned for the same chat template, if there is one."
        yield CheckResult("warning", "special tokens", message, remedy)
        return
    ends = f"both end an answer at {listed(base)}" if draft else "the draft names no end"
    yield CheckResult("ok", "special tokens", ends)


def listed(ids: tuple[int, ...]) -> str:
    """Token ids in words."""
    return ", ".join(map(str, ids)) or "no token"


def context(pair: Pair) -> Iterator[CheckResult]:
    """How long a sequence the draft follows."""
    base, draft = pair.model.max_position, model_of(pair).max_position
    if draft >= base:
        yield CheckResult("ok", "context", f"the draft follows {draft} tokens, the base {base}")
        return
    message = f"the draft was made for {draft} tokens, the base for {base}"
    remedy = f"Requests go on beyond {draft} tokens, without drafts."
    yield CheckResult("warning", "context", message, remedy)


def size(pair: Pair) -> Iterator[CheckResult]:
    """The draft runs once for each level of a tree: it pays where it is much smaller."""
    base, draft = parameters(pair.model), parameters(model_of(pair))
    message = f"the draft has {draft / 1e6:.1f} M parameters, the base {base / 1e6:.1f} M"
    remedy = "Take a smaller model of the same family; drafts cost more time than they save."
    if draft >= base:
        yield CheckResult(
            "warning", "size", f"{message}: the draft is as large as its base", remedy
        )
    elif draft > USUAL_SHARE * base:
        yield CheckResult("warning", "size", f"{message}, {draft / base:.0%} as many", remedy)
    else:
        yield CheckResult("ok", "size", f"{message}, {draft / base:.0%} as many")


def parameters(model: ModelConfig) -> int:
    """How many parameters a model has, however they are stored."""
    return sum(math.prod(shape) for shape in expected_tensors(model).values())


@dataclass(frozen=True)
class ModelForcing:
    """The draft under teacher forcing: it reads tokens alone, whatever the hidden states are."""

    graph: DecoderGraph
    ids: Ids
    model: ModelConfig
    tokens: Ids
    rows: EmbeddingRows
    correct: Correct | None = None

    def positions(self) -> Ids:
        """[T], all of them."""
        return np.arange(len(self.tokens))

    def passes(self, hidden_states: Array, reading: Reading) -> list[Feeds]:
        """One pass over all positions."""
        from edgespec.export.stepwise import causal_feeds

        del hidden_states, reading
        return [causal_feeds(self.rows.of(self.tokens), self.model.decoder)]


def force(pair: Pair, base: Decoder, text: ProbeText) -> Forced:
    """The draft over a text, whose tokens must have a row in its embedding; it reads no images."""
    from edgespec.pairing.forcing import EmbeddingRows, open_pair

    graph, ids = open_pair(pair, base)
    tokens = text.tokens
    if (lacking := tokens[tokens >= len(ids)]).size:
        message = (
            f"the text holds the token {lacking[0]}, the draft's embedding ends at {len(ids) - 1}"
        )
        raise PairingError(message, "Give another text to `probe_text`.")
    rows = EmbeddingRows.read(graph.table.source(EMBEDDING), tokens)
    return ModelForcing(graph, ids, model_of(pair), tokens, rows)


def readings(pair: Pair) -> tuple[Reading, ...]:
    """The one that there is: it reads no hidden states."""
    del pair
    return (Reading(AS_STATED),)


def remedy(better: Share) -> str:
    """Never asked: there is one reading."""
    return f"Give the model as {better.name}."


PAIRING = PairingRow(
    checks=(
        ("tensors", fit.tensors),
        ("aux layers", aux_layers),
        ("tokenizer", tokenizer),
        ("vocabulary", vocabulary),
        ("special tokens", special_tokens),
        ("context", context),
        ("size", size),
        ("quantization", acceptance_warnings.draft_quantization),
    ),
    force=force,
    readings=readings,
    remedy=remedy,
    reads_final=True,
)
