"""`bench serve ENGINE_DIR` starts edgespec's own server, loads it, and leaves nothing of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.benchmark.serving.process import ServeProcess
from edgespec.cli.main import run
from tests.lossless.engines import api_engines


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServeProcess]:
    """The servers that were started."""
    made, url = list[ServeProcess](), ServeProcess.url

    def noted(process: ServeProcess, stopping: Callable[[], bool]) -> str | None:
        made.append(process)
        return url(process, stopping)

    monkeypatch.setattr(ServeProcess, "url", noted)
    return made


def test_our_server_answers_both_ways_alike(tmp_path: Path, started: list[ServeProcess]) -> None:
    report, prompts = tmp_path / "load.json", tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Hi", "You"]}\n{"turns": ["Go"]}\n')
    sizes = ["--concurrency", "1,4", "--num-prompts", "4", "--output-tokens", "8"]
    words = ["bench", "serve", str(api_engines() / "four"), "--prompts", str(prompts), *sizes]
    assert run([*words, "--repeats", "1", "--warmup", "0", "--json", str(report)]) == 0
    value = json.loads(report.read_text())
    assert value["engine"]["engines"].keys() == {"base", "draft"}
    assert value["engine"]["model"] == "four"
    for row in value["rows"]:
        assert row["served"]["errors"] == {}
        assert row["answers"] == 6
    drafted = value["rows"][1::2]
    assert [row["answers_equal_to_plain"] for row in drafted] == [6, 6]
    assert all(row["speculation"]["steps"] > 0 for row in drafted)
    assert [one.process.returncode for one in started] == [0]


def test_what_a_server_says_that_does_not_start_is_told(
    tmp_path: Path, started: list[ServeProcess], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["Hi"]}\n')
    words = [str(tmp_path / "empty"), "--prompts", str(tmp_path / "prompts.jsonl")]
    assert run(["bench", "serve", *words]) == 4
    err = capsys.readouterr().err
    assert "does not serve: error: " in err
    assert "give its --url" in err
