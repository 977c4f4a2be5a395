"""Toy pairs, exported and built once: a plain one, one whose window is shorter than the answers,
one where only some layers have such a window, and a hybrid base."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lossless.pairs import make_pair


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "llama": make_pair(tmp_path_factory.mktemp("llama"), "llama", "eagle", None),
        "mistral-window-5": make_pair(tmp_path_factory.mktemp("mistral"), "mistral", "modelopt", 5),
        "gemma3-window-5": make_pair(tmp_path_factory.mktemp("gemma3"), "gemma3", "eagle", 5),
        "qwen3_5": make_pair(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5", "modelopt", None),
    }
