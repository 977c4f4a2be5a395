"""Engines of a trained draft accept what torch said, and another draft of the base does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.backends.build import build
from edgespec.contract import Limits
from edgespec.errors import RequestError
from edgespec.export.components import ExportOptions, export
from edgespec.pipeline.engine_acceptance import accepted_lengths
from tests import toys
from tests.unit.training.conftest import write_chats
from tests.unit.training.test_train import job_of, run

KEYS = ("training.max_steps=60", "training.learning_rate=0.01", "validation.max_new_tokens=40")
LIMITS = Limits(
    max_input_len=96, max_kv_cache_capacity=160, max_verify_tree_size=8, max_draft_tree_size=8
)


def test_engines_accept_what_torch_measured(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", "qwen3", layers=7)
    chats = write_chats(tmp_path / "chats.jsonl")
    recipe = job_of(base, chats, tmp_path / "draft", "eagle3", *KEYS).recipe
    run(base, chats, tmp_path / "draft", "eagle3", *KEYS)
    export(str(base), tmp_path / "onnx-base", ExportOptions(base_for="eagle3"))
    export(
        str(tmp_path / "draft"), tmp_path / "onnx-draft", ExportOptions(base_model_dir=str(base))
    )
    for name in ("base", "draft"):
        build(tmp_path / f"onnx-{name}" / "llm", tmp_path / "engines", LIMITS)
    in_torch, of_engine = accepted_lengths(recipe, tmp_path / "engines")
    assert in_torch > 1.1  # else nothing was accepted
    assert of_engine == pytest.approx(in_torch, abs=1e-4)  # as the report rounds
    chats.write_text(chats.read_text() + "\n")
    with pytest.raises(RequestError, match="another sha256"):
        accepted_lengths(recipe, tmp_path / "engines")
