"""What an encoder makes of one image: a row for each of its slots in a prompt.

Knows arrays. Knows neither pixels nor how prompts place images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def widths_text(widths: Mapping[str, int]) -> str:
    """Widths by input, as messages say them."""
    return ", ".join(f"{name} {width}" for name, width in widths.items()) or "nothing"


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """One image as the language model reads it, T rows in row-major order of the merged patches.

    `extras` is what the model reads of it beside the embeddings, by the names of its graph's inputs
    (`contract.INPUTS`). `grid` counts patches (time, height, width), before they are
    merged. `key` is the same for the same pixels under the same encoder, and for no others.
    """

    embeds: Floats  # [T, H]
    extras: Mapping[str, Floats]  # [T, width] each
    grid: tuple[int, int, int]
    key: str

    def __len__(self) -> int:
        return len(self.embeds)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.embeds.nbytes + sum(rows.nbytes for rows in self.extras.values())

    @property
    def widths(self) -> dict[str, int]:
        """Input -> width of the extras."""
        return {name: rows.shape[1] for name, rows in self.extras.items()}

    def part(self, start: int, end: int) -> ImageRows:
        """Rows `start` to `end`, as views; grid and key stay those of the whole image."""
        extras = {name: rows[start:end] for name, rows in self.extras.items()}
        return replace(self, embeds=self.embeds[start:end], extras=extras)
