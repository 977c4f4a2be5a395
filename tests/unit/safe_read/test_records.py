"""A record is read by the types of its fields, and a wrong key is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from edgespec.errors import BundleError
from edgespec.safe_read.fields import BundleFields
from edgespec.safe_read.records import Count, Record


@dataclass(frozen=True, slots=True)
class Part(Record):
    size: int
    errors: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Record):
    KEYS: ClassVar = {"layers": "taps"}
    IF_ANY = ("origin", "part")

    layers: tuple[int, ...]
    count: Count
    flag: bool
    parts: Mapping[str, Part]
    origin: str | None = None
    part: Part | None = None


KEYS: Mapping[str, Any] = {
    "taps": [1, 2],
    "count": 0,
    "flag": False,
    "parts": {"a": {"size": 1, "errors": {"x": -0.5}}},
}


def test_a_record_is_written_as_it_was_read() -> None:
    whole = Whole.read(BundleFields(KEYS, "f.json"))
    assert whole == Whole(layers=(1, 2), count=0, flag=False, parts={"a": Part(1, {"x": -0.5})})
    assert whole.to_dict() == KEYS
    more = KEYS | {"origin": "o", "part": {"size": 2, "errors": {}}}
    assert Whole.read(BundleFields(more, "f.json")).to_dict() == more


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"taps": [1, "2"]}, "'taps'"),
        ({"taps": None}, "'taps' is missing"),
        ({"count": -1}, "'count'"),
        ({"flag": "yes"}, "'flag'"),
        ({"origin": 3}, "'origin'"),
        ({"parts": {"a": {"size": 0, "errors": {}}}}, r"\(parts\) \(a\): 'size'"),
        ({"part": {"size": 1, "errors": {"x": "1"}}}, r"\(part\) \(errors\): 'x'"),
    ],
)
def test_a_wrong_key_of_a_record_is_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(BundleError, match=named):
        Whole.read(BundleFields(KEYS | changed, "f.json"))
