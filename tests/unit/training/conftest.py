"""A toy base and conversations to train drafts on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests import toys

WORDS = "the cat sat on a mat and then it ran far away over hills".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("train") / "base", "qwen3", layers=7)


@pytest.fixture(scope="module")
def chats(base: Path) -> Path:
    return write_chats(base.parent / "chats.jsonl")


def write_chats(path: Path) -> Path:
    draw = random.Random(0)
    texts = [[" ".join(draw.choices(WORDS, k=count)) for count in (4, 9)] for _ in range(8)]
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in texts
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
