"""Answers on stdout as they come, for prompts of the command line.

Knows the order of answers. What a terminal may be shown stands in `chat.screen`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from edgespec.cli.chat.screen import Screen
from edgespec.cli.stats import stats

if TYPE_CHECKING:
    from edgespec.runtime.loop.generation import Chunk
    from edgespec.runtime.requests.file_runner import FileRun


class AnswerStream:
    """Shows the answers of a run in the order of its prompts, each ended by a newline.

    With `live`, which needs one request at a time, each token is shown as soon as its text is
    certain; otherwise each answer once it and those before it are whole. `show_speculation` is that
    of `edgespec chat`.
    """

    def __init__(self, count: int, *, live: bool, show_speculation: bool = False) -> None:
        self.count, self.live, self.show_speculation = count, live, show_speculation
        self.screen = Screen(sys.stdout)
        self.run: FileRun | None = None
        self.next = 0  # the prompt whose answer is shown
        self.shown = 0  # characters of it

    def of(self, run: FileRun) -> AnswerStream:
        """This stream, for the answers of a run."""
        self.run = run
        return self

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.shown:  # the run ended within an answer
            self.screen.show("\n")

    def add(self, chunk: Chunk) -> None:
        """Shows what a step made certain; what a check of losslessness decodes again is not
        shown."""
        if not self.live or self.next == self.count:
            return
        drafted = chunk.accepted if self.show_speculation else 0
        self.screen.show("".join(chunk.pieces[:drafted]), accepted=True)
        self.screen.show("".join(chunk.pieces[drafted:]))
        self.shown += len(chunk.text)

    def finish(self, count: int) -> None:
        """Shows what is missing of the answers that are whole."""
        del count
        assert self.run is not None
        while (answer := self.run.done.get((self.next, 0))) is not None:
            response = answer.response
            if response is not None:
                self.screen.show(f"{response.text[self.shown :]}\n")
                if self.show_speculation:
                    self.screen.note(stats(response.metrics, drafted=answer.speculative))
            elif self.shown:
                self.screen.show("\n")
            self.next, self.shown = self.next + 1, 0
