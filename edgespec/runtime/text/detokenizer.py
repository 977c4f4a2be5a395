"""Incremental detokenization: emits text as soon as it is final, and ends before a stop string.

Knows characters of several tokens, and stop strings that begin in one token and end in another.
Knows nothing of models, nor of stop ids, which the session checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class TextStream:
    """Converts ids to text deltas; their concatenation is `decode` of all ids up to a stop string.

    A delta contains neither an incomplete character nor text that is or may become part of a stop
    string. The text is searched after each push and ends before the match that begins first. The
    total time is linear in the length of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, stop: Sequence[str] = ()) -> None:
        self._decoding = _Decoding(tokenizer)
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""  # the longest suffix of the text that is a prefix of a stop string
        self.stopped = False  # whether a stop string is complete

    def push(self, token_id: int, *, searching: bool = True) -> str:
        """Returns the text that this id makes final; empty once `stopped`. What comes before it is
        `searching` is part of no stop string."""
        if self.stopped:
            return ""
        text = self._decoding.push(token_id)
        return self._final(text) if searching else text

    def flush(self) -> str:
        """Returns the text still held back; an incomplete character becomes U+FFFD.

        Call it at the end. A second call returns nothing.
        """
        if self.stopped:
            return ""
        text = self._final(self._decoding.flush())
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _final(self, piece: str) -> str:
        if not self._matchers:
            return piece
        text = self._held + piece
        ends = [(matcher, matcher.feed(piece)) for matcher in self._matchers]
        starts = [
            len(self._held) + end - len(matcher.stop) for matcher, end in ends if end is not None
        ]
        if starts:
            self.stopped = True
            return text[: min(starts)]
        num_held = max(matcher.num_matched for matcher in self._matchers)
        num_final = len(text) - num_held
        self._held = text[num_final:]
        return text[:num_final]


class _Matcher:
    """Finds one stop string in a text that comes in pieces (Knuth, Morris and Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        assert stop, "prompts.checks refuses an empty stop string"
        self.stop = stop
        self.num_matched = 0  # characters of `stop` at the end of the text so far
        self._borders = [0]  # of stop[:n + 1]: the longest proper prefix that is also a suffix
        for char in stop[1:]:
            self._borders.append(self._next(self._borders[-1], char))

    def feed(self, piece: str) -> int | None:
        """Returns the end of the first match in `piece`, or None. Do not call it after a match."""
        for index, char in enumerate(piece):
            self.num_matched = self._next(self.num_matched, char)
            if self.num_matched == len(self.stop):
                return index + 1
        return None

    def _next(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._borders[num_matched - 1]
        return num_matched + (self.stop[num_matched] == char)


class _Decoding:
    """Converts ids to deltas of complete characters; their concatenation is `decode` of all ids.

    `tokenizers.decoders.DecodeStream` does not serve: it raises if invalid bytes follow valid ones
    in a byte-fallback vocabulary, and cannot be flushed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Ids since the delta before last: decoders treat the first id differently (they drop a
        # leading space), so a delta is what the new ids add to a text that begins earlier
        self._window: list[int] = []
        self._num_emitted = 0  # ids at the start of the window whose text was emitted
        self._emitted = ""  # their text

    def push(self, token_id: int) -> str:
        if self._tokenizer.token(token_id) is None or self._tokenizer.is_special(token_id):
            return ""  # decode omits it as well
        if self._tokenizer.joins_bytes and len(self._window) == self._num_emitted:
            text = self._tokenizer.decode([token_id])
            if REPLACEMENT not in text:  # whole characters, whatever stands around them
                self._window, self._num_emitted, self._emitted = [token_id], 1, text
                return text
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""  # a later byte can still make the sequence of bytes invalid
        text = self._tokenizer.decode(self._window)
        if text.endswith(REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        return self._emit(self._tokenizer.decode(self._window))

    def _emit(self, text: str) -> str:
        delta = text[len(self._emitted) :]
        if delta:
            self._window = self._window[self._num_emitted :]
            self._num_emitted = len(self._window)
            self._emitted = self._tokenizer.decode(self._window)
        return delta
