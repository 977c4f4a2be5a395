"""What is decoded has the pixels that transformers sees, and what is hostile is refused with no
word of the library's own."""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import GifImagePlugin, Image

from edgespec.errors import MissingDependency, RequestError
from edgespec.images import decode as decoding
from edgespec.images.decode import MAX_IMAGE_BYTES, check_size, decode
from tests.unit.images.samples import (
    animated,
    attempted,
    bomb,
    chunk,
    picture,
    png,
    saved,
    seen_by_transformers,
    turned,
)


def decoded(data: bytes, claimed: str = "") -> Image.Image:
    return decode(data, check_size(data, '"a.png"'), '"a.png"', claimed)


def refusal(data: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        decoded(data)
    assert caught.value.what.startswith('image "a.png" ')
    assert caught.value.remedy
    return caught.value


def grey_16() -> Image.Image:
    return Image.fromarray((np.arange(48 * 64).reshape(48, 64) * 21 % 700).astype(np.uint16))


def palette(transparency: object) -> bytes:
    image = picture(40, 30).quantize(16)
    return saved(image, "PNG", transparency=transparency)


FILES: dict[str, Any] = {
    "png": lambda: png(),
    "jpeg": lambda: saved(picture(40, 30), "JPEG"),
    "progressive jpeg": lambda: saved(picture(40, 30), "JPEG", progressive=True),
    "webp": lambda: saved(picture(40, 30), "WEBP"),
    "bmp": lambda: saved(picture(40, 30), "BMP"),
    "gif": lambda: saved(picture(40, 30), "GIF"),
    "one pixel": lambda: png(1, 1),
    "rgba": lambda: saved(picture(40, 30).convert("RGBA").rotate(30), "PNG"),
    "webp with alpha": lambda: saved(picture(40, 30).convert("RGBA").rotate(30), "WEBP"),
    "grey": lambda: saved(picture(40, 30).convert("L"), "PNG"),
    "grey jpeg": lambda: saved(picture(40, 30).convert("L"), "JPEG"),
    "grey with alpha": lambda: saved(picture(40, 30).convert("LA"), "PNG"),
    "black and white": lambda: saved(picture(40, 30).convert("1"), "PNG"),
    "palette": lambda: saved(picture(40, 30).quantize(16), "PNG"),
    "palette with one clear colour": lambda: palette(3),
    "palette with transparencies": lambda: palette(bytes(range(0, 160, 10))),
    "16 bits": lambda: saved(grey_16(), "PNG"),
    "cmyk": lambda: saved(picture(40, 30).convert("CMYK"), "JPEG"),
    "interlaced gif": lambda: saved(picture(40, 30), "GIF", interlace=1),
    "icc profile": lambda: saved(picture(40, 30), "PNG", icc_profile=b"no profile at all"),
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    data: bytes = FILES[name]()
    (tmp_path / "file").write_bytes(data)
    expected = seen_by_transformers(tmp_path / "file")
    found = decoded(data)
    assert (found.mode, found.size) == ("RGB", expected.size)
    assert np.array_equal(np.asarray(found), np.asarray(expected))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_a_turned_image_is_upright(orientation: int, format: str, tmp_path: Path) -> None:
    data = turned(orientation, format)
    (tmp_path / "file").write_bytes(data)
    expected = seen_by_transformers(tmp_path / "file")
    found = decoded(data)
    assert found.size == ((40, 64) if 5 <= orientation <= 8 else (64, 40))
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_turning_changes_pixels() -> None:
    """So that the test above sees a turn that is left out."""
    plain = np.asarray(decoded(turned(1, "PNG")))
    assert np.array_equal(np.asarray(decoded(turned(3, "PNG"))), plain[::-1, ::-1])


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "MPO"])
def test_several_frames_are_refused_by_name(format: str) -> None:
    error = refusal(animated(format))
    assert error.what == f'image "a.png" is animated: the {format} has several frames.'
    assert "Save the frame" in error.remedy


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG", "MPO"])
def test_one_frame_is_an_image(format: str) -> None:
    assert decoded(animated(format, num_frames=1)).size == (32, 24)


def test_frames_are_not_counted_which_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = property(lambda _: pytest.fail("counted"))
    monkeypatch.setattr(GifImagePlugin.GifImageFile, "n_frames", counted)
    assert "is animated" in refusal(animated("GIF")).what


@pytest.mark.parametrize(
    ("width", "height", "said"),
    [(50_000, 50_000, "more than 50000000"), (50_000, 1001, "50000 x 1001")],
)
def test_a_bomb_is_refused_by_its_declared_size(
    width: int, height: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    error = refusal(bomb(width, height))
    assert error.what == f'image "a.png" has {said} pixels, and 50000000 is the limit.'


@pytest.mark.parametrize(
    "data", [b"II*\0\x08\0\0\0", b"%PDF-1.7", b"<svg xmlns='x'/>", b"hello", bytes(100)]
)
def test_other_formats_are_refused(data: bytes) -> None:
    assert "is no PNG, JPEG, WebP, BMP or GIF" in refusal(data).what


def test_an_empty_file_is_refused() -> None:
    assert refusal(b"").what == 'image "a.png" is empty.'


def test_a_frame_larger_than_its_screen_is_refused() -> None:
    """The header declares one pixel, the frame in it 60000 x 60000."""
    data = bytearray(saved(Image.new("P", (1, 1)), "GIF"))
    at = bytes(data).index(b",\0\0\0\0\x01\0\x01\0")
    data[at + 5 : at + 9] = (60_000).to_bytes(2, "little") * 2
    refusal(bytes(data))


def test_too_many_bytes_are_refused_unseen() -> None:
    data = png() + bytes(MAX_IMAGE_BYTES)
    assert refusal(data).what == f'image "a.png" has more than {MAX_IMAGE_BYTES} bytes.'


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("kept", [0.5, 0.9])
def test_a_truncated_file_is_refused_without_the_librarys_words(format: str, kept: float) -> None:
    data = saved(picture(300, 200), format)
    error = refusal(data[: int(len(data) * kept)])
    what = 'image "a.png" cannot be decoded: it is damaged or cut off.'
    assert error.what == what
    assert "0x" not in str(error)


def test_truncation_is_refused_even_where_pillow_is_told_to_load_it() -> None:
    data = saved(picture(300, 200), "JPEG")
    assert "damaged" in refusal(data[:-2]).what


def test_errors_of_all_kinds_of_damage_are_plain() -> None:
    whole = png(100, 100)
    text_bomb = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27), 9))
    for data in (whole.replace(b"IDAT", b"IDAX"), whole[:33] + text_bomb + whole[33:]):
        assert "damaged" in refusal(data).what


def test_an_image_without_memory_for_it_is_not_called_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", full)
    with pytest.raises(MemoryError):
        decoded(png())


def test_a_wrong_extension_is_read_by_content_with_a_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = saved(picture(40, 30), "JPEG")
    with caplog.at_level(logging.WARNING):
        assert decoded(data, "png").size == (40, 30)
    assert caplog.messages == ['image "a.png" is a JPEG: read as that']
    caplog.clear()
    for claimed in ("jpg", "JPEG", "", "img", "tmp"):
        decoded(data, claimed)
    assert caplog.messages == []


def test_grey_levels_of_16_bits_are_clipped_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        decoded(saved(grey_16(), "PNG"))
    assert "grey levels of 16 bits" in caplog.text


def test_decoding_leaves_the_filters_of_warnings_alone() -> None:
    before = list(warnings.filters)
    palettes = [palette(bytes(range(0, 160, 10))) for _ in range(4)]
    threads = [threading.Thread(target=decoded, args=(data,)) for data in palettes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before


def test_without_pillow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingDependency, match="Pillow, which is not installed") as caught:
        decoding.import_pillow()
    assert "edgespec[images]" in caught.value.remedy


def test_no_other_format_of_pillow_is_reached() -> None:
    """The others are code that strangers' bytes should not reach."""
    tiff = saved(picture(40, 30), "TIFF")
    assert Image.open(io.BytesIO(tiff)).format == "TIFF"
    assert "is no PNG" in refusal(tiff).what


WHOLE = [
    png(),
    saved(picture(40, 30), "JPEG"),
    saved(picture(40, 30), "JPEG", progressive=True),
    saved(picture(40, 30), "WEBP"),
    saved(picture(40, 30), "GIF"),
    saved(picture(40, 30), "BMP"),
    saved(picture(40, 30).quantize(16), "PNG", transparency=bytes(16)),
    turned(6),
    turned(6, "PNG"),
    animated("GIF"),
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(WHOLE), st.data())
def test_a_damaged_file_is_an_image_or_a_plain_error(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 6))):
        damaged[draw.draw(st.integers(0, len(damaged) - 1))] = draw.draw(st.integers(0, 255))
    if draw.draw(st.booleans()):
        del damaged[draw.draw(st.integers(0, len(damaged) - 1)) :]
    header = attempted(lambda: check_size(bytes(damaged), "x"))
    if isinstance(header, RequestError) or header.width * header.height > 10**6:
        return  # refused, or within the limit, and slow
    found = attempted(lambda: decode(bytes(damaged), header, "x"))
    if isinstance(found, RequestError):
        assert found.what.startswith("image x ")
    else:
        assert found.mode == "RGB"


def test_pixels_of_a_decoded_image_outlive_its_file() -> None:
    data = io.BytesIO(png()).getvalue()
    found = decoded(data)
    del data
    assert np.asarray(found).shape == (30, 40, 3)
