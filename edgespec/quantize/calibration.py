"""Texts to calibrate with, cut into windows of tokens, and the last part of them held back for the
check.

Knows files of text and JSONL and the names of two hub datasets. Knows no model; tokens come from a
tokenizer that is given.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import EnvironmentProblem, MissingDependency, RequestError

SHIPPED = Path(__file__).with_name("calibration.txt")
# The mirrored tool's names -> repository, configuration, column
HUB = {
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "article"),
    "wikitext": ("Salesforce/wikitext", "wikitext-2-raw-v1", "text"),
}
MIN_TOKENS = 64
MAX_HELD_OUT = 512  # tokens
_WANTED = (
    'Each line is an object with "messages", "text" or "turns"; any other file is read as plain'
    " text."
)

Record = str | list[dict[str, str]]  # a text, or messages for the chat template


@dataclass(frozen=True, slots=True)
class Texts:
    records: tuple[Record, ...]
    name: str  # for reports: a file's name, a dataset's, or "shipped"
    sha256: str


@dataclass(frozen=True, slots=True)
class Windows:
    """Token ids; no token of `held_out` is in `calibration`."""

    calibration: tuple[tuple[int, ...], ...]
    held_out: tuple[tuple[int, ...], ...]


def read_texts(source: str | None, num_samples: int) -> Texts:
    """The shipped text, a local file, or a hub dataset. Raises RequestError for what cannot be
    used."""
    if source is None:
        return _from_bytes(SHIPPED.read_bytes(), "shipped", SHIPPED)
    path = Path(source)
    if path.is_file():
        return _from_bytes(path.read_bytes(), path.name, path)
    if path.exists():
        raise RequestError(f"{path} is no file.", "Give a text or JSONL file to --calib-data.")
    if source in HUB:
        return _from_hub(source, num_samples)
    raise RequestError(
        f"there is no calibration file {source!r}.",
        f"Give a text or JSONL file, one of the hub's datasets {', '.join(HUB)}, or nothing for the"
        " shipped text.",
    )


def _from_bytes(data: bytes, name: str, path: Path) -> Texts:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise RequestError(
            f"{path} is not UTF-8 (line {line}).", "Convert it: iconv -f latin1 -t utf-8."
        ) from error
    if not text.strip():
        raise RequestError(
            f"{path} is empty.", "Give a file with some pages of text that the model will meet."
        )
    is_json = path.suffix in (".jsonl", ".json") or text.lstrip().startswith('{"')
    records = _records(text, path) if is_json else (text,)
    return Texts(records, name, hashlib.sha256(data).hexdigest())


def _records(text: str, path: Path) -> tuple[Record, ...]:
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return tuple(_record(line, f"{path}, line {number}") for number, line in lines)


def _record(line: str, where: str) -> Record:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{where} is not JSON: {error}.", _WANTED) from error
    if not isinstance(value, dict):
        raise RequestError(f"{where} is no object.", _WANTED)
    if isinstance(value.get("text"), str):
        return str(value["text"])
    turns = value.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return [
            {"role": "user" if i % 2 == 0 else "assistant", "content": turn}
            for i, turn in enumerate(turns)
        ]
    messages = value.get("messages", value.get("conversations"))
    if (
        isinstance(messages, list)
        and messages
        and all(_is_message(message) for message in messages)
    ):
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    raise RequestError(
        f"{where} has none of messages (with role and content), text and turns.", _WANTED
    )


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )


def _from_hub(name: str, num_samples: int) -> Texts:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingDependency(
            f"the dataset {name} of the hub needs the package datasets, which is not installed.",
            "pip install datasets, or give a local file to --calib-data.",
        ) from error
    repository, configuration, column = HUB[name]
    try:
        rows = load_dataset(repository, configuration, split="train", streaming=True)
        texts = tuple(
            row[column]
            for row, _ in zip(rows, range(4 * num_samples), strict=False)
            if row[column].strip()
        )
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise EnvironmentProblem(
            f"the dataset {name} could not be had from the hub: {reason}",
            "Check the network, give a local file to --calib-data, or leave it out for the shipped"
            " text.",
        ) from error
    return Texts(texts, name, hashlib.sha256("\0".join(texts).encode()).hexdigest())


def cut(texts: Texts, tokenizer: Any, num_samples: int, seq_len: int) -> Windows:
    """All records as one stream of tokens; a fifth of it at the end (512 tokens at most) is held
    out.

    Each window begins with the model's own first token, where it has one. Raises RequestError for
    too little text.
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
            "Give some pages of text, or leave --calib-data out for the shipped text.",
        )
    held = min(len(stream) // 5, MAX_HELD_OUT)
    width = seq_len - len(first)
    head, tail = stream[:-held], stream[-held:]
    windows = _windows(head, width, first)
    full = tuple(
        window for window in windows if len(window) == len(windows[0])
    )  # AWQ weighs each batch alike
    return Windows(full[:num_samples], _windows(tail, width, first))


def _chat(messages: list[dict[str, str]], tokenizer: Any) -> str:
    if tokenizer.chat_template is None:
        return "\n".join(message["content"] for message in messages) + "\n"
    import jinja2

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise RequestError(
            f"the model's chat template refuses messages of the calibration file: {error}",
            "Let roles alternate from the user's on, or give plain texts.",
        ) from error


def _windows(stream: list[int], width: int, first: list[int]) -> tuple[tuple[int, ...], ...]:
    """Full windows; a last part of at least an eighth counts too, and so does a lone one."""
    parts = [stream[i : i + width] for i in range(0, len(stream), width)]
    return tuple(
        tuple(first + part) for part in parts if len(part) >= max(2, width // 8) or len(parts) == 1
    )
