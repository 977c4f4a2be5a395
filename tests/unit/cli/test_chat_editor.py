"""The line editor of the chat: keys, pasted text, history and completion, through a pipe instead of
a keyboard."""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import create_pipe_input

from edgespec.cli.chat import slashes
from edgespec.cli.chat.editor import LineEditor, SlashCompleter, history_path, open_history
from edgespec.cli.chat.reader import LineCleared

WORDS = {name: slash.words for name, slash in slashes.SLASHES.items()}


@contextmanager
def typing(keys: str, history: History | None = None) -> Iterator[LineEditor]:
    """An editor at which these keys are typed."""
    with create_pipe_input() as pipe, create_app_session(input=pipe):
        pipe.send_text(keys)
        yield LineEditor(history or InMemoryHistory(), WORDS, io.StringIO())


@pytest.mark.parametrize(
    ("keys", "turn"),
    [
        ("Hi\r", "Hi"),
        ("one\x1b\rtwo\r", "one\ntwo"),  # Alt+Enter
        ("\x1b[200~def f():\n    pass\n\x1b[201~\r", "def f():\n    pass\n"),  # bracketed paste
        ("Hx\x7fi\r", "Hi"),
    ],
)
def test_keys_become_one_turn(keys: str, turn: str) -> None:
    with typing(keys) as editor:
        assert editor("> ") == turn


def test_ctrl_c_and_ctrl_d_are_told_apart() -> None:
    with typing("never sent\x03\x04") as editor:
        with pytest.raises(KeyboardInterrupt):
            editor("> ")
        with pytest.raises(EOFError):
            editor("> ")


def test_ctrl_c_on_a_typed_line_is_not_that_on_an_empty_one() -> None:
    with typing("typed\x03again\x03\x03") as editor:
        for kind in (LineCleared, LineCleared, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt) as stop:
                editor("> ")
            assert stop.type is kind


def test_lines_of_an_earlier_session_come_back(tmp_path: Path) -> None:
    path = tmp_path / "state" / "edgespec" / "chat_history"
    history, note = open_history(path)
    assert note is None
    with typing("First?\rSecond?\r", history) as editor:
        assert [editor("> "), editor("> ")] == ["First?", "Second?"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again, _ = open_history(path)
    assert list(again.load_history_strings()) == ["Second?", "First?"]


def test_history_that_cannot_be_kept_is_told_and_the_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history, note = open_history(tmp_path / "file" / "chat_history")
    assert note is not None
    assert "the history is not kept" in note
    with typing("Hi\r", history) as editor:
        assert editor("> ") == "Hi"


def test_history_stands_in_the_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert history_path({}) == Path("/home/me/.local/state/edgespec/chat_history")
    assert history_path({"XDG_STATE_HOME": "/s"}) == Path("/s/edgespec/chat_history")


def completions(text: str) -> list[str]:
    found = SlashCompleter(WORDS).get_completions(Document(text), CompleteEvent())
    return [completion.text for completion in found]


def test_commands_and_settings_are_completed_and_turns_are_not(tmp_path: Path) -> None:
    assert completions("/s") == ["/system", "/set", "/stats", "/save"]
    assert completions("/set top") == ["top_p", "top_k"]
    assert completions("/set acceptance re") == ["acceptance rejection", "acceptance relaxed"]
    assert completions("/undo x") == []
    assert completions("hello /s") == completions("/set\n/s") == []
    (tmp_path / "talk.json").write_text("")
    assert completions(f"/load {tmp_path}/ta") == ["lk.json"]
