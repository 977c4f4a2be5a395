"""Do base and draft mean the same tokens: tokenizers, the draft's vocabulary map, the mask. Knows
ids and strings."""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.vocabulary import VocabularyTokens, differences, other_tokens, read_tokens
from edgespec.pairing.check_result import CheckResult
from edgespec.pairing.pair import Pair

FILE = "tokenizer.json"


def tokenizer(pair: Pair) -> Iterator[CheckResult]:
    """The base's ids fit its own embedding; the draft's, where it brings any, mean the same."""
    base = read_tokens(pair.base)
    if base is None:
        message = f"the base has no {FILE}: what its ids mean cannot be compared"
        yield CheckResult(
            "warning",
            "tokenizer",
            message,
            f"Download {FILE} as well, or export the base, which makes one.",
        )
        return
    highest = max(base.strings, default=0)
    if highest >= pair.model.vocab_size:
        message = (
            f"the base's tokenizer has ids up to {highest}, its embedding {pair.model.vocab_size}"
            " rows"
        )
        yield CheckResult(
            "refused", "tokenizer", message, "Use the tokenizer that belongs to this checkpoint."
        )
        return
    draft = read_tokens(pair.draft) if pair.draft is not None else None
    if draft is None:
        own = "" if pair.draft is None else "; the draft brings none, as is usual"
        yield CheckResult("ok", "tokenizer", f"the base's, {len(base.strings)} ids{own}")
        return
    yield _compared(base, draft)


def _compared(base: VocabularyTokens, draft: VocabularyTokens) -> CheckResult:
    compared = differences(base, draft)
    if compared.others:
        message = other_tokens(compared, base, draft)
        return CheckResult(
            "refused",
            "tokenizer",
            message,
            "Use a draft that was trained with this base's tokenizer.",
        )
    if base.cutting != draft.cutting:
        message = "the ids mean the same, and text is cut into them in another way"
        remedy = (
            "The base's tokenizer is the one that is used; if the draft's is newer, update the"
            " base's."
        )
        return CheckResult("warning", "tokenizer", message, remedy)
    return CheckResult("ok", "tokenizer", f"the same in both, {compared.both} ids compared")


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
        message = (
            f"the draft proposes {share}, and never the end of an answer:"
            f" {', '.join(map(str, lost))}"
        )
        yield CheckResult(
            "warning",
            "d2t",
            message,
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
    if (mismatch := pair.mismatch("mask token")) is not None:
        remedy = "Use a draft that was trained for this base."
        yield CheckResult("refused", "mask token", mismatch.what, remedy)
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
        message = f"{mask} is {string!r} to the base's tokenizer, a token that text is made of"
        yield CheckResult(
            "warning", "mask token", message, "Compare mask_token_id with the draft's model card."
        )
