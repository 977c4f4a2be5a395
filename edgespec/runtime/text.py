"""Text leaves a stream of ids as early as it is certain, and ends before a stop string.

Knows how decoders hold a character in pieces, and how a stop string may begin in one token and end
in another. Knows nothing of models, and nothing of stopping by id: that is the session's.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.runtime.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class TextStream:
    """Ids in, text out; all deltas together are `decode` of all ids, up to the earliest stop
    string.

    A delta never holds half a character, nor anything that is or may become part of a stop string.
    The text is searched as it stands after each push, and ends before the match that begins first.
    Linear in the length of the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), skip_special_tokens: bool = True
    ) -> None:
        self._decoding = _Decoding(tokenizer, skip_special_tokens)
        self._matchers = [_Matcher(text) for text in stop]
        self._held = ""  # the longest end of the certain text with which a stop string begins
        self.stopped = False  # a stop string is complete

    def push(self, token_id: int) -> str:
        """Text that has become certain with this id; often empty, and always so once `stopped`."""
        return "" if self.stopped else self._certain(self._decoding.push(token_id))

    def flush(self) -> str:
        """The text still held back; half a character comes out as U+FFFD. For the end: a second
        call gives nothing."""
        if self.stopped:
            return ""
        text = self._certain(self._decoding.flush())
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _certain(self, piece: str) -> str:
        text = self._held + piece
        ends = [(matcher, matcher.feed(piece)) for matcher in self._matchers]
        starts = [
            len(self._held) + end - len(matcher.stop) for matcher, end in ends if end is not None
        ]
        if starts:
            self.stopped = True
            return text[: min(starts)]
        num_certain = len(text) - max(
            (matcher.num_matched for matcher in self._matchers), default=0
        )
        self._held = text[num_certain:]
        return text[:num_certain]


class _Matcher:
    """Finds one stop string in a text that comes in pieces, without going back (Knuth, Morris and
    Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        assert stop, "an empty stop string is refused when a request is read"
        self.stop = stop
        self.num_matched = 0  # characters of `stop` with which the text so far ends
        self._borders = [0]  # of stop[:n + 1]: the longest proper beginning that is also its end
        for char in stop[1:]:
            self._borders.append(self._next(self._borders[-1], char))

    def feed(self, piece: str) -> int | None:
        """Where in `piece` the first match ends, None without one; not to be fed after a match."""
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
    """Ids in, whole characters out; all deltas together are `decode` of all ids.

    `tokenizers.decoders.DecodeStream` is not used: it raises where invalid bytes follow valid ones
    in a byte-fallback vocabulary, and has no way to hand out what it still holds.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # Ids since the delta before last: decoders treat the first id apart (a leading space is
        # dropped), so a delta is what the new ids add to a text that begins earlier.
        self._window: list[int] = []
        self._num_emitted = 0  # first ids of the window whose text is out
        self._emitted = ""  # their text

    def push(self, token_id: int) -> str:
        if self._tokenizer.token(token_id) is None or (
            self._skip_special_tokens and self._tokenizer.is_special(token_id)
        ):
            return ""  # decode leaves it out as well
        self._window.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""  # a later byte can still make the whole run of bytes invalid
        text = self._decode()
        if text.endswith(REPLACEMENT):
            return ""
        return self._emit(text)

    def flush(self) -> str:
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
