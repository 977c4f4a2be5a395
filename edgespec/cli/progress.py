"""Progress on stderr: a bar on a terminal, nothing elsewhere. Knows rich."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


class Bars:
    """One progress bar at a time, in bytes."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(
            *self.columns, console=console, transient=True, disable=not console.is_terminal
        )
        self.task: TaskID | None = None

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.progress.stop()

    def start(self, stage: str, total: int) -> None:
        """Replaces the bar by one for a stage of `total` bytes."""
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(stage, total=total)

    def advance(self, amount: int) -> None:
        """Advances the bar by `amount` bytes."""
        if self.task is not None:
            self.progress.advance(self.task, amount)
