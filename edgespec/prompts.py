"""What goes in and what comes out: `input.json` to requests, responses to `output.json`.

Knows the keys, their defaults and their limits, and refuses what this version cannot honour. Knows nothing of
tokens, templates or engines: whether a request fits an engine is asked where the engine is.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn, TypeVar

from edgespec.errors import OutputError, RequestError

END_OF_SEQUENCE = "end-of-sequence"
MAX_LENGTH = "max-length"
CANCELLED = "cancelled"
ERROR = "error"

MAX_FILE_BYTES = 64 * 2**20
MAX_BATCH_SIZE = 16
MAX_MESSAGES = 64
MAX_CONTENT_ITEMS = 18
MAX_MESSAGE_BYTES = 128 * 2**10
MAX_COUNT = 2**31 - 1
MAX_SEED = 2**63 - 1

ROLES = ("system", "developer", "user", "assistant", "tool")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; the text items of a content array are joined."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose the next token: `temperature` 0 is greedy, `top_k` 0 is off, no `seed` means that one is drawn."""

    temperature: float = 1.0
    top_p: float = 0.8
    top_k: int = 50
    seed: int | None = None
    max_generate_length: int = 256

    def __post_init__(self) -> None:
        """Raise RequestError for a value that input.json could not hold either."""
        for field in fields(self):
            CHECKS[field.name](getattr(self, field.name), _Place("SamplingParams", field.name))


@dataclass(frozen=True, slots=True)
class Request:
    """One conversation to be continued; `index` is its place in the file."""

    index: int
    messages: tuple[Message, ...]
    sampling: SamplingParams
    disable_spec_decode: bool
    apply_chat_template: bool
    add_generation_prompt: bool
    enable_thinking: bool


@dataclass(frozen=True, slots=True)
class RequestFile:
    """All requests of one `input.json`, in its order."""

    path: Path
    requests: tuple[Request, ...]
    batch_size: int


def read_requests(
    path: str | os.PathLike[str],
    *,
    batch_size: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    max_generate_length: int | None = None,
) -> RequestFile:
    """Read `input.json`; a value given here wins over the file, per-request values included.

    Raises RequestError, naming the place in the file and what to do.
    """
    return parse_requests(
        parse_json(_read_bytes(Path(path)), str(path)),
        str(path),
        batch_size=batch_size,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_generate_length=max_generate_length,
    )


def parse_requests(
    raw: object,
    source: str,
    *,
    batch_size: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    max_generate_length: int | None = None,
) -> RequestFile:
    """Turn the parsed JSON of an input file into requests; `source` is its name in errors. Raises RequestError."""
    given: dict[str, object] = {
        "batch_size": batch_size,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "max_generate_length": max_generate_length,
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    _check_values(overrides, _Place("command line", ""))

    here = _Place(source, "")
    top = _object(raw, here)
    _check_keys(top, TOP_KEYS, REQUEST_KEYS, "in each of the requests", here)
    _check_values(top, here)
    settings = {**DEFAULTS, **top, **overrides}
    items = _list(top.get("requests"), here.key("requests"), "add a non-empty list of requests, each with messages")
    requests = tuple(
        _request(index, item, settings, overrides, here.key("requests").item(index)) for index, item in enumerate(items)
    )
    return RequestFile(path=Path(source), requests=requests, batch_size=_typed(settings["batch_size"], int))


def write_output(
    path: str | os.PathLike[str], input_file: str | os.PathLike[str], responses: list[dict[str, object]]
) -> None:
    """Write `output.json` whole or not at all. Raises OutputError."""
    target = Path(path)
    check_writable(target)
    document = {"input_file": os.fsencode(input_file).decode("utf-8", "replace"), "responses": responses}
    data = (json.dumps(document, indent=4, ensure_ascii=False, allow_nan=False) + "\n").encode()
    try:
        _replace_atomically(_follow_links(target), data)
    except OSError as error:
        raise _cannot_write(target, error) from error


def check_writable(path: str | os.PathLike[str]) -> None:
    """Prove before any work that `output.json` can be written: try, and leave nothing. Raises OutputError."""
    target = Path(path)
    try:
        if target.is_dir():
            raise OutputError(f"{target} is a directory.", "Name a file in it, for example output.json.")
        if target.exists() and not target.is_file():
            raise OutputError(f"{target} is not an ordinary file.", "Name an ordinary file; it is replaced as a whole.")
        if not _follow_links(target).parent.is_dir():
            raise OutputError(
                f"{target} cannot be written: there is no directory {target.parent}.",
                "Create the directory first, or name another path.",
            )
        probe = _temporary_sibling(_follow_links(target))
        probe.open("xb").close()
        probe.unlink()
    except OSError as error:
        raise _cannot_write(target, error) from error


def parse_json(data: bytes, source: str) -> object:
    """Parse JSON from strangers: UTF-8, no duplicate keys, no NaN, bounded depth. Raises RequestError."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _line_and_column(error.object[: error.start])
        raise RequestError(
            f"{source} is not UTF-8: byte 0x{error.object[error.start]:02x} at line {line}, column {column}.",
            "Save the file as UTF-8.",
        ) from error

    def refuse_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in pairs:
            if key in found:
                raise RequestError(
                    f"{source}: the key {_show(key)} stands twice in one object.", "Keep one of the two."
                )
            found[key] = value
        return found

    def refuse_constant(name: str) -> NoReturn:
        raise RequestError(f"{source}: {name} is not JSON, and not a value to work with.", "Write a finite number.")

    try:
        parsed: object = json.loads(text, object_pairs_hook=refuse_duplicates, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        raise RequestError(
            f"{source} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}.",
            "Mend the file there; a missing comma or quote just before is the usual cause.",
        ) from error
    except RecursionError as error:
        raise RequestError(f"{source} is nested too deeply.", "An input file needs five levels.") from error
    except ValueError as error:  # an integer of thousands of digits
        raise RequestError(f"{source} holds a number that is too long: {error}.", "Write a shorter number.") from error
    return parsed


@dataclass(frozen=True, slots=True)
class _Place:
    """Where we are in a file, as errors say it: `input.json: requests[3].messages[0].content`."""

    source: str
    path: str

    def key(self, name: str) -> _Place:
        name = name if len(name) <= 60 and name.isprintable() else _show(name)
        return _Place(self.source, f"{self.path}.{name}" if self.path else name)

    def item(self, index: int) -> _Place:
        return _Place(self.source, f"{self.path}[{index}]")

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise RequestError(f"{self.source}: {self.path} {what}." if self.path else f"{self.source} {what}.", remedy)


def _request(
    index: int, raw: object, settings: Mapping[str, object], overrides: Mapping[str, object], here: _Place
) -> Request:
    own = _object(raw, here)
    _check_keys(own, REQUEST_KEYS, TOP_KEYS, "at the top level of the file", here)
    _check_values(own, here)
    chosen = {**settings, **own, **overrides}
    return Request(
        index=index,
        messages=_messages(own.get("messages"), here.key("messages")),
        sampling=_sampling(chosen),
        disable_spec_decode=_typed(own.get("disable_spec_decode", False), bool),
        apply_chat_template=_typed(chosen["apply_chat_template"], bool),
        add_generation_prompt=_typed(chosen["add_generation_prompt"], bool),
        enable_thinking=_typed(chosen["enable_thinking"], bool),
    )


def _sampling(chosen: Mapping[str, object]) -> SamplingParams:
    seed = chosen["seed"]
    return SamplingParams(
        temperature=float(_typed(chosen["temperature"], (int, float))),
        top_p=float(_typed(chosen["top_p"], (int, float))),
        top_k=_typed(chosen["top_k"], int),
        seed=None if seed is None else _typed(seed, int),
        max_generate_length=_typed(chosen["max_generate_length"], int),
    )


def _messages(raw: object, here: _Place) -> tuple[Message, ...]:
    items = _list(raw, here, 'add a list such as [{"role": "user", "content": "Hello"}]')
    if len(items) > MAX_MESSAGES:
        here.refuse(f"holds {len(items)} messages, and {MAX_MESSAGES} is the limit", "Send fewer messages.")
    return tuple(_message(item, here.item(index)) for index, item in enumerate(items))


def _message(raw: object, here: _Place) -> Message:
    parts = _object(raw, here)
    _check_keys(parts, ("role", "content"), (), "", here)
    role = parts.get("role")
    if not isinstance(role, str) or role not in ROLES:
        # Many chat templates skip a role that they do not know without a word, so the door has to be here.
        here.key("role").refuse(
            f"is {_show(role)}", f"Write one of {', '.join(ROLES)}.{_did_you_mean(role, ROLES, ' Did you mean {}?')}"
        )
    content = _content(parts.get("content"), here.key("content"))
    return Message(role=role, content=content)


def _content(raw: object, here: _Place) -> str:
    if isinstance(raw, str):
        text = raw
    else:
        items = _list(raw, here, 'write a string, or a list such as [{"type": "text", "text": "Hello"}]')
        if len(items) > MAX_CONTENT_ITEMS:
            here.refuse(f"holds {len(items)} items, and {MAX_CONTENT_ITEMS} is the limit", "Join the text items.")
        text = "".join(_content_item(item, here.item(index)) for index, item in enumerate(items))
    size_bytes = _utf8_size(text, here)
    if size_bytes > MAX_MESSAGE_BYTES:
        here.refuse(f"is {size_bytes} bytes of text, and {MAX_MESSAGE_BYTES} is the limit", "Shorten the message.")
    return text


def _content_item(raw: object, here: _Place) -> str:
    parts = _object(raw, here)
    kind = parts.get("type")
    if kind in ("image", "audio", "video"):
        here.refuse(f"is of type {kind}, and this version takes text only", f"Remove the {kind} item.")
    if kind != "text":
        here.key("type").refuse(f"is {_show(kind)}", 'Write {"type": "text", "text": "..."}.')
    _check_keys(parts, ("type", "text"), (), "", here)
    text = parts.get("text")
    if not isinstance(text, str):
        here.key("text").refuse(f"is {_show(text)}, not a string", 'Write {"type": "text", "text": "..."}.')
    return text


def _utf8_size(text: str, here: _Place) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        here.refuse(
            f"holds half of a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start}",
            "Write both halves, or the character itself.",
        )


# --- the table of keys ------------------------------------------------------------------------------------------------

Check = Callable[[object, _Place], None]


def _flag(value: object, here: _Place) -> None:
    if not isinstance(value, bool):
        here.refuse(f"is {_show(value)}, not true or false", "Write true or false, without quotes.")


def _integer(low: int, high: int) -> Check:
    def check(value: object, here: _Place) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            here.refuse(f"is {_show(value)}", f"Write a whole number from {low} to {high}.")

    return check


def _number(is_allowed: Callable[[float], bool], allowed: str) -> Check:
    def check(value: object, here: _Place) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            here.refuse(f"is {_show(value)}, not a number", f"Write {allowed}.")
        if not _is_finite(value) or not is_allowed(value):
            here.refuse(f"is {_show(value)}", f"Write {allowed}.")

    return check


def _seed(value: object, here: _Place) -> None:
    if value is not None:
        _integer(0, MAX_SEED)(value, here)


def _not_yet(reason: str, *neutral: object) -> Check:
    """A key of the mirrored tool that this version cannot honour: fine while it asks for nothing."""

    def check(value: object, here: _Place) -> None:
        if not any(value == item and type(value) is type(item) for item in (None, *neutral)):
            here.refuse(f"is {_show(value)}, and this version cannot honour it: {reason}", "Remove the key.")

    return check


DEFAULTS: dict[str, object] = {
    "batch_size": 1,
    **{field.name: field.default for field in fields(SamplingParams)},
    "apply_chat_template": True,
    "add_generation_prompt": True,
    "enable_thinking": False,
}

CHECKS: dict[str, Check] = {
    "batch_size": _integer(1, MAX_BATCH_SIZE),
    "temperature": _number(lambda x: x >= 0, "a number of 0 or more; 0 is greedy"),
    "top_p": _number(lambda x: 0 < x <= 1, "a number above 0 and up to 1; 1 is off"),
    "top_k": _integer(0, MAX_COUNT),
    "seed": _seed,
    "max_generate_length": _integer(1, MAX_COUNT),
    "apply_chat_template": _flag,
    "add_generation_prompt": _flag,
    "enable_thinking": _flag,
    "disable_spec_decode": _flag,
    "num_logprobs": _not_yet("log-probabilities are not written to the output", 0),
    "logit_bias": _not_yet("logits are not biased", {}),
    "stop": _not_yet("generation stops at the end-of-sequence token or at the length limit only", "", []),
    "lora_name": _not_yet("there are no LoRA adapters", ""),
    "available_lora_weights": _not_yet("there are no LoRA adapters", {}),
    "save_system_prompt_kv_cache": _not_yet("prompts share no KV cache", False),
    "streaming": _not_yet("it belongs to audio output", False, {}),
    "talker_*": _not_yet("it belongs to audio output"),
}

TOP_KEYS = (*DEFAULTS, "num_logprobs", "logit_bias", "available_lora_weights", "streaming", "talker_*", "requests")
REQUEST_KEYS = (
    "messages",
    *(field.name for field in fields(SamplingParams)),
    "disable_spec_decode",
    "num_logprobs",
    "logit_bias",
    "stop",
    "lora_name",
    "save_system_prompt_kv_cache",
)


def _check_values(fields: Mapping[str, object], here: _Place) -> None:
    for key, value in fields.items():
        check = CHECKS.get(_row(key))
        if check is not None:
            check(value, here.key(key))


def _check_keys(
    fields: Mapping[str, object], known: tuple[str, ...], elsewhere: tuple[str, ...], where: str, here: _Place
) -> None:
    for key in fields:
        if _row(key) in known:
            continue
        if _row(key) in elsewhere:
            here.key(key).refuse("is in the wrong place", f'"{key}" belongs {where}.')
        names = [name for name in known if name != "talker_*"]
        remedy = _did_you_mean(key, names, "Did you mean {}? If not, remove the key.")
        here.key(key).refuse("is not a known key", remedy or f"Remove it; the known keys are {', '.join(names)}.")


def _row(key: str) -> str:
    return "talker_*" if key.startswith("talker_") else key


# --- small helpers ----------------------------------------------------------------------------------------------------


def _object(raw: object, here: _Place) -> dict[str, object]:
    if not isinstance(raw, dict):
        here.refuse(f"is {_show(raw)}, not an object", "Write an object: {...}.")
    return raw


def _list(raw: object, here: _Place, remedy: str) -> list[object]:
    remedy = f"{remedy[0].upper()}{remedy[1:]}."
    if raw is None:
        here.refuse("is missing", remedy)
    if not isinstance(raw, list):
        here.refuse(f"is {_show(raw)}, not a list", remedy)
    if not raw:
        here.refuse("is empty", remedy)
    return raw


def _typed(value: object, kind: type[T] | tuple[type[T], ...]) -> T:
    assert isinstance(value, kind)
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _show(value: object) -> str:
    if isinstance(value, dict | list) and value:
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _did_you_mean(word: object, known: Iterable[str], sentence: str) -> str:
    close = difflib.get_close_matches(str(word)[:80], list(known), n=1)
    return sentence.format(f'"{close[0]}"') if close else ""


def _line_and_column(before: bytes) -> tuple[int, int]:
    """Line and column, counted from 1, of the byte that follows `before` (which is valid UTF-8)."""
    last_line = before.rpartition(b"\n")[2]
    return before.count(b"\n") + 1, len(last_line.decode("utf-8-sig")) + 1


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror}.", "Pass the path of an input.json that exists and is readable."
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise RequestError(f"{path} is larger than {MAX_FILE_BYTES} bytes.", "Split it into several input files.")
    return data


def _replace_atomically(path: Path, data: bytes) -> None:
    temporary = _temporary_sibling(path)
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary_sibling(path: Path) -> Path:
    return path.parent / f".edgespec-{secrets.token_hex(8)}.tmp"


def _follow_links(path: Path) -> Path:
    """The file that a symbolic link means: replacing must not turn the link into a file."""
    return Path(os.path.realpath(path))


def _cannot_write(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path} cannot be written: {error.strerror}.", "Free space or permissions there, or name another path."
    )
