"""Image files made in code, for all tests of images."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image
from transformers.image_utils import load_image

from edgespec.errors import RequestError

T = TypeVar("T")


def attempted(call: Callable[[], T]) -> T | RequestError:
    """What a call gives, or the error that it is refused with."""
    try:
        return call()
    except RequestError as error:
        return error


def seen_by_transformers(path: Path) -> Image.Image:
    """An image file as transformers loads it for its processors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_image(str(path))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Coloured noise that is smooth enough for a JPEG, and differs in each place."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (max(height // 8, 1), max(width // 8, 1), 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    """The bytes of an image file."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    """A PNG of a picture."""
    return saved(picture(width, height, seed), "PNG")


def turned(orientation: int, format: str = "JPEG") -> bytes:
    """A picture with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(picture(64, 40), format, exif=exif)


def animated(format: str, num_frames: int = 3) -> bytes:
    """Several different frames."""
    first, *rest = (picture(32, 24, seed) for seed in range(num_frames))
    return saved(first, format, save_all=True, append_images=rest)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that declares a size, and has a row or less of it."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in parts)


def chunk(name: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
