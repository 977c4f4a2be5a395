"""Bytes of an image to upright RGB pixels, by Pillow.

What comes from strangers is limited before anything is decoded: bytes, pixels, frames, scans.
Knows nothing of where the bytes come from, nor of models.
"""

from __future__ import annotations

import io
import logging
import struct
import threading
import warnings
import zlib
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from edgespec.errors import MissingDependency, RequestError
from edgespec.images.header import Header, read_header
from edgespec.images.parts import DAMAGED, check_parts

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

logger = logging.getLogger(__name__)

MAX_IMAGE_BYTES = 32 * 2**20
MAX_PIXELS = 50_000_000  # 150 MB as RGB; cameras of telephones make up to that

# Of Pillow: the plugin of a format, and the library that it may have been built without
PLUGINS = {
    "PNG": ("PngImagePlugin", "zlib"),
    "JPEG": ("JpegImagePlugin", "jpg"),
    "WEBP": ("WebPImagePlugin", "webp"),
    "BMP": ("BmpImagePlugin", ""),
    "GIF": ("GifImagePlugin", ""),
}

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


def check_size(data: bytes, shown: str) -> Header:
    """The header of an image within all limits; `shown` is its name in messages.

    Raises RequestError for what is too large, and as `read_header`.
    """
    if len(data) > MAX_IMAGE_BYTES:
        raise too_large(shown)
    header = read_header(data, shown)
    _check_pixels(header.width, header.height, shown)
    return header


def too_large(shown: str) -> RequestError:
    """The error for an image of more than MAX_IMAGE_BYTES."""
    return RequestError(
        f"image {shown} has more than {MAX_IMAGE_BYTES} bytes.", "Save it smaller, or as JPEG."
    )


def decode(data: bytes, header: Header, shown: str, claimed: str = "") -> Image:
    """The image in RGB as it is looked at: turned by its EXIF orientation, transparency dropped,
    other colours converted, all as transformers does before its image processors.

    `claimed` is the format that its name claims, such as jpg. Raises RequestError for an image that
    is damaged, animated or beyond a limit, MissingDependency without Pillow.
    """
    pillow = import_pillow()
    _check_plugin(header.format)
    check_parts(data, header.format, shown)
    with _pillow, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with pillow.open(io.BytesIO(data), formats=(header.format,)) as image:
                width, height = image.size
                _check_pixels(width, height, shown)
                _check_frames(image, shown)
                image.load()
                if image.mode.startswith("I;16") or image.mode == "I":
                    logger.warning(
                        "image %s has grey levels of 16 bits: those above 255 become white, as in"
                        " transformers; save it with 8 bits",
                        shown,
                    )
                upright = _upright(image, pillow)
                found: Image = upright.convert("RGB") if upright.mode != "RGB" else upright
        except (*FAULTS, pillow.DecompressionBombError) as error:
            what = f"image {shown} cannot be decoded: the {header.format} is damaged or cut off."
            raise RequestError(what, DAMAGED) from error
    if claimed.lower() in KNOWN_SUFFIXES - set(SUFFIXES[header.format]):
        logger.warning("image %s is a %s: read as that", shown, header.format)
    return found


def import_pillow() -> ModuleType:
    """Pillow's module of images. Raises MissingDependency."""
    try:
        import PIL.Image
    except ImportError as error:
        what = "images are read by Pillow, which is not installed."
        raise MissingDependency(what, "Run: pip install 'edgespec[images]'.") from error
    return PIL.Image


def _check_plugin(format: str) -> None:
    """Imports the one plugin of Pillow that is needed. Raises MissingDependency where this Pillow
    was built without the format's library."""
    from PIL import features

    plugin, library = PLUGINS[format]
    import_module(f"PIL.{plugin}")
    if library and not features.check(library):
        what = f"this Pillow was built without the library of {format}."
        raise MissingDependency(what, "Run: pip install --force-reinstall pillow.")


def _check_pixels(width: int, height: int, shown: str) -> None:
    if width * height > MAX_PIXELS:
        raise RequestError(
            f"image {shown} has {width} x {height} pixels, and {MAX_PIXELS} is the limit.",
            "Make it smaller.",
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
