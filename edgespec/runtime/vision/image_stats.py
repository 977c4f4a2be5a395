"""What was done with the images of prompts, as figures.

Knows counts and seconds.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class ImageStats:
    """What was done so far: images of prompts and their tokens, with the seconds of reading,
    decoding and resizing them; of those, the ones that were encoded, which others are again."""

    images: int = 0
    tokens: int = 0
    read_s: float = 0.0
    encoded: int = 0
    encoded_tokens: int = 0
    encode_s: float = 0.0

    def __add__(self, other: ImageStats) -> ImageStats:
        return ImageStats(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: ImageStats) -> ImageStats:
        return ImageStats(*map(operator.sub, astuple(self), astuple(other)))
