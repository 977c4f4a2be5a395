"""A data: URL is an image in base64, or refused with the form that it should have."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import RequestError
from edgespec.images.data_url import decode
from edgespec.prompts import ImageItem
from tests.unit.images.samples import attempted, png

DATA = png()
TEXT = base64.b64encode(DATA).decode()


def decoded(url: str, max_bytes: int = 2**20) -> tuple[str, bytes]:
    item = ImageItem(url)
    assert item.kind == "data"
    return decode(url, item.shown, max_bytes)


@pytest.mark.parametrize(
    ("head", "claimed"),
    [
        ("data:image/png;base64,", "png"),
        ("DATA:IMAGE/PNG;BASE64,", "png"),
        ("data:image/jpeg;charset=utf-8;base64,", "jpeg"),
        ("data:image;base64,", ""),
        ("data:;base64,", ""),
    ],
)
def test_bytes_and_the_claimed_format_are_read(head: str, claimed: str) -> None:
    assert decoded(head + TEXT) == (claimed, DATA)


def test_base64_may_have_line_breaks() -> None:
    assert decoded("data:image/png;base64," + base64.encodebytes(DATA).decode())[1] == DATA


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:", "without a comma"),
        ("data:image/png;base64", "without a comma"),
        ("data:" + "x" * 300 + ",AAAA", "without a comma"),
        (f"data:text/plain;base64,{TEXT}", "of another type than image"),
        (f"data:application/pdf;base64,{TEXT}", "of another type than image"),
        (f"data:image/png,{TEXT}", "not in base64"),
        (f"data:image/png;base64;x=y,{TEXT}", "not in base64"),
        ("data:image/png;base64,", "without data"),
        ("data:image/png;base64,  \n", "without data"),
        ("data:image/png;base64,A", "damaged"),
        ("data:image/png;base64,AA", "damaged"),
        ("data:image/png;base64,AA==AAAA", "damaged"),
        ("data:image/png;base64,AA_-", "damaged"),
        ("data:image/png;base64,AA%2BA", "damaged"),
        ("data:image/png;base64,AAAÄ", "damaged"),
        (f"data:image/png;base64,{TEXT}!", "damaged"),
    ],
)
def test_a_broken_url_is_refused_by_what_is_wrong(url: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        decoded(url)
    assert caught.value.what.startswith('image "data:')
    assert said in caught.value.what
    assert caught.value.remedy.startswith("Write data:image/png;base64,...")
    assert TEXT not in str(caught.value)


@pytest.mark.parametrize("max_bytes", [0, 1, 2, 3, 10, len(DATA) - 1])
def test_no_more_is_decoded_than_shows_that_it_is_too_long(max_bytes: int) -> None:
    data = decoded(f"data:image/png;base64,{TEXT}", max_bytes)[1]
    assert max_bytes < len(data) <= max_bytes + 3
    assert DATA.startswith(data)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200))
def test_any_bytes_come_back(data: bytes) -> None:
    assert decoded(f"data:image/png;base64,{base64.b64encode(data).decode()}")[1] == data


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_bytes_or_an_error(text: str) -> None:
    found = attempted(lambda: decode(f"data:{text}", "x", 100))
    assert found.remedy if isinstance(found, RequestError) else found[1]
