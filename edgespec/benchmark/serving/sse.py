"""An event stream (Server-Sent Events; HTML standard, 9.2), read strictly: bytes that are no such
stream are an error, where a browser would pass over them.

Knows lines and fields. Knows nothing of what events say.
"""

from __future__ import annotations

from collections.abc import Iterator

FIELDS = ("data", "event", "id", "retry")
MAX_EVENT_BYTES = 2**20


class StreamError(ValueError):
    """Bytes that are no event stream."""


class EventReader:
    """Takes bytes as they arrive, and gives the data of events as they are whole."""

    def __init__(self) -> None:
        self.rest = b""  # of a line that has not ended
        self.data: list[str] = []  # of an event that has not ended
        self.size_bytes = 0

    def feed(self, received: bytes) -> Iterator[str]:
        """The data of each event that ends in these bytes. Raises StreamError."""
        *lines, self.rest = (self.rest + received).split(b"\n")
        for line in lines:
            self.size_bytes += len(line)
            if line.removesuffix(b"\r"):
                self.take(line.removesuffix(b"\r"))
                continue
            if self.data:
                yield "\n".join(self.data)
            self.data, self.size_bytes = [], 0
        if self.size_bytes + len(self.rest) > MAX_EVENT_BYTES:
            raise StreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")

    def take(self, line: bytes) -> None:
        """A line of an event. A line that begins with a colon is a comment."""
        try:
            text = line.decode()
        except UnicodeDecodeError:
            raise StreamError("a line that is not UTF-8") from None
        name, _, value = text.partition(":")
        if "\r" in text or (name and name not in FIELDS):
            raise StreamError(f"a line that no event has: {text!r:.60}")
        if name == "data":
            self.data.append(value.removeprefix(" "))

    def end(self) -> None:
        """The stream has ended. Raises StreamError within an event."""
        if self.rest or self.data:
            raise StreamError("it ends within an event")
