"""The line editor of a terminal: history, completion of commands, text pasted as one turn.

Knows prompt_toolkit, keys and the file of the history. Knows nothing of what a line means.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from edgespec.cli.chat.reader import CONTINUED, LineCleared

# A command -> the words that may stand behind it; None: the path of a file
Words = Mapping[str, Sequence[str] | None]


def history_path(environ: Mapping[str, str]) -> Path:
    """Returns where the history is kept: $XDG_STATE_HOME/edgespec/chat_history, by default below
    ~/.local/state."""
    state = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "edgespec" / "chat_history"


def open_history(path: Path | None) -> tuple[History, str | None]:
    """Returns the history of earlier sessions, and a note where its file cannot be used.

    The file is readable by its owner alone. None keeps the lines of this session only.
    """
    if path is None:
        return InMemoryHistory(), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as error:
        note = f"the history is not kept: {path}: {error.strerror}. Name a file: --history-file"
        return InMemoryHistory(), note
    return FileHistory(str(path)), None


class LineEditor:
    """Reads lines in a terminal. Enter sends; Alt+Enter begins a new line.

    The prompt is on `answers`, or on stderr where that is a file.
    """

    def __init__(self, history: History, words: Words, answers: TextIO) -> None:
        self.session: PromptSession[str] = PromptSession(
            history=history,
            completer=SlashCompleter(words),
            complete_while_typing=False,
            multiline=True,
            prompt_continuation=CONTINUED,
            key_bindings=keys(),
            enable_history_search=True,
            output=create_output(stdout=answers if answers.isatty() else sys.stderr),
        )

    def __call__(self, prompt: str) -> str:
        """Returns a turn. Raises EOFError for Ctrl-D, KeyboardInterrupt for Ctrl-C, and its kind
        LineCleared where a text was typed."""
        return self.session.prompt(prompt)


def keys() -> KeyBindings:
    """Returns the keys that differ from the editor's own."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-c")
    @bindings.add("<sigint>")
    def interrupt(event: KeyPressEvent) -> None:
        typed = event.current_buffer.text
        event.app.exit(
            exception=LineCleared if typed else KeyboardInterrupt, style="class:aborting"
        )

    return bindings


class SlashCompleter(Completer):
    """Completes commands that begin with a slash, and the first word or the path behind them."""

    def __init__(self, words: Words) -> None:
        self.words = words

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterator[Completion]:
        """Yields what the text before the cursor may become; nothing for text that is a turn."""
        text = document.text_before_cursor
        name, space, behind = text.partition(" ")
        if not text.startswith("/") or "\n" in text:
            return
        words = self.words.get(name, ())
        if not space:
            yield from starting_with(name, self.words)
        elif words is None:
            paths = PathCompleter(expanduser=True)
            yield from paths.get_completions(Document(behind), complete_event)
        else:
            yield from starting_with(behind, words)


def starting_with(text: str, words: Iterable[str]) -> Iterator[Completion]:
    """Yields the words that begin with a text."""
    for word in words:
        if word.startswith(text):
            yield Completion(word, start_position=-len(text))
