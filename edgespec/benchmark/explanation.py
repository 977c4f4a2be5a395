"""What was predicted of each way of drafting beside what was measured, in plain sentences.

Knows the rows of a report. What the kept costs mean by themselves is said by `runtime.cost_words`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgespec.benchmark.compare import words
from edgespec.benchmark.rows import Row

CLOSE = 0.1  # a prediction within so much of what was measured is said to hold


def of_rows(rows: Sequence[Row]) -> Iterator[str]:
    """A sentence for each row that has a prediction."""
    for row in rows:
        predicted, over = row.predicted, row.over_plain
        if predicted is None or over is None:
            continue
        apart = over.median / predicted - 1
        more = "more" if apart > 0 else "less"
        told = "as predicted" if abs(apart) <= CLOSE else f"{100 * abs(apart):.0f} % {more}"
        yield f"{words(row)}: {over.median:.2f} x plain, predicted {predicted:.2f} ({told})."
