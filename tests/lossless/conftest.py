"""Toy pairs, exported and built once: a plain one, one whose window is shorter than the answers,
one where only some layers have such a window, one of longrope, and a hybrid base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lossless.pairs import Family, shared_pair
from tests.toys import DraftLayout

PAIRS: dict[str, tuple[Family, DraftLayout, int | None]] = {
    "llama": ("llama", "eagle", None),
    "mistral-window-5": ("mistral", "modelopt", 5),
    "gemma3-window-5": ("gemma3", "eagle", 5),
    "phi4-mini": ("phi4-mini", "eagle", None),
    "qwen3_5": ("qwen3_5", "modelopt", None),
}


@pytest.fixture(scope="session")
def pairs() -> dict[str, Path]:
    return {name: shared_pair(*how) / "engines" for name, how in PAIRS.items()}
