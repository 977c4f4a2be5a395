"""Do base and draft mean the same tokens: tokenizers, the draft's vocabulary map, the mask. Knows
ids and strings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.files import Checkpoint, read_json
from edgespec.errors import CheckpointError
from edgespec.pairing.check_result import CheckResult
from edgespec.pairing.pair import Pair

FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a tokenizer.json says: each id's string, which ids are special, and how text is cut into
    them."""

    strings: dict[int, str]
    special: frozenset[int]
    cutting: tuple[Any, ...]


def tokenizer(pair: Pair) -> Iterator[CheckResult]:
    """The base's ids fit its own embedding; the draft's, where it brings any, mean the same."""
    base = read_tokens(pair.base)
    if base is None:
        what = f"the base has no {FILE}: what its ids mean cannot be compared"
        yield CheckResult(
            "warning",
            "tokenizer",
            what,
            f"Download {FILE} as well, or export the base, which makes one.",
        )
        return
    highest = max(base.strings, default=0)
    if highest >= pair.model.vocab_size:
        what = (
            f"the base's tokenizer has ids up to {highest}, its embedding {pair.model.vocab_size}"
            " rows"
        )
        yield CheckResult(
            "refused", "tokenizer", what, "Use the tokenizer that belongs to this checkpoint."
        )
        return
    draft = read_tokens(pair.draft) if pair.draft is not None else None
    if draft is None:
        own = "" if pair.draft is None else "; the draft brings none, as is usual"
        yield CheckResult("ok", "tokenizer", f"the base's, {len(base.strings)} ids{own}")
        return
    yield _compared(base, draft)


def _compared(base: Tokens, draft: Tokens) -> CheckResult:
    both = sorted(base.strings.keys() & draft.strings.keys())
    other = [i for i in both if base.strings[i] != draft.strings[i]]
    if other:
        at = other[0]
        what = (
            f"{len(other)} of {len(both)} ids mean other tokens, the first of them {at}: "
            f"{draft.strings[at]!r} to the draft, {base.strings[at]!r} to the base"
        )
        return CheckResult(
            "refused", "tokenizer", what, "Use a draft that was trained with this base's tokenizer."
        )
    if base.cutting != draft.cutting:
        what = "the ids mean the same, and text is cut into them in another way"
        remedy = (
            "The base's tokenizer is the one that is used; if the draft's is newer, update the"
            " base's."
        )
        return CheckResult("warning", "tokenizer", what, remedy)
    return CheckResult("ok", "tokenizer", f"the same in both, {len(both)} ids compared")


def read_tokens(checkpoint: Checkpoint) -> Tokens | None:
    """None where there is no tokenizer.json. Raises CheckpointError for one that cannot be read."""
    path = checkpoint.path / FILE
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
    return Tokens(
        strings,
        special,
        ([list(piece) for piece in pieces], raw.get("normalizer"), raw.get("pre_tokenizer")),
    )


def coverage(pair: Pair) -> Iterator[CheckResult]:
    """How much of the vocabulary the draft can propose; the tokens that end an answer should be
    among it."""
    draft, config = pair.drafted()
    offsets = read_d2t(draft, config)
    if offsets is None:
        yield CheckResult("ok", "d2t", "the draft proposes any token of the vocabulary")
        return
    reached = {i + int(offset) for i, offset in enumerate(offsets)}
    share = (
        f"{config.draft_vocab_size} of {config.vocab_size} tokens"
        f" ({config.draft_vocab_size / config.vocab_size:.0%})"
    )
    lost = [i for i in pair.model.eos_token_ids if i not in reached]
    if lost:
        what = (
            f"the draft proposes {share}, and never the end of an answer:"
            f" {', '.join(map(str, lost))}"
        )
        yield CheckResult(
            "warning",
            "d2t",
            what,
            "The output stays the same; the last step of an answer drafts to no use.",
        )
        return
    yield CheckResult("ok", "d2t", f"the draft proposes {share}, the ends of an answer among them")


def mask_token(pair: Pair) -> Iterator[CheckResult]:
    """The mask must have a row of the base's embedding, and should be no token that text is made
    of."""
    _, config = pair.drafted()
    mask = config.mask_token_id
    assert mask is not None
    if (found := pair.mismatch("mask token")) is not None:
        remedy = "Use a draft that was trained for this base."
        yield CheckResult("refused", "mask token", found.what, remedy)
        return
    base = read_tokens(pair.base)
    string = base.strings.get(mask) if base is not None else None
    if base is None:
        yield CheckResult("ok", "mask token", f"{mask}")
    elif string is None:
        yield CheckResult("ok", "mask token", f"{mask}, a row of the embedding that no text uses")
    elif mask in base.special:
        yield CheckResult("ok", "mask token", f"{mask}, the special token {string}")
    else:
        what = f"{mask} is {string!r} to the base's tokenizer, a token that text is made of"
        yield CheckResult(
            "warning", "mask token", what, "Compare mask_token_id with the draft's model card."
        )
