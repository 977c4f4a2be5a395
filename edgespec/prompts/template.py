"""Renders a conversation with the checkpoint's chat template, in Jinja or as a flattened one.

Knows the files of chat templates. A template runs in a `sandbox`. Knows nothing of token
ids.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime

from edgespec.errors import BundleError, RequestError
from edgespec.prompts.named_templates import NAMED_TEMPLATES
from edgespec.prompts.places import did_you_mean
from edgespec.prompts.rendering import DEFAULT_RENDERING, THINKING, Rendering
from edgespec.prompts.sandbox import sandbox
from edgespec.prompts.types import Message
from edgespec.safe_read.regular import read_regular

JINJA_TEMPLATE = "chat_template.jinja"
FLAT_TEMPLATE = "processed_chat_template.json"
OLDER_TEMPLATE = "chat_template.json"  # of processors: the source under one key
IMAGE_WORDS = ("image", "image_url")  # one of which a template compares an item's type with
SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

COPY_AGAIN = "Copy it again from the model's checkpoint."
WRITE_IT_YOURSELF = (
    'set "apply_chat_template": false (with `prompt`: `no_chat_template`) and write the complete'
    " prompt yourself."
)


class ChatTemplate(Protocol):
    """Renders a conversation as one prompt, with the model's own marks where its images stand."""

    @property
    def has_special_tokens(self) -> bool:
        """Whether the prompt begins with its special tokens, so that the tokenizer adds none."""

    def knows_thinking(self) -> bool:
        """Returns whether the template has a thinking mode."""

    def render(self, messages: Sequence[Message], asked: Rendering = DEFAULT_RENDERING) -> str:
        """Returns the prompt. Raises RequestError if the template rejects the messages or flags,
        or knows no images where there are some."""


def read_template(directory: Path) -> ChatTemplate:
    """Returns the chat template of a directory.

    It is in `chat_template.jinja`, `chat_template.json`, `tokenizer_config.json` or, flattened, in
    `processed_chat_template.json`, in this order: the flattened one is derived from Jinja and says
    less. Without a template only rendering raises an error, because plain text needs none. Raises
    BundleError for a damaged file.
    """
    config = read_object(directory / "tokenizer_config.json") or {}
    source, place = _read_source(directory, config)
    if source is not None:
        return JinjaTemplate(source, _special_tokens(config), place)
    flat = read_object(directory / FLAT_TEMPLATE)
    return NoTemplate() if flat is None else FlatTemplate.parse(flat, directory / FLAT_TEMPLATE)


def check_template(directory: Path) -> None:
    """Reads the chat template of a directory and compiles it.

    Raises BundleError for a damaged file, RequestError for invalid syntax, with file and line.
    """
    template = read_template(directory)
    if isinstance(template, JinjaTemplate):
        template.check()


def named_template(name: str, directory: Path) -> ChatTemplate:
    """Returns a template of NAMED_TEMPLATES, or the one of a file in Jinja, with the special tokens
    of a model's directory. Raises RequestError for a name that is neither, BundleError for an
    unreadable file."""
    source = NAMED_TEMPLATES.get(name) or read_text(Path(name).expanduser())
    if source is None:
        near = did_you_mean(name, NAMED_TEMPLATES, "Did you mean {}? ")
        raise RequestError(
            f"There is no chat template {name!r:.80}, and no such file.",
            f"{near}Names: {', '.join(NAMED_TEMPLATES)}.",
        )
    config = read_object(directory / "tokenizer_config.json") or {}
    return JinjaTemplate(source, _special_tokens(config), name)


class RawTemplate:
    """No template on purpose: the messages as they are, joined by line breaks."""

    has_special_tokens = False

    def knows_thinking(self) -> bool:
        """Returns False."""
        return False

    def render(self, messages: Sequence[Message], asked: Rendering = DEFAULT_RENDERING) -> str:
        """Returns the messages' texts. Raises RequestError for a thinking mode, tools or images."""
        if asked.enable_thinking:
            raise _no_thinking_mode()
        _refuse_tools(messages, asked)
        if _has_images(messages):
            raise _knows_no_images()
        return "\n".join(message.content for message in messages)


class NoTemplate:
    """A missing chat template."""

    has_special_tokens = True

    def knows_thinking(self) -> bool:
        """Returns False."""
        return False

    def render(self, messages: Sequence[Message], asked: Rendering = DEFAULT_RENDERING) -> str:
        """Raises RequestError."""
        remedy = f"Name one with `chat_template` ({', '.join(NAMED_TEMPLATES)}), or"
        raise RequestError("This model has no chat template.", f"{remedy} {WRITE_IT_YOURSELF}")


# --- the flattened template


@dataclass(frozen=True, slots=True)
class FlatTemplate:
    """The texts around each message. A system message of the request replaces the default one."""

    has_special_tokens: ClassVar[bool] = True

    roles: Mapping[str, tuple[str, str]]  # prefix and suffix by role
    default_system_prompt: str
    generation_prompt: str | None
    generation_prompt_thinking: str | None
    image: str | None = None  # what stands in the place of an image

    @classmethod
    def parse(cls, raw: Mapping[str, object], path: Path) -> FlatTemplate:
        """Parses the JSON of a flattened template. Unknown keys are ignored: exporters write more.

        Raises BundleError for invalid values.
        """
        if "roles" not in raw:
            raise BundleError(
                f"{path} has no roles.",
                f"{COPY_AGAIN} It has the texts around each role's messages.",
            )
        roles = {
            role: _object(parts, f"{path}: roles.{role}")
            for role, parts in _object(raw["roles"], path).items()
        }
        return cls(
            roles={role: _around(parts, f"{path}: roles.{role}") for role, parts in roles.items()},
            default_system_prompt=_text(raw, "default_system_prompt", path) or "",
            generation_prompt=_text(raw, "generation_prompt", path),
            generation_prompt_thinking=_text(raw, "generation_prompt_thinking", path),
            image=_image_format(raw, path),
        )

    def render(self, messages: Sequence[Message], asked: Rendering = DEFAULT_RENDERING) -> str:
        """Returns the prompt. Raises RequestError for an unknown role or a missing mode."""
        opening = self._opening(asked.enable_thinking)
        _refuse_tools(messages, asked)
        if asked.add_generation_prompt and opening is None:
            problem = f"The model's chat template ({FLAT_TEMPLATE}) has no generation_prompt."
            raise RequestError(
                problem, f'Set "add_generation_prompt": false, or {WRITE_IT_YOURSELF}'
            )
        given = any(message.role == "system" for message in messages)
        if self.default_system_prompt and not given:
            messages = [Message("system", self.default_system_prompt), *messages]
        text = "".join(map(self._turn, messages))
        return text + (opening or "") if asked.add_generation_prompt else text

    def knows_thinking(self) -> bool:
        """Returns whether there is a generation prompt for the thinking mode."""
        return self.generation_prompt_thinking is not None

    def _opening(self, enable_thinking: bool) -> str | None:
        if not enable_thinking:
            return self.generation_prompt
        if self.generation_prompt_thinking is None:
            raise _no_thinking_mode()
        return self.generation_prompt_thinking

    def _turn(self, message: Message) -> str:
        if message.role not in self.roles:
            problem = f"The model's chat template ({FLAT_TEMPLATE}) has no role {message.role!r}."
            known = ", ".join(self.roles) or "none"
            raise RequestError(
                problem, f"Its roles: {known}. Use one of these, or {WRITE_IT_YOURSELF}"
            )
        prefix, suffix = self.roles[message.role]
        return f"{prefix}{self._content(message)}{suffix}"

    def _content(self, message: Message) -> str:
        if not message.parts:
            return message.content
        if self.image is None:
            raise _knows_no_images()
        return "".join(part if isinstance(part, str) else self.image for part in message.parts)


def _around(parts: Mapping[str, object], where: str) -> tuple[str, str]:
    return _text(parts, "prefix", where) or "", _text(parts, "suffix", where) or ""


def _image_format(raw: Mapping[str, object], path: Path) -> str | None:
    types = _object(raw.get("content_types") or {}, f"{path}: content_types")
    image = _object(types.get("image") or {}, f"{path}: content_types.image")
    return _text(image, "format", f"{path}: content_types.image")


def _text(raw: Mapping[str, object], key: str, where: object) -> str | None:
    text = raw.get(key)
    if text is None:
        return None
    if not isinstance(text, str):
        raise BundleError(f"{where}: {key} is {text!r:.60}, not a string.", COPY_AGAIN)
    size_bytes = len(text.encode(errors="surrogatepass"))
    if size_bytes > MAX_TEMPLATE_BYTES:
        size = f"{size_bytes} bytes, and {MAX_TEMPLATE_BYTES} is the limit"
        raise BundleError(f"{where}: {key} is {size}.", COPY_AGAIN)
    return text


def _object(raw: object, where: object) -> dict[str, object]:
    if not isinstance(raw, dict):
        raise BundleError(f"{where}: {raw!r:.60} is not an object.", COPY_AGAIN)
    return raw


# --- the Jinja template

MAX_TEMPLATE_BYTES = 2**16  # twice the longest ones in use
MAX_REASON_CHARS = 500
MAX_PROMPT_CHARS = 2**20  # in addition to the allowance for the messages
CHARS_PER_MESSAGES = 8  # allowance: times the size of the messages

# The errors that an expression in a template can raise, Jinja's own included
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class JinjaTemplate:
    """A chat template as transformers runs it, with prompts of bounded size.

    It is compiled at its first use. `place` names its file in errors.
    """

    has_special_tokens = True

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], place: str = JINJA_TEMPLATE
    ) -> None:
        self._source, self._place = source, place
        self._special_tokens = dict(special_tokens)
        self._sandbox = sandbox()
        self._compiled: jinja2.Template | None = None
        self._reads: set[str] = set()  # the variables that it reads
        self._words: set[str] = set()  # its texts, and the attributes that it reads
        self._lock = threading.Lock()  # it is compiled once

    def render(self, messages: Sequence[Message], asked: Rendering = DEFAULT_RENDERING) -> str:
        """Returns the prompt.

        Raises RequestError for an invalid template, for messages that it rejects, and for images,
        tools, a thinking mode and further variables where it never asks for them.
        """
        turns = [{"role": m.role, "content": _items(m), **reasoned(m.more)} for m in messages]
        with self._lock:
            template = self._compiled or self._compile()
        if asked.enable_thinking and THINKING not in self._reads:
            raise _no_thinking_mode()
        if (asked.tools and "tools" not in self._reads) or (
            any(m.tool_calls for m in messages) and "tool_calls" not in self._words
        ):
            raise _knows_no_tools()
        if _has_images(messages) and self._words.isdisjoint(IMAGE_WORDS):
            raise _knows_no_images()
        given = {
            "documents": None,
            **self._variables(asked),
            "messages": turns,
            "tools": list(asked.tools) if asked.tools else None,
            "add_generation_prompt": asked.add_generation_prompt,
            "enable_thinking": asked.enable_thinking,
        }
        limit = MAX_PROMPT_CHARS + CHARS_PER_MESSAGES * len(str((turns, asked.tools)))
        try:
            text = _joined(template.generate(**given, **self._special_tokens), limit)
            text.encode()  # raises for an unpaired surrogate
        except TEMPLATE_FAULTS as error:
            raise RequestError(
                f"The chat template rejects these messages: {_reason(error)}.",
                f"Change the messages, or {WRITE_IT_YOURSELF}",
            ) from error
        return text

    def _variables(self, asked: Rendering) -> Mapping[str, Any]:
        """The further variables. Raises RequestError for one that the template never reads, or that
        is not the request's to say."""
        taken = {"messages", "tools", "add_generation_prompt", *SPECIAL_TOKENS}
        known = self._reads - taken - {*self._sandbox.globals}
        for name in asked.variables:
            if name not in known:
                near = did_you_mean(name, known, "Did you mean {}? ")
                raise RequestError(
                    f"The model's chat template reads no variable {name!r:.80} of"
                    " chat_template_kwargs.",
                    f"{near}It reads: {', '.join(sorted(known)) or 'none'}.",
                    param="chat_template_kwargs",
                )
        return asked.variables

    def knows_thinking(self) -> bool:
        """Returns whether the template reads `enable_thinking`; False for an invalid template."""
        with self._lock, suppress(RequestError):
            _ = self._compiled or self._compile()
        return THINKING in self._reads

    def check(self) -> None:
        """Compiles the template. Raises RequestError for one that is invalid."""
        with self._lock:
            _ = self._compiled or self._compile()

    def _compile(self) -> jinja2.Template:
        size_bytes = len(self._source.encode(errors="surrogatepass"))
        if size_bytes > MAX_TEMPLATE_BYTES:
            size = f"{size_bytes} bytes, and {MAX_TEMPLATE_BYTES} is the limit"
            message = f"The chat template in {self._place} is {size}."
            raise RequestError(message, _sentence(WRITE_IT_YOURSELF))
        try:
            tree = self._sandbox.parse(self._source)
            self._reads = jinja2.meta.find_undeclared_variables(tree)
            # A template without images would print the list of items, or the text alone; one
            # without tools would leave the calls out
            words = [node.value for node in tree.find_all(jinja2.nodes.Const)]
            words += [node.attr for node in tree.find_all(jinja2.nodes.Getattr)]
            self._words = {word for word in words if isinstance(word, str)}
            self._compiled = self._sandbox.from_string(tree)
        except TEMPLATE_FAULTS as error:
            raise RequestError(
                f"The chat template in {self._place} cannot be read: {_reason(error)}.",
                f"Fix it in the checkpoint, then export and build again, or {WRITE_IT_YOURSELF}",
            ) from error
        return self._compiled


def _joined(pieces: Iterable[str], limit: int) -> str:
    """The text of a rendering. Raises jinja2.TemplateRuntimeError above `limit` characters."""
    written: list[str] = []
    left = limit
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise jinja2.TemplateRuntimeError(f"it makes a prompt of more than {limit} characters")
        written.append(piece)
    return "".join(written)


def _items(message: Message) -> str | list[dict[str, str]]:
    """The content of a message as templates take it: a text, or items with their types."""
    if not message.parts:
        return message.content
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in message.parts
    ]


def reasoned(more: dict[str, Any]) -> dict[str, Any]:
    """What a message has beside role and content, what was thought under both names in use."""
    thought = more.get("reasoning_content")
    return more if thought is None else {**more, "reasoning": thought}


def _has_images(messages: Sequence[Message]) -> bool:
    return any(message.parts for message in messages)


def _knows_no_images() -> RequestError:
    return RequestError(
        "The model's chat template knows no images.",
        "Send text alone, or take a vision-language model (docs/images.md).",
    )


def _refuse_tools(messages: Sequence[Message], asked: Rendering) -> None:
    """Of a template that only puts texts around messages."""
    if asked.tools or any(message.tool_calls for message in messages):
        raise _knows_no_tools()
    if asked.variables:
        message = "The model's chat template reads no variables, and chat_template_kwargs has some."
        raise RequestError(message, "Remove them.", param="chat_template_kwargs")


def _knows_no_tools() -> RequestError:
    return RequestError(
        "The model's chat template knows no tools.",
        "Remove the tools and their calls, or take a model that was trained with tools.",
        param="tools",
    )


def _no_thinking_mode() -> RequestError:
    return RequestError(
        "The model's chat template has no thinking mode.",
        'Remove "enable_thinking" or set it false.',
    )


def _reason(error: BaseException) -> str:
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    text = str(error)
    if len(text) > MAX_REASON_CHARS:  # a template can put whatever it made into an error
        text = f"{text[:MAX_REASON_CHARS]} ..."
    return f"{text.rstrip('.') or type(error).__name__}{line}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


# --- files


def _read_source(directory: Path, config: Mapping[str, object]) -> tuple[str | None, str]:
    """The source of the template, and the name of the file that it is in."""
    source, place = read_text(directory / JINJA_TEMPLATE), JINJA_TEMPLATE
    if source is not None:
        return source, place
    older = read_object(directory / OLDER_TEMPLATE) or {}
    place = OLDER_TEMPLATE if older.get("chat_template") is not None else "tokenizer_config.json"
    template = older.get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        named = {
            item.get("name"): item.get("template") for item in template if isinstance(item, dict)
        }
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise BundleError(
            f"{directory / place}: chat_template is neither a string nor a list of named"
            " templates.",
            COPY_AGAIN,
        )
    return template, place


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Returns the special tokens that are set. null stays undefined, which a template omits."""
    texts: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def read_object(path: Path) -> dict[str, object] | None:
    """Returns the JSON object in a file; None if there is no file. Raises BundleError."""
    text = read_text(path)
    if text is None:
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}.", COPY_AGAIN) from error
    if not isinstance(values, dict):
        raise BundleError(f"{path} is not a JSON object.", COPY_AGAIN)
    return values


def read_text(path: Path) -> str | None:
    """Returns the text of a file; None if there is no file. Raises BundleError."""
    try:
        return read_regular(path).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise BundleError(f"{path} cannot be read: {reason}.", COPY_AGAIN) from error
