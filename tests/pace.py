"""Steps of a scheduler one by one, as a test allows them: what happens between two is no matter of
luck."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from edgespec.runtime.loop.scheduler import Scheduler

MOST = 100_000


@contextmanager
def paced() -> Iterator[Callable[[int], None]]:
    """Inside, schedulers take as many steps as were allowed; afterwards any number."""
    allowed, real = threading.Semaphore(0), Scheduler.step

    def step(self: Scheduler) -> Any:
        assert allowed.acquire(timeout=200)
        return real(self)

    with mock.patch.object(Scheduler, "step", step):
        try:
            yield allowed.release
        finally:
            allowed.release(MOST)
