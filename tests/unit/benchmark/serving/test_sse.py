"""Event streams are read as they arrive, and anything else is an error."""

from __future__ import annotations

import pytest

from edgespec.benchmark.serving.sse import MAX_EVENT_BYTES, EventReader, StreamError

STREAM = (
    'data: {"a":"é"}\n\n: beat\r\n\r\nevent: x\ndata: one\ndata:two\nid: 7\n\n\ndata: [DONE]\n\n'
)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_the_same_however_their_bytes_arrive(size: int) -> None:
    reader, data = EventReader(), STREAM.encode()
    parts = [data[start : start + size] for start in range(0, len(data), size)]
    found = [event for part in parts for event in reader.feed(part)]
    reader.end()
    assert found == ['{"a":"é"}', "one\ntwo", "[DONE]"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"data: \xff\n\n", "not UTF-8"),
        (b"<html>\n\n", "a line that no event has: '<html>'"),
        (b"data: a\rdata: b\n\n", "a line that no event has"),
        (b"data: a\n", "it ends within an event"),
        (b"data: [DONE]", "it ends within an event"),
        (b"data: " + b"a" * MAX_EVENT_BYTES, "an event of more than"),
        (b"data: aaaaaaa\n" * (MAX_EVENT_BYTES // 13 + 1), "an event of more than"),
    ],
)
def test_what_is_no_event_stream_is_refused(data: bytes, said: str) -> None:
    def read() -> None:
        reader = EventReader()
        assert [*reader.feed(data)] == []
        reader.end()

    with pytest.raises(StreamError, match=said):
        read()
