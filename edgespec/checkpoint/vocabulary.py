"""What the ids of a checkpoint's tokenizer mean, and where two tokenizers differ.

Knows the JSON of a vocabulary. Knows no tokenizer library, and of texts only by which rules they
are cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.artifacts import file_names, hashes
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.source import read_json
from edgespec.errors import CheckpointError, PairingError

SENTENCEPIECE = "tokenizer.model"


@dataclass(frozen=True, slots=True)
class VocabularyTokens:
    """What a tokenizer.json says: each id's string, which ids are special, and how text is cut into
    them."""

    strings: dict[int, str]
    special: frozenset[int]
    cutting: tuple[Any, ...]


def read_tokens(checkpoint: Checkpoint) -> VocabularyTokens | None:
    """None where there is no tokenizer.json. Raises CheckpointError for one that cannot be read."""
    path = checkpoint.path / file_names.TOKENIZER
    if not path.is_file():
        return None
    raw = read_json(path)
    model, added = raw.get("model"), raw.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    try:
        if isinstance(vocab, dict):
            strings = {int(i): str(token) for token, i in vocab.items()}
        elif isinstance(vocab, list):  # Unigram: pairs of a token and its score
            strings = {i: str(entry[0]) for i, entry in enumerate(vocab)}
        else:
            raise TypeError("no vocabulary")
        strings |= {int(token["id"]): str(token["content"]) for token in added}
        special = frozenset(int(token["id"]) for token in added if token.get("special"))
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not a tokenizer: {error}.", "Download it again."
        ) from error
    merges = model.get("merges") if isinstance(model, dict) else None
    pieces = [
        tuple(merge.split(" ", 1)) if isinstance(merge, str) else merge for merge in merges or []
    ]
    return VocabularyTokens(
        strings,
        special,
        ([list(piece) for piece in pieces], raw.get("normalizer"), raw.get("pre_tokenizer")),
    )


@dataclass(frozen=True, slots=True)
class Differences:
    """How the ids of two tokenizers compare. `both` are compared; `others` mean another token,
    ascending; the rest is known to one of the two alone."""

    both: int
    others: tuple[int, ...]
    base_alone: tuple[int, ...]
    draft_alone: tuple[int, ...]


def differences(base: VocabularyTokens, draft: VocabularyTokens) -> Differences:
    """Every id of the two tokenizers, compared by its string."""
    both = base.strings.keys() & draft.strings.keys()
    return Differences(
        both=len(both),
        others=tuple(sorted(i for i in both if base.strings[i] != draft.strings[i])),
        base_alone=tuple(sorted(base.strings.keys() - draft.strings.keys())),
        draft_alone=tuple(sorted(draft.strings.keys() - base.strings.keys())),
    )


def other_tokens(differing: Differences, base: VocabularyTokens, draft: VocabularyTokens) -> str:
    """How many ids mean other tokens, and the first of them with both."""
    at = differing.others[0]
    return (
        f"{len(differing.others)} of {differing.both} ids mean other tokens, the first of them"
        f" {at}: {draft.strings[at]!r} to the draft, {base.strings[at]!r} to the base"
    )


def compared_tokenizers(base: Checkpoint, draft: Checkpoint) -> Differences | None:
    """How the ids of two whole models compare, of which none means another token; None where both
    have the very same SentencePiece model and no tokenizer.json to look into.

    Raises PairingError where an id means another token, or where a tokenizer is missing, and
    CheckpointError for one that cannot be read.
    """
    of_base, of_draft = read_tokens(base), read_tokens(draft)
    if of_base is None or of_draft is None:
        if same_sentencepiece(base, draft):
            return None
        lacking = base if of_base is None else draft
        message = f"{lacking.place} has no {file_names.TOKENIZER}: its tokens cannot be compared"
        raise PairingError(
            message, f"Put the {file_names.TOKENIZER} of the model beside its weights."
        )
    compared = differences(of_base, of_draft)
    if compared.others:
        message = (
            f"draft and base have different tokenizers: {other_tokens(compared, of_base, of_draft)}"
        )
        raise PairingError(message, "A draft model has the tokenizer of its base.")
    return compared


def same_sentencepiece(base: Checkpoint, draft: Checkpoint) -> bool:
    """Whether both checkpoints have the same SentencePiece model, byte by byte."""
    paths = [checkpoint.path / SENTENCEPIECE for checkpoint in (base, draft)]
    if not all(path.is_file() for path in paths):
        return False
    return hashes.sha256_file(paths[0]) == hashes.sha256_file(paths[1])
