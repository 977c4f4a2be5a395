"""`edgespec chat` with a toy pair: in this process, line by line, and in a terminal of its own with
Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.cli.chat import slashes
from edgespec.cli.chat.conversation import Conversation
from edgespec.cli.chat.loop import Chat
from edgespec.cli.chat.screen import Screen
from edgespec.cli.chat.settings import DRAFT_SIZES, Settings
from edgespec.prompts import Message, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.e2e.workshop import Cli, Outcome, cli
from tests.forked import Forked
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.pairs import shared_pair

__all__ = ["cli"]
VOCAB = 256
GREEDY = SamplingParams(temperature=0, max_generate_length=8)
SAMPLED = SamplingParams(temperature=1, seed=5, max_generate_length=8)


@pytest.fixture(scope="module")
def engines() -> Path:
    return shared_pair("llama", "eagle") / "engines"


@pytest.fixture
def engine(engines: Path) -> Iterator[Engine]:
    with Engine(engines) as opened:
        opened.stop_ids = frozenset()
        yield opened


def chat_of(
    engine: Engine, sampling: SamplingParams, screen: Screen, plan: DraftPlan, **how: bool
) -> Chat:
    sizes = dict(zip(DRAFT_SIZES, (plan.top_k, plan.steps, plan.verify_size), strict=True))
    settings = Settings(sampling, drafts=True, sizes=sizes, **how)
    return Chat(engine, settings, screen, Conversation(), slashes.run)


class Recorded(Screen):
    """A Screen that keeps what it is told."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, bool]] = []
        self.notes: list[str] = []

    def show(self, text: str, *, accepted: bool = False) -> None:
        self.pieces += [(text, accepted)] if text else []

    def note(self, text: str) -> None:
        self.notes.append(text)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.pieces)


def ids_of(engine: Engine, messages: Sequence[Message]) -> list[int]:
    return engine.tokenizer.encode(engine.render(messages))


def agreeing(tree: DraftTree, truth: Sequence[int]) -> int:
    """Drafts of a tree that stand on the true path."""
    node, count = 0, 0
    while found := [
        c
        for c in np.flatnonzero(tree.parents == node)
        if [tree.tokens[c]] == [*truth[count : count + 1]]
    ]:
        node, count = int(found[0]), count + 1
    return count


@pytest.mark.parametrize(
    ("right", "plan"),
    [(0.0, DraftPlan(3, 3, 9)), (0.6, DraftPlan(3, 3, 9)), (1.0, DraftPlan(1, 3, 4))],
)
def test_what_is_marked_is_what_the_base_accepted(
    engine: Engine, right: float, plan: DraftPlan
) -> None:
    """The marks against the drafts that plain decoding agrees with, step by step."""
    said = "Count to ten."
    ids = ids_of(engine, [Message("user", said)])
    plain = engine.plainly(ids, GREEDY)
    engine.session.drafter = drafter = ScriptedDrafter([(ids, plain.token_ids)], VOCAB, right)
    screen = Recorded()
    chat_of(engine, GREEDY, screen, plan, show_speculation=True).turn(Message("user", said))
    assert screen.text == f"{plain.text}\n"
    marked = [text for text, accepted in screen.pieces if accepted]
    truth, done, wanted = plain.token_ids, 1, []  # prefill's token is no draft
    for tree in drafter.trees:
        right_ones = agreeing(tree, truth[done:])
        wanted.append(engine.tokenizer.decode(truth[done : done + right_ones]))
        done += right_ones + 1
    assert marked == [text for text in wanted if text]
    assert bool(marked) == bool(right)
    steps, accepted = re.findall(
        r"(\d+) base passes after prefill, acceptance length ([\d.]+)", screen.notes[-1]
    )[0]
    assert float(accepted) == pytest.approx(7 / int(steps), abs=0.005)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_second_turn_reuses_the_first_and_says_what_a_fresh_engine_says(
    engine: Engine, engines: Path, sampling: SamplingParams
) -> None:
    screen = Recorded()
    chat = chat_of(engine, sampling, screen, engine.plan(), show_speculation=True)
    chat.turn(Message("user", "Hi"))
    chat.turn(Message("user", "On?"))
    (_, first), (_, second) = chat.conversation.exchanges
    reused, total = map(
        int, re.findall(r"(\d+) of (\d+) prompt tokens reused", screen.notes[-1])[0]
    )
    history = [Message("user", "Hi"), first, Message("user", "On?")]
    with Engine(engines, spec_decode=False) as fresh:
        fresh.stop_ids = frozenset()
        ids = ids_of(fresh, history)
        wanted = fresh.plainly(ids, sampling)
    assert first.content in fresh.tokenizer.decode(ids)
    assert second.content == wanted.text
    assert total == len(ids)
    assert reused >= len(ids_of(engine, [Message("user", "Hi")])) - 1


def test_stream_is_shown_step_by_step(engine: Engine) -> None:
    """Not only at the end: something is shown between any two steps that made text certain."""
    screen = Recorded()
    shown: list[tuple[str, str]] = []
    stream = engine.stream

    class Watched:
        def __init__(self, *args: Any, **how: bool) -> None:
            self.stream = stream(*args, **how)
            self.result = self.stream.result

        def __iter__(self) -> Iterator[Chunk]:
            text = ""
            for chunk in self.stream:
                shown.append((screen.text, text))
                yield chunk
                text += chunk.text

    engine.stream = Watched  # type: ignore[method-assign, assignment]
    chat_of(engine, GREEDY, screen, DraftPlan(1, 1, 2)).turn(Message("user", "Hi"))
    assert len(shown) >= 4
    assert all(there == certain for there, certain in shown)


# Line by line, as from a pipe


@pytest.fixture
def chat(engines: Path, cli: Cli) -> Callable[..., Outcome]:
    """A chat with what is said on stdin."""

    def chat(said: str, flags: str = "", code: int = 0, engine_dir: Path = engines) -> Outcome:
        done = cli("chat", "--engine-dir", engine_dir, *flags.split(), stdin=said)
        assert done.code == code, done.err
        return done

    return chat


PipedChat = Callable[..., Outcome]


def answers(engines: Path, turns: Sequence[str], sampling: SamplingParams) -> list[str]:
    """What plain decoding answers to one turn after the other."""
    said: list[Message] = []
    with Engine(engines, spec_decode=False, prefix_cache_bytes=0) as engine:
        for turn in turns:
            said.append(Message("user", turn))
            said.append(Message("assistant", engine.plainly(ids_of(engine, said), sampling).text))
    return [message.content for message in said if message.role == "assistant"]


@pytest.mark.parametrize("drafts", ["--spec-draft-top-k 3 --spec-draft-step 2", "--noSpecDecode"])
def test_piped_lines_are_turns_and_stdout_holds_the_answers_alone(
    engines: Path, chat: PipedChat, drafts: str
) -> None:
    done = chat("Hi\n\nOn?\n", f"--temperature 1.5 --seed 3 --maxGenerateLength 5 {drafts}")
    sampling = SamplingParams(temperature=1.5, seed=3, max_generate_length=5)
    assert done.out == "".join(f"{text}\n" for text in answers(engines, ["Hi", "On?"], sampling))
    assert ("drafting a tree: top-k 3" in done.err) == ("top-k" in drafts)
    assert ("decoding plainly" in done.err) == ("top-k" not in drafts)


def test_drafts_are_the_default_where_there_are_any_and_figures_go_to_stderr(
    engines: Path, chat: PipedChat
) -> None:
    done = chat("Hi", "--temperature 0 --max-generate-length 5 --show-speculation")
    assert "drafting a chain" in done.err
    assert re.search(
        r"\[\d tokens, \d base passes after prefill, acceptance length .* prompt tokens reused\]",
        done.err,
    )
    assert "\x1b" not in done.out + done.err


def test_full_conversation_is_told_and_reset_makes_room(engines: Path, chat: PipedChat) -> None:
    turns = "Hi\nTell me of the boat, please.\nTell me of the boat, please.\n/reset\nHi\n"
    done = chat(turns, "--temperature 0 --max-generate-length 6", code=5)
    first = answers(engines, ["Hi"], SamplingParams(temperature=0, max_generate_length=6))
    assert done.out.splitlines()[0] == done.out.splitlines()[-1] == first[0]
    assert re.search(
        r"error: the prompt has \d+ tokens, the base engine was built for 48\n .*/reset",
        done.err,
    )


def test_full_cache_cuts_an_answer_and_says_so(engines: Path, chat: PipedChat) -> None:
    done = chat("Tell me of the boat.", "--temperature 0 --max-generate-length 60")
    assert "[cut: no room left. /undo" in done.err


def test_stop_text_ends_an_answer(engines: Path, chat: PipedChat) -> None:
    (whole,) = answers(engines, ["Hi"], SamplingParams(temperature=0, max_generate_length=6))
    stop = whole.strip()[2:4]
    assert chat("Hi", f"--temperature 0 --max-generate-length 6 --stop {stop} --stop zz").out == (
        whole[: whole.index(stop)] + "\n"
    )


def test_directory_without_a_draft_decodes_plainly_unless_drafts_are_asked_for(
    engines: Path, chat: PipedChat, tmp_path: Path
) -> None:
    only_base = shutil.copytree(engines, tmp_path / "engines")
    manifest = json.loads((only_base / "manifest.json").read_text())
    del manifest["engines"]["draft"]
    (only_base / "manifest.json").write_text(json.dumps(manifest))
    assert "decoding plainly" in chat("Hi", "--max-generate-length 2", engine_dir=only_base).err
    for flag in ("--spec-verify-size 2", "--spec-decode"):
        assert "draft" in chat("Hi", flag, code=3, engine_dir=only_base).err


# In a terminal

# The engine's calls take as long as STEP_S says; and the pty becomes the terminal that Ctrl-C comes
# from.
DRIVER = """
import os, sys, time
os.close(os.open(os.ttyname(0), os.O_RDWR))
from edgespec.runtime.lanes.decoder import CachedDecoder
run = CachedDecoder.run
def slowly(self, rows):
    os.write(2, b"(call)\\n")  # at once: this thread is not the one that shows the answer
    time.sleep(float(os.environ["STEP_S"]))
    return run(self, rows)
CachedDecoder.run = slowly
from edgespec.cli.main import main
main(["chat", "--no-spec-decode", "--temperature", "0", "--max-generate-length", "20", *sys.argv[1:]])
"""


PROMPT = ">\x08\x1b[2C"  # as the line editor draws it


class Terminal:
    """A chat in a terminal; `sees` waits for a text beyond what was seen before."""

    def __init__(
        self,
        engines: Path,
        tmp_path: Path,
        *flags: str,
        step_s: float = 0,
        stdout: Path | None = None,
    ) -> None:
        env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
        env |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "STEP_S": str(step_s)}
        env |= {"XDG_STATE_HOME": str(tmp_path / "state")}
        self.fd, child = pty.openpty()
        out = child if stdout is None else os.open(stdout, os.O_WRONLY | os.O_CREAT)
        streams = {"stdin": child, "stdout": out, "stderr": child}
        words = ["--engine-dir", engines, *flags]
        self.process = Forked(DRIVER, *words, env=env, new_session=True, **streams)
        for fd in {child, out}:
            os.close(fd)
        self.seen, self.at = "", 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.__exit__(*raised)
        os.close(self.fd)

    def read(self, until: float) -> bool:
        """More of the output; False at its end."""
        if not select.select([self.fd], [], [], max(0, until - time.monotonic()))[0]:
            raise AssertionError(f"nothing more came after {self.seen!r}")
        try:
            more = os.read(self.fd, 4096)
        except OSError:  # Linux's way to say that the other side is closed
            return False
        self.seen += more.decode(errors="replace").replace("\r\n", "\n")
        return bool(more)

    def sees(self, text: str, within_s: float = 30) -> None:
        until = time.monotonic() + within_s
        while text not in self.seen[self.at :]:
            assert self.read(until), f"it ended before {text!r}: {self.seen!r}"
        self.at = self.seen.index(text, self.at) + len(text)

    def types(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def interrupts(self) -> None:
        """Ctrl-C, once the keys before it are read: between two reads readline itself would miss
        it."""
        time.sleep(0.3)
        self.types("\x03")

    def exits(self, code: int, within_s: float = 30) -> None:
        until = time.monotonic() + within_s
        while self.read(until):
            pass
        assert self.process.wait(max(0.1, until - time.monotonic())) == code, self.seen


def test_terminal_shows_prompt_answer_and_figures_and_ctrl_d_leaves(
    engines: Path, tmp_path: Path
) -> None:
    (wanted,) = answers(engines, ["Hi"], SamplingParams(temperature=0, max_generate_length=20))
    with Terminal(engines, tmp_path, "--show-speculation") as terminal:
        terminal.sees(PROMPT)
        terminal.types("Hi\n")
        terminal.sees("prompt tokens reused]")
        assert wanted in terminal.seen.replace("\x1b[2m(call)\x1b[0m", "").replace("(call)\n", "")
        assert "\x1b[2m[20 tokens, 19 base passes" in terminal.seen
        assert "\x1b[32m" not in terminal.seen  # no drafts, none accepted
        terminal.sees(PROMPT)
        terminal.types("\x04")
        terminal.exits(0)


def test_interrupt_stops_the_answer_keeps_it_and_the_chat_goes_on(
    engines: Path, tmp_path: Path
) -> None:
    with Terminal(engines, tmp_path, "--show-speculation", step_s=0.4) as terminal:
        terminal.sees(PROMPT)
        terminal.types("Hi\n")
        terminal.sees("(call)\n")
        terminal.sees("(call)\n")
        terminal.interrupts()
        terminal.sees("[stopped]", within_s=5)
        terminal.sees("prompt tokens reused]")
        count = int(re.findall(r"\[(\d+) tokens,", terminal.seen)[0])
        assert 1 <= count < 10
        terminal.sees(PROMPT)
        terminal.types("/undo\n")
        terminal.sees("[the last exchange is taken back]")
        terminal.sees(PROMPT)
        terminal.interrupts()
        terminal.sees("once more leaves")
        terminal.sees(PROMPT)
        terminal.interrupts()
        terminal.exits(130)


def test_second_interrupt_leaves_though_the_engine_is_in_a_long_call(
    engines: Path, tmp_path: Path
) -> None:
    with Terminal(engines, tmp_path, step_s=600) as terminal:
        terminal.sees(PROMPT)
        terminal.types("Hi\n")
        terminal.sees("(call)")
        terminal.interrupts()
        terminal.sees("stopping after this step")
        terminal.interrupts()
        terminal.exits(130, within_s=10)


def test_interrupt_at_the_prompt_clears_the_line(engines: Path, tmp_path: Path) -> None:
    with Terminal(engines, tmp_path) as terminal:
        terminal.sees(PROMPT)
        terminal.types("never sent")
        terminal.sees("never sent")
        terminal.interrupts()
        terminal.sees("once more leaves")
        terminal.sees(PROMPT)
        terminal.types("/undo\n")
        terminal.sees("no exchange to take back")
        terminal.sees(PROMPT)
        terminal.types("/exit\n")
        terminal.exits(0)


def test_prompt_stays_in_the_terminal_where_answers_go_to_a_file(
    engines: Path, tmp_path: Path
) -> None:
    (wanted,) = answers(engines, ["Hi"], SamplingParams(temperature=0, max_generate_length=20))
    with Terminal(engines, tmp_path, stdout=tmp_path / "answers.txt") as terminal:
        terminal.sees(PROMPT)
        terminal.types("Hi\n")
        terminal.sees(PROMPT)
        terminal.types("\x04")
        terminal.exits(0)
    assert (tmp_path / "answers.txt").read_text() == f"{wanted}\n"


def test_sigterm_during_an_answer_ends_the_chat_after_the_step(
    engines: Path, tmp_path: Path
) -> None:
    with Terminal(engines, tmp_path, step_s=0.3) as terminal:
        terminal.sees(PROMPT)
        terminal.types("Hi\n")
        terminal.sees("(call)")
        terminal.process.send_signal(signal.SIGTERM)
        terminal.sees("[stopped]")
        terminal.exits(143)
