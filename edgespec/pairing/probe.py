"""How often a draft says what its base says, on a little text, without engines.

Teacher-forced: at each position the draft reads the base's own hidden states and the token that
follows, and its first token is compared with the base's own next one. What engines would never
notice, since the output stays the same, shows here: the draft is also run on the hidden states of
other readings. What a draft is given stands in `forcing`, the text in `probe_text`, the
readings in `readings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.finite import refuse_not_finite
from edgespec.checkpoint.names import EMBEDDING
from edgespec.contract import image_widths
from edgespec.errors import CheckpointError, counted
from edgespec.export.stepwise import PassOutput, causal_feeds, run_stepwise
from edgespec.graphs.decoder import Decoder
from edgespec.pairing import against
from edgespec.pairing.check_result import CheckResult, Probed, Share
from edgespec.pairing.forcing import EmbeddingRows
from edgespec.pairing.pair import Pair
from edgespec.pairing.probe_text import ProbeText
from edgespec.pairing.readings import WITH_IMAGE_ROWS, Reading
from edgespec.pairing.table import PAIRINGS
from edgespec.progress import Progress

# By which another reading must be better to be reported: one layer often makes little difference
SIGMAS, MIN_GAIN = 3.0, 0.03
MIN_SHARE = 0.1  # a draft that agrees less often hardly knows its base
ALPHA = 0.01  # how often chance may mislead
MAX_LOSS = 0.15  # of its agreement: what images may cost a draft without a warning
UNRELATED = "the draft was not made for this base"
IMAGE_ROWS = "Pass `drafter_option` image_rows=true to infer, chat and run."
TRAIN_WITH_IMAGES = (
    "Answers are the same. It may have been trained on text alone, or with images at other"
    " positions: look for one that was trained with images."
)
Array = NDArray[Any]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Asked:
    """What a draft says first at each position [P] in each of the readings, beside the base's own
    next token there."""

    wanted: Ids
    said: list[Ids]

    @property
    def agreed(self) -> list[NDArray[np.bool_]]:
        """Where both agree, [P] in each reading."""
        return [drafted == self.wanted for drafted in self.said]


def probe(
    pair: Pair, text: ProbeText, progress: Progress, other: against.Other | None = None
) -> Probed:
    """The share of positions where the draft's first token is the base's next one, for each reading
    of the hidden states, and for the first one with the weights of another base.

    Raises CheckpointError for weights or logits that are NaN or Inf; nothing is left on disk.
    """
    row = PAIRINGS[pair.method]
    readings = row.readings(pair)
    if row.image_rows and text.image_width == pair.drafted()[1].decoder.hidden_size:
        readings = *readings, replace(readings[0], name=WITH_IMAGE_ROWS, image_rows=True)
    sources = [pair.base, pair.draft]
    sources += [other.pair.base] if other else []
    for checkpoint in filter(None, sources):
        progress.start("weights", sum(info.num_bytes for info in checkpoint.tensors.values()))
        refuse_not_finite(checkpoint, progress.advance)
    base = Decoder.open(pair.base, pair.model, emits_final=row.reads_final)
    asked = ask(pair, base, text, readings, progress)
    agreed = asked.agreed
    shares = [
        compared(reading, same, agreed[0]) for reading, same in zip(readings, agreed, strict=True)
    ]
    positions = len(asked.wanted)
    chances = [chance_level(said, asked.wanted, base.shape.vocab_size) for said in asked.said]
    counts = [int(same.sum()) for same in agreed]
    by_chance = not any(
        is_beyond_chance(count, chance, positions)
        for count, chance in zip(counts, chances, strict=True)
    )
    without = None
    if text.images:
        (alone,) = ask(pair, base, text.without_images(), readings[:1], progress).agreed
        without = float(alone.mean())
    against_other = None
    if other is not None:
        weights = Decoder.open(other.pair.base, other.pair.model, emits_final=row.reads_final)
        (right,) = ask(other.pair, weights, text, readings[:1], progress).agreed
        against_other = against.compared(other.name, right, agreed[0])
    return Probed(
        positions,
        tuple(shares),
        chances[0],
        images=len(text.images),
        without_images=without,
        unrelated=by_chance and is_below_usable(max(counts), positions),
        against=against_other,
    )


def ask(
    pair: Pair, base: Decoder, text: ProbeText, readings: Sequence[Reading], progress: Progress
) -> Asked:
    """Run base and draft over a text. Raises CheckpointError where one computes NaN or Inf."""
    draft = PAIRINGS[pair.method].force(pair, base, text)
    progress.start("probe", base.shape.num_layers + draft.graph.shape.num_layers + 4)

    def done() -> None:
        progress.advance(1)

    embeds = EmbeddingRows.read(base.table.source(EMBEDDING), text.tokens).of(text.tokens)
    feeds = causal_feeds(text.placed(embeds), pair.model.decoder, text.positions)
    feeds |= text.extras(image_widths(base.shape))
    aux_layers = {layer for reading in readings for layer in reading.aux_layers}
    (truth,) = run_stepwise(base, [feeds], aux_layers, done)
    if not truth.finite:
        raise CheckpointError(
            f"the base computes NaN or Inf on the text, with finite weights: {pair.base.place}",
            "Its scales are damaged, or its values overflow float32: download it again.",
        )
    asked = [draft.passes(hidden_states(reading, truth), reading) for reading in readings]
    passes = [feeds for feeds_of_reading in asked for feeds in feeds_of_reading]
    outputs = run_stepwise(draft.graph, passes, done=done, correct=draft.correct)
    if not all(output.finite for output in outputs):
        raise CheckpointError(
            "the draft computes NaN or Inf on the base's hidden states, with finite weights",
            "Its scales are damaged, or it was made for a base of other hidden states.",
        )
    answers, positions = iter(outputs), draft.positions()
    firsts = [np.concatenate([next(answers).best for _ in feeds]) for feeds in asked]
    # What a base says in the slots of an image is never asked for
    kept = text.is_text[positions]
    said = [draft.ids[first][kept] for first in firsts]
    return Asked(truth.best[positions][kept], said)


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
    behind = f" of text with {counted(probed.images, 'image')}" if probed.images else ""
    message = (
        f"the draft's first token is the base's next one at {stated.share:.0%} of"
        f" {probed.positions} positions{behind}"
    )
    message += "".join(f"; {other.name} {other.share:.0%}" for other in others)
    if probed.without_images is not None:
        message += f"; without images {probed.without_images:.0%}"
    if is_clearly_better(best, stated):
        message = f"{message}: it was trained on what it reads {best.name}"
        images = best.name == WITH_IMAGE_ROWS
        return CheckResult(
            "warning",
            "probe",
            message,
            IMAGE_ROWS if images else PAIRINGS[pair.method].remedy(best),
        )
    remedy = (
        "Make sure that it was trained for this very base; a text of the kind it knows is"
        " `probe_text` FILE."
    )
    message += f" ({probed.chance:.1%} by chance)"
    if probed.unrelated:
        return CheckResult("refused", "probe", f"{message}: {UNRELATED}", remedy)
    if stated.share < MIN_SHARE:
        return CheckResult(
            "warning", "probe", f"{message}: the draft hardly knows this base", remedy
        )
    if loses_by_images(probed):
        message += ": it agrees less often where there are images"
        return CheckResult("warning", "probe", message, TRAIN_WITH_IMAGES)
    return CheckResult("ok", "probe", message)


def loses_by_images(probed: Probed) -> bool:
    """Whether a draft agrees less often with images than without, beyond chance and by more than
    MAX_LOSS of it."""
    without, share, n = probed.without_images, probed.shares[0].share, probed.positions
    if without is None:
        return False
    deviation = math.sqrt((without * (1 - without) + share * (1 - share)) / n)
    return without - share > SIGMAS * deviation and share < (1 - MAX_LOSS) * without
