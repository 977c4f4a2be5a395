"""The text of `calib_data` as windows of a model's tokens, for a build that rounds weights by it.

Knows texts and tokenizers. Backends know windows alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.contract import Limits, Role
from edgespec.errors import RequestError
from edgespec.prompts import Message
from edgespec.prompts.conversations import Record
from edgespec.prompts.rendering import Rendering
from edgespec.prompts.shipped_text import calibration_text
from edgespec.quantize.calibration import (
    MIN_TOKENS,
    SHIPPED,
    CalibrationTexts,
    read_texts,
)
from edgespec.runtime.text.tokenizer import Tokenizer

MAX_TOKENS = 8192  # more bring little, and take as many times as long
WINDOW = 512


def texts_of(options: Any) -> CalibrationTexts | None:
    """The text that options of a build name; None where they name none. Raises RequestError for one
    that is missing or cannot be read."""
    source = getattr(options, "calib_data", None)
    if source is None and getattr(options, "size", None) is not None:
        source = SHIPPED  # for what is measured alone
    if source is None:
        return None
    texts = read_texts(source, MAX_TOKENS)
    # A fifth of the shipped text is for what quantization costs
    return replace(texts, records=(calibration_text(),)) if source == SHIPPED else texts


def with_windows(options: Any, onnx_dir: Path, role: Role, limits: Limits) -> Any:
    """Options of a build with the tokens of the text that they name. Drafts and options without a
    text are left as they are.

    Raises RequestError for a text that is missing, too short, or cannot be read.
    """
    texts = texts_of(options)
    if texts is None:
        return options
    if role not in (Role.LLM, Role.BASE):
        return replace(options, calib_data=None, size=None)
    tokenizer, config = Tokenizer.open(onnx_dir), ComponentConfig.read(onnx_dir / file_names.CONFIG)
    ids: list[int] = []
    for text in texts.records:
        read = tokenizer.encode(rendered(tokenizer, text))
        ids += [token for token in read if token < config.vocab_size]
        if len(ids) >= MAX_TOKENS:
            break
    if len(ids) < MIN_TOKENS:
        raise RequestError(
            f"{texts.title} has {len(ids)} tokens to calibrate with, and {MIN_TOKENS} are needed",
            "Give some pages of text to `calib_data`, or shipped.",
        )
    whole = tokenizer.encode(tokenizer.decode(ids[:MIN_TOKENS]), add_special_tokens=True)
    begin = whole[: whole.index(ids[0])] if ids[0] in whole else []
    room = limits.max_kv_cache_capacity
    rows = min(WINDOW, room, config.max_position or room, len(ids)) - len(begin)
    starts = range(0, min(len(ids), MAX_TOKENS) - rows + 1, rows)
    windows = tuple((*begin, *ids[start : start + rows]) for start in starts)
    return replace(options, windows=windows)


def rendered(tokenizer: Tokenizer, text: Record) -> str:
    """A record as the model reads it: messages by its chat template, where it has one."""
    if isinstance(text, str):
        return text
    if not tokenizer.has_template():
        return "\n".join(message["content"] for message in text) + "\n"
    messages = [Message(message["role"], message["content"]) for message in text]
    return tokenizer.render(messages, Rendering(add_generation_prompt=False))
