"""The chat around an engine that says what it is told to: lines, commands, history, and what a
terminal is shown."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.cli.chat import command as chat_command
from edgespec.cli.chat import slashes
from edgespec.cli.chat.conversation import Conversation
from edgespec.cli.chat.loop import Chat
from edgespec.cli.chat.reader import LineCleared, read_pipe, read_turn
from edgespec.cli.chat.screen import Screen
from edgespec.cli.chat.settings import Settings
from edgespec.cli.chat.slashes import SLASHES
from edgespec.cli.main import run
from edgespec.cli.stats import stats
from edgespec.errors import EdgeSpecError, LimitError, RequestError
from edgespec.prompts import (
    CANCELLED,
    CAPACITY,
    END_OF_SEQUENCE,
    MAX_LENGTH,
    Message,
    SamplingParams,
)
from edgespec.prompts.parse import read_requests
from edgespec.runtime.acceptance.verify import (
    ACCEPT_RULES,
    EXACT_ACCEPTANCE,
    AcceptOptions,
    RejectionAcceptance,
    RelaxedAcceptance,
    TypicalAcceptance,
)
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.trees.tree import PLAIN, DraftPlan, DraftTree, Plain

Event = Chunk | Response | EdgeSpecError


def chunk(*pieces: str, accepted: int = 0) -> Chunk:
    return Chunk([*range(len(pieces))], [*pieces], accepted, None)


def response(text: str, reason: str = END_OF_SEQUENCE, **metrics: Any) -> Response:
    return Response(text, [], reason, RequestMetrics(7, **metrics), None)


def saying(text: str) -> list[Event]:
    return [chunk(text), response(text)]


@dataclass
class Spoken:
    """Stands for a Stream: its events, and the response of one that was cancelled."""

    events: Sequence[Event]
    signals: tuple[int, ...] = ()  # sent to this process with the first event
    cancelled: bool = False

    def __iter__(self) -> Iterator[Chunk]:
        for event in self.events:
            if self.cancelled:
                return
            for number in self.signals:
                os.kill(os.getpid(), number)
                time.sleep(0.3)  # the rest of the step, in which the signal is read
            self.signals = ()
            if isinstance(event, EdgeSpecError):
                raise event
            if isinstance(event, Chunk):
                yield event

    def result(self) -> Response:
        if self.cancelled:
            return response("so far, and what was held", CANCELLED)
        last = self.events[-1]
        assert isinstance(last, Response)
        return last

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(frozen=True)
class Plans:
    """Stands for a Planner."""

    acceptance: AcceptOptions = EXACT_ACCEPTANCE

    def by_sizes(self, top_k: int | None, steps: int | None, verify_size: int | None) -> DraftPlan:
        if top_k == 99:
            raise LimitError("`spec_draft_top_k` 99", "Lower `spec_verify_size`.")
        return DraftPlan(top_k or 1, steps or 3, verify_size or 4)

    def check_acceptance(self, asked: AcceptOptions, plan: DraftPlan) -> None:
        if ACCEPT_RULES[asked.rule].chains_only and plan.top_k > 1:
            raise LimitError("chains alone", "Set --spec-draft-top-k to 1.")


@dataclass
class Told:
    """Stands for an Engine: answers one turn after the other, and remembers what it was asked."""

    answers: list[Spoken]
    asked: list[list[Message]] = field(default_factory=list)
    thinking: list[bool] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)
    tokenizer: Any = field(
        default_factory=lambda: SimpleNamespace(
            token_bytes=lambda token: bytes([token]),
            knows_thinking=lambda: False,
            token_id=lambda token: None,
            token=str,
        )
    )
    plans: list[DraftPlan | Plain] = field(default_factory=list)
    rules: list[AcceptOptions | None] = field(default_factory=list)
    drafter_notes: tuple[str, ...] = ()
    drafting_stopped: str | None = None
    drafting: Any = field(default_factory=lambda: SimpleNamespace(has_trained_draft=False))
    images: Any = None
    planner: Any = field(default_factory=Plans)

    def acceptance_for(self, asked: AcceptOptions) -> AcceptOptions:
        return asked.for_model(self.tokenizer)

    def stream(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams,
        plan: DraftPlan | Plain,
        *,
        enable_thinking: bool,
        keep: bool,
        acceptance: AcceptOptions | None,
    ) -> Spoken:
        self.rules.append(acceptance)
        self.asked.append([*messages])
        self.thinking.append(enable_thinking)
        self.kept.append(keep)
        self.plans.append(plan)
        return self.answers.pop(0)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def chat_of(*answers: Spoken | list[Event], **how: Any) -> Chat:
    engine = Told([a if isinstance(a, Spoken) else Spoken(a) for a in answers])
    settings = Settings(
        SamplingParams(max_generate_length=9),
        drafts=True,
        enable_thinking=how.pop("thinking", False),
        show_speculation=how.pop("show_speculation", False),
    )
    screen, conversation = Screen(how.pop("out", sys.stdout)), Conversation(how.pop("system", ""))
    return Chat(engine, settings, screen, conversation, slashes.run, **how)  # type: ignore[arg-type]


def talk(chat: Chat, *lines: str | type[BaseException]) -> int:
    """The exit code after these lines; an exception is what reading meets there."""
    left = [*lines]

    def read(prompt: str) -> str:
        line = left.pop(0) if left else EOFError
        if isinstance(line, str):
            return line
        raise line

    return chat.run(read)


def asked(chat: Chat) -> list[list[tuple[str, str]]]:
    engine: Any = chat.engine
    return [[(m.role, m.content) for m in messages] for messages in engine.asked]


# What a terminal is shown


def test_accepted_drafts_alone_are_green(terminal: Terminal) -> None:
    steps: list[Event] = [
        chunk("The"),
        chunk(" small", " boat", " left", accepted=2),
        chunk(" it"),
        response("The small boat left it"),
    ]
    assert talk(chat_of(steps, out=terminal, show_speculation=True), "Tell.") == 0
    assert terminal.getvalue() == "The\x1b[32m small boat\x1b[0m left it\n"


@pytest.mark.parametrize("without", ["the flag", "NO_COLOR", "a clever terminal", "a terminal"])
def test_nothing_is_coloured_without(
    without: str,
    monkeypatch: pytest.MonkeyPatch,
    terminal: Terminal,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if without == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    if without == "a clever terminal":
        monkeypatch.setenv("TERM", "dumb")
    if without == "a terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    talk(
        chat_of(
            [chunk("a", "b", accepted=1), response("ab")],
            out=terminal,
            show_speculation=without != "the flag",
        ),
        "Say.",
    )
    assert terminal.getvalue() == "ab\n"
    assert "\x1b" not in capsys.readouterr().err


HOSTILE = "\x1b[2Ja\r\x07b\x9b31m\x7f\x00\tc\nd"


@pytest.mark.parametrize("accepted", [0, 1])
def test_control_characters_of_a_model_act_on_no_terminal(
    terminal: Terminal, accepted: int
) -> None:
    talk(chat_of([chunk(HOSTILE, accepted=accepted), response(HOSTILE)], out=terminal), "Say.")
    assert terminal.getvalue() == "\\x1b[2Ja\\x0d\\x07b\\x9b31m\\x7f\\x00\tc\nd\n"


def test_control_characters_go_into_a_pipe_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    talk(chat_of(saying(HOSTILE)), "Say.")
    assert capsys.readouterr().out == f"{HOSTILE}\n"


def test_control_characters_in_an_error_act_on_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk(chat_of([RequestError("template: \x1b[2J", "Mend \x07 it.")]), "Say.")
    assert capsys.readouterr().err == "error: template: \\x1b[2J\n  Mend \\x07 it.\n"


def test_text_that_the_encoding_lacks_is_escaped(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "encoding", "ascii")
    talk(chat_of(saying("five \u20ac"), out=terminal), "Say.")
    assert terminal.getvalue() == "five \\u20ac\n"


def test_text_is_out_before_the_next_step_begins(terminal: Terminal) -> None:
    seen = []

    class Watched(Spoken):
        def __iter__(self) -> Iterator[Chunk]:
            for chunk in super().__iter__():
                seen.append(terminal.getvalue())
                yield chunk

        def result(self) -> Response:
            seen.append(terminal.getvalue())
            return super().result()

    talk(chat_of(Watched([chunk("one"), chunk(" two"), response("one two")]), out=terminal), "Say.")
    assert seen == ["", "one", "one two"]


def test_figures_are_those_of_the_answer() -> None:
    metrics = RequestMetrics(
        40,
        3,
        reused_tokens=31,
        completion_tokens=12,
        time_to_first_token=0.25,
        request_latency=2.25,
        per_step_accepted=[3, 0, 2, 1, 0],
        per_step_drafted=[3] * 5,
    )
    assert stats(metrics, drafted=True) == (
        "[12 tokens, 5 base passes after prefill, acceptance length 2.20, 5.5 tokens/s, "
        "time to first token 0.250 s, 31 of 40 prompt tokens reused]"
    )
    assert "acceptance" not in stats(metrics, drafted=False)


def test_figures_stand_on_stderr_and_only_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk(chat_of(saying("x"), show_speculation=True), "Say.")
    said = capsys.readouterr()
    assert (said.out, said.err.count("prompt tokens reused")) == ("x\n", 1)
    talk(chat_of(saying("x")), "Say.")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("reason", "count", "said"),
    [
        (END_OF_SEQUENCE, 9, ""),
        (MAX_LENGTH, 9, "[cut at --max-generate-length 9]"),
        (CAPACITY, 9, "[cut: no room"),
    ],
)
def test_answer_that_was_cut_says_by_what(
    reason: str, count: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(chat_of([chunk("x"), response("x", reason, completion_tokens=count)]), "Say.")
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert bool(err) == bool(said)


# History


def test_each_turn_sends_all_that_was_said_and_keeps_the_rows() -> None:
    chat = chat_of(saying("one"), saying("two"), system="Be brief.", thinking=True)
    assert talk(chat, "First?", "", "   ", "Second?") == 0
    first = [("system", "Be brief."), ("user", "First?")]
    assert asked(chat) == [first, [*first, ("assistant", "one"), ("user", "Second?")]]
    engine: Any = chat.engine
    assert engine.kept == [True, True]
    assert engine.thinking == [True, True]


@pytest.mark.parametrize(
    "events", [[RequestError("no", "Mend it.")], [chunk("half"), RequestError("no", "Mend it.")]]
)
def test_turn_that_fails_leaves_no_trace_and_the_chat_goes_on(
    events: list[Event], capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(saying("one"), events, saying("three"))
    assert talk(chat, "First?", "Bad?", "Third?") == 5
    assert asked(chat)[2] == [("user", "First?"), ("assistant", "one"), ("user", "Third?")]
    said = capsys.readouterr()
    assert said.out == ("one\nhalf\nthree\n" if len(events) == 2 else "one\nthree\n")
    assert said.err == "error: no\n  Mend it.\n"


def test_failed_turns_of_a_terminal_are_no_failure_of_the_chat() -> None:
    assert talk(chat_of([RequestError("no", "Mend it.")], interactive=True), "Bad?") == 0


def test_conversation_that_no_longer_fits_is_told_with_the_way_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full: list[Event] = [LimitError("the prompt has 70 tokens", "Shorten it.")]
    talk(chat_of(full), "Long?")
    assert (
        capsys.readouterr().err == "error: the prompt has 70 tokens\n  Shorten it.\n"
    )  # nothing to take back yet
    talk(chat_of(saying("one"), full), "First?", "Long?")
    error, remedy = capsys.readouterr().err.splitlines()
    assert error == "error: the prompt has 70 tokens"
    assert "/reset" in remedy
    assert remedy.startswith("  Shorten it. Your turn was taken back.")


# Commands


def test_undo_takes_back_the_last_exchange_only() -> None:
    chat = chat_of(saying("one"), saying("two"), saying("three"))
    talk(chat, "First?", "Second?", "/undo", "Third?")
    assert asked(chat)[2] == [("user", "First?"), ("assistant", "one"), ("user", "Third?")]


def test_undo_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(chat_of(), "/undo") == 5
    assert "no exchange" in capsys.readouterr().err


def test_reset_begins_anew_with_the_same_system_prompt() -> None:
    chat = chat_of(saying("one"), saying("two"), system="Be brief.")
    talk(chat, "First?", "/reset", "Second?")
    assert asked(chat)[1] == [("system", "Be brief."), ("user", "Second?")]


def test_system_prompt_is_set_and_removed_in_between() -> None:
    chat = chat_of(saying("one"), saying("two"), saying("three"))
    talk(chat, "First?", "/system\nBe long. ", "Second?", "/system", "Third?")
    assert [messages[0] for messages in asked(chat)] == [
        ("user", "First?"),
        ("system", "Be long."),
        ("user", "First?"),
    ]
    assert len(asked(chat)[1]) == 4


def test_exit_leaves_at_once() -> None:
    assert talk(chat_of(), "/exit", "Never asked.") == 0


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert talk(chat_of(), "/help") == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.err.splitlines()[:-1]] == [*SLASHES]
    assert "/system TEXT" in said.err
    assert said.out == ""


@pytest.mark.parametrize("line", ["/x", "/Reset", "/", "/ reset", "/etc/passwd, what is it?"])
def test_unknown_command_is_no_turn_and_names_the_known_ones(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of()
    assert talk(chat, line) == 5
    assert asked(chat) == []
    said = capsys.readouterr().err
    assert f"there is no command {line.split(' ')[0]}\n" in said
    assert all(name in said for name in SLASHES)


def test_text_behind_a_command_that_takes_none_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = chat_of(saying("one"))
    talk(chat, "First?", "/reset the router")
    assert len(chat.conversation.exchanges) == 1
    assert "//reset" in capsys.readouterr().err


def test_two_slashes_send_one() -> None:
    chat = chat_of(saying("one"), saying("two"))
    talk(chat, "//x y", "///")
    assert [messages[-1][1] for messages in asked(chat)] == ["/x y", "//"]


# Lines


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "", "never"], "one\ntwo\n"),
        (["\\ one", "never"], "\\ one"),
        (["one\\"], "one"),
        (["one\\\\", "two"], "one\\\ntwo"),
    ],
)
def test_line_that_ends_with_a_backslash_goes_on(lines: list[str], wanted: str) -> None:
    prompts: list[str] = []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        if not lines:
            raise EOFError
        return lines.pop(0)

    assert read_turn(read) == wanted
    assert prompts[0] == "> "
    assert set(prompts[1:]) <= {". "}


def test_line_that_is_not_utf8_harms_none_after_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = io.BytesIO("First? \u20ac\r\n".encode() + b"\xff\xfe bad\nThird?")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=raw))
    chat = chat_of(saying("one"), saying("three"))
    assert chat.run(read_pipe) == 5
    assert [messages[-1][1] for messages in asked(chat)] == ["First? \u20ac", "Third?"]
    assert "not UTF-8" in capsys.readouterr().err


def test_half_of_a_surrogate_pair_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_of(saying("two"))
    assert talk(chat, "bad \udcff", "Second?") == 5
    assert len(asked(chat)) == 1
    assert "this turn has an unpaired surrogate" in capsys.readouterr().err


# Ctrl-C


def test_first_interrupt_at_the_prompt_warns_and_the_second_leaves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = KeyboardInterrupt
    assert talk(chat_of(interactive=True), stop, stop, "never") == 130
    assert capsys.readouterr().err.count("once more leaves") == 1
    chat = chat_of(saying("one"), interactive=True)
    assert talk(chat, stop, "First?", stop) == 0  # what was typed between them forgives the first
    assert len(asked(chat)) == 1


def test_interrupt_of_what_was_typed_since_the_first_one_leaves_nothing() -> None:
    typed = LineCleared
    chat = chat_of(saying("one"), interactive=True)
    assert talk(chat, typed, typed, typed, "First?") == 0
    assert len(asked(chat)) == 1
    assert talk(chat_of(interactive=True), typed, KeyboardInterrupt, "never") == 130


def test_interrupt_without_a_terminal_leaves_at_once() -> None:
    assert talk(chat_of(), KeyboardInterrupt, "never") == 130


LONG: list[Event] = [chunk("so far"), chunk(", never"), response("so far, never")]


@pytest.mark.parametrize("interactive", [True, False])
def test_interrupt_ends_an_answer_and_keeps_what_there_is(
    interactive: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(Spoken(LONG, (signal.SIGINT,)), saying("two"), interactive=interactive)
    code = talk(chat, "First?", "Second?")
    said = capsys.readouterr()
    assert "[stopped]" in said.err
    assert said.out.startswith("so far, and what was held\n")
    kept = [("user", "First?"), ("assistant", "so far, and what was held")]
    if interactive:
        assert code == 0
        assert asked(chat)[1] == [*kept, ("user", "Second?")]
    else:
        assert code == 130
        assert len(asked(chat)) == 1


@pytest.mark.parametrize("interactive", [True, False])
def test_sigterm_during_an_answer_ends_the_chat(interactive: bool) -> None:
    chat = chat_of(Spoken(LONG, (signal.SIGTERM,)), interactive=interactive)
    assert talk(chat, "First?", "never") == 143


def test_interrupt_of_a_turn_that_fails_ends_a_run_without_a_terminal() -> None:
    chat = chat_of(Spoken([RequestError("no", "Mend it.")], (signal.SIGINT,)), saying("never"))
    assert talk(chat, "Bad?", "never") == 130
    assert len(asked(chat)) == 1


# The command


def test_parameters_are_refused_before_an_engine_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--topP", "1.5", "--stop", "\n"]
    assert run(["chat", "--engineDir", str(tmp_path / "none"), *flags]) == 3
    assert "error: --top-p is 1.5." in capsys.readouterr().err
    assert run(["chat", "--engineDir", str(tmp_path / "none"), "--stop", ""]) == 3
    assert "--stop: [0] is an empty string" in capsys.readouterr().err


def test_sizes_of_drafts_want_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["chat", "--engine-dir", str(tmp_path), "--no_spec_decode", "--spec-draft-step", "3"])
        == 2
    )
    assert "--no-spec-decode" in capsys.readouterr().err


def test_defaults_are_those_of_input_json() -> None:
    given = {
        p.name: p.default for p in chat_command.command.params if p.name in SamplingParams.__slots__
    }
    assert len(given) == 9
    numbers: dict[str, Any] = {
        name: value for name, value in given.items() if isinstance(value, int | float)
    }
    assert SamplingParams(**numbers) == SamplingParams()
    assert given.keys() - numbers.keys() == {"guided", "seed", "stop"}


def test_regenerate_replaces_the_last_answer() -> None:
    chat = chat_of(saying("one"), saying("two"), saying("three"))
    talk(chat, "First?", "/regenerate", "Second?")
    first = [("user", "First?")]
    assert asked(chat) == [first, first, [*first, ("assistant", "two"), ("user", "Second?")]]


def test_regenerate_that_fails_keeps_the_old_answer(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_of(saying("one"), [RequestError("no", "Mend it.")])
    assert talk(chat, "/regenerate", "First?", "/regenerate") == 5
    assert [answer.content for _, answer in chat.conversation.exchanges] == ["one"]
    assert "no answer to generate again" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["/set temperature 0", "/set seed 4"])
def test_regenerate_says_when_the_answer_will_be_the_same(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(chat_of(saying("one"), saying("one")), line, "First?", "/regenerate")
    assert "the same settings give the same answer" in capsys.readouterr().err


# Settings


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("temperature 0.2", "temperature", 0.2),
        ("--top-k 7", "top_k", 7),
        ("seed 5", "seed", 5),
        ("max_generate_length 3", "max_generate_length", 3),
        ("temperature=0.3", "temperature", 0.3),
        ("temperature = 0.3", "temperature", 0.3),
        ("stop=a = b", "stop", ("a = b",)),
        ('stop ["a", "b c"]', "stop", ("a", "b c")),
        ("stop Human:", "stop", ("Human:",)),
    ],
)
def test_setting_of_sampling_changes_the_answers_to_come(
    line: str, name: str, value: object
) -> None:
    chat = chat_of()
    assert talk(chat, f"/set {line}") == 0
    assert getattr(chat.settings.sampling, name) == value


def test_seed_none_draws_one_again() -> None:
    chat = chat_of()
    talk(chat, "/set seed 5", "/set seed none")
    assert chat.settings.sampling.seed is None


def test_sizes_of_drafts_are_the_plan_of_the_next_answer() -> None:
    chat = chat_of(saying("one"), saying("two"), saying("three"))
    lines = ["First?", "/set spec_draft_top_k 4", "/set spec-verify-size 16", "Second?"]
    assert talk(chat, *lines, "/set spec_decode off", "Third?") == 0
    engine: Any = chat.engine
    assert engine.plans == [DraftPlan(1, 3, 4), DraftPlan(4, 3, 16), PLAIN]


@pytest.mark.parametrize(
    ("lines", "rule", "said"),
    [
        (["acceptance rejection"], RejectionAcceptance(), "lossless in distribution"),
        (
            ["acceptance typical posterior_threshold=0.09 posterior_fast=off"],
            TypicalAcceptance(0.09, None, False),
            "typical acceptance, LOSSY",
        ),
        (["acceptance typical"], TypicalAcceptance(), "greedy at every temperature"),
        (["--eagle-posterior-threshold 0.2"], TypicalAcceptance(0.2), "LOSSY"),
        (
            ["posterior_threshold 0.2", "posterior_alpha 0.3", "posterior_alpha none"],
            TypicalAcceptance(0.2),
            "LOSSY",
        ),
        (
            ["acceptance relaxed begin_thinking_phase_token=4 end_thinking_phase_token=5"],
            RelaxedAcceptance(10, 0.6, 4, 5),
            "relaxed acceptance for thinking, LOSSY",
        ),
        (
            [
                "acceptance relaxed begin_thinking_phase_token=4 end_thinking_phase_token=5",
                "relaxed_topk 3",
                "relaxed_delta 0.1",
            ],
            RelaxedAcceptance(3, 0.1, 4, 5),
            "LOSSY",
        ),
        (["posterior_threshold 0.2", "acceptance exact"], EXACT_ACCEPTANCE, "token for token"),
    ],
)
def test_accept_rule_is_that_of_the_next_answer_and_says_what_it_guarantees(
    lines: list[str],
    rule: AcceptOptions,
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    chat = chat_of(saying("one"), saying("two"))
    assert talk(chat, "First?", *(f"/set {line}" for line in lines), "Second?") == 0
    engine: Any = chat.engine
    assert engine.rules == [None, rule]
    assert said in capsys.readouterr().err


def test_every_answer_of_a_lossy_rule_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    lossy = [chunk("one"), response("one", acceptance="typical", lossless="no")]
    chat = chat_of(lossy, lossy, saying("three"))
    talk(chat, "First?", "Second?", "Third?")
    assert capsys.readouterr().err.count("typical acceptance: LOSSY") == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/set acceptance lucky", "acceptance is lucky.\n  Write one of exact, rejection"),
        ("/set acceptance typcal", 'Did you mean "typical"?'),
        ("/set acceptance typical 0.09", "posterior_threshold=0.09"),
        ("/set acceptance typical posterior=1", "Did you mean"),
        ("/set posterior_threshold 2", "posterior_threshold of typical acceptance is 2"),
        ("/set posterior_alpha 0.3", "Give posterior_threshold too"),
        ("/set acceptance relaxed", "Name them with begin_thinking_phase_token and"),
        ("/set temperature -1", "temperature is -1"),
        ("/set temperature warm", 'temperature is "warm", not a number'),
        ("/set temprature 1", 'Did you mean "temperature"?'),
        ("/set temperature", "temperature has no value"),
        ("/set spec_draft_top_k 0", "spec_draft_top_k is 0"),
        ("/set spec_draft_top_k 99", "error: spec_draft_top_k 99\n  Lower spec_verify_size."),
        ("/set spec_decode perhaps", "spec_decode is"),
        ("/set enable_thinking on", "this model's template has no thinking mode"),
    ],
)
def test_value_that_cannot_be_is_refused_and_changes_nothing(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of()
    before = chat.settings
    assert talk(chat, line) == 5
    assert said in capsys.readouterr().err
    assert chat.settings == before


def test_all_settings_are_shown_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    chat = chat_of()
    talk(chat, "/set spec_draft_step 2", "/set")
    lines = capsys.readouterr().err.splitlines()[1:]
    values = dict(line.split(maxsplit=1) for line in lines)
    assert values["temperature"] == "1.0"
    assert (values["seed"], values["spec_decode"], values["spec_draft_step"]) == ("none", "on", "2")
    for name, value in values.items():
        assert talk(chat, f"/set {name} {value}") == 0


# Files


def test_conversation_is_saved_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    chat = chat_of(saying("one"), saying("two"), system="Be brief.")
    assert talk(chat, "First?", f"/save {path}", "Second?", f"/save {path}") == 0
    again = chat_of(saying("three"))
    assert talk(again, f"/load {path}", "Third?") == 0
    assert asked(again) == [
        [
            ("system", "Be brief."),
            ("user", "First?"),
            ("assistant", "one"),
            ("user", "Second?"),
            ("assistant", "two"),
            ("user", "Third?"),
        ]
    ]


def test_saved_conversation_is_an_input_file(tmp_path: Path) -> None:
    talk(chat_of(saying("one")), "First?", f"/save {tmp_path / 'talk.json'}")
    (request,) = read_requests(tmp_path / "talk.json").requests
    assert [m.content for m in request.messages] == ["First?", "one"]


def test_save_overwrites_no_file_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "weights.bin"
    path.write_text("precious")
    assert talk(chat_of(saying("one")), "First?", f"/save {path}") == 5
    assert path.read_text() == "precious"
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "not JSON"),
        ("[]", "is empty"),
        ('[{"role": "user", "content": "Hi"}]', "ends with a turn that has no answer"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
            "messages[1] is of the role user, not assistant",
        ),
        ('{"requests": []}', "requests is not a list of one request"),
    ],
)
def test_file_that_holds_no_conversation_is_refused_and_changes_nothing(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "talk.json"
    path.write_text(content)
    chat = chat_of(saying("one"))
    assert talk(chat, "First?", f"/load {path}", f"/load {tmp_path / 'none'}", "/load") == 5
    assert said in capsys.readouterr().err
    assert len(chat.conversation.exchanges) == 1


def test_save_into_a_missing_directory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(chat_of(), f"/save {tmp_path / 'no' / 'talk.json'}") == 5
    assert "cannot be written" in capsys.readouterr().err


# Figures and pictures


def test_stats_are_of_the_last_answer_and_of_the_session(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = [chunk("a"), response("a", completion_tokens=5, per_step_accepted=[1, 1])]
    second = [chunk("b"), response("b", completion_tokens=7, per_step_accepted=[2, 1])]
    assert talk(chat_of(first, second), "/stats", "First?", "Second?", "/stats") == 5
    said = capsys.readouterr().err
    assert "there is no answer yet" in said
    assert "[7 tokens, 2 base passes" in said
    assert "[session: 2 answers, 12 tokens, 4 base passes" in said


TREE = DraftTree(
    np.array([*b"abcde"]), np.array([-1, 0, 0, 1, 3]), np.array([1, 0.5, 0.25, 1, 1], np.float32)
)


def test_tree_shows_what_was_drafted_and_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    step = Chunk([*b"bdz"], ["b", "d", "z"], 2, None, TREE, [0, 1, 3])
    assert talk(chat_of([step, response("bdz")]), "/tree", "Say.", "/tree") == 5
    said = capsys.readouterr().err
    assert "no draft was verified yet" in said
    lines = re.sub(r"\x1b\[\d*m", "", said).splitlines()[2:]
    assert lines == [
        "'a'  (the token before)",
        "├─ ● 'b'  50%",
        "│  └─ ● 'd'  100%",
        "│     ├─ ○ 'e'  100%",
        "│     └─ 'z'  (the base's own)",
        "└─ ○ 'c'  25%",
        "[4 drafted, 2 accepted (●); the percentages are the draft's own]",
    ]


def test_tree_of_an_answer_that_ended_has_no_token_of_the_base(
    capsys: pytest.CaptureFixture[str],
) -> None:
    step = Chunk([*b"b"], ["b"], 1, "stop-words", TREE, [0, 1])
    talk(chat_of([step, response("b")]), "Say.", "/tree")
    assert "the base's own" not in capsys.readouterr().err


def test_tree_is_that_of_the_last_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    step = Chunk([*b"b"], ["b"], 1, None, TREE, [0, 1])
    lines = ["Say.", "/set spec_decode off", "Say.", "/tree"]
    assert talk(chat_of([step, response("b")], saying("plain")), *lines) == 5
    assert "no draft was verified in the last answer" in capsys.readouterr().err


def test_note_of_a_stop_begins_a_line_of_its_own(
    terminal: Terminal, capfd: pytest.CaptureFixture[str]
) -> None:
    chat = chat_of(Spoken(LONG, (signal.SIGINT,)), interactive=True, out=terminal)
    assert talk(chat, "First?") == 0
    assert "\n\nstopping after this step" not in capfd.readouterr().err  # nothing was shown before
    middle: list[Event] = [chunk("so far"), chunk(", more"), response("so far, more")]

    class Late(Spoken):
        def __iter__(self) -> Iterator[Chunk]:
            yield from [chunk("so far")]
            yield from Spoken(middle[1:], (signal.SIGINT,))

    chat = chat_of(Late(middle), interactive=True, out=terminal)
    assert talk(chat, "First?") == 0
    assert "\n\nstopping after this step" in capfd.readouterr().err


def test_drafts_no_better_than_chance_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = RequestMetrics(
        7, completion_tokens=31, per_step_accepted=[0] * 30, per_step_drafted=[3] * 30
    )
    wrong: list[Event] = [chunk("a"), Response("a", [*range(31)], END_OF_SEQUENCE, metrics, None)]
    chat = chat_of(wrong, wrong)
    chat.engine.drafting.has_trained_draft = True  # type: ignore[misc]
    assert talk(chat, "First?", "Second?") == 0
    assert capsys.readouterr().err.count("drafts are no better than chance: 0 of 30") == 1
    assert talk(chat_of(wrong), "First?") == 0  # nothing was trained
    assert "chance" not in capsys.readouterr().err


def test_one_of_a_kind_is_counted_as_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = [chunk("a"), response("a", completion_tokens=1, per_step_accepted=[0])]
    lines = ["First?", "/stats", f"/save {tmp_path}/a.json", f"/load {tmp_path}/a.json"]
    assert talk(chat_of(one), *lines) == 0
    said = capsys.readouterr().err
    assert "[session: 1 answer, 1 token, 1 base pass after prefill" in said
    assert "[1 exchange from" in said
    assert "[1 token, 1 base pass after prefill" in said
