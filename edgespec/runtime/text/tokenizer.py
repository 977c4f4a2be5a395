"""The tokenizer of a checkpoint, from its `tokenizer.json`.

Knows tokens, their bytes, which of them are special, and the chat template in the same directory.
Knows nothing of models, sampling or streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from edgespec.errors import RequestError
from edgespec.prompts import Message
from edgespec.prompts.rendering import DEFAULT_RENDERING, Rendering
from edgespec.prompts.template import ChatTemplate, NoTemplate, read_template
from edgespec.prompts.tokenizer_file import (
    chars_per_token,
    check_growth,
    normalizer_growth,
    read_tokenizer,
)
from edgespec.runtime.text.control_tokens import ControlTokens
from edgespec.safe_read.tokenizer import panics_as

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ANCHOR = "a"


class Tokenizer:
    """The tokenizer and chat template of one directory."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added if token.special}
        self._specials = frozenset(self._special_ids.values())
        self._growth = normalizer_growth(tokenizer)
        self._decoder_steps = frozenset(_decoder_steps(tokenizer))
        # Whether a text is the bytes of its tokens, one behind the other
        self.joins_bytes = self._decoder_steps == {"ByteLevel"}
        self._tokens: dict[int, str] = {}  # those that were asked for
        self._texts: dict[tuple[int, bool], str] = {}  # likewise, of one id alone
        self.template = template or NoTemplate()

    @classmethod
    def open(cls, directory: Path) -> Tokenizer:
        """Reads `tokenizer.json` and the chat template (see `read_template`) of a directory.

        Raises BundleError for missing or damaged files; a missing template is not an error.
        """
        return cls(read_tokenizer(directory / "tokenizer.json"), read_template(directory))

    @property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def chars_per_token(self) -> float:
        """How many characters of a text one token stands for at most; infinity without a bound."""
        return chars_per_token(self._tokenizer)

    def to_json(self) -> str:
        """Returns the text of its tokenizer.json."""
        return str(self._tokenizer.to_str())

    def render(self, messages: Sequence[Message], asked: Rendering = DEFAULT_RENDERING) -> str:
        """Returns the prompt of a conversation. Raises RequestError as `ChatTemplate.render`."""
        return self.template.render(messages, asked)

    def has_template(self) -> bool:
        """Returns whether messages can be rendered."""
        return not isinstance(self.template, NoTemplate)

    def knows_thinking(self) -> bool:
        """Returns whether the chat template has a thinking mode; False for an invalid one."""
        return self.template.knows_thinking()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a text.

        Use `add_special_tokens` for plain text; a rendered chat template has its special tokens.
        Raises RequestError for a text that the tokenizer's regular expressions cannot split, and
        for one that its normalizer makes many times as long.
        """
        with panics_as(_cannot_split):
            check_growth(self._tokenizer, text, self._growth)
            # As a batch, which lets other threads run meanwhile
            (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return list(encoded.ids)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """What tells control tokens that are spelled in texts from others."""
        return ControlTokens(self._tokenizer)

    def encode_marked(self, marked: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a text in which `control_tokens` has marked what is to stay text.

        Raises RequestError as `encode`, and for a text that only its control token can stand for.
        """
        with panics_as(_cannot_split):
            check_growth(self._tokenizer, marked, self._growth)
            return self.control_tokens.encode(marked, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of ids. Invalid UTF-8 becomes U+FFFD; unknown ids are omitted."""
        if len(ids) != 1:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        key = ids[0], skip_special_tokens
        text = self._texts.get(key)
        if text is None:
            text = str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
            if text:  # no id that there is not
                self._texts[key] = text
        return text

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token such as `<|im_end|>`, or None."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def token(self, token_id: int) -> str | None:
        """Returns the token of an id as written in the vocabulary, or None."""
        token = self._tokens.get(token_id)
        if token is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is not None:
                self._tokens[token_id] = token
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to the text, perhaps an incomplete character.

        They are empty for an unknown id. A token that begins a word includes its space, which some
        decoders drop at the start of a text.
        """
        token = self.token(token_id)
        if token is None:
            return b""
        if "ByteLevel" in self._decoder_steps:
            return _alphabet_bytes(token)
        if self.is_byte(token_id):
            return bytes.fromhex(token[3:5])
        decoder = self._tokenizer.decoder
        if decoder is None:
            return token.encode()
        text: str = decoder.decode([ANCHOR, token])
        return text.removeprefix(decoder.decode([ANCHOR])).encode()

    def is_special(self, token_id: int) -> bool:
        """Returns whether a token is special."""
        return token_id in self._specials

    def is_byte(self, token_id: int) -> bool:
        """Returns whether a token is a byte `<0xNN>` of a byte-fallback vocabulary."""
        return (
            "ByteFallback" in self._decoder_steps
            and BYTE_TOKEN.fullmatch(self.token(token_id) or "") is not None
        )

    def split_stops(self, stops: Sequence[str]) -> tuple[frozenset[int], tuple[str, ...]]:
        """Returns the ids of stops that are one special token, and the other stops as strings.

        Special tokens produce no text to search. So a stop with a special token and other text
        would never match: it raises RequestError.
        """
        ids = frozenset(self._special_ids[stop] for stop in stops if stop in self._special_ids)
        texts = tuple(dict.fromkeys(stop for stop in stops if stop not in self._special_ids))
        for stop in texts:
            if inside := [token for token in self._special_ids if token and token in stop]:
                token = max(inside, key=len)
                raise RequestError(
                    f"The stop {stop!r:.80} contains the special token {token!r}, which produces no"
                    " text to search.",
                    f'Stop at the token itself: "stop": {json.dumps([token], ensure_ascii=False)}.',
                )
        return ids, texts


def _cannot_split(why: str) -> RequestError:
    message = f"the regular expressions of tokenizer.json cannot split this text: {why}"
    return RequestError(message, "Shorten the text, or break up long runs of one character.")


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """Yields the types of the decoders in tokenizer.json; a sequence yields each of its own."""
    waiting = [] if tokenizer.decoder is None else [json.loads(tokenizer.decoder.__getstate__())]
    while waiting:
        step = waiting.pop()
        yield step["type"]
        waiting += step.get("decoders", [])


def _alphabet() -> dict[str, int]:
    """Returns GPT-2's characters for the 256 bytes.

    Printable characters of Latin-1 represent themselves, other bytes are mapped from U+0100 on.
    """
    letters = {
        chr(byte): byte for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    }
    others = [byte for byte in range(256) if byte not in letters.values()]
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


ALPHABET = _alphabet()


def _alphabet_bytes(token: str) -> bytes:
    if all(letter in ALPHABET for letter in token):
        return bytes(ALPHABET[letter] for letter in token)
    return token.encode()  # an added token is plain text
