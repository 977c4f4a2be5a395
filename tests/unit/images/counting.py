"""Images of prompts without an engine: an encoder that counts what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edgespec.config.values import ImageTokens
from edgespec.images import ImageProcessor, ImageReader, ImageRules, PreparedImage
from edgespec.runtime.vision.image_prompts import ImagePrompts
from edgespec.vision.grid import num_patches
from edgespec.vision.rows import ImageRows

IMAGE = 8
MARK = [1, IMAGE, 2]  # of a prompt with one image
TOKENS = 6  # of an image of 84 x 56 pixels
CONFIG: Any = SimpleNamespace(
    component=SimpleNamespace(
        tokens=ImageTokens(image=IMAGE, video=9, vision_start=10, vision_end=11),
        vision=SimpleNamespace(merge_size=2),
    ),
    limits=SimpleNamespace(max_image_tokens=20),
)


@dataclass
class Counting:
    """Stands for an encoder: rows of zeros. `meanwhile` is called while it encodes."""

    asked: list[str] = field(default_factory=list)
    meanwhile: Callable[[], object] = lambda: None
    closed: bool = False

    def encode(self, image: PreparedImage) -> ImageRows:
        assert not self.closed
        self.meanwhile()
        assert not self.closed
        self.asked.append(image.source)
        rows = np.zeros((num_patches(image.grid) // 4, 3), np.float32)
        return ImageRows(rows, {}, image.grid, image.key)

    def close(self) -> None:
        self.closed = True


def images_of(directory: Path, encoder: Any = None, **rules: Any) -> ImagePrompts:
    """Those of files in a directory."""
    reader = ImageReader(ImageRules(directory=directory, **rules), ImageProcessor())
    return ImagePrompts(directory, CONFIG, reader, encoder=encoder or Counting())
