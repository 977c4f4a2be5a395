"""What the first bytes of an image say: its format and its size in pixels.

So both are known, and limited, before a decoder sees the file. Knows bytes alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from edgespec.errors import RequestError
from edgespec.images.parts import DAMAGED, MAX_SEGMENTS, jpeg_segments

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")  # Pillow's names
TAKEN = "Save it as PNG or JPEG."

PNG_MARK = b"\x89PNG\r\n\x1a\n"
# Formats with decoders of their own, which are not wanted here -> their first bytes
REFUSED: dict[str, tuple[bytes, ...]] = {
    "a TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "a PDF": (b"%PDF",),
    "a Photoshop file": (b"8BPS",),
    "an icon": (b"\0\0\1\0", b"\0\0\2\0"),
    "a JPEG 2000": (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
    "a JPEG XL": (b"\0\0\0\x0cJXL ", b"\xff\x0a"),
    "a Matroska video": (b"\x1aE\xdf\xa3",),
}
REFUSED_TEXTS: dict[str, tuple[bytes, ...]] = {  # in small letters
    "an SVG": (b"<svg", b"<?xml", b"<!doctype svg"),
    "an HTML page": (b"<!doctype html", b"<html"),
}
STILL_BRANDS = {b"avif": "an AVIF", b"heic": "a HEIC", b"heix": "a HEIC", b"mif1": "a HEIC"}

FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # of a JPEG: markers before its size


@dataclass(frozen=True, slots=True)
class Header:
    """A format of FORMATS, and the size in pixels that the file declares."""

    format: str
    width: int
    height: int


def read_header(data: bytes, shown: str) -> Header:
    """The header of an image; `shown` is its name in messages.

    Raises RequestError for other formats, by their names, and for a file that is too short.
    """
    if not data:
        raise RequestError(f"image {shown} is empty.", DAMAGED)
    found = _format_of(data)
    if found not in SIZES:
        what = "is no image of a known format" if found is None else f"is {found}"
        raise RequestError(
            f"image {shown} {what}; PNG, JPEG, WebP, BMP and GIF are read.",
            TAKEN if found != "a video" else "Send some frames of it as images.",
        )
    try:
        width, height = SIZES[found](data)
    except (struct.error, IndexError):
        width = height = 0
    if width < 1 or height < 1:
        raise RequestError(
            f"image {shown} is a {found} whose header is damaged or cut off.", DAMAGED
        )
    return Header(found, width, height)


def _format_of(data: bytes) -> str | None:
    """A format of FORMATS, what else it is, or None."""
    if data.startswith(PNG_MARK):
        return "PNG"
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "GIF"
    if data.startswith(b"RIFF"):
        return "WEBP" if data[8:12] == b"WEBP" else "a video"
    if data[4:8] == b"ftyp":
        return STILL_BRANDS.get(data[8:12], "a video")
    if data.startswith(b"BM"):
        return "BMP"
    text = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    refused = (*((name, data, marks) for name, marks in REFUSED.items()),)
    texts = (*((name, text, marks) for name, marks in REFUSED_TEXTS.items()),)
    return next((name for name, told, marks in refused + texts if told.startswith(marks)), None)


def _png_size(data: bytes) -> tuple[int, int]:
    return struct.unpack_from(">II", data, 16) if data[12:16] == b"IHDR" else (0, 0)


def _gif_size(data: bytes) -> tuple[int, int]:
    return struct.unpack_from("<HH", data, 6)


def _bmp_size(data: bytes) -> tuple[int, int]:
    (length,) = struct.unpack_from("<I", data, 14)
    if length == 12:  # of OS/2
        return struct.unpack_from("<HH", data, 18)
    width, height = struct.unpack_from("<ii", data, 18)
    return width, abs(height)  # negative: the rows stand from the top down


def _webp_size(data: bytes) -> tuple[int, int]:
    chunk = data[12:16]
    if chunk == b"VP8X":
        width, high, height, top = struct.unpack_from("<HBHB", data, 24)
        return (high << 16 | width) + 1, (top << 16 | height) + 1
    if chunk == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _jpeg_size(data: bytes) -> tuple[int, int]:
    """Of the first frame."""
    for marker, at, _ in islice(jpeg_segments(data), MAX_SEGMENTS):
        if marker in FRAMES:
            height, width = struct.unpack_from(">HH", data, at + 3)
            return width, height
    return 0, 0


SIZES: dict[str, Callable[[bytes], tuple[int, int]]] = {
    "PNG": _png_size,
    "JPEG": _jpeg_size,
    "WEBP": _webp_size,
    "BMP": _bmp_size,
    "GIF": _gif_size,
}
assert set(SIZES) == set(FORMATS)
