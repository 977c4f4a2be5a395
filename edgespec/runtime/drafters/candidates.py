"""The most probable tokens of rows of logits: where a draft's tree may go on. Knows numbers
alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


def top_log_probs(logits: Floats, count: int) -> tuple[Ids, Floats]:
    """The `count` best ids of each row [R, V] with their log-probabilities, descending; ties to the
    lowest id."""
    peak = logits.max(1, keepdims=True)
    norm = peak[:, 0] + np.log(np.exp(logits - peak).sum(1, dtype=np.float64)).astype(np.float32)
    count = min(count, logits.shape[1])
    if count == 1:
        best = logits.argmax(1)[:, None]
        return best, logits[np.arange(len(logits))[:, None], best] - norm[:, None]
    edges = np.partition(logits, logits.shape[1] - count, axis=1)[:, -count]
    ids = np.empty((len(logits), count), np.int64)
    for row, edge in enumerate(edges):
        found = np.flatnonzero(logits[row] >= edge)
        ids[row] = found[np.argsort(-logits[row][found], kind="stable")[:count]]
    return ids, np.take_along_axis(logits, ids, 1) - norm[:, None]
