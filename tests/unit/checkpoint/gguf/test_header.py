"""What a damaged GGUF file is refused with: one sentence with the file, before anything is made of
it."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.checkpoint.gguf.header import read_model
from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel
from tests import gguf_files, toys

KIB = 1024
HUGE = 2**62


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def uint32(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def tensor(name: str, sizes: Iterable[int], code: int = 0, offset: int = 0) -> bytes:
    sizes = list(sizes)
    packed = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + packed + struct.pack("<IQ", code, offset)


def gguf(
    values: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    *,
    begin: bytes = b"GGUF\3\0\0\0",
    counts: tuple[int, int] | None = None,
) -> bytes:
    values, tensors = list(values), list(tensors)
    counts = counts or (len(tensors), len(values))
    return begin + struct.pack("<QQ", *counts) + b"".join(values) + b"".join(tensors)


A, B = tensor("a", [8]), tensor("b", [8], offset=32)
ARRAY = text("k") + struct.pack("<IIQ", 9, 4, HUGE)
NESTED = text("k") + struct.pack("<IIQ", 9, 9, 1)
DAMAGED = {
    "begins with b'NOPE'": gguf(begin=b"NOPE\3\0\0\0"),
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1",
    "is big-endian": gguf(begin=b"GGUF\0\0\0\3"),
    "has version 1;": gguf(begin=b"GGUF\1\0\0\0"),
    "its counts would take": b"GGUF\3\0\0\0",
    f"has {HUGE} metadata values": gguf(counts=(0, HUGE)),
    f"has {HUGE} tensors": gguf(counts=(HUGE, 0)),
    "a key has 70000 bytes": gguf([struct.pack("<Q", 70000) + b"x" * 70000]),
    "the value of 'k' would take": gguf([ARRAY]),
    "the value of 'k' is an array of arrays": gguf([NESTED]),
    "the value of 'k' is of the unknown type 13": gguf([text("k") + struct.pack("<II", 13, 0)]),
    "the value of 'k' is not UTF-8": gguf(
        [text("k") + struct.pack("<IQ", 8, 4) + b"\xff\xfe\xfd\xfc"]
    ),
    "the key 'k' occurs twice": gguf([uint32("k", 1), uint32("k", 2)]),
    "the tensor 'a' occurs twice": gguf([], [A, A]),
    "general.alignment is 12": gguf([uint32("general.alignment", 12)]),
    "tensor 'a' has 5 dimensions": gguf([], [tensor("a", [1] * 5)]),
    "has the sizes [0]": gguf([], [tensor("a", [0])]),
    f"has the sizes [{2**41}]": gguf([], [tensor("a", [2**41])]),
    "of q4_0 has the sizes [31]": gguf([], [tensor("a", [31], 2)]),
    "type 99 of ggml": gguf([], [tensor("a", [32], 99)]),
    "begins at 33, no multiple of 32": gguf([], [tensor("a", [8], offset=33)]) + bytes(KIB),
    "tensor 'b' overlaps 'a'": gguf([], [tensor("a", [16]), B]) + bytes(KIB),
    "tensor 'b' ends at byte": gguf([], [A, B]) + bytes(64),
    "part 3 of 4, counted from 0": gguf(
        [
            text("split.no") + struct.pack("<IH", 2, 3),
            text("split.count") + struct.pack("<IH", 2, 4),
        ]
    ),
    "split.tensors.count is 7": gguf([uint32("split.tensors.count", 7)]),
}


@pytest.mark.parametrize("said", DAMAGED)
def test_damaged_headers_are_refused_in_one_sentence(said: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(DAMAGED[said])
    tracemalloc.start()
    with pytest.raises((CheckpointError, UnsupportedModel)) as found:
        read_model(file)
    assert tracemalloc.get_traced_memory()[1] < 512 * KIB
    tracemalloc.stop()
    assert said in found.value.what
    assert str(file) in found.value.what
    assert found.value.what.count(". ") == 0
    assert found.value.remedy


WRONG = (
    *(("split.no", [0, 1]), ("split.tensors.count", [0, 1]), ("general.architecture", [1, 2])),
    *(("llama.expert_count", [0, 0]), ("llama.rope.scaling.type", [1, 2])),
    *(("tokenizer.ggml.model", [1, 2]), ("tokenizer.ggml.pre", ["a"])),
    *(("tokenizer.ggml.pre", [1, 2]), ("tokenizer.ggml.eos_token_id", [1, 2])),
    *(("tokenizer.ggml.add_bos_token", [1, 2]), ("tokenizer.ggml.add_bos_token", "false")),
    *(("tokenizer.chat_template", [1, 2]), ("tokenizer.chat_template.tool_use", ["a"])),
)


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_values_of_a_wrong_type_are_refused_with_file_and_key(
    key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    file, add = tmp_path / "m.gguf", GGUFWriter.add_key_value

    def add_changed(self: GGUFWriter, name: str, old: Any, *types: Any) -> None:
        if name == "general.architecture":
            add(self, key, value, GGUFValueType.get_type(value))
        if name != key:
            add(self, name, old, *types)

    monkeypatch.setattr(GGUFWriter, "add_key_value", add_changed)
    gguf_files.write(toys.make_base(tmp_path / "hf", layers=1, vocab=128), file)
    with pytest.raises(EdgeSpecError) as found:
        open_checkpoint(file)
    assert {str(file), key} <= set(re.split("[ ,:]", found.value.what))
    assert found.value.remedy
    assert not list(tmp_path.glob("cache/gguf/*"))


def test_the_same_bytes_undamaged_are_read(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf([uint32("general.alignment", 64), uint32("k", 7)], [A]) + bytes(KIB))
    header = read_model(file)
    assert header.metadata["k"] == 7
    assert (header.tensors["a"].shape, header.tensors["a"].offset % 64) == ((8,), 0)


def test_a_header_cut_or_changed_anywhere_is_read_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    whole = tmp_path / "whole.gguf"
    gguf_files.write(toys.make_base(tmp_path / "hf", layers=1, vocab=128), whole, "Q8_0")
    data = whole.read_bytes()
    end = min(tensor.offset for tensor in read_model(whole).tensors.values())
    chance = random.Random(0)
    file = tmp_path / "m.gguf"
    outcomes = {"read": 0, "refused": 0}
    for i in range(400):
        changed = bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.randrange(end)] = chance.randrange(256)
        file.write_bytes(changed[: chance.randrange(len(data))] if i % 4 == 0 else changed)
        try:
            checkpoint = open_checkpoint(file)
            detect(checkpoint)
            for name in checkpoint.tensors:
                checkpoint.read(name)
            outcomes["read"] += 1
        except EdgeSpecError as error:
            outcomes["refused" if "m.gguf" in error.what else error.what] = (
                outcomes.get("refused", 0) + 1
            )
    assert outcomes.keys() == {"read", "refused"}
    assert min(outcomes.values()) > 20, outcomes
