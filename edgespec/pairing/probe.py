"""How often a draft says what its base says, on a little text, without engines.

Teacher-forced: at each position the draft reads the base's own hidden states and the token that
follows, and its first token is compared with the base's own next one. What engines would never
notice, since the output stays the same, shows here: the draft is also run on the hidden states of
other readings. What a draft is given stands in `forcing`, the readings in `readings`.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.finite import is_finite
from edgespec.checkpoint.names import EMBEDDING
from edgespec.checkpoint.tokenizer import refuse_growth
from edgespec.errors import CheckpointError, RequestError
from edgespec.export.sidecars import copy_tokenizer
from edgespec.export.stepwise import PassOutput, causal_feeds, run_stepwise
from edgespec.graphs.decoder import Decoder
from edgespec.pairing.check_result import CheckResult, Probed, Share
from edgespec.pairing.forcing import EmbeddingRows
from edgespec.pairing.pair import Pair
from edgespec.pairing.readings import Reading
from edgespec.pairing.table import PAIRINGS
from edgespec.progress import Progress
from edgespec.stored.regular import open_regular
from edgespec.stored.tokenizer import panics_as

SHIPPED = Path(__file__).with_name("probe.txt")
MIN_TOKENS, MAX_TOKENS = 16, 512
MAX_CHARACTERS = MAX_TOKENS * 128  # of a text: hardly a token is so long
# By which another reading must be better to be reported: one layer often makes little difference
SIGMAS, MIN_GAIN = 3.0, 0.03
MIN_SHARE = 0.1  # a draft that agrees less often hardly knows its base
ALPHA = 0.01  # how often chance may mislead
UNRELATED = "the draft was not made for this base"
Array = NDArray[Any]
Ids = NDArray[np.int64]


def probe(pair: Pair, text: str, progress: Progress) -> Probed:
    """The share of positions where the draft's first token is the base's next one, for each reading
    of the hidden states.

    Raises RequestError for a text of too few tokens, CheckpointError for weights or logits that are
    NaN or Inf; nothing is left on disk.
    """
    row = PAIRINGS[pair.method]
    tokens, readings = tokens_of(pair.base, text), row.readings(pair)
    for checkpoint in filter(None, (pair.base, pair.draft)):
        refuse_not_finite(checkpoint, progress)
    base = Decoder.open(pair.base, pair.model, emits_final=row.reads_final)
    draft = row.force(pair, base, tokens)
    progress.start("probe", base.shape.num_layers + draft.graph.shape.num_layers + 4)

    def done() -> None:
        progress.advance(1)

    rows = EmbeddingRows.read(base.table.source(EMBEDDING), tokens).of(tokens)
    aux_layers = {layer for reading in readings for layer in reading.aux_layers}
    (truth,) = run_stepwise(base, [causal_feeds(rows, pair.model.decoder)], aux_layers, done)
    if not truth.finite:
        raise CheckpointError(
            f"the base computes NaN or Inf on the text, with finite weights: {pair.base.path}",
            "Its scales are damaged, or its values overflow float32: download it again.",
        )
    asked = [draft.passes(hidden_states(reading, truth)) for reading in readings]
    passes = [feeds for feeds_of_reading in asked for feeds in feeds_of_reading]
    outputs = run_stepwise(draft.graph, passes, done=done, correct=draft.correct)
    if not all(output.finite for output in outputs):
        raise CheckpointError(
            "the draft computes NaN or Inf on the base's hidden states, with finite weights",
            "Its scales are damaged, or it was made for a base of other hidden states.",
        )
    answers = iter(outputs)
    wanted = truth.best[draft.positions()]
    firsts = [np.concatenate([next(answers).best for _ in feeds]) for feeds in asked]
    said = [draft.ids[first] for first in firsts]
    right = [tokens_said == wanted for tokens_said in said]
    shares = [
        compared(reading, found, right[0]) for reading, found in zip(readings, right, strict=True)
    ]
    chances = [chance_level(tokens_said, wanted, base.shape.vocab_size) for tokens_said in said]
    agreed = [int(found.sum()) for found in right]
    by_chance = not any(
        is_beyond_chance(count, chance, len(wanted))
        for count, chance in zip(agreed, chances, strict=True)
    )
    unrelated = by_chance and is_below_usable(max(agreed), len(wanted))
    return Probed(len(wanted), tuple(shares), chances[0], unrelated)


def refuse_not_finite(checkpoint: Checkpoint, progress: Progress) -> None:
    """CheckpointError that names the tensors with NaN or Inf."""
    bad = []
    progress.start("weights", len(checkpoint.tensors))
    for name, info in checkpoint.tensors.items():
        if not is_finite(checkpoint.read(name).reshape(-1).view(np.uint8).data, info.dtype):
            bad.append(name)
        progress.advance(1)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path} has weights with NaN or Inf: {bad[0]}{more}",
            "Download it again, or ask its authors.",
        )


# Chance


def chance_level(said: Ids, wanted: Ids, vocab_size: int) -> float:
    """The share of positions at which tokens [n] agree that know nothing of each other.

    That of the draft's tokens dealt out to other positions: the sum over tokens of both shares, so
    that a draft which always says a frequent token has no credit for it; at least one token of the
    vocabulary.
    """
    tokens = np.union1d(said, wanted)
    drafted, true = (
        np.bincount(np.searchsorted(tokens, ids), minlength=len(tokens)) for ids in (said, wanted)
    )
    return max(float(drafted @ true) / len(wanted) ** 2, 1 / vocab_size)


def is_beyond_chance(agreed: int, chance: float, positions: int) -> bool:
    """Whether so many agreements come by chance in less than ALPHA of all cases. Agreements by
    chance are rare and nearly independent: their number is a Poisson variable."""
    rate = chance * positions
    fewer = sum(math.exp(k * math.log(rate) - rate - math.lgamma(k + 1)) for k in range(agreed))
    return 1 - fewer < ALPHA


def is_below_usable(agreed: int, positions: int) -> bool:
    """Whether a draft that agrees at MIN_SHARE of all positions has so few agreements in less than
    ALPHA of all cases: on a short text nothing can be said."""
    p, n = MIN_SHARE, positions
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(agreed + 1)) < ALPHA


def compared(reading: Reading, right: NDArray[np.bool_], stated: NDArray[np.bool_]) -> Share:
    """A reading's share, and what it gains and loses against the stated one; each [positions]."""
    gained, lost = int((right & ~stated).sum()), int((stated & ~right).sum())
    return Share(reading.name, reading.aux_layers, float(right.mean()), gained, lost)


def is_clearly_better(other: Share, stated: Share) -> bool:
    """Beyond chance at the positions where the two readings differ, and by enough to matter."""
    beyond_chance = other.gained - other.lost > SIGMAS * math.sqrt(other.gained + other.lost)
    return beyond_chance and other.share - stated.share > MIN_GAIN


def hidden_states(reading: Reading, truth: PassOutput) -> Array:
    """[T, k*H], what the base says of each position as the reading has it."""
    if reading.aux_layers:
        return np.concatenate([truth.streams[layer] for layer in reading.aux_layers], -1)
    assert truth.state is not None
    return truth.state


def probe_result(probed: Probed, pair: Pair) -> CheckResult:
    """What was found, and whether another reading is clearly better."""
    stated, *others = probed.shares
    best = max(others, key=lambda share: share.share, default=stated)
    what = (
        f"the draft's first token is the base's next one at {stated.share:.0%} of"
        f" {probed.positions} positions"
    )
    what += "".join(f"; {other.name} {other.share:.0%}" for other in others)
    if is_clearly_better(best, stated):
        what = f"{what}: it was trained on what it reads {best.name}"
        return CheckResult("warning", "probe", what, PAIRINGS[pair.method].remedy(best))
    remedy = (
        "Make sure that it was trained for this very base; a text of the kind it knows is"
        " --probe-text FILE."
    )
    what += f" ({probed.chance:.1%} by chance)"
    if probed.unrelated:
        return CheckResult("refused", "probe", f"{what}: {UNRELATED}", remedy)
    if stated.share < MIN_SHARE:
        return CheckResult("warning", "probe", f"{what}: the draft hardly knows this base", remedy)
    return CheckResult("ok", "probe", what)


# The text


def read_text(source: Path | None) -> str:
    """The text of a file, as much of it as may be needed, or the shipped one. Raises
    RequestError."""
    path = source or SHIPPED
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8.", "Convert it: iconv -f latin1 -t utf-8."
        ) from error
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror}", "Give a text file to --probe-text."
        ) from error


def tokens_of(base: Checkpoint, text: str) -> NDArray[np.int64]:
    """[T], the text's first tokens, by the base's tokenizer. Raises CheckpointError for a damaged
    tokenizer.json, RequestError for too few tokens."""
    from edgespec.prompts.tokenizer_file import check_growth, normalizer_growth, read_tokenizer

    refuse_growth(base)
    with TemporaryDirectory() as name:
        copy_tokenizer(base, Path(name))
        with panics_as(lambda why: damaged_tokenizer(base, why)):
            try:
                tokenizer = read_tokenizer(Path(name) / "tokenizer.json")
                check_growth(tokenizer, text, normalizer_growth(tokenizer))
                encoded = tokenizer.encode(text)
            except Exception as error:  # what the library raises for any damage
                raise damaged_tokenizer(base, str(error)) from error
    ids = np.array(encoded.ids[:MAX_TOKENS], np.int64)
    if len(ids) < MIN_TOKENS:
        what = f"the probe's text has {len(ids)} tokens; at least {MIN_TOKENS} are needed"
        raise RequestError(
            what, "Give a file with some paragraphs to --probe-text, or leave it out."
        )
    return ids


def damaged_tokenizer(base: Checkpoint, why: str) -> CheckpointError:
    """The error for a tokenizer.json that cannot be used."""
    what = f"tokenizer.json of {base.path} cannot be used: {why}"
    return CheckpointError(what, "Download it again.")
