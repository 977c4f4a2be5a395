"""Progress on stderr: a bar with the time left on a terminal. Elsewhere nothing, or a line a step.

Knows rich.
"""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from edgespec.cli.terminal import harmless, ours


class Bars:
    """One progress bar at a time, with the share that is done: stages count bytes, layers or
    passes."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet)
        self.progress = Progress(
            *self.columns(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task: TaskID | None = None

    def columns(self) -> tuple[ProgressColumn, ...]:
        """What stands in the line of a bar."""
        return (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.progress.disable:  # stop() prints an empty line where there is no terminal
            self.progress.stop()

    def start(self, stage: str, total: int) -> None:
        """Replaces the bar by one for a stage of `total` units; 0: it is not known how many."""
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(stage, total=total or None)

    def advance(self, amount: int) -> None:
        """Advances the bar by `amount` units."""
        if self.task is not None:
            self.progress.advance(self.task, amount)


class Steps(Bars):
    """The steps of a long command: each has a bar on a terminal, and leaves a line with the time it
    took. Elsewhere a line says that it begins."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self.title: str | None = None
        self.began_s = 0.0

    def columns(self) -> tuple[ProgressColumn, ...]:
        """The same behind what shows that it is alive: some steps begin without a stage."""
        return (SpinnerColumn(), *super().columns())

    def __exit__(self, kind: object = None, *exc: object) -> None:
        if kind is None:
            self.finish()
        super().__exit__(kind, *exc)

    def step(self, title: str) -> None:
        """Ends the step before and begins one."""
        self.finish()
        self.title, self.began_s = title, time.monotonic()
        if self.console.is_terminal:
            super().start(harmless(title), 0)
        else:
            self.note(f"{title} ...")

    def start(self, stage: str, total: int) -> None:
        """A stage of the step begins, of `total` units; 0: it is not known how many."""
        super().start(harmless(f"{self.title}: {stage}" if self.title else stage), total)

    def finish(self) -> None:
        """Ends the step under way with a line."""
        if self.title is None:
            return
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None
        if self.console.is_terminal:
            self.note(f"{self.title}: {time.monotonic() - self.began_s:.1f} s")
        self.title = None

    def note(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(ours(text), markup=False, highlight=False, soft_wrap=True)
