"""A hostile tokenizer.json is refused before it takes memory or time; any would end the process."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import BundleError
from edgespec.prompts.tokenizer_file import read_tokenizer

LETTERS = {letter: index for index, letter in enumerate("abcdefgh!1 ")}
BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
OTHER = {"Sequence": {"id": "B", "type_id": 1}}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 127}
EMPTY = {"type": "BPEDecoder", "suffix": ""}
LONG = "q" * 10_000_000


def added(content: str) -> dict[str, object]:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"id": 90, "content": content, **dict.fromkeys(flags, False)}


def document(model: dict[str, object] | None = None, **keys: object) -> dict[str, object]:
    """A tokenizer.json of single letters."""
    plain = {"type": "BPE", "vocab": LETTERS, "merges": []}
    return {"version": "1.0", "model": plain | (model or {}), "added_tokens": []} | keys


# What is encoded, or decoded where it is ids, and what is said of it; "" where it is harmless
HOSTILE: dict[str, tuple[dict[str, object], Any, str]] = {
    "a token": (document({"vocab": {**LETTERS, LONG: 90}}), [90] * 99, "model.vocab has a token"),
    "quotes": (document({"vocab": {**LETTERS, '"' * 9**7: 90}}), [90] * 99, "model.vocab"),
    "an added token": (document(added_tokens=[added(LONG)]), [90], "added_tokens.content has"),
    "many added tokens": (
        document(added_tokens=[added(f"{i:08}" * 900) for i in range(3000)]),
        "a",
        "added_tokens has 21600000 characters in all",
    ),
    "a prefix of each letter": (
        document({"continuing_subword_prefix": LONG}),
        "abcdefgh" * 40,
        "model.continuing_subword_prefix has",
    ),
    "bytes of bytes": (
        document(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTES] * 30}),
        "\u00e9" * 100,
        "the pre_tokenizer makes a text more than 32 times",
    ),
    "prefixes": (
        document(
            normalizer={
                "type": "Sequence",
                "normalizers": [{"type": "Prepend", "prepend": "a" * 1024}] * 1000,
            },
            added_tokens=[added("e")],
        ),
        "ae" * 5000,
        "the normalizer makes a text more than 128 times",
    ),
    "a prefix between added tokens": (
        document(normalizer={"type": "Prepend", "prepend": "a" * 100}, added_tokens=[added("e")]),
        "ae" * 500_000,
        "the normalizer puts more than 4 characters before a text",
    ),
    "a longer text": (document(normalizer=GROWING), "a" * 2**20, "makes more than 5242880"),
    "a text again and again": (
        document(
            post_processor={
                "type": "TemplateProcessing",
                "single": [TEXT] * 900,
                "pair": [TEXT, OTHER],
                "special_tokens": {},
            }
        ),
        "a" * 2**17,
        "the post_processor adds more than 1024 tokens",
    ),
    "padding": (
        document(padding={"strategy": {"Fixed": 10**8}, "pad_token": "a", **PADDING}),
        "a",
        "",
    ),
    "padding to a multiple": (
        document(
            padding={
                **PADDING,
                "strategy": "BatchLongest",
                "pad_token": "a",
                "pad_to_multiple_of": 10**8,
            }
        ),
        "a",
        "",
    ),
    "a decoder that doubles": (
        document(decoder={"type": "Sequence", "decoders": [EMPTY] * 30}),
        [0, 1, 2],
        "the decoder makes a text more than 4 times",
    ),
    "a decoder of 127": (document(decoder=GROWING), [0], "the decoder makes"),
}

CHILD = """
import json, resource, sys, tempfile, time
from pathlib import Path
from edgespec.errors import EdgeSpecError
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.runtime.requests.memory import peak_bytes

resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
directory = Path(sys.argv[1])
for line in sys.stdin:
    name, text = json.loads(line)
    (directory / name).rename(directory / "tokenizer.json")
    began = time.process_time()
    try:
        tokenizer = Tokenizer.open(directory)
        if isinstance(text, str):
            said = f"{len(tokenizer.encode(text, add_special_tokens=True))} ids"
        else:
            said = f"{len(tokenizer.decode(text))} characters"
    except EdgeSpecError as error:
        said = error.what
    print(json.dumps([name, said, time.process_time() - began, peak_bytes()]), flush=True)
"""


@cache
def hostile_results(directory: Path) -> dict[str, tuple[str, float, int]]:
    for name, (raw, _, _) in HOSTILE.items():
        (directory / name).write_text(json.dumps(raw))
    lines = "".join(json.dumps([name, text]) + "\n" for name, (_, text, _) in HOSTILE.items())
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)], stdin=-1, stdout=-1, text=True
    )
    try:
        out, _ = child.communicate(lines, timeout=120)
    except subprocess.TimeoutExpired:
        child.kill()
        out, _ = child.communicate()
    found = [json.loads(line) for line in out.splitlines()]
    return {name: (said, seconds, peak_bytes) for name, said, seconds, peak_bytes in found}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float, int]]:
    """One process for all of them."""
    return hostile_results(tmp_path_factory.mktemp("hostile"))


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tokenizer_takes_little_time_and_memory(
    name: str, results: dict[str, tuple[str, float, int]]
) -> None:
    assert name in results, "this tokenizer, or one before it, hung or ended its process"
    said, seconds, peak_bytes = results[name]
    assert (HOSTILE[name][2] or "1 ids") in said
    assert seconds < 2
    assert peak_bytes < 500e6


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json is damaged") as refused:
        read_tokenizer(tmp_path / "tokenizer.json")
    assert "Copy it again" in refused.value.remedy


def test_a_tokenizer_in_use_is_read(tmp_path: Path) -> None:
    longest = "\u0120" * 8000
    raw = document(
        {"vocab": {**LETTERS, longest: 90}},
        pre_tokenizer=BYTES,
        decoder=BYTES,
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, TEXT],
            "pair": [TEXT, OTHER],
            "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
        },
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = read_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.decode([90]) == " " * 8000
