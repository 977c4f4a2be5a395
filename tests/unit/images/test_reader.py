"""From a name in a request to patches: each step is taken, and none before its check."""

from __future__ import annotations

import base64
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from edgespec.errors import RequestError
from edgespec.images import ImageProcessor, ImageReader, ImageRules, reader
from edgespec.prompts import ImageItem
from tests.unit.images.samples import bomb, picture, png, saved, seen_by_transformers, turned

PROCESSOR = ImageProcessor()


def reading(directory: Path, **rules: object) -> ImageReader:
    return ImageReader(ImageRules(directory=directory, **rules), PROCESSOR)  # type: ignore[arg-type]


def refusal(directory: Path, source: str) -> str:
    with pytest.raises(RequestError) as caught:
        reading(directory).read(ImageItem(source))
    assert caught.value.remedy
    return caught.value.what


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.png", png(100, 70)),
        ("a.jpg", saved(picture(100, 70), "JPEG")),
        ("turned.jpg", turned(6)),
        ("palette.png", saved(picture(100, 70).quantize(16), "PNG", transparency=bytes(16))),
        ("grey.png", saved(picture(33, 70).convert("L"), "PNG")),
        ("alpha.png", saved(picture(33, 70).convert("RGBA").rotate(10), "PNG")),
        ("one.png", png(1, 1)),
    ],
)
def test_a_file_becomes_what_transformers_makes_of_it(
    tmp_path: Path, name: str, data: bytes
) -> None:
    (tmp_path / name).write_bytes(data)
    size = {"shortest_edge": PROCESSOR.min_pixels, "longest_edge": PROCESSOR.max_pixels}
    expected = Qwen2VLImageProcessorPil(size=size)(
        [seen_by_transformers(tmp_path / name)], return_tensors="np"
    )
    found = reading(tmp_path).read(ImageItem(name))
    assert list(found.grid) == expected["image_grid_thw"][0].tolist()
    assert np.array_equal(found.pixel_values, expected["pixel_values"])
    assert found.source == f'"{name}"'


def test_a_data_url_has_the_key_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    by_path, by_data = (reading(tmp_path).read(ImageItem(s)) for s in ("a.png", url))
    assert by_path.key == by_data.key
    assert by_data.source == '"data:image/png;base64,..."'


def test_urls_are_fetched_only_where_they_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(url: str, shown: str, max_bytes: int, timeout_s: float) -> bytes:
        fetched.append(url)
        return png()

    monkeypatch.setattr("edgespec.images.urls.fetch", fetch)
    said = refusal(tmp_path, "https://host/a.png")
    assert said == 'image "https://host/a.png" is a URL, and URLs are not fetched.'
    assert fetched == []
    found = reading(tmp_path, allow_urls=True).read(ImageItem("https://host/a.png"))
    assert (fetched, found.grid) == (["https://host/a.png"], (1, 4, 6))


def test_urls_of_a_request_have_one_time_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []
    now = [100.0]

    def fetch(url: str, shown: str, max_bytes: int, timeout_s: float) -> bytes:
        left.append(timeout_s)
        now[0] += 6
        return png()

    monkeypatch.setattr("edgespec.images.urls.fetch", fetch)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    urls = [ImageItem(f"https://host/{name}") for name in "ab"]
    allowed = reading(tmp_path, allow_urls=True)
    assert len(list(allowed.read_all(urls))) == 2
    assert left == [20, 14]


def test_rules_say_whether_the_working_directory_is_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "a.png").write_bytes(png())
    monkeypatch.chdir(tmp_path)
    assert "is not there" in refusal(tmp_path / "inputs", "a.png")
    both = reading(tmp_path / "inputs", also_working_directory=True)
    assert both.read(ImageItem("a.png")).num_tokens == 6


def test_roots_of_the_rules_may_be_read(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "a.png").write_bytes(png())
    path = str(tmp_path / "a.png")
    assert "outside" in refusal(tmp_path / "inputs", path)
    assert reading(tmp_path / "inputs", roots=(tmp_path,)).read(ImageItem(path)).num_tokens == 6


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bomb(50_000, 50_000), "has more than 50000000 pixels, and 50000000 is the limit"),
        (bomb(30_000, 10), "one side is more than 200 times the other"),
        (b"II*\0\x08\0\0\0", "is no PNG, JPEG"),
        (b"hello", "is no PNG, JPEG"),
        (b"", "is empty"),
        (bytes(33 * 2**20), "has more than 33554432 bytes"),
    ],
)
def test_what_is_refused_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, said: str
) -> None:
    (tmp_path / "a.png").write_bytes(data)
    monkeypatch.setattr(reader, "decode", lambda *_: pytest.fail("decoded"))
    assert said in refusal(tmp_path, "a.png")


def test_an_image_beyond_an_engines_limit_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(png(3000, 20))
    monkeypatch.setattr(reader, "decode", lambda *_: pytest.fail("decoded"))
    limited = replace(reading(tmp_path), processor=PROCESSOR.limited(16))
    with pytest.raises(RequestError, match="takes 48 tokens, and the engine takes 16"):
        limited.read(ImageItem("a.png"))


def test_a_wrong_extension_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.jpg").write_bytes(png())
    with caplog.at_level(logging.WARNING):
        reading(tmp_path).read(ImageItem("a.jpg"))
    assert caplog.messages == ['image "a.jpg" is a PNG: read as that']


def test_a_broken_image_leaves_the_next_one_alone(tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(png(200, 200)[:-500])
    (tmp_path / "good.png").write_bytes(png())
    both = reading(tmp_path)
    with pytest.raises(RequestError, match="damaged or cut off"):
        both.read(ImageItem("bad.png"))
    assert both.read(ImageItem("good.png")).num_tokens == 6
