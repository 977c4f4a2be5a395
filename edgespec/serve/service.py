"""What a server holds: an open engine under its names, who may ask, and what is under way.

Knows how many answers wait, and whether the server is about to stop. Knows no protocol.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from edgespec.errors import counted
from edgespec.runtime.engine import Engine
from edgespec.serve.errors import Form, Refusal, refusal_of
from edgespec.serve.fields import Values
from edgespec.serve.limits import ServeLimits
from edgespec.serve.metrics import ServeMetrics
from edgespec.serve.reasoning import Marks
from edgespec.serve.security import Guard


@dataclass(eq=False)
class Service:
    """`names` are those by which requests may call the model, the first in answers."""

    engine: Engine
    names: Sequence[str]
    limits: ServeLimits = field(default_factory=ServeLimits)
    guard: Guard = field(default_factory=Guard)
    allow_control_tokens: bool = False  # control tokens that texts of messages spell are some
    draining: bool = False
    in_flight: int = 0  # answers that were begun and have not ended
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.metrics = ServeMetrics(self.engine, self.name)
        self.marks = Marks.of(self.engine.tokenizer)
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer together that the engines hold."""
        return self.engine.configs["base"].limits.max_kv_cache_capacity

    @property
    def num_waiting(self) -> int:
        """Answers that wait for a lane."""
        return max(0, self.in_flight - self.engine.max_batch_size)

    def check_model(self, name: str | None) -> None:
        """Raises Refusal for a model that is not served. Who names none gets the one there is."""
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            message = f"There is no model {name[:200]!r} here; served is {known}."
            raise Refusal(404, message, code="model_not_found", param="model")

    def admit(self, count: int) -> Ticket:
        """A place for some answers. Raises Refusal where the queue is full or the server stops."""
        if self.draining:
            raise Refusal(503, "The server is stopping.", code="shutting_down")
        most = self.limits.max_choices
        if count > most:
            message = f"The request asks for {counted(count, 'answer')}, and {most} is the limit."
            raise Refusal(400, message, code="invalid_value", param="n")
        if self.in_flight + count > self.engine.max_batch_size + self.limits.max_queue:
            message = f"The queue is full: {self.num_waiting} answers wait. Ask again later."
            raise Refusal(429, message, code="queue_full")
        return Ticket(self, count)


class Ticket:
    """A place for some answers, until it is given back."""

    def __init__(self, service: Service, count: int) -> None:
        self.service, self.count = service, count
        service.in_flight += count
        service.idle.clear()

    def give_back(self) -> None:
        """The answers have ended; a second call is harmless."""
        self.service.in_flight -= self.count
        self.count = 0
        if not self.service.in_flight:
            self.service.idle.set()


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it was read: its fields' values, and what of it was taken otherwise."""

    service: Service
    request: Request
    form: Form
    values: Values = field(default_factory=dict)
    adjusted: list[str] = field(default_factory=list)

    def error_of(self, error: Exception) -> dict[str, Any]:
        """An error in the form of its protocol."""
        return self.form.body(refusal_of(error, self.service.max_model_len))
