"""What the thread that steps for all requests costs: answers of steps that do nothing, without it,
by generate and by stream.

    python scripts/measure_driver.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from edgespec.runtime.loop.driver import Driver
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.streams import Ends, Stream

STEPS, ANSWERS = 50, 500


class Handle:
    """A request that ends after STEPS steps."""

    prompt, plan, number = (1,), None, 0

    def __init__(self) -> None:
        self.left = STEPS
        self.deliver: Callable[[Any], object] = lambda event: None

    def cancel(self) -> None:
        self.left = 0


class Nothing:
    """Stands for a Scheduler: a step gives each request a Chunk."""

    def __init__(self) -> None:
        self.active: list[Handle] = []

    @property
    def has_work(self) -> bool:
        return bool(self.active)

    def enqueue(self, handles: list[Handle]) -> None:
        self.active.extend(handles)

    def step(self) -> list[tuple[Handle, Any]]:
        events: list[tuple[Handle, Any]] = []
        for handle in list(self.active):
            handle.left -= 1
            events.append((handle, Chunk([1], ["a"], 0, None)))
            if handle.left <= 0:
                self.active.remove(handle)
                events.append((handle, Response("", [], "max-length", RequestMetrics(1), None)))
        return events


def bare() -> None:
    scheduler, handle = Nothing(), Handle()
    scheduler.enqueue([handle])
    while scheduler.has_work:
        for _, event in scheduler.step():
            handle.deliver(event)


def main() -> None:
    driver: Any = Driver(Nothing())  # type: ignore[arg-type]

    def by_generate() -> None:
        ends = Ends([Handle()])  # type: ignore[list-item]
        driver.submit(ends.handles)
        next(iter(ends))

    def by_stream() -> None:
        for _ in Stream(driver, Handle()):  # type: ignore[arg-type]
            pass

    def cpu_s() -> float:
        """CPU time of this thread and of the driver's."""
        thread = driver.work.thread
        other = (
            0.0 if thread is None else time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        )
        return time.thread_time() + other

    for form in (bare, by_generate, by_stream):
        seconds = []
        for _ in range(ANSWERS):
            began = cpu_s()
            form()
            seconds.append(cpu_s() - began)
        per_step = 1e6 * statistics.median(seconds) / STEPS
        print(f"{form.__name__}: {per_step:.2f} us of CPU time a step, answers of {STEPS} steps")


if __name__ == "__main__":
    main()
