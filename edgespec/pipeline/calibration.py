"""The text of `calib_data` as windows of a model's tokens, for a build that rounds weights by it.

Knows texts and tokenizers. Backends know windows alone.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.contract import Role
from edgespec.errors import RequestError
from edgespec.prompts.shipped_text import calibration_text
from edgespec.quantize.calibration import MIN_TOKENS, SHIPPED, Record, read_texts
from edgespec.runtime.text.tokenizer import Tokenizer

MAX_TOKENS = 8192  # more bring little, and take as many times as long
WINDOW = 512


def with_windows(options: Any, onnx_dir: Path, role: Role) -> Any:
    """Options of a build with the tokens of the text that they name. Drafts and options without a
    text are left as they are.

    Raises RequestError for a text that is missing, too short, or cannot be read.
    """
    source = getattr(options, "calib_data", None)
    if source is None:
        return options
    if role not in (Role.LLM, Role.BASE):
        return replace(options, calib_data=None)
    tokenizer = Tokenizer.open(onnx_dir)
    texts = (calibration_text(),) if source == SHIPPED else read_texts(source, MAX_TOKENS).records
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(rendered(tokenizer, text))
        if len(ids) >= MAX_TOKENS:
            break
    if len(ids) < MIN_TOKENS:
        raise RequestError(
            f"the calibration text {source} has {len(ids)} tokens, and {MIN_TOKENS} are needed",
            "Give some pages of text to `calib_data`, or shipped.",
        )
    rows = min(WINDOW, len(ids))
    count = min(len(ids), MAX_TOKENS) // rows
    windows = tuple(tuple(ids[i * rows : (i + 1) * rows]) for i in range(count))
    return replace(options, windows=windows)


def rendered(tokenizer: Tokenizer, text: Record) -> str:
    """A record as the model reads it: messages by its chat template, where it has one."""
    if isinstance(text, str):
        return text
    if not tokenizer.has_template():
        return "\n".join(message["content"] for message in text) + "\n"
    messages: Any = text
    return tokenizer.render(messages, add_generation_prompt=False, enable_thinking=False)
