"""YAML of strangers: what is read is what is written, and nothing grows, runs or surprises."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.errors import EdgeSpecError, OptionError, RequestError
from edgespec.pipeline.recipe import (
    MAX_BYTES,
    MAX_DEPTH,
    overridden,
    parse,
    read,
    read_config,
)

# Text -> value, by YAML 1.2's core schema where YAML 1.1 surprises
VALUES: dict[str, Any] = {
    "3": 3,
    "-3": -3,
    "010": 10,
    "0.5": 0.5,
    ".5": 0.5,
    "1e-5": 1e-5,
    "1E5": 1e5,
    "true": True,
    "True": True,
    "FALSE": False,
    "yes": "yes",
    "no": "no",
    "on": "on",
    "off": "off",
    "y": "y",
    "null": None,
    "~": None,
    "": None,
    "12:30": "12:30",
    "2026-11-22": "2026-11-22",
    "1_000": "1_000",
    "0x10": "0x10",
    "1.2.3": "1.2.3",
    ".inf": ".inf",
    ".nan": ".nan",
    "9e999": "9e999",
    "'3'": "3",
    '"true"': "true",
    "[[0], [0, 1]]": [[0], [0, 1]],
    "{1: 4, 8: 2}": {1: 4, 8: 2},
    "Qwen/Qwen3-8B": "Qwen/Qwen3-8B",
    "a#b": "a#b",
    "a  # a comment": "a",
}


@pytest.mark.parametrize("text", VALUES)
def test_a_value_is_what_yaml_1_2_says(text: str) -> None:
    found = parse(f"key: {text}", "f.yaml")["key"]
    assert found == VALUES[text]
    assert type(found) is type(VALUES[text])


def test_blocks_and_an_empty_file() -> None:
    text = "speculative_config:\n  decoding_type: NGram\n  note: |\n    3\n    4\n"
    assert parse(text, "f") == {"speculative_config": {"decoding_type": "NGram", "note": "3\n4\n"}}
    assert parse("", "f") == parse("# nothing\n", "f") == parse("---\n...\n", "f") == {}


BOMB = "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))])
REFUSED = {
    "a list": ("- 1\n- 2", "f.yaml holds a list, not keys and values"),
    "a value": ("text", "holds the value text"),
    "an alias": ("a: &x 1\nb: *x", r"line 1: an anchor or alias, x"),
    "a bomb": (BOMB, "an anchor or alias, a0"),
    "an undefined alias": ("a: *x", "an anchor or alias, x"),
    "a merge": ("a: {b: 1}\n<<: {c: 2}", "line 2: a merge key"),
    "a merge inside": ("a:\n  <<: {c: 2}", "line 2: a merge key"),
    "an object": ("a: !!python/object/apply:os.system ['true']", "line 1: a tag, tag:yaml.org"),
    "a set": ("a: !!set {b, c}", "a tag"),
    "a tag of one's own": ("a: !mine 3", "a tag, !mine"),
    "a string by tag": ("a: !!str 3", "a tag"),
    "duplicates": ("a: 1\nb: 2\na: 3", "line 3: a occurs twice"),
    "duplicates inside": ("x:\n  a: 1\n  a: 1", "line 3: a occurs twice"),
    "two documents": ("a: 1\n---\nb: 2", "another document at line 2"),
    "a key that is a list": ("? [a]\n: 1", "line 1: a key that is a list"),
    "depth": ("a: " + "[" * 5000 + "]" * 5000, f"nested deeper than {MAX_DEPTH}"),
    "depth by blocks": ("".join(f"{' ' * i}a:\n" for i in range(200)), "nested deeper"),
    "depth by dashes": ("a:\n  " + "- " * 500 + "x", "nested deeper"),
    "a long number": ("a: " + "9" * 5000, "a number of 5000 digits"),
    "a tab": ("a:\n\tb: 1", "line 2, column 1"),
    "an open quote": ("a: 'b", "is not YAML"),
    "an open bracket": ("a: [1, 2", "is not YAML"),
    "a control character": ("a: \x00", "is not YAML"),
    "a percent": ("%YAML 3.0\n---\na: 1", "is not YAML"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_mapping_is_refused_with_its_place(name: str) -> None:
    text, said = REFUSED[name]
    began = time.process_time()
    with pytest.raises(RequestError, match=said) as error:
        parse(text, "f.yaml")
    assert error.value.remedy
    assert len(str(error.value)) < 500
    assert time.process_time() - began < 5


def test_file_that_is_none_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    for content, said in (
        (b"a: " + b"x" * MAX_BYTES, "more than"),
        (b"a: \xff", "not UTF-8: byte 0xff at 3"),
    ):
        path.write_bytes(content)
        with pytest.raises(RequestError, match=said):
            read(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for strange in (pipe, tmp_path, tmp_path / "missing", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(RequestError, match="cannot be read"):
            read(strange)
    path.write_bytes(b"\xef\xbb\xbfa: 1")  # a byte order mark
    assert read_config(path) == {"a": 1}


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_is_a_mapping_or_an_error_of_ours(text: str) -> None:
    assert isinstance(parsed_or_refused(text), dict)


PIECES = st.sampled_from(
    [
        *(
            "a",
            "b: ",
            ": ",
            "- ",
            "\n",
            "  ",
            "[",
            "]",
            "{",
            "}",
            ",",
            "&x ",
            "*x",
            "!!t ",
            "'",
            '"',
        ),
        *("|", ">", "#", "? ", "---", "...", "%", "<<", "1", "1e5", "~", "true", "\t", "\\", "@"),
    ]
)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(PIECES, max_size=25))
def test_any_yaml_of_pieces_is_a_mapping_or_an_error_of_ours(pieces: list[str]) -> None:
    assert_plain(parsed_or_refused("".join(pieces)))


def parsed_or_refused(text: str) -> dict[str, Any]:
    """The mapping; an empty one where it is refused with a remedy. Other errors are raised."""
    with suppress(EdgeSpecError):
        return parse(text, "f")
    with pytest.raises(EdgeSpecError) as error:
        parse(text, "f")
    assert error.value.remedy
    return {}


def assert_plain(value: object) -> None:
    assert type(value) in (dict, list, str, int, float, bool, type(None))
    for item in value if isinstance(value, list) else ():
        assert_plain(item)
    for key, item in value.items() if isinstance(value, dict) else ():
        assert type(key) in (str, int, float, bool, type(None))
        assert_plain(item)


texts = st.text("ab ~:#-[]{},&*!|>%@\n'\"é漢", max_size=8)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(values=st.dictionaries(texts, plain_values, max_size=4))
def test_what_a_writer_wrote_comes_back(values: dict[str, Any]) -> None:
    """By PyYAML's writer, which quotes what YAML 1.1 would misread."""
    text = yaml.safe_dump(values, allow_unicode=True, default_flow_style=None)
    if "&id" not in text:
        assert parse(text, "f") == values


# ---- key=value


def test_overrides_reach_into_the_file_in_their_order() -> None:
    values = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}, "seed": 1}
    found = overridden(
        values,
        [
            *("speculative_config.max_draft_len=5", "seed=2"),
            *("speculative_config.is_keep_all=false", "new.deep.key=[1, {a: 2}]"),
            *("seed=3", "empty=", "text=a=b"),
        ],
    )
    assert found["speculative_config"] == {
        "decoding_type": "NGram",
        "max_draft_len": 5,
        "is_keep_all": False,
    }
    assert found["seed"] == 3
    assert found["new"] == {"deep": {"key": [1, {"a": 2}]}}
    assert (found["empty"], found["text"]) == (None, "a=b")
    assert values["speculative_config"] == {"decoding_type": "NGram", "max_draft_len": 2}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("words", "words is no override"),
        ("=3", "no override"),
        ("a..b=3", "no override"),
        (".=3", "no override"),
        ("seed.x=3", "seed has no keys"),
    ],
)
def test_override_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        overridden({"seed": 1}, [text])


def test_value_of_an_override_is_yaml_too() -> None:
    with pytest.raises(RequestError, match="an anchor"):
        overridden({}, ["a=&x 1"])
