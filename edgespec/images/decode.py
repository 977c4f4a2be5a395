"""Bytes of an image to upright RGB pixels, by Pillow.

What comes from strangers is limited before anything is decoded: bytes, formats, pixels, frames.
Knows nothing of where the bytes come from, nor of models.
"""

from __future__ import annotations

import io
import logging
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from edgespec.errors import MissingDependency, RequestError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

logger = logging.getLogger(__name__)

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # Pillow's names
DAMAGED = "Copy it again, or save it anew as PNG or JPEG."
MAX_IMAGE_BYTES = 32 * 2**20
MAX_PIXELS = 50_000_000  # 150 MB as RGB; cameras of telephones make up to that

ORIENTATION = 0x0112  # of EXIF
# How an image was turned -> the method of Pillow's Transpose that turns it upright
UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
SUFFIXES = {
    "PNG": ("png", "apng"),
    "JPEG": ("jpg", "jpeg", "jpe", "jfif", "pjpeg"),
    "WEBP": ("webp",),
    "BMP": ("bmp", "dib", "x-ms-bmp", "x-bmp"),
    "GIF": ("gif",),
}
KNOWN_SUFFIXES = frozenset(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)

# What Pillow and its decoders raise for damaged files
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)

_pillow = threading.Lock()  # filters of warnings are the whole process's


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """A format of FORMATS, and the size in pixels that the file declares."""

    format: str
    width: int
    height: int


def check_size(data: bytes, shown: str) -> ImageHeader:
    """The header of an image within all limits; `shown` is its name in messages.

    Raises RequestError for what is too large, damaged or of another format, MissingDependency
    without Pillow.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large(shown)
    with _opened(data, shown) as image:
        return ImageHeader(_format(image), *image.size)


def too_large(shown: str) -> RequestError:
    """The error for an image of more than MAX_IMAGE_BYTES."""
    return RequestError(
        f"image {shown} has more than {MAX_IMAGE_BYTES} bytes.", "Save it smaller, or as JPEG."
    )


def decode(data: bytes, header: ImageHeader, shown: str, claimed: str = "") -> Image:
    """The image in RGB as it is looked at: turned by its EXIF orientation, transparency dropped,
    other colours converted, all as transformers does before its image processors.

    `claimed` is the format that its name claims, such as jpg. Raises RequestError for an image that
    is damaged, animated or beyond a limit, MissingDependency without Pillow.
    """
    pillow = import_pillow()
    with _opened(data, shown) as image:
        _check_frames(image, shown)
        image.load()
        if image.mode.startswith("I;16") or image.mode == "I":
            logger.warning(
                "image %s has grey levels of 16 bits: those above 255 become white, as in"
                " transformers; save it with 8 bits",
                shown,
            )
        upright = _upright(image, pillow)
        rgb: Image = upright.convert("RGB") if upright.mode != "RGB" else upright
    if claimed.lower() in KNOWN_SUFFIXES - set(SUFFIXES[header.format]):
        logger.warning("image %s is a %s: read as that", shown, header.format)
    return rgb


def import_pillow() -> ModuleType:
    """Pillow's module of images. Raises MissingDependency."""
    try:
        import PIL.Image
    except ImportError as error:
        message = "images are read by Pillow, which is not installed."
        raise MissingDependency(message, "Run: pip install 'edgespec[images]'.") from error
    return PIL.Image


@contextmanager
def _opened(data: bytes, shown: str) -> Iterator[ImageFile]:
    """An image of FORMATS of which nothing but the header is read. Raises RequestError for what is
    none, for one of too many pixels and, also while it is used, for damage."""
    pillow = import_pillow()
    if not data:
        raise RequestError(f"image {shown} is empty.", DAMAGED)
    with _pillow, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with pillow.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise _too_many_pixels(f"{width} x {height}", shown)
                yield image
        except pillow.UnidentifiedImageError as error:
            raise RequestError(
                f"image {shown} is no PNG, JPEG, WebP, BMP or GIF, or is damaged.",
                "Save it as PNG or JPEG; of a video, send some frames as images.",
            ) from error
        except pillow.DecompressionBombError as error:
            raise _too_many_pixels(f"more than {MAX_PIXELS}", shown) from error
        except FAULTS as error:
            raise RequestError(
                f"image {shown} cannot be decoded: it is damaged or cut off.", DAMAGED
            ) from error


def _format(image: ImageFile) -> str:
    """A JPEG that may have several images is one."""
    return "JPEG" if image.format == "MPO" else str(image.format)


def _too_many_pixels(size: str, shown: str) -> RequestError:
    return RequestError(
        f"image {shown} has {size} pixels, and {MAX_PIXELS} is the limit.", "Make it smaller."
    )


def _check_frames(image: ImageFile, shown: str) -> None:
    """Asks whether there is a second frame, not how many there are: counting them takes time."""
    if getattr(image, "is_animated", False):
        raise RequestError(
            f"image {shown} is animated: the {image.format} has several frames.",
            "Save the frame that is meant as PNG or JPEG; of a video, send some frames as images.",
        )


def _upright(image: Image, pillow: ModuleType) -> Image:
    method = UPRIGHT.get(image.getexif().get(ORIENTATION, 1))
    return image if method is None else image.transpose(pillow.Transpose[method])
