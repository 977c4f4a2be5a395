"""`bench serve` against a server of canned answers: two ways of decoding in turn, and a report."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec.benchmark.report import read_report
from edgespec.benchmark.serving.client import ChatClient
from edgespec.cli.main import run
from edgespec.serve import security
from tests.chat_server import Body, ChatServer, serving

PROMPTS = (
    '{"question_id": 1, "turns": ["Write.", "Again."]}\n{"question_id": 2, "turns": ["Hi."]}\n'
)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS)
    return path


def plain(body: Body) -> bool:
    return bool(body.get("disable_spec_decode"))


def slower(body: Body) -> float:
    return 0.1 if plain(body) else 0.02


def bench(server: ChatServer, prompts: Path, *words: str) -> int:
    line = ["bench", "serve", "--url", server.url, "--model", "m", "--prompts", str(prompts)]
    return run([*line, "--warmup", "0", "--repeats", "2", "--num-prompts", "2", *words])


def test_both_ways_are_measured_in_turn(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "load.json"
    with serving(between_s=slower) as server:
        assert bench(server, prompts, "--concurrency", "1,2", "--json", str(path)) == 0
    modes = [plain(body) for body in server.asked]
    once = [True] * 3 + [False] * 6 + [True] * 3
    assert modes == [True, False, *once, *once]  # a request of each before
    salts = [body["cache_salt"] for body in server.asked[2:5]]
    assert salts[0] == salts[1] != salts[2]
    assert len({body["cache_salt"] for body in server.asked}) == 2 + 8 * 2
    sent = {"model": "m", "max_tokens": 128, "temperature": 0.0, "seed": 0}
    assert all(sent.items() <= body.items() for body in server.asked)

    report = json.loads(path.read_text())
    rows = report["rows"]
    keys = [(row["mode"], row["batch_size"]) for row in rows]
    assert keys == [(f"serve_{m}", c) for c in (1, 2) for m in ("plain", "speculative")]
    assert all(row["answers"] == 6 and not row["served"]["errors"] for row in rows)
    assert [row["answers_equal_to_plain"] for row in rows] == [0, 6, 0, 6]
    for row in rows[1::2]:
        assert row["speed_over_plain"]["median"] > 1
        told = row["speculation"]
        figures = told["acceptance_length"], told["acceptance_rate"]
        assert (*figures, told["per_position_acceptance"]) == (2.0, 1 / 3, [0.5, 0.5])
    assert report["crossover"] == {"pays_up_to": 2, "at": None}
    assert report["engine"]["url"] == server.url
    assert json.loads(json.dumps(read_report(path).to_dict())) == report
    out = capsys.readouterr().out
    assert "file+128 c2" in out
    assert "drafts were faster with up to 2 clients" in out
    assert run(["bench", "compare", str(path), str(path), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["rows"]
    assert {row["figure"] for row in compared if row["control"]} == {
        "output_token_throughput",
        "time_to_first_token",
    }
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert run(["bench", "draw", str(path), "--pictures", str(tmp_path / "drawn")]) == 0
    drawn = {one.stem for one in (tmp_path / "drawn").iterdir() if "served_" in one.stem}
    assert len(drawn) == 4


def without(*names: str) -> Any:
    """Refuses requests that have one of these."""
    return lambda body: next(((400, f"{name} is unknown") for name in names if name in body), None)


def test_a_server_without_extensions_is_measured_as_it_is(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(refuse=without("disable_spec_decode", "cache_salt")) as server:
        assert bench(server, prompts, "--concurrency", "1") == 3
        assert "Measure it as it is: --mode speculative." in capsys.readouterr().err
        server.asked.clear()
        assert bench(server, prompts, "--mode", "speculative", "--concurrency", "1") == 0
    assert ["cache_salt" in body for body in server.asked] == [True] + [False] * 7
    assert "takes no cache_salt" in capsys.readouterr().out


def test_failed_requests_are_counted_by_their_reasons(
    prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(body: Body) -> tuple[int, str] | None:
        return (429, "full\x1b[2J") if body["messages"][0]["content"] == "Hi." else None

    with serving(refuse=refuse) as server:
        assert bench(server, prompts, "--concurrency", "1", "--mode", "speculative") == 0
    out = capsys.readouterr().out
    assert "2/6" in out
    assert "with drafts file+128 c1: 2 x HTTP 429: full\\x1b[2J" in out


def test_ctrl_c_leaves_what_was_measured(prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "load.json"

    def refuse(body: Body) -> None:
        if len(server.asked) == 2 + 3 + 3 + 2:  # in the third run
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(2)

    with serving(refuse=refuse) as server:
        assert bench(server, prompts, "--concurrency", "1", "--json", str(path)) == 130
    report = json.loads(path.read_text())
    assert [row["answers"] for row in report["rows"]] == [3, 3]
    assert (report["complete"], len(server.asked)) == (False, 10)
    assert threading.active_count() < 10


def test_another_machine_is_warned_of_and_gets_the_key(
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "key").write_text("key of sixteen chars\n")
    told = []
    monkeypatch.setattr(security, "is_loopback", lambda host: told.append(host))
    sent = ChatClient.connection

    def connection(client: ChatClient) -> Any:
        assert client.key == "key of sixteen chars"
        return sent(client)

    monkeypatch.setattr(ChatClient, "connection", connection)
    with serving() as server:
        words = ("--concurrency", "1", "--api-key-file", str(tmp_path / "key"))
        assert bench(server, prompts, *words) == 0
    assert told == ["127.0.0.1"]
    assert "prompts are sent to 127.0.0.1, not to this machine" in capsys.readouterr().err
