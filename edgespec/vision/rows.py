"""What an encoder makes of one image: a row for each of its slots in a prompt.

Knows arrays. Knows neither pixels nor how prompts place images.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class ImageRows:
    """One image as the language model reads it, T rows in row-major order of the merged patches.

    `deepstack` are the k rows of H, side by side, that join the stream behind the first k layers;
    None where the model has none. `grid` counts patches (time, height, width), before they are
    merged. `key` is the same for the same pixels under the same encoder, and for no others.
    """

    embeds: Floats  # [T, H]
    deepstack: Floats | None  # [T, k*H]
    grid: tuple[int, int, int]
    key: str

    def __len__(self) -> int:
        return len(self.embeds)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.embeds.nbytes + (0 if self.deepstack is None else self.deepstack.nbytes)

    def part(self, start: int, end: int) -> ImageRows:
        """Rows `start` to `end`, as views; grid and key stay those of the whole image."""
        deepstack = None if self.deepstack is None else self.deepstack[start:end]
        return replace(self, embeds=self.embeds[start:end], deepstack=deepstack)
