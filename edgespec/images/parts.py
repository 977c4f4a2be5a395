"""The segments of a JPEG and the chunks of a PNG, counted before a decoder walks through them.

A few bytes each cost a decoder much time. Knows bytes alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from edgespec.errors import RequestError

DAMAGED = "Copy it again, or save it anew as PNG or JPEG."

MAX_SCANS = 100  # of a JPEG: each costs a pass over all pixels, and ten are usual
MAX_SEGMENTS = 4096
MAX_GAP_BYTES = 4096  # before a segment: filling, or bytes of nothing
MAX_CHUNKS = 2**16  # of a PNG

# JPEG: markers of a scan, of the end, and those that stand alone
SCAN, END = 0xDA, 0xD9
BARE = frozenset((0x01, *range(0xD0, 0xDA)))
MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # inside a scan there are none of these


def check_parts(data: bytes, format: str, shown: str) -> None:
    """Raises RequestError for an image of more parts than an image has; `shown` is its name in
    messages."""
    if format == "JPEG" and (what := _too_much_of_jpeg(data)):
        raise RequestError(f"image {shown} is a JPEG of {what}.", DAMAGED)
    if format == "PNG" and _has_many_chunks(data):
        raise RequestError(f"image {shown} is a PNG of more than {MAX_CHUNKS} chunks.", DAMAGED)


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """The segments of a JPEG up to its end: the marker, where it begins behind that, and how many
    bytes of nothing stand before it. What stands behind the end, such as the video of a moving
    photograph, is none of the image."""
    at = 2
    while found := MARKER.search(data, at):
        marker, gap, at = data[found.end() - 1], found.start() - at, found.end()
        yield marker, at, gap
        if marker == END:
            return
        if marker not in BARE:
            at += max(int.from_bytes(data[at : at + 2], "big"), 2)


def _too_much_of_jpeg(data: bytes) -> str:
    """What a JPEG has too much of, or nothing."""
    num_scans = 0
    for index, (marker, _, gap) in enumerate(jpeg_segments(data)):
        if num_scans == 0 and gap > MAX_GAP_BYTES:  # behind a scan it is the scan itself
            return f"more than {MAX_GAP_BYTES} bytes of nothing"
        num_scans += marker == SCAN
        if num_scans > MAX_SCANS:
            return f"more than {MAX_SCANS} scans"
        if index >= MAX_SEGMENTS:
            return f"more than {MAX_SEGMENTS} segments"
    return ""


def _has_many_chunks(data: bytes) -> bool:
    at = 8
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(data):
            return False
        (length,) = struct.unpack_from(">I", data, at)
        at += 12 + length
    return True
