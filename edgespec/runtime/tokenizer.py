"""Text to token ids and back, as the checkpoint's own files say it: `tokenizer.json` and the chat template.

Knows tokenizers, templates and how text leaves a stream of ids. Knows nothing of models, sampling or stopping, and
never runs code from a checkpoint: a template is a stranger's program and runs in Jinja's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgespec.errors import BundleError, RequestError
from edgespec.prompts import Message

MAX_TEMPLATE_BYTES = 2**20

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# What a template can raise beside Jinja's own errors: whatever an expression in it can.
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer of one directory: ids, text, and the chat template."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, *, chat_template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._chat_template = chat_template
        self._compiled: jinja2.Template | None = None
        self.special_tokens = dict(special_tokens)

    @classmethod
    def open(cls, directory: Path) -> Tokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template of a directory.

        Raises BundleError where the files are missing or damaged. A missing template is no fault until one is wanted.
        """
        config = _read_config(directory / "tokenizer_config.json")
        return cls(
            _read_tokenizer(directory / "tokenizer.json"),
            chat_template=_read_template(directory, config),
            special_tokens=_special_tokens(config),
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text. A chat template writes its special tokens itself; plain text wants `add_special_tokens`."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, and ids outside the vocabulary nothing."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """The id of a token, such as `<|im_end|>`, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token(self, token_id: int) -> str | None:
        """The token of an id, as it stands in the vocabulary, or None."""
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool, enable_thinking: bool) -> str:
        """The prompt that the chat template makes of a conversation. Raises RequestError."""
        template = self._template()
        try:
            return template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                enable_thinking=enable_thinking,
                **self.special_tokens,
            )
        except TEMPLATE_FAULTS as error:
            raise RequestError(
                f"The chat template refuses these messages: {_reason(error)}.",
                'Change the messages, or set "apply_chat_template": false and write the whole prompt yourself.',
            ) from error

    def _template(self) -> jinja2.Template:
        if self._chat_template is None:
            raise RequestError(
                "This model has no chat template.",
                'Set "apply_chat_template": false and write the whole prompt yourself.',
            )
        if self._compiled is None:
            self._compiled = _compile(self._chat_template)
        return self._compiled


class TextStream:
    """Ids in, text out, as early as it is certain; all deltas together are `decode` of all ids.

    A delta never ends inside a character. `tokenizers.decoders.DecodeStream` is not used: it raises where invalid bytes
    follow valid ones in a byte-fallback vocabulary, and has no way to hand out what it still holds.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Ids since the delta before last: decoders treat the first id apart (a leading space is dropped), so a delta
        # is what the new ids add to a text that begins earlier.
        self._window: list[int] = []
        self._num_emitted = 0  # ids at the head of the window whose text is out
        self._emitted = ""  # their text

    def push(self, token_id: int) -> str:
        """Text that has become certain with this id; often empty."""
        token = self._tokenizer.token(token_id)
        if token is None or (self._skip_special_tokens and self._tokenizer.is_special(token_id)):
            return ""  # decode leaves it out as well
        self._window.append(token_id)
        if BYTE_TOKEN.fullmatch(token):
            return ""  # a later byte can still make the whole run of bytes invalid
        text = self._decode()
        if text.endswith(REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The text still held back; half a character comes out as U+FFFD. Call it once, at the end."""
        return self._emit(self._decode())

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _emit(self, text: str) -> str:
        delta = text[len(self._emitted) :]
        if delta:
            self._window = self._window[self._num_emitted :]
            self._num_emitted = len(self._window)
            self._emitted = self._decode()
        return delta


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    text = _read_text(path)
    if text is None:
        raise BundleError(
            f"{path.parent} has no {path.name}.",
            "Copy tokenizer.json from the model's checkpoint; where it has none, save it once with transformers: "
            "AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY).",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises Exception itself, and nothing narrower
        raise BundleError(f"{path} is damaged: {error}.", "Copy it again from the model's checkpoint.") from error
    # A prompt is never cut or filled up behind the user's back, whatever the file says.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_config(path: Path) -> dict[str, object]:
    text = _read_text(path)
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}.", "Copy it again from the model's checkpoint.") from error
    if not isinstance(config, dict):
        raise BundleError(f"{path} is not a JSON object.", "Copy it again from the model's checkpoint.")
    return config


def _read_template(directory: Path, config: Mapping[str, object]) -> str | None:
    template = _read_text(directory / "chat_template.jinja")
    if template is not None:
        return template
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise BundleError(
            f"{directory / 'tokenizer_config.json'}: chat_template is neither a text nor a list of named texts.",
            "Copy it again from the model's checkpoint.",
        )
    return found


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Those that are set. One that is null stays undefined, so that a template prints nothing for it, not `None`."""
    texts: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            texts[name] = text
    return texts


def _read_text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BundleError(f"{path} cannot be read: {error}.", "Copy it again from the model's checkpoint.") from error


# --- the sandbox, as transformers sets it up --------------------------------------------------------------------------


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; rendering writes its body as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    size_bytes = len(source.encode(errors="surrogatepass"))
    if size_bytes > MAX_TEMPLATE_BYTES:
        raise RequestError(
            f"The chat template is {size_bytes} bytes, and {MAX_TEMPLATE_BYTES} is the limit.",
            'Set "apply_chat_template": false and write the whole prompt yourself.',
        )
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[[str], str]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    try:
        return environment.from_string(source)
    except TEMPLATE_FAULTS as error:
        raise RequestError(
            f"The chat template cannot be read: {_reason(error)}.",
            'Mend chat_template.jinja, or set "apply_chat_template": false and write the whole prompt yourself.',
        ) from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, and no model was trained on `\\u003c`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _reason(error: BaseException) -> str:
    line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{str(error).rstrip('.') or type(error).__name__}{line}"
