"""The text of `calib_data` as windows of tokens: within the engine's room, and part of what a
prepared engine is known by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.backends.ort.options import WeightFormat
from edgespec.contract import Limits, Role
from edgespec.errors import RequestError
from edgespec.pipeline.calibration import texts_of, with_windows
from edgespec.prompts import Message
from edgespec.prompts.rendering import Rendering
from edgespec.runtime.text.tokenizer import Tokenizer
from tests import made, toys


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = toys.make_base(tmp_path_factory.mktemp("base") / "base", "llama", layers=1)
    return made.exported(base) / "llm"


def options(text: Path | str) -> WeightFormat:
    return WeightFormat("int4", 32, minimums=True, kernels="native", calib_data=str(text))


def test_windows_fit_into_the_cache_and_drafts_have_none(onnx: Path) -> None:
    limits = Limits(max_kv_cache_capacity=48)
    windows = with_windows(options("shipped"), onnx, Role.LLM, limits).windows
    assert {len(window) for window in windows} == {48}
    assert len(windows) > 10
    assert with_windows(options("shipped"), onnx, Role.DRAFT, limits).windows is None


def test_a_text_of_other_content_is_another_text(tmp_path: Path) -> None:
    text, digests = tmp_path / "text.txt", set()
    for content in ("some words " * 50, "other words " * 50):
        text.write_text(content)
        texts = texts_of(options(text))
        assert texts is not None
        digests.add(texts.sha256)
    assert len(digests) == 2
    text.unlink()
    with pytest.raises(RequestError, match="there is no calibration file"):
        texts_of(options(text))


def test_a_text_of_a_few_words_is_refused(onnx: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("two words")
    with pytest.raises(RequestError, match=r"text.txt has \d+ tokens to calibrate with, and 64"):
        with_windows(options(tmp_path / "text.txt"), onnx, Role.LLM, Limits())


def test_messages_are_read_by_the_chat_template(onnx: Path, tmp_path: Path) -> None:
    text, asked = tmp_path / "text.jsonl", "a question of a few words " * 20
    message = {"role": "user", "content": asked}
    text.write_text(json.dumps({"messages": [message]}) + "\n")
    windows = with_windows(options(text), onnx, Role.LLM, Limits()).windows
    tokenizer = Tokenizer.open(onnx)
    wanted = tokenizer.render([Message(**message)], Rendering(add_generation_prompt=False))
    assert tokenizer.has_template()
    assert list(windows[0]) == tokenizer.encode(wanted)[: len(windows[0])]


def test_a_budget_without_a_text_is_measured_on_the_shipped_one(onnx: Path) -> None:
    own = WeightFormat("int4", 32, minimums=True, kernels="native", size=5.0)
    limits = Limits(max_kv_cache_capacity=48)
    found, shipped = (
        with_windows(one, onnx, Role.LLM, limits) for one in (own, options("shipped"))
    )
    assert found.windows == shipped.windows
    assert (found.weights.method, shipped.weights.method) == ("least squares", "gptq")
    assert with_windows(own, onnx, Role.DRAFT, limits).size is None
