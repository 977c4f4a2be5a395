"""What happens to `infer` when the file, the machine or the user do not cooperate: nothing that is
finished is lost, each request's fault stays its own, and the message says what to do."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from edgespec.prompts import CAPACITY as FULL
from edgespec.prompts import END_OF_SEQUENCE, MAX_LENGTH, STOP_WORDS, Journal
from edgespec.prompts.source import MAX_FILE_BYTES
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.session import Session
from tests.e2e.workshop import (
    ENGINE_CALL,
    INTERRUPTED,
    JOURNAL_ADD,
    TEMPLATE,
    TERMINATED,
    Cli,
    Outcome,
    asked,
    cli,
    ended,
    halted,
    happening,
    infer,
    kept_lines,
    process,
    responses,
    said,
    send,
    small_disk,
)
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.engines import make_engines

__all__ = ["cli", "small_disk"]  # fixtures

USAGE, REFUSED, ENVIRONMENT, SOME_FAILED = 2, 3, 4, 5
CAPACITY, VOCAB = 64, 256
CHAIN = ["--spec-decode"]
TREE = [*CHAIN, "--spec-draft-top-k", 4, "--spec-draft-step", 3, "--spec-verify-size", 16]
PARTIAL = "output.json.partial.jsonl"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` for a sequence at a time, `four` for four."""
    return make_engines(tmp_path_factory.mktemp("engines"), chat_template=TEMPLATE)


# ---- files that are no requests

REQUEST = '{"messages": [{"role": "user", "content": "x"}]}'
FILES: dict[str, tuple[bytes, str]] = {
    "nested deeply": (b"[" * 100_000, "nested too deeply"),
    "nested deeply in a value": (b'{"requests": ' + b'{"a":' * 100_000, "nested too deeply"),
    "not UTF-8": (b'{"requests": ["\xe9"]}', "not UTF-8: byte 0xe9 at line 1, column 16"),
    "empty": (b"", "is not JSON"),
    "no requests": (b'{"requests": []}', "requests is empty"),
    "NaN": (f'{{"temperature": NaN, "requests": [{REQUEST}]}}'.encode(), "NaN is not JSON"),
    "infinite": (
        f'{{"temperature": 1e999, "requests": [{REQUEST}]}}'.encode(),
        "temperature is Infinity",
    ),
    "long number": (
        f'{{"seed": {"9" * 5000}, "requests": [{REQUEST}]}}'.encode(),
        "a number that is too long",
    ),
    "out of range": (f'{{"top_p": 1.5, "requests": [{REQUEST}]}}'.encode(), "top_p is 1.5"),
    "half a surrogate": (
        b'{"requests": [{"messages": [{"role": "user", "content": "\\ud83d"}]}]}',
        "unpaired surrogate",
    ),
}


@pytest.mark.parametrize("case", FILES)
def test_file_that_is_no_requests_is_refused(
    engines: Path, tmp_path: Path, cli: Cli, case: str
) -> None:
    data, words = FILES[case]
    args = infer(engines / "one", tmp_path)
    (tmp_path / "input.json").write_bytes(data)
    assert_refused(cli(*args), tmp_path, words)


def test_file_that_is_too_large_is_refused_unread(engines: Path, tmp_path: Path) -> None:
    args = infer(engines / "one", tmp_path)
    with (tmp_path / "input.json").open("r+b") as file:
        file.truncate(2**40)  # a hole: nothing is on the disk
    assert_refused(process(*args), tmp_path, f"is larger than {MAX_FILE_BYTES} bytes")


def assert_refused(found: Outcome, tmp_path: Path, words: str) -> None:
    assert found.code == REFUSED, found.err
    what, remedy = found.err.splitlines()
    assert what.startswith(f"error: {tmp_path / 'input.json'}")
    assert words in what
    assert len(remedy.strip()) > 10
    assert found.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]


UNSUPPORTED = {
    "lora_name": ({"lora_name": "mine"}, "there are no LoRA adapters"),
    "available_lora_weights": (
        {"available_lora_weights": {"mine": "x"}},
        "there are no LoRA adapters",
    ),
    "streaming": ({"streaming": True}, "it belongs to audio output"),
    "talker_temperature": ({"talker_temperature": 0.5}, "it belongs to audio output"),
    "talker_top_k": ({"talker_top_k": 5}, "it belongs to audio output"),
}


@pytest.mark.parametrize("place", ["file", "request"])
@pytest.mark.parametrize("key", UNSUPPORTED)
def test_key_that_cannot_be_honoured_is_refused_by_name_with_the_reason(
    engines: Path, tmp_path: Path, cli: Cli, key: str, place: str
) -> None:
    value, reason = UNSUPPORTED[key]
    args = infer(
        engines / "one",
        tmp_path,
        asked("x", **value if place == "request" else {}),
        **value if place == "file" else {},
    )
    found = cli(*args)
    assert (found.code, found.out) == (REFUSED, "")
    assert f"{key} is " in found.err
    assert reason in found.err


@pytest.mark.parametrize("kind", ["audio", "video"])
def test_content_that_is_no_text_is_refused_by_its_kind(
    engines: Path, tmp_path: Path, cli: Cli, kind: str
) -> None:
    content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: "file"}]
    found = cli(
        *infer(engines / "one", tmp_path, {"messages": [{"role": "user", "content": content}]})
    )
    assert found.code == REFUSED
    assert (
        f"requests[0].messages[0].content[1] is of type {kind}, and this version reads texts and"
        in found.err
    )


# ---- requests that fail alone

FAILING = {
    "empty prompt": (asked("", apply_chat_template=False), "the prompt is empty"),
    "too long": (asked("boat " * 60), "the base engine was built for 48"),
    "refused by the template": ({"messages": [{"role": "tool", "content": "x"}]}, "no tool here"),
    "stop that is never found": (
        asked("x", stop=["x<|im_end|>"]),
        "contains the special token '<|im_end|>'",
    ),
    "image for a model of text": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]},
        "knows no images",
    ),
    "bias of no token": (asked("x", logit_bias={"256": 1}), "logit_bias names the token id 256"),
}


@pytest.mark.parametrize("batch_size", [1, 3])
def test_requests_that_fail_have_their_own_errors_and_the_others_are_as_without_them(
    engines: Path, tmp_path: Path, cli: Cli, batch_size: int
) -> None:
    good = [
        asked(text, temperature=1.0, seed=index)
        for index, text in enumerate(["one", "two", "three", "four", "5", "six"])
    ]
    engine = engines / ("one" if batch_size == 1 else "four")
    assert cli(*infer(engine, tmp_path, *good, batch_size=batch_size), *TREE).code == 0
    wanted = said(responses(tmp_path))
    mixed = [
        request
        for pair in zip(good, [bad for bad, _ in FAILING.values()], strict=True)
        for request in pair
    ]
    found = cli(*infer(engine, tmp_path, *mixed, batch_size=batch_size), *TREE)
    assert found.code == SOME_FAILED
    answers = responses(tmp_path)
    assert said(answers[::2]) == wanted
    for index, (bad, (_, words)) in enumerate(zip(answers[1::2], FAILING.values(), strict=True)):
        assert (bad["finish_reason"], bad["output_text"], bad["batch_idx"]) == ("error", "", None)
        assert words in bad["error"]
        assert f"request {2 * index + 1}: " in found.err
        assert words in found.err


def test_memory_that_runs_out_in_a_step_fails_the_batch_and_not_the_rest(
    engines: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [asked(text) for text in ("one", "two", "three", "four", "five")]
    args = infer(engines / "four", tmp_path, *requests, batch_size=3)
    assert cli(*args).code == 0
    wanted = said(responses(tmp_path))
    real, steps = Session.step, 0

    def step(self: Session) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise MemoryError
        return real(self)

    monkeypatch.setattr(Session, "step", step)
    found = cli(*args)
    assert found.code == SOME_FAILED
    answers = responses(tmp_path)
    assert [a["finish_reason"] for a in answers] == ["error"] * 3 + [MAX_LENGTH] * 2
    assert said(answers[3:]) == wanted[3:]
    assert all(
        "not enough memory" in a["error"] and "lower the batch size" in a["error"]
        for a in answers[:3]
    )


def test_fault_of_ours_ends_the_run_and_keeps_what_is_finished(
    engines: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = CachedDecoder.run, 0

    def run(self: CachedDecoder, parts: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 11:  # the third of the second request
            raise ZeroDivisionError("planted")
        return real(self, parts)

    monkeypatch.setattr(CachedDecoder, "run", run)
    found = cli(*infer(engines / "one", tmp_path, asked("one"), asked("two"), asked("three")))
    assert found.code == 1
    assert "ZeroDivisionError: planted" in found.err
    assert f"what was finished is in {tmp_path / 'output.json'}" in found.err
    assert [a["finish_reason"] for a in responses(tmp_path)] == [
        MAX_LENGTH,
        "cancelled",
        "cancelled",
    ]
    assert not (tmp_path / PARTIAL).exists()


# ---- ends inside an accepted run


def rightly_drafted(
    monkeypatch: pytest.MonkeyPatch, told: list[dict[str, Any]], stop_ids: set[int] | None
) -> None:
    """Engines are opened with a drafter that is always right, and with other stop ids where some
    are given."""
    real = Engine.__init__

    def opened(self: Engine, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        scripts = [
            (self.tokenizer.encode(r["formatted_complete_request"]), r["output_ids"]) for r in told
        ]
        self.session.drafter = ScriptedDrafter(scripts, VOCAB, 1)
        if stop_ids is not None:
            self.stop_ids = frozenset(stop_ids)

    monkeypatch.setattr(Engine, "__init__", opened)


@pytest.mark.parametrize(
    ("index", "kind", "batch_size"),
    [
        (index, kind, 1 if (index + place) % 2 else 3)
        for index in (1, 2, 3, 4)
        for place, kind in enumerate((STOP_WORDS, END_OF_SEQUENCE))
    ],
)
def test_end_inside_an_accepted_run_is_where_plain_decoding_ends(
    engines: Path,
    tmp_path: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    index: int,
    kind: str,
    batch_size: int,
) -> None:
    """A step accepts tokens 1 to 3 and emits 4 as the bonus; the text may end at any of them."""
    engine = engines / ("one" if batch_size == 1 else "four")
    texts = ["tell of the boat", "one", "two"]
    assert cli(*infer(engine, tmp_path, *map(asked, texts), max_generate_length=14)).code == 0
    whole = responses(tmp_path)
    with Engine(engines / "one") as opened:
        pieces = [opened.tokenizer.decode([token]) for token in whole[0]["output_ids"]]
    token = whole[0]["output_ids"][index]
    assert token not in whole[0]["output_ids"][:index], "choose another prompt"
    rightly_drafted(monkeypatch, whole, {token} if kind == END_OF_SEQUENCE else None)
    stop = {"stop": pieces[index]} if kind == STOP_WORDS else {}
    requests = [asked(texts[0], **stop), *map(asked, texts[1:])]
    args = infer(engine, tmp_path, *requests, max_generate_length=14, batch_size=batch_size)
    found = cli(*args, "--spec-decode", "--check-lossless", "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["lossless"] == "yes"
    first = responses(tmp_path)[0]
    assert first["finish_reason"] == kind
    assert first["output_ids"] == whole[0]["output_ids"][: index + 1]
    assert first["metrics"]["speculative_decoding"]["per_step_accepted"] == [min(index, 3)]
    if kind == STOP_WORDS:
        assert first["output_text"] == "".join(pieces)[: "".join(pieces).index(pieces[index])]


# ---- capacity


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.deep), 3])
def test_full_cache_ends_plain_and_drafted_runs_at_the_same_token(
    engines: Path, tmp_path: Path, cli: Cli, batch_size: int
) -> None:
    engine = engines / ("one" if batch_size == 1 else "four")
    requests = [
        asked("a", seed=1, temperature=0.9),
        asked("the boat left"),
        asked("two", max_generate_length=5),
    ]
    args = infer(engine, tmp_path, *requests, batch_size=batch_size, max_generate_length=999)
    found = []
    for flags in ([], CHAIN, TREE, [*TREE, "--check-lossless"]):
        done = cli(*args, *flags)
        assert done.code == 0
        assert (
            f"2 of 3 answers ended early (finish_reason capacity): the KV cache holds {CAPACITY}"
            " tokens."
        ) in done.err
        found.append(responses(tmp_path))
    assert all(said(one) == said(found[0]) for one in found)
    for response in found[0][:2]:
        assert response["finish_reason"] == FULL
        assert len(response["output_ids"]) == CAPACITY - response["metrics"]["prompt_tokens"] + 1
    assert len(found[0][2]["output_ids"]) == 5


# ---- memory

# The address space from here on: what is in use now, and a little more.
LIMITED = """
pages = int(open('/proc/self/statm').read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {more},) * 2)
"""


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the size of a process is not to be had here"
)
@pytest.mark.parametrize(
    ("part", "more"), [("open_session", 0), ("open_session", 2**20), ("KvCache", 0)]
)
def test_memory_that_runs_out_while_loading_is_one_error_with_a_remedy(
    engines: Path, tmp_path: Path, part: str, more: int
) -> None:
    place = f"edgespec.backends.ort.runner:{part}"
    found = happening(
        place, 1, LIMITED.format(more=more), *infer(engines / "four", tmp_path), *CHAIN
    )
    if found.code or not more:  # a little may be enough
        assert_out_of_memory(found, tmp_path)


def test_thread_that_cannot_be_had_is_one_error_with_a_remedy(
    engines: Path, tmp_path: Path
) -> None:
    """The stack that it asks for is larger than one that a thread has left behind."""
    place = "edgespec.cli.signals:Stopper.__enter__"
    code = LIMITED.format(more=0) + "import threading; threading.stack_size(1 << 28)"
    assert_out_of_memory(happening(place, 1, code, *infer(engines / "one", tmp_path)), tmp_path)


def assert_out_of_memory(found: Outcome, tmp_path: Path) -> None:
    assert found.code == ENVIRONMENT, (found.code, found.err)
    what, remedy = (line for line in found.err.splitlines() if not line.startswith("drafting a "))
    assert what.startswith("error: ")
    assert "memory" in what or "thread" in what
    assert len(remedy.strip()) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]


# ---- disks and directories

FIVE = [asked(text, num_logprobs=20) for text in ("one", "two", "three", "four", "five")]


def test_every_size_of_a_full_disk_loses_nothing(
    engines: Path,
    tmp_path: Path,
    small_disk: Callable[[int], Path],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Responses are in output.json, in the journal beside it, or where temporary files go; the
    message says where."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    args = infer(engines / "one", tmp_path, *FIVE)
    assert cli(*args).code == 0
    wanted = said(responses(tmp_path))
    need = -(-(tmp_path / "output.json").stat().st_size // 4096)
    places = set()
    for num_pages in (1, need // 4, need - 1, need, 2 * need + 1):
        disk = small_disk(num_pages)
        found = cli(*args[:-1], disk / "output.json")
        if found.code == 0:
            places.add("output")
            kept = responses(disk)
        else:
            assert found.code == ENVIRONMENT
            assert f"{disk / 'output.json'} cannot be written: No space left on device" in found.err
            assert not (disk / "output.json").exists()
            (place,) = [
                p for p in (disk / PARTIAL, *elsewhere.iterdir()) if f"are kept in {p}" in found.err
            ]
            places.add(place.suffix)
            kept = (
                kept_lines(place)
                if place.suffix == ".jsonl"
                else responses(place.parent, place.name)
            )
        assert said(kept) == wanted
        assert [p.name for p in disk.iterdir() if p.name.endswith(".tmp")] == []
        for path in elsewhere.iterdir():
            path.unlink()
    assert places == {"output", ".jsonl", ".json"}


def test_no_place_for_all_keeps_whole_lines_of_what_there_is_room_for(
    engines: Path,
    tmp_path: Path,
    small_disk: Callable[[int], Path],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = infer(engines / "one", tmp_path, *FIVE)
    assert cli(*args).code == 0
    wanted = said(responses(tmp_path))
    line = len(json.dumps(responses(tmp_path)[0]))
    disk = small_disk(2 * line // 4096 + 2)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    found = cli(*args[:-1], disk / "output.json")
    assert found.code == ENVIRONMENT
    assert "could not be saved anywhere else: No space left on device" in found.err
    kept = kept_lines(disk / PARTIAL)
    assert 0 < len(kept) < 5
    assert f"The first {len(kept)} are kept in {disk / PARTIAL}" in found.err
    assert said(kept) == wanted[: len(kept)]
    assert sorted(p.name for p in disk.iterdir()) == [PARTIAL]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_journal_that_cannot_be_written_does_not_stop_the_run(
    engines: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = infer(engines / "one", tmp_path, *FIVE)
    monkeypatch.setattr(Journal, "_open", lambda self: FileIO("/dev/full", "wb"))
    assert cli(*args).code == 0
    assert len(responses(tmp_path)) == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input.json", "output.json"]


def becomes_read_only(place: Path) -> None:
    place.chmod(0o555)
    if os.geteuid() == 0:
        os.seteuid(NOBODY)


def becomes_a_directory_without_journal(place: Path) -> None:
    (place / "output.json").mkdir()
    (place / PARTIAL).unlink()


NOBODY = 65534
# What happens to a place between the last answer and the output, and where the responses are then.
MEANWHILE: dict[str, tuple[Callable[[Path], object], str, str | None]] = {
    "a directory": (lambda place: (place / "output.json").mkdir(), "is a directory", PARTIAL),
    "read-only": (becomes_read_only, "Permission denied", None),
    "gone": (shutil.rmtree, "there is no directory", None),
    "journal gone too": (becomes_a_directory_without_journal, "is a directory", None),
}


@pytest.mark.parametrize("case", MEANWHILE)
def test_place_that_changed_meanwhile_loses_nothing(
    engines: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    change, why, kept_at = MEANWHILE[case]
    place, elsewhere = tmp_path / "results", tmp_path / "elsewhere"
    place.mkdir()
    elsewhere.mkdir()
    elsewhere.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
    for above in (tmp_path, *tmp_path.parents):
        if above.stat().st_mode & 0o055 != 0o055:  # pytest's own, one more of them per worker
            above.chmod(0o755)
    finish, user = Journal.finish, os.geteuid()

    def finish_later(self: Journal, *args: Any) -> Path:
        change(place)
        return finish(self, *args)

    monkeypatch.setattr(Journal, "finish", finish_later)
    args = infer(engines / "one", tmp_path, asked("one"), asked("two"))[:-1]
    try:
        found = cli(*args, place / "output.json")
    finally:
        os.seteuid(user)
    assert found.code == ENVIRONMENT, found.err
    assert why in found.err
    kept = place / PARTIAL if kept_at else None
    if kept is None:
        (kept,) = [
            p
            for p in [*place.glob("*.jsonl"), *elsewhere.iterdir()]
            if f"are kept in {p}" in found.err
        ]
    assert str(kept) in found.err
    lines = kept_lines(kept) if kept.suffix == ".jsonl" else responses(kept.parent, kept.name)
    assert [one["finish_reason"] for one in lines] == [MAX_LENGTH] * 2


# ---- signals

THREE = [asked("one", max_generate_length=3), asked("two"), asked("three"), asked("four")]


@pytest.mark.parametrize(
    ("number", "code", "flags"),
    [(signal.SIGTERM, TERMINATED, []), (signal.SIGINT, INTERRUPTED, TREE)],
    ids=["plain", "tree"],
)
def test_one_signal_finishes_the_step_and_writes_what_there_is(
    engines: Path, tmp_path: Path, number: int, code: int, flags: list[object]
) -> None:
    """Three at a time: the first has ended and the fourth has its place when the signal comes."""
    args = infer(engines / "four", tmp_path, *THREE, batch_size=3)
    kill = f"os.kill(os.getpid(), {int(number)}); time.sleep(0.2)"
    found = happening("edgespec.runtime.loop.session:Session.step", 5, kill, *args, *flags)
    assert found.code == code, found.err
    assert "stopping after this step; another signal stops at once" in found.err
    assert found.err.splitlines()[-1] == f"what was finished is in {tmp_path / 'output.json'}"
    answers = responses(tmp_path)
    assert [a["finish_reason"] for a in answers] == [
        MAX_LENGTH,
        "cancelled",
        "cancelled",
        "cancelled",
    ]
    counts = [len(a["output_ids"]) for a in answers]
    assert counts[0] == 3
    assert flags or counts == [3, 6, 6, 4]
    assert all(0 < count < 9 for count in counts)
    assert not (tmp_path / PARTIAL).exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)]
)
def test_second_signal_stops_at_once_in_the_middle_of_a_call(
    engines: Path, tmp_path: Path, number: int, code: int
) -> None:
    """The call does not return to Python; the journal keeps what was finished."""
    args = infer(engines / "one", tmp_path, asked("one", max_generate_length=3), asked("two"))
    with halted(ENGINE_CALL, 6, *args) as child:
        send(child, signal.SIGINT, "stopping after this step")
        send(child, number)
        found = ended(child, timeout_s=30)  # the call would last twice as long
    assert found.code == code
    assert "stopped at once" in found.err
    assert str(tmp_path / PARTIAL) in found.err
    assert [one["finish_reason"] for one in kept_lines(tmp_path / PARTIAL)] == [MAX_LENGTH]
    assert not (tmp_path / "output.json").exists()


def test_signal_during_a_check_of_losslessness_keeps_the_answers(
    engines: Path, tmp_path: Path
) -> None:
    args = [
        *infer(engines / "one", tmp_path, asked("one"), asked("two")),
        *CHAIN,
        "--check-lossless",
    ]
    kill = f"os.kill(os.getpid(), {int(signal.SIGINT)}); time.sleep(0.2)"
    found = happening("edgespec.runtime.requests.file_runner:FileRun.check", 1, kill, *args)
    assert found.code == INTERRUPTED, found.err
    assert [a["finish_reason"] for a in responses(tmp_path)] == [MAX_LENGTH] * 2


def test_killed_run_leaves_its_journal_and_the_next_one_leaves_it_alone(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    args = infer(engines / "one", tmp_path, asked("one"), asked("two"), asked("three"))
    with halted(JOURNAL_ADD, 3, *args) as child:
        child.send_signal(signal.SIGKILL)
        assert child.wait(10) == -signal.SIGKILL
    left = (tmp_path / PARTIAL).read_bytes()
    assert len(kept_lines(tmp_path / PARTIAL)) == 2
    assert not (tmp_path / "output.json").exists()
    found = cli(*args)
    assert found.code == 0
    assert f"{tmp_path / PARTIAL} is from a run that was killed" in found.err
    assert (tmp_path / PARTIAL).read_bytes() == left
    assert said(responses(tmp_path))[:2] == said(kept_lines(tmp_path / PARTIAL))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input.json", "output.json", PARTIAL]


# ---- flags

PREFILL = {
    "total_runs",
    "reused_tokens",
    "computed_tokens",
    "average_tokens_per_run",
    "average_time_per_run_ms",
    "tokens_per_second",
    "average_time_per_token_ms",
}
GENERATION = {
    "total_runs",
    "generated_tokens",
    "average_tokens_per_run",
    "tokens_per_second",
    "average_time_per_token_ms",
}
EAGLE = {
    "total_runs",
    "total_iterations",
    "total_generated_tokens",
    "average_tokens_per_run",
    "average_acceptance_rate",
    "overall_tokens_per_second_excluding_base_prefill",
}
STAGE = {"stage_id", "total_runs", "total_gpu_time_ms", "average_time_per_run_ms", "gpu_time_stats"}
STATS = {"count", "min_ms", "max_ms", "mean_ms", "median_ms", "p95_ms", "p99_ms", "stddev_ms"}


def numbers(value: object) -> Iterator[float]:
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from numbers(part)
    if isinstance(value, int | float):
        yield value


@pytest.mark.parametrize("flags", [[], CHAIN], ids=["plain", "chain"])
def test_profile_has_the_mirrored_tools_keys_and_finite_figures(
    engines: Path, tmp_path: Path, cli: Cli, flags: list[object]
) -> None:
    args = infer(engines / "four", tmp_path, asked("one"), asked("two"), batch_size=2)
    assert cli(*args, *flags, "--profile-output-file", tmp_path / "profile.json").code == 0
    found = json.loads((tmp_path / "profile.json").read_text())
    assert set(found["prefill"]) == PREFILL
    kind, keys = ("eagle_generation", EAGLE) if flags else ("generation", GENERATION)
    assert set(found[kind]) == keys
    assert all(
        set(stage) == STAGE and set(stage["gpu_time_stats"]) == STATS for stage in found["stages"]
    )
    ids = {stage["stage_id"] for stage in found["stages"]}
    assert {"llm_prefill", "spec_decode_base_verification" if flags else "llm_generation"} <= ids
    assert {"peak_cpu_memory_bytes", "peak_cpu_memory_mb"} <= set(found)
    assert all(math.isfinite(number) and number >= 0 for number in numbers(found))
    assert found["prefill"]["total_runs"] == 2
    assert found["prefill"]["computed_tokens"] == sum(
        r["metrics"]["prompt_tokens"] for r in responses(tmp_path)
    )
    tokens = sum(len(r["output_ids"]) - 1 for r in responses(tmp_path))
    assert found[kind]["total_generated_tokens" if flags else "generated_tokens"] == tokens


def test_warmup_is_measured_nowhere_and_changes_no_answer(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    system = {
        "messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "one"}]
    }
    args = [
        *infer(engines / "one", tmp_path, system),
        "--profile-output-file",
        tmp_path / "profile.json",
    ]
    with_calls: list[tuple[int, int, list[tuple[object, ...]]]] = []
    for times in (0, 2):
        assert cli(*args, "--warmup", times).code == 0
        stage = json.loads((tmp_path / "profile.json").read_text())["stages"][0]
        answers = responses(tmp_path)
        assert answers[0]["metrics"]["reused_tokens"] == 0
        with_calls.append((stage["total_runs"], len(answers), said(answers)))
    assert with_calls[0] == with_calls[1]


def test_warmup_runs_the_first_batch_so_often_before(
    engines: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts: list[int] = []
    real = Session.admit
    monkeypatch.setattr(
        Session, "admit", lambda self, seq: prompts.append(len(seq.prompt)) or real(self, seq)
    )
    args = infer(engines / "four", tmp_path, asked("a"), asked("aa"), asked("aaa"), batch_size=2)
    assert cli(*args, "--warmup", 2).code == 0
    first = prompts[0]
    assert [length - first for length in prompts] == [0, 1] * 2 + [0, 1, 2]


def test_dumps_go_to_stdout_with_the_answers_text(engines: Path, tmp_path: Path, cli: Cli) -> None:
    args = infer(engines / "one", tmp_path, asked("one"), asked("two"))
    found = cli(*args, "--dump-output", "--dump-profile")
    assert found.code == 0
    for index, response in enumerate(responses(tmp_path)):
        assert f"--- request {index} (max-length)\n{response['output_text']}\n" in found.out
    for words in ("stage (wall ms)", "llm_prefill", "llm_generation", "outside the stages"):
        assert words in found.out
    assert found.err == ""


@pytest.mark.parametrize("dump", ["--dump-output", "--dump-profile"])
def test_json_and_dumps_exclude_each_other(
    engines: Path, tmp_path: Path, cli: Cli, dump: str
) -> None:
    found = cli(*infer(engines / "one", tmp_path), "--json", dump)
    assert (found.code, found.out) == (USAGE, "")
    assert "--json prints the summary alone" in found.err
    assert not (tmp_path / "output.json").exists()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--dflashBlockSize", "a block is as long as the draft was trained for"),
        ("--outputAudioDir", "this version gives text only"),
    ],
)
def test_flag_of_the_mirrored_tool_is_refused_by_name(
    engines: Path, tmp_path: Path, cli: Cli, flag: str, reason: str
) -> None:
    found = cli(*infer(engines / "one", tmp_path), flag, "4")
    assert found.code == USAGE
    assert reason in found.err
    assert flag.lower().replace("-", "")[:12] in found.err.lower().replace("-", "")


def test_one_source_of_requests_is_needed_and_only_one(
    engines: Path, tmp_path: Path, cli: Cli
) -> None:
    args = infer(engines / "one", tmp_path)
    (tmp_path / "set.jsonl").write_text('{"turns": ["x"]}\n')
    without = [arg for arg in args if arg not in ("--input-file", tmp_path / "input.json")]
    for given in ([*args, "--prompts", tmp_path / "set.jsonl"], without):
        found = cli(*given)
        assert found.code == USAGE
        assert "give one of --input-file, --prompts, --prompt and --input-text" in found.err


OVERRIDES: dict[str, tuple[object, dict[str, object]]] = {
    "--max-generate-length": (3, {"max_generate_length": 3}),
    "--temperature": (1.5, {"temperature": 1.5}),
    "--top-k": (2, {"top_k": 2}),
    "--top-p": (0.3, {"top_p": 0.3}),
    "--min-p": (0.6, {"min_p": 0.6}),
    "--seed": (11, {"seed": 11}),
    "--repetition-penalty": (3.0, {"repetition_penalty": 3.0}),
    "--num-logprobs": (2, {"num_logprobs": 2}),
}


@pytest.mark.parametrize("flag", OVERRIDES)
def test_override_is_what_the_file_could_have_said_and_wins_over_it(
    engines: Path, tmp_path: Path, cli: Cli, flag: str
) -> None:
    value, keys = OVERRIDES[flag]
    usual = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "seed": 4, "max_generate_length": 16}
    requests = [
        asked("one", **usual),
        asked("two", **usual, min_p=0.001, repetition_penalty=1.0, num_logprobs=1),
    ]

    def answered(args: list[object]) -> list[dict[str, Any]]:
        assert cli(*args).code == 0
        return [
            {k: v for k, v in r.items() if k not in ("metrics", "messages")}
            for r in responses(tmp_path)
        ]

    before = answered(infer(engines / "one", tmp_path, *requests))
    overridden = answered([*infer(engines / "one", tmp_path, *requests), flag, value])
    assert overridden == answered(
        infer(engines / "one", tmp_path, *({**request, **keys} for request in requests))
    )
    assert overridden != before


def test_batch_size_override_is_seen_in_the_slots(engines: Path, tmp_path: Path, cli: Cli) -> None:
    args = infer(
        engines / "four", tmp_path, asked("one"), asked("two"), asked("three"), batch_size=1
    )
    slots = []
    for flags in ([], ["--batch-size", 3]):
        assert cli(*args, *flags).code == 0
        slots.append([r["batch_idx"] for r in responses(tmp_path)])
    assert slots == [[0, 0, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    "given", [["--temperature", -1], ["--top-p", 0], ["--batch-size", 17], ["--num-logprobs", 51]]
)
def test_override_out_of_range_is_refused_by_name(
    engines: Path, tmp_path: Path, cli: Cli, given: list[object]
) -> None:
    found = cli(*infer(engines / "one", tmp_path), *given)
    assert found.code == REFUSED
    assert f"command line: {str(given[0])[2:].replace('-', '_')} is {given[1]}" in found.err
