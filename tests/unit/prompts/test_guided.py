"""The form of an answer as a request says it."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.errors import RequestError
from edgespec.prompts import Guided, SamplingParams, parse_requests

MESSAGES = [{"role": "user", "content": "a"}]


def of_file(guided: object) -> Guided | None:
    raw = {"requests": [{"messages": MESSAGES, "guided": guided}]}
    return parse_requests(raw, "input.json").requests[0].sampling.guided


def test_a_form_is_the_same_from_a_file_and_from_python() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    for given in ({"json_schema": schema}, schema):
        form = of_file(given)
        assert form == Guided(json_schema=schema) == SamplingParams(guided=given).guided
        assert form is not None
        assert form.to_dict() == {"json_schema": schema}
        assert hash(form) == hash(Guided(json_schema=schema))
    assert of_file({"choice": ["a", "b"]}) == Guided(choice=("a", "b"))
    assert of_file(None) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("a", r"requests\[0\].guided is \"a\", not an object"),
        ({"regex": "a", "choice": ["b"]}, "says regex and choice"),
        ({"json_schema": None, "json_object": False}, "says nothing"),
        ({"json_object": True, "regexp": "a"}, 'regexp is not a known key.*\nDid you mean "regex"'),
        ({"json_schema": "{"}, "json_schema is no JSON"),
        ({"json_schema": "[1]"}, "json_schema is a list, not an object"),
        ({"choice": []}, "choice is"),
        ({"choice": ["a", ""]}, r"choice\[1\] is"),
        ({"json_object": 1}, "json_object is 1"),
        ({"regex": "a" * 5000}, "regex has 5000 bytes, and 4096 is the limit"),
        ({"json_schema": {"enum": ["a" * 70000]}}, "bytes, and 65536"),
        ({"regex": "\ud800"}, "unpaired surrogate"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_its_place(given: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        of_file(given)


def test_a_schema_that_is_nested_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="40 levels, and 32 is the limit"):
        Guided(json_schema=schema)
    for _ in range(3000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="Guided: json_schema"):
        Guided(json_schema=schema)
