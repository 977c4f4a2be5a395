"""A prompt as the loop takes it: tokens, and the rows of images that stand for some of them.

Knows slots, positions and keys. Knows no pixels, no text and no engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from edgespec.config.ropes import AXES
from edgespec.vision.positions import Ids, prompt_positions
from edgespec.vision.rows import ImageRows


@dataclass(frozen=True, slots=True)
class ImageSlots:
    """An image in a prompt: its rows replace the embeddings of as many slots from `start` on."""

    start: int
    rows: ImageRows

    @property
    def end(self) -> int:
        """The slot behind the last."""
        return self.start + len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class PromptValue(Sequence[int]):
    """The token ids of a prompt, and what is more to it where it has images.

    Slots of an image hold the image token's id, one a row. `positions` are those of the rotary
    embedding; None: slot s has position s on all axes. `cache_key` has for each slot what must be
    equal for the KV rows up to it to be the same: the token, or below 0 a number of the image's
    content and the row.
    """

    tokens: tuple[int, ...]
    images: tuple[ImageSlots, ...] = ()
    positions: NDArray[np.int64] | None = None  # [S, 3]
    cache_key: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int] | Ids) -> PromptValue:
        """A text prompt of these ids; a prompt is returned as it is."""
        if isinstance(tokens, PromptValue):
            return tokens
        ids = tuple(tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
        return cls(ids, cache_key=ids)

    @classmethod
    def with_images(
        cls, tokens: Sequence[int], images: Sequence[ImageSlots], merge_size: int
    ) -> PromptValue:
        """A prompt whose slots of `images`, in ascending order, hold the image token already."""
        ids = tuple(tokens)
        if not images:
            return cls.of(ids)
        grids = [(image.start, image.rows.grid) for image in images]
        positions = prompt_positions(len(ids), grids, merge_size)
        key = list(ids)
        for image in images:
            key[image.start : image.end] = row_keys(image.rows.key, len(image.rows))
        return cls(ids, tuple(images), positions, tuple(key))

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.tokens[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def positions_of(self, start: int, end: int) -> Ids | None:
        """[end - start, 3], the positions of slots `start` to `end`; None where they are the
        slots."""
        return None if self.positions is None else self.positions[start:end]

    def images_of(self, start: int, end: int) -> tuple[ImageSlots, ...]:
        """The images in slots `start` to `end`, counted from `start`; what reaches beyond them is
        left out."""
        return cut(self.images, start, end)

    def then(self, tokens: Sequence[int]) -> PromptValue:
        """This prompt and text behind it."""
        following, positions = tuple(tokens), self.positions
        if positions is not None:
            places = np.arange(len(self), len(self) + len(following)) + self.position_offset
            positions = np.concatenate([positions, on_all_axes(places)])
        key = (*self.cache_key, *following)
        return PromptValue((*self.tokens, *following), self.images, positions, key)

    @property
    def position_offset(self) -> int:
        """What follows slot s behind the prompt has position s + this on all axes."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self)


def on_all_axes(positions: Ids) -> Ids:
    """[S, 3] of [S]: the same on each axis. What has three axes stays as it is."""
    if positions.ndim > 1:
        return positions
    return np.broadcast_to(positions[:, None], (len(positions), AXES))


def cut(images: Sequence[ImageSlots], start: int, end: int) -> tuple[ImageSlots, ...]:
    """What of some images is in slots `start` to `end`, counted from `start`."""
    slots = []
    for image in images:
        first, last = max(start, image.start), min(end, image.end)
        if first < last:
            rows = image.rows.part(first - image.start, last - image.start)
            slots.append(ImageSlots(first - start, rows))
    return tuple(slots)


def row_keys(key: str, num_rows: int) -> list[int]:
    """A number below 0 for each row of an image: 63 bits of a hash of its content, drawn row by
    row, so that two images that begin alike for one row do not for the next."""
    digest = hashlib.shake_256(key.encode()).digest(8 * num_rows)
    numbers = np.frombuffer(digest, np.int64) | np.int64(-(2**63))
    return [int(number) for number in numbers]
