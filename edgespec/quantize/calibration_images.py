"""The images that calibrate an image encoder: those of a folder, or a few that are drawn here.

Knows files and Pillow. Knows no encoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edgespec.errors import RequestError, counted
from edgespec.images import ImageProcessor, ImageReader, ImageRules, PreparedImage
from edgespec.images.decode import KNOWN_SUFFIXES, import_pillow
from edgespec.images.preprocess import prepare
from edgespec.prompts import ImageItem

if TYPE_CHECKING:
    from PIL.Image import Image

DRAWN = "drawn"  # the name of those that are drawn here
MAX_TOKENS = 512  # of an image: attention over all patches needs memory by their square
SIZES = (
    (448, 336),
    (301, 517),
    (224, 224),
    (640, 97),
    (83, 410),
    (395, 395),
    (512, 283),
    (130, 61),
)


@dataclass(frozen=True, slots=True)
class CalibrationImages:
    """The images of `directory` as `processor` prepares them, of at most about MAX_TOKENS each;
    without a directory, those that are drawn. Each is read when it is its turn."""

    directory: Path | None
    files: tuple[Path, ...]
    processor: ImageProcessor

    @classmethod
    def of(cls, directory: Path | None, processor: ImageProcessor) -> CalibrationImages:
        """Raises RequestError for what is no directory, and for one without images."""
        limited = replace(processor.limited(MAX_TOKENS), max_tokens=None)
        return cls(directory, () if directory is None else image_files(directory), limited)

    @property
    def name(self) -> str:
        """The name for manifests."""
        return DRAWN if self.directory is None else self.directory.resolve().name

    @property
    def title(self) -> str:
        """What they are, for the user."""
        if self.directory is None:
            return counted(len(self), "drawn image")
        return f"{counted(len(self), 'image')} from the folder {self.name}"

    def __len__(self) -> int:
        return len(SIZES) if self.directory is None else len(self.files)

    def __iter__(self) -> Iterator[PreparedImage]:
        """Raises RequestError for an image that cannot be read, is too large or damaged."""
        if self.directory is None:
            for number, size in enumerate(SIZES):
                yield prepare(drawn(number, *size), self.processor, f"drawn image {number + 1}")
        for path in self.files:
            rules = ImageRules(path.parent, roots=(path.resolve().parent,))  # a link is followed
            yield ImageReader(rules, self.processor).read(ImageItem(f"./{path.name}"))

    def digest(self) -> str:
        """The sha256 of all patches. Reads every image, and raises as iterating does."""
        digest = hashlib.sha256()
        for image in self:
            digest.update(image.key.encode())
        return digest.hexdigest()


def image_files(directory: Path) -> tuple[Path, ...]:
    """The image files of a directory by name; others, and directories in it, are not looked at."""
    remedy = f"Put images into it: {', '.join(sorted(KNOWN_SUFFIXES))}."
    try:
        entries = sorted(directory.iterdir())
    except OSError as error:
        raise RequestError(
            f"`image_dataset` {directory} is no directory that can be read: {error.strerror}.",
            "Give a directory of images, or omit the flag: a few are drawn.",
        ) from error
    files = [path for path in entries if path.suffix.removeprefix(".").lower() in KNOWN_SUFFIXES]
    if not files:
        raise RequestError(f"`image_dataset` {directory} has no image.", remedy)
    return tuple(files)


def drawn(number: int, width: int, height: int) -> Image:
    """Image `number`: noise in spots of some size, from one pixel to a third of the image; always
    the same."""
    import_pillow()
    from PIL import Image

    rng, parts = np.random.default_rng(number), 3 * 2 ** (number % 7)
    noise = rng.integers(0, 256, (min(parts, height), min(parts, width), 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)
