"""Acceptance by the names of NVIDIA's specdec_bench (Model-Optimizer, examples/specdec_bench), so
that its readers take ours. Knows numbers of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Place = tuple[int, int]  # of an answer: its request and its turn


def acceptance_rate(emitted: Mapping[Place, Sequence[int]]) -> dict[str, Any]:
    """The content of its acceptance_rate.json, of the tokens that each verify step emitted, by
    request and turn: lengths with the bonus, and their mean over turns. The rates are of steps that
    emit so many tokens at least, of all of them and of those that emit the next lower number that
    occurs."""
    requests: dict[str, dict[str, float]] = {}
    for (request, turn), steps in sorted(emitted.items()):
        requests.setdefault(str(request), {})[str(turn)] = sum(steps) / len(steps)
    lengths = [length for turns in requests.values() for length in turns.values()]
    counts = Counter(length for steps in emitted.values() for length in steps)
    total = left = sum(counts.values())
    conditional, joint, before = dict[str, float](), dict[str, float](), 1.0
    for length, count in sorted(counts.items()):
        joint[str(length)] = left / total
        conditional[str(length)] = joint[str(length)] / before
        before, left = joint[str(length)], left - count
    return {
        "Request_AL": requests,
        "Average_AL": sum(lengths) / max(1, len(lengths)),
        "Acceptance_Length_Histogram": {str(k): v for k, v in sorted(counts.items())},
        "Conditional_Acceptance_Rate": conditional,
        "Joint_Acceptance_Rate": joint,
    }
