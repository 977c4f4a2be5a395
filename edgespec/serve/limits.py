"""What the server takes, and how long it waits: one table, which is printed at the start.

Knows numbers. What engines take stands in runtime.limits, what messages may hold in prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from edgespec.prompts.image_item import MAX_IMAGES
from edgespec.prompts.parse import (
    MAX_CONTENT_ITEMS,
    MAX_MESSAGE_BYTES,
    MAX_MESSAGES,
    MAX_REQUEST_BYTES,
)
from edgespec.prompts.tools import MAX_TOOLS


def limit(default: Any, about: str) -> Any:
    """A limit, with what the list says of it."""
    return field(default=default, metadata={"about": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """Sizes in bytes, times in seconds."""

    max_body_bytes: int = limit(8 * 2**20, "bytes of a request's body")
    max_header_bytes: int = limit(32 * 2**10, "bytes of a request's head")
    max_json_depth: int = limit(32, "levels of its JSON")
    max_choices: int = limit(64, "answers of a request: prompts times `n`")
    max_queue: int = limit(64, "answers that wait for a lane")
    max_connections: int = limit(256, "connections at a time")
    request_timeout_s: float = limit(600, "seconds for an answer; it ends within a step")
    receive_timeout_s: float = limit(30, "seconds in which a request must have come")
    send_timeout_s: float = limit(30, "seconds for which a client may read nothing")
    keep_alive_s: float = limit(30, "seconds for which a connection may be idle")
    heartbeat_s: float = limit(15, "seconds without an event before a stream sends a comment")
    drain_s: float = limit(60, "seconds for what is under way, once the server is to stop")

    def lines(self) -> Iterator[str]:
        """A line for each limit, those of messages among them."""
        for row in fields(self):
            yield f"{row.name} {getattr(self, row.name)}: {row.metadata['about']}"
        yield f"messages {MAX_MESSAGES}, of {MAX_CONTENT_ITEMS} blocks each; tools {MAX_TOOLS}"
        yield f"text {MAX_MESSAGE_BYTES} bytes a message, {MAX_REQUEST_BYTES} in all"
        yield f"images {MAX_IMAGES}"
