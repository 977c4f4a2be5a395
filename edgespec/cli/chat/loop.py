"""A conversation with an open engine: turn after turn, until the input ends.

Knows turns, the history and signals. Knows nothing of how an answer comes about: that is the
engine's.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from edgespec.cli.chat.conversation import Conversation
from edgespec.cli.chat.reader import LineCleared, Read, read_turn
from edgespec.cli.chat.screen import Screen
from edgespec.cli.chat.settings import Settings
from edgespec.cli.exit_codes import INTERRUPTED, SOME_FAILED
from edgespec.cli.signals import Stopper, exit_code
from edgespec.cli.stats import stats
from edgespec.cli.terminal import report
from edgespec.errors import EdgeSpecError, LimitError, RequestError, counted
from edgespec.prompts import CANCELLED, CAPACITY, MAX_LENGTH, ImageItem, Message
from edgespec.prompts.parse import message_text
from edgespec.prompts.places import JsonPlace

if TYPE_CHECKING:
    from pathlib import Path

    from edgespec.runtime.engine import Engine
    from edgespec.runtime.loop.generation import Chunk, Response
    from edgespec.runtime.measuring.random_baseline import NoBetterThanChance
    from edgespec.runtime.streams import Stream

MAKE_ROOM = "/undo drops the last exchange, /reset all of them."

WAIT = "of the turn will go with the next one; /image without a name drops that."

Command = Callable[["Chat", str], None]  # what a line that begins with a slash does


class Chat:
    """One conversation with an open engine. A turn that fails leaves no trace in the history.

    `command` runs a line that begins with a slash; it raises RequestError or LimitError.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        screen: Screen,
        conversation: Conversation,
        command: Command,
        *,
        interactive: bool = False,
    ) -> None:
        self.engine, self.settings = engine, settings
        self.screen, self.conversation = screen, conversation
        self.command, self.interactive = command, interactive
        self.images: list[ImageItem] = []  # they go with the next turn
        self.some_failed = False
        self.code: int | None = None  # the exit code, once the chat is over
        self.last: Response | None = None
        self.last_step: Chunk | None = None  # of the last answer, the last that verified drafts
        self.responses: list[Response] = []  # all answers of this session
        self.own_files: set[Path] = set()  # what /save and /load have named
        self.num_drafter_notes = 0  # that were shown
        self.told_stopped = False  # whether it was shown that drafting has
        self.told_chance = False  # whether it was shown that drafts are no better than chance

    def run(self, read: Read) -> int:
        """Turn after turn until the input ends; returns the exit code."""
        warned = False
        if self.interactive:
            self.screen.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves")
        while self.code is None:
            try:
                said = read_turn(read)
                warned = False
                self.take(said)
            except EOFError:
                self.at_the_end()
            except KeyboardInterrupt as stop:
                cleared = isinstance(stop, LineCleared)  # typed since the first one
                if not self.interactive or (warned and not cleared):
                    return INTERRUPTED
                warned = True
                self.screen.note("\nonce more leaves, and so does Ctrl-D")
            except UnicodeDecodeError:
                self.failed(
                    RequestError("this turn is not UTF-8", "Send it again, encoded as UTF-8.")
                )
            except EdgeSpecError as error:
                self.failed(error)
        return self.code

    def failed(self, error: EdgeSpecError) -> None:
        """Shows the error and goes on."""
        self.some_failed = True
        report(error)

    def take(self, said: str) -> None:
        """Runs a command, or answers a turn. Raises RequestError."""
        if said.startswith("/") and not said.startswith("//"):
            self.command(self, said)
        elif said.strip():
            text = said.removeprefix("/") if said.startswith("//") else said
            said_text = message_text(text, JsonPlace("this turn"))
            try:
                self.turn(Message.of("user", (*self.images, said_text)))
            except EdgeSpecError as error:
                raise self.with_images_that_wait(error) from error
            self.images = []

    def at_the_end(self) -> None:
        """The input has ended: leave, on a terminal below the prompt's line."""
        if self.interactive:
            self.screen.note("")
        self.leave()

    def leave(self) -> None:
        """Sets the exit code: 0, or 5 where input is no terminal and a turn failed."""
        self.code = SOME_FAILED if self.some_failed and not self.interactive else 0

    # ---- a turn

    def turn(self, said: Message) -> None:
        """Sends what was said, shows the answer as it comes, and keeps both."""
        from edgespec.runtime.trees.tree import PLAIN

        settings, messages = self.settings, self.conversation.and_then(said)
        with Stopper(in_line=lambda: self.screen.in_line) as stopper:
            try:
                stream = self.engine.stream(
                    messages,
                    settings.sampling,
                    settings.plan(self.engine) or PLAIN,
                    enable_thinking=settings.enable_thinking,
                    keep=True,
                    acceptance=settings.acceptance,
                )
                response = self.answer(stream, stopper)
                self.conversation.add(said, response.text)
            except LimitError as error:
                raise self.with_a_way_out(error) from error
            finally:
                self.heed(stopper.number)
            self.last = response
            self.responses.append(response)
            for line in self.notes(response):
                self.screen.note(line)

    def heed(self, number: int | None) -> None:
        """A signal that stopped an answer ends the chat too, but for Ctrl-C in a terminal."""
        if number is not None and (not self.interactive or number == signal.SIGTERM):
            self.code = exit_code(number)

    def answer(self, stream: Stream, stopper: Stopper) -> Response:
        """The response, once all of it is shown. What is shown of an answer that fails ends with
        its line."""
        shown, self.last_step = 0, None
        try:
            for chunk in stream:
                drafted = chunk.accepted if self.settings.show_speculation else 0
                self.screen.show("".join(chunk.pieces[:drafted]), accepted=True)
                self.screen.show("".join(chunk.pieces[drafted:]))
                shown += len(chunk.text)
                if chunk.tree is not None and len(chunk.tree) > 1:
                    self.last_step = chunk
                if stopper():
                    stream.cancel()
            response = stream.result()
        except EdgeSpecError:
            self.screen.show("\n" if shown else "")
            raise
        self.screen.show(f"{response.text[shown:]}\n")  # what a cancelled answer still held back
        return response

    def with_a_way_out(self, error: LimitError) -> LimitError:
        """The error, with the commands that shorten the history where there is one to shorten."""
        if not self.conversation.exchanges:
            return error
        return LimitError(error.what, f"{error.remedy} Your turn was taken back. {MAKE_ROOM}")

    def with_images_that_wait(self, error: EdgeSpecError) -> EdgeSpecError:
        """The error of a turn, with what becomes of its images where it has some."""
        if not self.images:
            return error
        count = counted(len(self.images), "image")
        return type(error)(error.what, f"{error.remedy} {count} {WAIT}".strip())

    def notes(self, response: Response) -> list[str]:
        """What the user should know of an answer beside its text."""
        notes = []
        if response.finish_reason == CANCELLED:
            notes.append("[stopped]")
        if response.finish_reason == MAX_LENGTH:
            most = self.settings.sampling.max_generate_length
            notes.append(f"[cut at --max-generate-length {most}]")
        if response.finish_reason == CAPACITY:
            notes.append(f"[cut: no room left. {MAKE_ROOM}]")
        if response.metrics.lossless == "no" and not self.settings.show_speculation:
            notes.append(f"[{response.metrics.guarantee}]")
        if self.settings.show_speculation:
            notes.append(stats(response.metrics, drafted=self.settings.drafts))
        notes += self.engine.drafter_notes[self.num_drafter_notes :]
        self.num_drafter_notes = len(self.engine.drafter_notes)
        if (stopped := self.engine.drafting_stopped) is not None and not self.told_stopped:
            self.told_stopped = True
            notes.append(stopped)
        if not self.told_chance and (chance := self.chance) is not None:
            self.told_chance = True
            notes += chance.lines
        return notes

    @property
    def chance(self) -> NoBetterThanChance | None:
        """Whether a trained draft was accepted no more often than by chance in this session."""
        from edgespec.runtime.measuring.random_baseline import NoBetterThanChance

        if not self.engine.drafting.has_trained_draft:
            return None
        drafted = [response for response in self.responses if response.metrics.drafting_steps]
        return NoBetterThanChance.of(
            [response.metrics for response in drafted],
            [response.token_ids for response in drafted],
        )
