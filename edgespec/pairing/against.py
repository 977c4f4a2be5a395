"""What other weights of a base, a quantization of them, cost a draft in acceptance: both read one
text, and the draft is asked on each.

Knows two pairs, and where each agrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.vocabulary import differences, read_tokens
from edgespec.config import ModelConfig
from edgespec.errors import EdgeSpecError, counted
from edgespec.pairing.check_result import CheckResult, Compared
from edgespec.pairing.pair import Pair
from edgespec.pairing.table import PAIRINGS

TOPIC = "against"
CONFIDENCE, QUANTILE = 0.95, 1.96
WORTH_TELLING = 0.03  # of all positions
_SAME_MODEL = "Give another quantization of BASE to `against`, or the model that it was made from."


@dataclass(frozen=True, slots=True)
class Other:
    """The pair with the other weights, and how the user calls them."""

    name: str
    pair: Pair


def refusals(pair: Pair, other: Other) -> Iterator[CheckResult]:
    """Why the other weights are not of the same model, or do not fit the draft; nothing where they
    are and do."""
    first, second = described(pair.model), described(other.pair.model)
    if first != second:
        message = f"{other.name} is {second}, and BASE {first}"
        yield CheckResult("refused", TOPIC, message, _SAME_MODEL)
        return
    tokens, theirs = read_tokens(pair.base), read_tokens(other.pair.base)
    unlike = differences(tokens, theirs).others if tokens and theirs else ()
    if tokens and theirs and unlike:
        at = unlike[0]
        message = (
            f"{counted(len(unlike), 'id')} of {other.name} mean other tokens, the first of them"
            f" {at}: {theirs.strings[at]!r}, and {tokens.strings[at]!r} in BASE"
        )
        yield CheckResult("refused", TOPIC, message, _SAME_MODEL)
        return
    for _, look in PAIRINGS[other.pair.method].checks:
        try:
            found = [result for result in look(other.pair) if result.level == "refused"]
        except EdgeSpecError as error:
            found = [CheckResult("refused", TOPIC, error.what, error.remedy)]
        for result in found:
            yield CheckResult("refused", TOPIC, f"{other.name}: {result.what}", result.remedy)


def described(model: ModelConfig) -> str:
    """What two quantizations of one model have in common."""
    decoder = model.decoder
    layers = counted(decoder.num_layers, "layer")
    return (
        f"{model.architecture} with {layers}, hidden {decoder.hidden_size},"
        f" {model.vocab_size} tokens"
    )


def compared(name: str, right: NDArray[np.bool_], stated: NDArray[np.bool_]) -> Compared:
    """How often a draft agrees with other weights [positions], beside the base's own.

    Positions are pairs, of which only those count that changed; the interval is Wald's for paired
    shares with half a position more in each of the four cells (Agresti and Min, 2005).
    """
    gained, lost = int((right & ~stated).sum()), int((stated & ~right).sum())
    total, more, fewer = len(right) + 2, gained + 0.5, lost + 0.5
    variance: Any = (more + fewer) / total**2 - ((more - fewer) / total) ** 2 / total
    difference = (gained - lost) / len(right)
    margin = QUANTILE * math.sqrt(variance)
    return Compared(name, float(right.mean()), difference, margin, CONFIDENCE, gained, lost)


def compared_result(found: Compared, positions: int) -> CheckResult:
    """The line of it: a loss beyond chance is a warning where it is large."""
    beyond = abs(found.difference) > found.margin
    more = "more" if found.difference > 0 else "less"
    message = (
        f"the same draft on {found.name}: {found.share:.1%} of the {positions} positions,"
        f" {abs(found.difference) * 100:.1f} points {more} (+- {found.margin * 100:.1f} at"
        f" {found.confidence:.0%}"
    )
    message += ")" if beyond else "): no difference that this text could show"
    if beyond and -found.difference > WORTH_TELLING:
        remedy = "Take a quantization of more bits, or a draft that was trained for this one."
        return CheckResult("warning", TOPIC, message, remedy)
    return CheckResult("ok", TOPIC, message)
