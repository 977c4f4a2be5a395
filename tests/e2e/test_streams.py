"""Standard streams that go away, outputs that are one file, and signals that nobody can be told
of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.workshop import Cli, Outcome, cli, process
from tests.forked import COMMAND, Forked
from tests.lossless.pairs import shared_pair

__all__ = ["cli"]
STOPPING = """
import os, signal, sys, time
from edgespec.cli.signals import Stopper
os.close(2) if sys.argv[1] == "closed" else None
with Stopper() as stopper:
    print("ready", flush=True)
    time.sleep(20)  # as a long call of an engine
"""


@pytest.fixture(scope="module")
def engine_dir() -> Path:
    return shared_pair("llama", "eagle") / "engines"


def infer(engine_dir: Path, tmp_path: Path, *more: object) -> list[object]:
    source = tmp_path / "input.json"
    requests = [{"messages": [{"role": "user", "content": "a"}]}]
    source.write_text(
        json.dumps({"temperature": 0, "max_generate_length": 4, "requests": requests})
    )
    return ["infer", "--engine-dir", engine_dir, "--input-file", source, *more]


def unread(*args: object) -> tuple[int, str]:
    """A command of whose stdout nobody reads: its exit code and stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    with Forked(COMMAND, *args, stdout=writing) as child:
        os.close(writing)
        _, err = child.communicate()
        return child.wait(), err


def test_reader_of_stdout_that_goes_away_is_no_failure_of_ours(
    engine_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    assert unread(*infer(engine_dir, tmp_path, "--output-file", out))[0] == 141
    assert len(json.loads(out.read_text())["responses"]) == 1


def test_responses_and_profile_in_one_file_are_refused_by_whatever_name(
    engine_dir: Path, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "d").mkdir()
    same = tmp_path / "same.json"
    (tmp_path / "link.json").symlink_to(same)
    for other in (tmp_path / "d" / ".." / "same.json", tmp_path / "link.json"):
        args = infer(engine_dir, tmp_path, "--output-file", same, "--profile-output-file", other)
        done = cli(*args)
        assert (done.code, "both the responses and the profile" in done.err) == (3, True)
        assert not same.exists()


@pytest.mark.parametrize("stderr", ["open", "closed", "full"])
def test_second_signal_ends_at_once_whether_or_not_anybody_reads(stderr: str) -> None:
    reading, writing = os.pipe()
    if stderr == "full":
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
    with Forked(STOPPING, stderr, stderr=writing) as child:
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        child.send_signal(signal.SIGINT)
        assert child.wait(5) == 130
    os.close(writing)
    os.close(reading)


# Responses on stdout


def shell(command: str, args: list[object]) -> Outcome:
    line = ["sh", "-c", command, "sh", sys.executable, "-m", "edgespec.cli.main", *map(str, args)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1"])
def test_responses_go_through_a_pipe(engine_dir: Path, tmp_path: Path, name: str) -> None:
    done = process(*infer(engine_dir, tmp_path, "--output-file", name))
    assert len(json.loads(done.out)["responses"]) == 1
    assert "tokens/s" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]


def test_responses_and_profile_go_to_streams_of_their_own(engine_dir: Path, tmp_path: Path) -> None:
    args = infer(engine_dir, tmp_path, "--output-file", "-", "--profile-output-file", "/dev/fd/3")
    done = shell(f'"$@" 3> {tmp_path / "profile.json"}', args)
    assert "responses" in json.loads(done.out)
    assert "stages" in json.loads((tmp_path / "profile.json").read_text())


@pytest.mark.parametrize("flag", ["--json", "--dump-output"])
def test_nothing_else_is_on_stdout_with_the_responses(
    engine_dir: Path, tmp_path: Path, cli: Cli, flag: str
) -> None:
    done = cli(*infer(engine_dir, tmp_path, "--output-file", "-", flag))
    assert (done.code, done.out) == (2, "")
    assert f"stdout has the responses: {flag} needs an output file" in done.err


def test_closed_stdout_is_told_before_any_work(engine_dir: Path, tmp_path: Path) -> None:
    done = shell('"$@" >&-', infer(engine_dir, tmp_path, "--output-file", "-"))
    assert done.code == 4
    assert done.err.startswith("error: stdout cannot be written")


def test_reader_of_the_responses_that_goes_away_is_no_failure_of_ours(
    engine_dir: Path, tmp_path: Path
) -> None:
    _, err = unread(*infer(engine_dir, tmp_path, "--output-file", "-"))
    assert "Traceback" not in err
    assert "error:" not in err


def test_files_whose_names_are_not_utf8_are_read_and_written(
    engine_dir: Path, tmp_path: Path, cli: Cli
) -> None:
    args = infer(engine_dir, tmp_path)
    odd = tmp_path / os.fsdecode(b"a\xff.json")
    (tmp_path / "input.json").rename(odd)
    out = tmp_path / os.fsdecode(b"out\xff.json")
    done = cli(*args[:-1], odd, "--output-file", out)
    assert done.code == 0, done.err
    assert len(json.loads(out.read_bytes())["responses"]) == 1
