"""Conversations answered anew, turn by turn: each user turn is asked behind the answers to those
before it, as many conversations at a time as whoever answers takes.

Knows files, threads and what is kept of a run. Who answers is an argument.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Protocol

from edgespec.artifacts import atomic
from edgespec.artifacts.json_files import read_json, write_json
from edgespec.errors import EnvironmentProblem, OutputError, RequestError
from edgespec.progress import Progress
from edgespec.prompts.chats import Chat, Turn, parsed, read_chats

POLL_S = 0.05
SEEDS = 2**31
LEAST_IN_A_ROW = 16  # conversations that failed before a run gives up; two for each at a time
BEFORE_ANSWERS = ("system", "developer", "user")


class AnswerFailed(Exception):
    """A turn that was not answered; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said to a turn. `cut`: it reached the longest that was allowed."""

    text: str
    cut: bool = False
    reasoning: str = ""

    @property
    def turn(self) -> Turn:
        """As a message."""
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        return {"role": "assistant", "content": self.text, **thought}


class Answerer(Protocol):
    """Who answers, from as many threads as `concurrency` says."""

    @property
    def concurrency(self) -> int:
        """How many at a time."""

    def answer(self, chat: Chat, messages: Sequence[Turn], seed: int) -> Answer:
        """The answer to the last message. Raises AnswerFailed."""

    def abort(self) -> None:
        """Ends what is under way, from another thread."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The ids of a file of conversations, and how many of these ask what another asks."""

    path: Path
    ids: frozenset[str]
    repeated: int


@dataclass(slots=True)
class Synthesis:
    """What came of a run: `kept` conversations were there before, `written` are new, and `cut` of
    these have an answer of the longest length; `dropped` were left out for one. `repeated` ask what
    another asks too, and are answered once."""

    kept: int = 0
    written: int = 0
    cut: int = 0
    dropped: int = 0
    failed: int = 0
    repeated: int = 0


def settings_path(out: Path) -> Path:
    """Where the settings of an output stand."""
    return out.with_name(f"{out.stem}.settings.json")


def failures_path(out: Path) -> Path:
    """Where the conversations are listed that could not be answered."""
    return out.with_name(f"{out.stem}.failures.jsonl")


def synthesize(
    asked: Asked,
    out: Path,
    answerer: Answerer,
    settings: Mapping[str, Any],
    *,
    stopping: Callable[[], bool],
    progress: Progress,
) -> Synthesis:
    """Answers the conversations of a file into `out`, a line as each ends, and goes on where an
    earlier run was stopped or killed. `settings` are kept beside it; among them are `seed`
    and `drop_truncated`.

    Raises RequestError for an output of other settings, OutputError for one that another run
    writes, EnvironmentProblem where nothing is answered any more.
    """
    with atomic.writing(out), ExitStack() as stack:
        out.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(out.open("a+b"))
        refuse_other_run(file, out)
        done = kept_ids(file, out, settings)
        todo = set(asked.ids - done)
        write_json(settings_path(out), dict(settings))
        failures = stack.enter_context(failures_path(out).open("w", encoding="utf-8"))
        run = Run(answerer, file, failures, settings, stopping, progress)
        run.result.kept, run.result.repeated = len(done), asked.repeated
        progress.start("answers", len(todo))
        run.all_of(chat for chat in read_chats(asked.path) if take(todo, chat.id))
        if not run.result.failed:
            failures_path(out).unlink()
        if run.fault is not None:
            raise run.fault
    return run.result


def take(ids: set[str], name: str) -> bool:
    """Whether an id is among those that wait; it is no more afterwards."""
    found = name in ids
    ids.discard(name)
    return found


def refuse_other_run(file: IO[bytes], out: Path) -> None:
    """Raises OutputError where another run writes the file; holds its lock until it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(
            f"{out} is being written by another run.", "Wait until it has ended."
        ) from error


def kept_ids(file: IO[bytes], out: Path, settings: Mapping[str, Any]) -> set[str]:
    """The ids that an output has; a last line that a kill tore is cut off. Raises RequestError for
    one of other settings, and for another file."""
    file.seek(0)
    done, end = set[str](), 0
    for number, line in enumerate(file, 1):
        if end == 0:
            refuse_other_settings(out, settings)
        if not line.endswith(b"\n"):
            break
        value = parsed(line, f"{out}, line {number}")
        name = value.get("conversation_id") if isinstance(value, dict) else None
        if not isinstance(name, str):
            raise RequestError(f"{out}, line {number} has no conversation_id.", OTHER_FILE)
        done.add(name)
        end += len(line)
    os.ftruncate(file.fileno(), end)
    return done


OTHER_FILE = "Name another file, or remove this one."


def refuse_other_settings(out: Path, settings: Mapping[str, Any]) -> None:
    """Raises RequestError that names the first setting in which an output differs."""
    path = settings_path(out)
    if not path.exists():
        raise RequestError(f"{out} is there, and no {path.name} says how it was made.", OTHER_FILE)
    before = read_json(path)
    for key in sorted({*settings, *before}):
        if before.get(key) != settings.get(key):
            was, now = (json.dumps(values.get(key)) for values in (before, settings))
            raise RequestError(
                f"{out} was made with {key} {was}, and this run has {now}.",
                f"Give the same again, or {OTHER_FILE[0].lower()}{OTHER_FILE[1:]}",
            )


def read_asked(source: Path) -> Asked:
    """What a file asks. Raises RequestError for what is no conversation, and for an id that stands
    for two."""
    seen, asked, repeated = dict[str, str](), dict[str, int](), 0
    for chat in read_chats(source):
        content = hash(tuple((m["role"], m["content"]) for m in chat.asked))
        if chat.id not in seen:
            seen[chat.id], asked[chat.id] = chat.where, content
        elif asked[chat.id] == content:
            repeated += 1
        else:
            raise RequestError(
                f"{chat.where} has the id {chat.id!r:.80} of {seen[chat.id]}.",
                "Give each conversation an id of its own, or none.",
            )
    return Asked(source, frozenset(seen), repeated)


class Run:
    """The conversations of one run, and what is counted of them. `fault` has ended it early."""

    def __init__(
        self,
        answerer: Answerer,
        file: IO[bytes],
        failures: IO[str],
        settings: Mapping[str, Any],
        stopping: Callable[[], bool],
        progress: Progress,
    ) -> None:
        self.answerer, self.file, self.failures, self.settings = answerer, file, failures, settings
        self.stopping, self.progress = stopping, progress
        self.result, self.in_a_row = Synthesis(), 0
        self.reading, self.writing = threading.Lock(), threading.Lock()
        self.fault: BaseException | None = None

    def all_of(self, chats: Iterator[Chat]) -> None:
        """As many at a time as are answered at a time."""
        count = self.answerer.concurrency
        with ThreadPoolExecutor(count) as threads:
            working = {threads.submit(self.work, chats) for _ in range(count)}
            while working:
                ended, working = wait(working, POLL_S)
                for one in ended:
                    self.fault = self.fault or one.exception()
                if self.is_over:
                    self.answerer.abort()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be asked."""
        return self.fault is not None or self.stopping()

    def work(self, chats: Iterator[Chat]) -> None:
        """What one thread does: a conversation after the other."""
        while not self.is_over:
            with self.reading:
                chat = next(chats, None)
            if chat is None:
                return
            try:
                line, cut = self.converse(chat)
            except AnswerFailed as error:
                if not self.is_over:
                    self.failed(chat, str(error))
            else:
                self.keep(line, cut=cut)

    def converse(self, chat: Chat) -> tuple[str, bool]:
        """A conversation's line, and whether an answer was cut. Raises AnswerFailed."""
        messages, cut = list[Turn](), False
        digest = hashlib.sha256(f"{self.settings['seed']}:{chat.id}".encode()).digest()
        seed = int.from_bytes(digest[:8]) % SEEDS
        for turn in chat.asked:
            if turn["role"] not in BEFORE_ANSWERS:
                raise AnswerFailed(f"what follows a turn of the role {turn['role']} is not asked")
            messages.append(turn)
            if turn["role"] != "user":
                continue
            answer = self.answerer.answer(chat, messages, seed)
            if not answer.text.strip():
                raise AnswerFailed(f"the answer to message {len(messages)} is empty")
            messages.append(answer.turn)
            cut |= answer.cut
        more = {"truncated": True} if cut else {}
        return replace(chat, messages=tuple(messages)).line(**more), cut

    def keep(self, line: str, *, cut: bool) -> None:
        """Appends a conversation."""
        with self.writing:
            self.in_a_row = 0
            self.progress.advance(1)
            if cut and self.settings["drop_truncated"]:
                self.result.dropped += 1
                return
            self.file.write(line.encode("utf-8", "replace"))
            self.file.flush()
            self.result.written += 1
            self.result.cut += cut

    def failed(self, chat: Chat, reason: str) -> None:
        """Lists a conversation. Raises EnvironmentProblem where none is answered any more."""
        with self.writing:
            self.in_a_row += 1
            self.progress.advance(1)
            self.result.failed += 1
            value = {"conversation_id": chat.id, "where": chat.where, "reason": reason}
            self.failures.write(json.dumps(value, ensure_ascii=False) + "\n")
            self.failures.flush()
            if self.in_a_row >= max(LEAST_IN_A_ROW, 2 * self.answerer.concurrency):
                raise EnvironmentProblem(
                    f"{self.in_a_row} conversations in a row were not answered: {reason}",
                    "Mend that; the same command goes on from there.",
                )
