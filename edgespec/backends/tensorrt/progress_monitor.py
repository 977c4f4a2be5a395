"""How far a build is, from the phases that the builder reports, and how it is cancelled.

Phases are nested, and come from several threads. A callback that raises, or that returns nothing,
cancels the build: so each is guarded, and always answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from edgespec.backends.tensorrt.bindings import Trt

Listener = Callable[[float, str], None]  # the share that is done, and the phase's name


@dataclass
class Phase:
    """A phase under way: its steps, those that are done, and the phases inside the current one."""

    name: str
    steps: int
    done: int = 0
    inside: dict[str, Phase] = field(default_factory=dict)

    def share(self) -> float:
        """The share of its steps that is done; a step under way counts by the phases inside it."""
        inner = max((phase.share() for phase in self.inside.values()), default=0.0)
        return min(1.0, (self.done + inner) / max(1, self.steps))


class BuildProgress:
    """The phases of one build. `listener` is called where the share has grown; `cancel` lets the
    builder stop at its next step. What a callback raised is in `failure`."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.lock = threading.Lock()
        self.cancelled = threading.Event()
        self.failure: BaseException | None = None
        self.roots: dict[str, Phase] = {}
        self.open: dict[str, list[tuple[Phase, dict[str, Phase]]]] = {}
        self.said = -1.0

    def cancel(self) -> None:
        """Let the builder stop at its next step."""
        self.cancelled.set()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase begins, inside `parent` where there is one."""
        with self.lock:
            above = self.open.get(parent or "")
            place = above[-1][0].inside if above else self.roots
            phase = Phase(name, steps)
            place[name] = phase
            self.open.setdefault(name, []).append((phase, place))
        self.tell(name)

    def step(self, name: str, step: int) -> bool:
        """A step of a phase is done. Whether the build goes on."""
        with self.lock:
            for phase, _ in self.open.get(name, ())[-1:]:
                phase.done = max(phase.done, step + 1)
        self.tell(name)
        return not self.cancelled.is_set()

    def finish(self, name: str) -> None:
        """A phase has ended; it may have done fewer steps than it said."""
        with self.lock:
            stack = self.open.get(name, [])
            if stack:
                phase, place = stack.pop()
                phase.done = max(1, phase.steps)
                if place is not self.roots:  # the whole stays, and is done
                    place.pop(name, None)
        self.tell(name)

    def tell(self, name: str) -> None:
        """Call the listener where the share has grown by a thousandth."""
        with self.lock:
            share = max((phase.share() for phase in self.roots.values()), default=0.0)
            if share < self.said + 1e-3:
                return
            self.said = share
        self.listener(share, name)

    def guarded(self, call: Callable[[], bool | None]) -> bool:
        """Whether the build goes on after `call`; an error in it is kept, and cancels."""
        try:
            return call() is not False
        except BaseException as error:
            self.failure = self.failure or error
            self.cancel()
            return False


def monitor_of(trt: Trt, progress: BuildProgress) -> Any:
    """The builder's progress monitor that reports to `progress`."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            progress.guarded(lambda: progress.start(phase_name, parent_phase, num_steps))

        def step_complete(self, phase_name: str, step: int) -> bool:
            return progress.guarded(lambda: progress.step(phase_name, step))

        def phase_finish(self, phase_name: str) -> None:
            progress.guarded(lambda: progress.finish(phase_name))

    return Monitor()
