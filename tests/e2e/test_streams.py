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
