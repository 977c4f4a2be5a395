"""An RGB image to the patches that an encoder takes, with the values of transformers' processor of
Qwen2-VL, bit for bit.

Knows pixels. Knows nothing of files, nor of tokens.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import RequestError
from edgespec.images.processor import ImageProcessor

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200  # of the longer side to the shorter one, as transformers has it
LEVELS = 256  # of a channel
PATCHES_AT_A_TIME = 256  # so that what is between stays in the processor's cache


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as an encoder takes it: a row for each patch, those of a token one after the other.

    `pixel_values` [P, 3 * temporal_patch_size * patch_size^2] float32, read-only; `grid` in
    patches: time, height, width. `key` is a hash of the pixels and of what they were made into:
    equal keys have equal rows. `source` is its name in messages.
    """

    pixel_values: NDArray[np.float32]
    grid: tuple[int, int, int]
    key: str
    source: str
    merge_size: int = 2

    @property
    def num_tokens(self) -> int:
        """How many tokens of a prompt it takes."""
        return len(self.pixel_values) // self.merge_size**2


def resized(width: int, height: int, processor: ImageProcessor, shown: str) -> tuple[int, int]:
    """Width and height in pixels that an image is resized to: multiples of the factor near its own
    shape, within the processor's limits of pixels.

    Raises RequestError for an image that is too long, or that takes more tokens than an engine.
    """
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise RequestError(
            f"image {shown} has {width} x {height} pixels: one side is more than {MAX_ASPECT} times"
            " the other.",
            "Cut it into parts.",
        )
    if processor.do_resize:
        size = _fitted(width, height, processor)
    elif width % processor.factor or height % processor.factor:
        raise RequestError(
            f"image {shown} has {width} x {height} pixels, and this model does not resize images.",
            f"Make both sides multiples of {processor.factor}.",
        )
    else:
        size = width, height
    num_tokens = math.prod(size) // processor.factor**2
    if processor.max_tokens is not None and num_tokens > processor.max_tokens:
        raise RequestError(
            f"image {shown} has {width} x {height} pixels and takes {num_tokens} tokens, and the"
            f" engine takes {processor.max_tokens} of an image.",
            "Make it smaller or less long, or build with more `max_image_tokens_per_image`.",
        )
    return size


def prepare(image: Image, processor: ImageProcessor, source: str) -> PreparedImage:
    """The patches of an image in RGB. Raises RequestError as `resized`."""
    width, height = resized(image.width, image.height, processor, source)
    if processor.do_resize:
        image = image.resize((width, height), resample=processor.resample)
    pixels = np.asarray(image)  # [height, width, 3] uint8
    patch, merge, times = processor.patch_size, processor.merge_size, processor.temporal_patch_size
    rows, columns = height // patch, width // patch
    # Rows and columns of tokens, of patches in a token, of pixels in a patch
    blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    tokens = blocks.transpose(6, 0, 3, 1, 4, 2, 5).reshape(3, rows * columns, patch * patch)
    values = np.empty((rows * columns, 3, times, patch * patch), np.float32)
    tables = _tables(processor)
    for start in range(0, len(values), PATCHES_AT_A_TIME):
        some = slice(start, start + PATCHES_AT_A_TIME)
        for channel in range(3):
            values[some, channel] = tables[channel].take(tokens[channel, some])[:, None]
    patches = values.reshape(rows * columns, processor.patch_width)
    patches.flags.writeable = False
    grid, key = (1, rows, columns), _key(pixels, tables, processor)
    return PreparedImage(patches, grid, key, source, merge)


def _fitted(width: int, height: int, processor: ImageProcessor) -> tuple[int, int]:
    """Both sides rounded to the factor; beyond the limits, scaled by the root of their ratio and
    then rounded towards the inside."""
    factor, area = processor.factor, width * height
    sides = tuple(round(side / factor) * factor for side in (width, height))
    if math.prod(sides) > processor.max_pixels:
        scale = math.sqrt(area / processor.max_pixels)
        sides = tuple(
            max(factor, math.floor(side / scale / factor) * factor) for side in (width, height)
        )
    elif math.prod(sides) < processor.min_pixels:
        scale = math.sqrt(processor.min_pixels / area)
        sides = tuple(math.ceil(side * scale / factor) * factor for side in (width, height))
    return sides[0], sides[1]


def _tables(processor: ImageProcessor) -> NDArray[np.float32]:
    """The value of each level in each channel [3, 256]: there are so few that none is computed
    twice. Each operation rounds as transformers' does: scaled in float64, the rest in float32."""
    levels = np.arange(LEVELS, dtype=np.float64)
    if processor.do_rescale:
        levels = levels * processor.rescale_factor
    tables = np.repeat(levels.astype(np.float32)[None], 3, axis=0)
    if processor.do_normalize:
        mean = np.array(processor.image_mean, np.float32)[:, None]
        tables = (tables - mean) / np.array(processor.image_std, np.float32)[:, None]
    return tables


def _key(pixels: NDArray[np.uint8], tables: NDArray[np.float32], processor: ImageProcessor) -> str:
    """All that the rows are made of: the resized pixels, their shape, and the steps after them."""
    sizes = (processor.patch_size, processor.temporal_patch_size, processor.merge_size)
    told = hashlib.sha256(repr((pixels.shape, sizes)).encode())
    told.update(tables.tobytes())
    told.update(pixels.tobytes())
    return told.hexdigest()
