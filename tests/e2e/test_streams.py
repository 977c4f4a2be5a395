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

from tests.lossless.pairs import shared_pair

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


def infer(engine_dir: Path, tmp_path: Path, *more: object) -> list[str]:
    source = tmp_path / "input.json"
    requests = [{"messages": [{"role": "user", "content": "a"}]}]
    source.write_text(
        json.dumps({"temperature": 0, "max_generate_length": 4, "requests": requests})
    )
    words = ["infer", "--engine-dir", engine_dir, "--input-file", source, *more]
    return [sys.executable, "-m", "edgespec.cli.main", *map(str, words)]


def test_reader_of_stdout_that_goes_away_is_no_failure_of_ours(
    engine_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    child = subprocess.Popen(
        infer(engine_dir, tmp_path, "--output-file", out), stdout=subprocess.PIPE, stderr=-3
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(60) == 141
    assert len(json.loads(out.read_text())["responses"]) == 1


def test_responses_and_profile_in_one_file_are_refused_by_whatever_name(
    engine_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "same.json")
    for other in (tmp_path / "d" / ".." / "same.json", tmp_path / "link.json"):
        args = infer(
            engine_dir,
            tmp_path,
            "--output-file",
            tmp_path / "same.json",
            "--profile-output-file",
            other,
        )
        done = subprocess.run(args, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, "both the responses and the profile" in done.stderr) == (3, True)
        assert not (tmp_path / "same.json").exists()


@pytest.mark.parametrize("stderr", ["open", "closed", "full"])
def test_second_signal_ends_at_once_whether_or_not_anybody_reads(stderr: str) -> None:
    reading, writing = os.pipe()
    if stderr == "full":
        os.set_blocking(writing, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writing, b"x" * 4096)
        os.set_blocking(writing, True)
    with subprocess.Popen(
        [sys.executable, "-c", STOPPING, stderr], stdout=subprocess.PIPE, stderr=writing
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        child.send_signal(signal.SIGINT)
        assert child.wait(5) == 130
    os.close(writing)
    os.close(reading)


# Responses on stdout


def shell(command: str, args: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command, "sh", *args], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1"])
def test_responses_go_through_a_pipe(engine_dir: Path, tmp_path: Path, name: str) -> None:
    done = shell('"$@" | cat', infer(engine_dir, tmp_path, "--output-file", name))
    assert len(json.loads(done.stdout)["responses"]) == 1
    assert "tokens/s" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["input.json"]


def test_responses_and_profile_go_to_streams_of_their_own(engine_dir: Path, tmp_path: Path) -> None:
    args = infer(engine_dir, tmp_path, "--output-file", "-", "--profile-output-file", "/dev/fd/3")
    done = shell(f'"$@" 3> {tmp_path / "profile.json"}', args)
    assert "responses" in json.loads(done.stdout)
    assert "stages" in json.loads((tmp_path / "profile.json").read_text())


@pytest.mark.parametrize("flag", ["--json", "--dump-output"])
def test_nothing_else_is_on_stdout_with_the_responses(
    engine_dir: Path, tmp_path: Path, flag: str
) -> None:
    done = shell('"$@"', infer(engine_dir, tmp_path, "--output-file", "-", flag))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"stdout has the responses: {flag} needs an output file" in done.stderr


def test_closed_stdout_is_told_before_any_work(engine_dir: Path, tmp_path: Path) -> None:
    done = shell('"$@" >&-', infer(engine_dir, tmp_path, "--output-file", "-"))
    assert done.returncode == 4
    assert done.stderr.startswith("error: stdout cannot be written")


def test_reader_of_the_responses_that_goes_away_is_no_failure_of_ours(
    engine_dir: Path, tmp_path: Path
) -> None:
    done = shell('"$@" | true', infer(engine_dir, tmp_path, "--output-file", "-"))
    assert "Traceback" not in done.stderr
    assert "error:" not in done.stderr


def test_files_whose_names_are_not_utf8_are_read_and_written(
    engine_dir: Path, tmp_path: Path
) -> None:
    args = infer(engine_dir, tmp_path)
    odd = os.fsdecode(b"a\xff.json")
    (tmp_path / "input.json").rename(tmp_path / odd)
    args = [word.replace("input.json", odd) for word in args]
    out = tmp_path / os.fsdecode(b"out\xff.json")
    done = subprocess.run(
        [*args, "--output-file", str(out)], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(out.read_bytes())["responses"]) == 1
