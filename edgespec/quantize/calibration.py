"""Calibration text, cut into windows of tokens; the last part is held out for the check.

Knows text and JSONL files and the names of two hub datasets. Knows no model; the tokenizer is an
argument.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import EnvironmentProblem, MissingDependency, RequestError
from edgespec.prompts import shipped_text
from edgespec.prompts.conversations import Record, numbered_records

# TensorRT Edge-LLM's names -> repository, configuration, column
HUB = {
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "article"),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "text"),
}
SHIPPED = "shipped"  # the name of the text that comes with edgespec
MIN_TOKENS = 64
CHARACTERS_PER_TOKEN = 8  # more than any tokenizer makes of English
MAX_HELD_OUT = 512  # tokens
_WANTED = (
    'Each line is an object with "messages", "text" or "turns"; any other file is read as plain'
    " text."
)


@dataclass(frozen=True, slots=True)
class CalibrationTexts:
    """The records of one calibration file or dataset."""

    records: tuple[Record, ...]
    name: str  # for reports: the name of a file or a dataset, or "shipped"
    sha256: str

    @property
    def title(self) -> str:
        """The source in a sentence."""
        return "the shipped text" if self.name == SHIPPED else self.name


@dataclass(frozen=True, slots=True)
class Windows:
    """Token ids of each window. `calibration` and `held_out` are disjoint parts of the stream."""

    calibration: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]


def read_texts(source: str | None, num_tokens: int) -> CalibrationTexts:
    """Returns the shipped text, a local file, or as much of a hub dataset as makes `num_tokens`.

    Raises RequestError for an unknown name or an unusable file, MissingDependency without the
    package datasets, and EnvironmentProblem for a failed download.
    """
    if source in (None, SHIPPED):
        path = shipped_text.PATH
        return _from_bytes(path.read_bytes(), SHIPPED, path)
    path = Path(source)
    if path.is_file():
        return _from_bytes(path.read_bytes(), path.name, path)
    if path.exists():
        raise RequestError(f"{path} is not a file.", "Give a text or JSONL file to `calib_data`.")
    if source in HUB:
        return _from_hub(source, num_tokens)
    raise RequestError(
        f"there is no calibration file {source!r}.",
        f"Give a text or JSONL file, one of the hub datasets {', '.join(HUB)}, or shipped for the"
        " text that comes with edgespec.",
    )


def _from_bytes(data: bytes, name: str, path: Path) -> CalibrationTexts:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RequestError(
            f"{path} is not UTF-8 (line {line}).", "Convert it: iconv -f latin1 -t utf-8."
        ) from error
    if not text.strip():
        raise RequestError(
            f"{path} is empty.", "Give a file with some pages of text like the model's input."
        )
    is_json = path.suffix in (".jsonl", ".json") or text.lstrip().startswith('{"')
    records = (
        tuple(record for _, record in numbered_records(text, path, _WANTED)) if is_json else (text,)
    )
    return CalibrationTexts(records, name, hashlib.sha256(data).hexdigest())


def _from_hub(name: str, num_tokens: int) -> CalibrationTexts:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependency(
            f"the hub dataset {name} needs the package datasets, which is not installed.",
            "pip install 'edgespec[datasets]', or give a local file to `calib_data`.",
        ) from error
    repository, configuration, column = HUB[name]
    try:
        rows = load_dataset(repository, configuration, split="train", streaming=True)
        texts = _first(
            (row[column] for row in rows if row[column].strip()), CHARACTERS_PER_TOKEN * num_tokens
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EnvironmentProblem(
            f"the dataset {name} could not be downloaded from the hub: {reason}",
            "Check the network, give a local file to `calib_data`, or omit the flag.",
        ) from error
    return CalibrationTexts(texts, name, hashlib.sha256("\0".join(texts).encode()).hexdigest())


def _first(texts: Iterable[str], num_characters: int) -> tuple[str, ...]:
    """The first texts, up to the one with which they are that long."""
    first, left = [], num_characters
    for text in texts:
        first.append(text)
        left -= len(text)
        if left <= 0:
            break
    return tuple(first)


def cut(texts: CalibrationTexts, tokenizer: Any, num_samples: int, seq_len: int) -> Windows:
    """Returns windows of at most `seq_len` tokens from the concatenated records.

    The last fifth of the stream (at most 512 tokens) is held out. Each window begins with the BOS
    token if the tokenizer adds one. Calibration windows all have the same length. Raises
    RequestError for fewer than MIN_TOKENS tokens.
    """
    first = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id][:1]
    stream: list[int] = []
    for record in texts.records:
        text = record if isinstance(record, str) else _chat(record, tokenizer)
        stream += tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(stream) < MIN_TOKENS:
        raise RequestError(
            f"the calibration text {texts.name} has {len(stream)} tokens; at least {MIN_TOKENS} are"
            " needed.",
            "Give some pages of text, or omit `calib_data` for the shipped text.",
        )
    num_held_out = min(len(stream) // 5, MAX_HELD_OUT)
    width = seq_len - len(first)
    windows = _windows(stream[:-num_held_out], width, first)
    # AWQ gives each batch the same weight, so that all windows must have one length
    full = tuple(window for window in windows if len(window) == len(windows[0]))
    return Windows(full[:num_samples], _windows(stream[-num_held_out:], width, first))


def refuse_too_few(windows: Windows, texts: CalibrationTexts, asked: int | None) -> None:
    """Raises RequestError where the text makes fewer samples than were asked for by number."""
    used = windows.calibration
    if asked is not None and len(used) < asked:
        raise RequestError(
            f"{texts.title} makes {samples_text(len(used))} of {len(used[0])} tokens, and"
            f" `num_samples` asks for {asked}.",
            f"Give more text to `calib_data`, or pass `num_samples` {len(used)} or a smaller"
            " `calib_seq_len`.",
        )


def samples_text(count: int) -> str:
    """A count of samples in words."""
    return f"{count} sample{'' if count == 1 else 's'}"


def _chat(messages: list[dict[str, str]], tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        return "\n".join(message["content"] for message in messages) + "\n"
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise RequestError(
            f"the model's chat template rejects messages of the calibration file: {error}",
            "Alternate user and assistant roles, beginning with user, or give plain text.",
        ) from error


def _windows(stream: list[int], width: int, first: list[int]) -> tuple[tuple[int, ...], ...]:
    """Full windows, and a last partial one of at least an eighth of `width` or without others."""
    parts = [stream[i : i + width] for i in range(0, len(stream), width)]
    return tuple(
        tuple(first + part) for part in parts if len(part) >= max(2, width // 8) or len(parts) == 1
    )
