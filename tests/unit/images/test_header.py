"""Format and size of an image are known from its first bytes, as Pillow would read them."""

from __future__ import annotations

import io
import struct
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from edgespec.errors import RequestError
from edgespec.images.header import Header, read_header
from tests.unit.images.pictures import animated, attempted, bomb, picture, png, saved, turned

FILES: list[tuple[str, dict[str, Any]]] = [
    ("PNG", {}),
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("JPEG", {"comment": b"\xff\xc0 in a comment", "dpi": (72, 72)}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {"quality": 70}),
    ("WEBP", {"quality": 70, "exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"}),
    ("BMP", {}),
    ("GIF", {}),
]


@pytest.mark.parametrize(("format", "options"), FILES)
@pytest.mark.parametrize("size", [(1, 1), (40, 30), (7, 301)])
def test_format_and_size_are_those_of_pillow(
    format: str, options: dict[str, Any], size: tuple[int, int]
) -> None:
    data = saved(picture(*size), format, **options)
    assert read_header(data, "x") == Header(format, *size)
    assert Image.open(io.BytesIO(data)).size == size


def test_older_and_upturned_bitmaps_have_their_sizes() -> None:
    of_os2 = b"BM" + bytes(12) + struct.pack("<IHHHH", 12, 40, 30, 1, 24)
    assert read_header(of_os2, "x") == Header("BMP", 40, 30)
    upturned = b"BM" + bytes(12) + struct.pack("<Iii", 40, 40, -30) + bytes(40)
    assert read_header(upturned, "x") == Header("BMP", 40, 30)


def test_a_size_is_what_a_file_declares_however_little_it_holds() -> None:
    data = bomb(50_000, 50_000)
    assert len(data) < 200
    assert read_header(data, "x") == Header("PNG", 50_000, 50_000)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"II*\0\x08\0\0\0", "is a TIFF"),
        (b"MM\0*\0\0\0\x08", "is a TIFF"),
        (b"\0\0\0\x18ftypavif\0\0\0\0", "is an AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "is a HEIC"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "is a video"),
        (b"RIFF\x24\0\0\0AVI LIST", "is a video"),
        (b"\x1aE\xdf\xa3\x01\0\0\0", "is a Matroska video"),
        (b"\0\0\1\0\1\0\x10\x10", "is an icon"),
        (b"\xff\x0a\xfa\x07", "is a JPEG XL"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "is a JPEG 2000"),
        (b"8BPS\0\1", "is a Photoshop file"),
        (b"%PDF-1.7", "is a PDF"),
        (b"<svg xmlns='x'/>", "is an SVG"),
        (b"\xef\xbb\xbf\n <?xml version='1.0'?><svg/>", "is an SVG"),
        (b"<!DOCTYPE html><html>", "is an HTML page"),
        (b"<HTML>", "is an HTML page"),
        (b"hello", "is no image of a known format"),
        (bytes(100), "is no image of a known format"),
    ],
)
def test_other_files_are_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_header(data, '"a.png"')
    assert caught.value.what.startswith(f'image "a.png" {said}; PNG, JPEG, WebP, BMP')
    assert caught.value.remedy


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(RequestError, match=r'image "a.png" is empty\.'):
        read_header(b"", '"a.png"')


WHOLE = [
    png(),
    saved(picture(40, 30), "JPEG"),
    saved(picture(40, 30), "WEBP"),
    saved(picture(40, 30), "GIF"),
    saved(picture(40, 30), "BMP"),
    turned(6),
    animated("WEBP"),
]


@pytest.mark.parametrize("data", WHOLE, ids=range(len(WHOLE)))
def test_a_header_that_is_cut_off_is_refused(data: bytes) -> None:
    whole = read_header(data, "x")
    for length in range(min(len(data), 400)):
        found = attempted(partial(read_header, data[:length], "x"))
        assert found == whole if isinstance(found, Header) else found.remedy


@settings(deadline=None)
@given(st.sampled_from(WHOLE), st.data())
def test_damaged_bytes_give_a_header_or_an_error(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data[: draw.draw(st.integers(0, len(data)))])
    for _ in range(draw.draw(st.integers(0, 8))):
        if damaged:
            place = draw.draw(st.integers(0, min(len(damaged) - 1, 200)))
            damaged[place] = draw.draw(st.integers(0, 255))
    found = attempted(lambda: read_header(bytes(damaged), "x"))
    assert min(found.width, found.height) > 0 if isinstance(found, Header) else found.remedy


@settings(deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_give_a_header_or_an_error(data: bytes) -> None:
    for start in (b"", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBPVP8X", b"GIF89a", b"BM"):
        found = attempted(partial(read_header, start + data, "x"))
        assert min(found.width, found.height) > 0 if isinstance(found, Header) else found.remedy
