"""Text to token ids and back, as the checkpoint's own `tokenizer.json` says it.

Knows tokens, their bytes, and which of them are special; carries the chat template that stands in
the same directory. Knows nothing of models, sampling or streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers

from edgespec.errors import BundleError, RequestError
from edgespec.prompts import Message
from edgespec.runtime.template import COPY_AGAIN, ChatTemplate, NoTemplate, read_template, read_text

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
ANCHOR = "a"


class Tokenizer:
    """The tokenizer of one directory: ids, text, and the chat template."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._special_ids = {token.content: token_id for token_id, token in added if token.special}
        self._specials = frozenset(self._special_ids.values())
        self._decoder_steps = frozenset(_decoder_steps(tokenizer))
        self._template = template or NoTemplate()

    @classmethod
    def open(cls, directory: Path) -> Tokenizer:
        """Read `tokenizer.json` and the chat template of a directory; see `read_template` for the
        files that hold one.

        Raises BundleError where the files are missing or damaged. A missing template is no fault
        until one is wanted.
        """
        return cls(_read_tokenizer(directory / "tokenizer.json"), read_template(directory))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, enable_thinking: bool
    ) -> str:
        """The prompt that the chat template makes of a conversation. Raises RequestError."""
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    def knows_thinking(self) -> bool:
        """Whether the chat template has a thinking mode; False where it cannot be read."""
        return self._template.knows_thinking()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of a text. A chat template writes its special tokens itself; plain text wants
        `add_special_tokens`."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD, and ids outside the vocabulary
        nothing."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """The id of a token, such as `<|im_end|>`, or None."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token(self, token_id: int) -> str | None:
        """The token of an id, as it stands in the vocabulary, or None."""
        found: str | None = self._tokenizer.id_to_token(token_id)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text, which may be half a character; none for an id
        outside.

        A token that begins a word has its space, even where a decoder drops it from the very first
        word of a text.
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
        return token_id in self._specials

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is one byte by its name, `<0xNN>`, and not those six characters."""
        return (
            "ByteFallback" in self._decoder_steps
            and BYTE_TOKEN.fullmatch(self.token(token_id) or "") is not None
        )

    def split_stops(self, stops: Sequence[str]) -> tuple[frozenset[int], tuple[str, ...]]:
        """Stops that are one special token, as ids, and the others, as texts: special tokens leave
        no text to search.

        Raises RequestError for a stop that has a special token among other words: it would never be
        found.
        """
        ids = frozenset(self._special_ids[stop] for stop in stops if stop in self._special_ids)
        texts = tuple(dict.fromkeys(stop for stop in stops if stop not in self._special_ids))
        for stop in texts:
            if inside := [token for token in self._special_ids if token and token in stop]:
                token = max(inside, key=len)
                raise RequestError(
                    f"The stop {stop!r:.80} holds the special token {token!r}, which leaves no text"
                    " to be found.",
                    f'Stop at the token itself: "stop": {json.dumps([token], ensure_ascii=False)}.',
                )
        return ids, texts


def _decoder_steps(tokenizer: tokenizers.Tokenizer) -> Iterator[str]:
    """The types in the decoder of tokenizer.json, those of a sequence one by one."""
    waiting = [] if tokenizer.decoder is None else [json.loads(tokenizer.decoder.__getstate__())]
    while waiting:
        step = waiting.pop()
        yield step["type"]
        waiting += step.get("decoders", [])


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for the 256 bytes: printable ones of Latin-1 stand for themselves, others
    from U+0100 on."""
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


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    text = read_text(path)
    if text is None:
        raise BundleError(
            f"{path.parent} has no {path.name}.",
            "Copy tokenizer.json from the model's checkpoint; where it has none, save it once with"
            " transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY).",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises Exception itself, and nothing narrower
        raise BundleError(f"{path} is damaged: {error}.", COPY_AGAIN) from error
    # A prompt is never cut or filled up behind the user's back, whatever the file says.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
