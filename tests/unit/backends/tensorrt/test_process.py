"""The process of a build, from both sides: what it reports, how it crashes, and how it is ended."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.backends.tensorrt import process
from edgespec.backends.tensorrt.build_job import BuildJob, BuildReport
from edgespec.backends.tensorrt.build_process import watch
from edgespec.backends.tensorrt.process import BuildRefused
from edgespec.backends.tensorrt.progress_monitor import BuildProgress
from edgespec.errors import BuildError, EnvironmentProblem, InternalError

JOB = BuildJob(backend="tensorrt-rtx", model="/x/model.onnx", engine="/x/y.engine", profiles=())
BEGIN = """
import json, os, signal, sys
job = json.loads(sys.stdin.readline())
def say(kind, **values):
    print(json.dumps({"kind": kind, **values}), flush=True)
"""
BUILT = "say('built', engine_bytes=5, layers=3, parse_s=1.0, build_s=2.0, peak_bytes=7)"


def nothing(share: float) -> None:
    """Listens to nothing."""


def run(program: str, advance: Callable[[float], None] = nothing) -> BuildReport:
    return process.run(JOB, advance, os.environ, (sys.executable, "-c", BEGIN + program))


def refused(message: str, *lines: str) -> str:
    node = "layers.0/attn (Attention)"
    return f"say('refused', message={message!r}, lines={list(lines)!r}, node={node!r})"


def test_a_process_is_given_its_job_and_reports_an_engine(caplog: pytest.LogCaptureFixture) -> None:
    shares: list[float] = []
    program = f"""
assert job["model"] == "/x/model.onnx"
print("not ours")
say("log", severity="WARNING", text="Int64 binding")
say("progress", share=0.25, phase="x")
say("progress", share=0.75, phase="x")
{BUILT}
"""
    with caplog.at_level(logging.INFO):
        report = run(program, shares.append)
    assert (report.engine_bytes, report.peak_bytes) == (5, 7)
    assert shares == [0.25, 0.75]
    assert "Int64 binding" in caplog.text
    assert "not ours" in caplog.text


@pytest.mark.parametrize("line", ["", "[1]", "{}", "TensorRT says hello", '"kind"'])
def test_a_line_that_is_no_message_is_none(line: str) -> None:
    assert process.message_of(line) is None


def test_what_the_library_refuses_is_said_in_its_own_words() -> None:
    with pytest.raises(BuildRefused) as error:
        run(refused("the parser refuses the graph", "the cache must be static"))
    assert "the parser refuses the graph at layers.0/attn (Attention)" in error.value.what
    assert "the cache must be static" in error.value.what
    assert "edgespec check --tensorrt" in error.value.remedy
    assert (error.value.exit_code, error.value.lacks_kernel) == (1, False)


def test_attention_without_a_kernel_is_recognized() -> None:
    with pytest.raises(BuildRefused) as error:
        run(refused("no engine", "Attention operation was not supported by a dedicated kernel"))
    assert error.value.lacks_kernel


@pytest.mark.parametrize("line", ["Error Code 2: OutOfMemory", "std::bad_alloc"])
def test_too_little_memory_is_the_machine_s(line: str) -> None:
    with pytest.raises(EnvironmentProblem, match="no engine") as error:
        run(refused("no engine", line))
    assert "`workspace_mib`" in error.value.remedy


def test_a_process_without_the_library_says_what_to_install() -> None:
    with pytest.raises(EnvironmentProblem, match="cannot be imported") as error:
        run("say('failed', message='x cannot be imported', remedy='pip install x', code=4)")
    assert error.value.remedy == "pip install x"


def test_an_error_of_our_own_is_a_bug() -> None:
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        run("say('failed', message='ZeroDivisionError', remedy='', code=1)")


def test_a_crashed_compiler_is_told_from_a_killed_one() -> None:
    program = "print('a stack', file=sys.stderr); os.kill(os.getpid(), signal.{})"
    with pytest.raises(BuildError, match="SIGABRT in the middle of the build\na stack"):
        run(program.format("SIGABRT"))
    with pytest.raises(EnvironmentProblem, match="was killed, as Linux does where memory runs out"):
        run(program.format("SIGKILL"))
    with pytest.raises(BuildError, match="with code 3"):
        run("sys.exit(3)")


def test_a_process_that_is_gone_before_its_job_is_told_of() -> None:
    with pytest.raises(BuildError, match="with code 7"):
        process.run(JOB, nothing, os.environ, (sys.executable, "-c", "raise SystemExit(7)"))


@pytest.mark.parametrize("obeys", [True, False])
def test_ctrl_c_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obeys: bool
) -> None:
    """One that stops by itself has time for it; one that does not is killed."""
    monkeypatch.setattr(process, "STOP_S", 20.0 if obeys else 0.05)
    mark = tmp_path / "mark"
    after = f"open({str(mark)!r}, 'w').close()" if obeys else "signal.pause()"
    program = f"""
say("progress", share=0.5, phase=str(os.getpid()))
assert sys.stdin.read() == ""
{after}
"""
    children: list[subprocess.Popen[str]] = []
    real = process.stop

    def stop(child: subprocess.Popen[str]) -> None:
        children.append(child)
        real(child)

    monkeypatch.setattr(process, "stop", stop)

    def interrupt(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(program, interrupt)
    assert children[0].poll() is not None
    assert mark.exists() is obeys


# ---- the other side


@pytest.mark.parametrize("said", ["cancel\n", "", "what\ncancel\n"])
def test_a_build_is_cancelled_by_word_or_by_the_end_of_stdin(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`leave` follows where the library does not stop in time."""
    monkeypatch.setattr("edgespec.backends.tensorrt.build_process.GRACE_S", 0.0)
    reading, writing = os.pipe()
    os.write(writing, said.encode())
    os.close(writing)
    progress, left = BuildProgress(lambda share, phase: None), threading.Event()
    with os.fdopen(reading) as stream:
        watch(stream, progress, left.set)
    assert progress.cancelled.is_set()
    assert left.wait(20)


def test_the_process_without_the_library_says_so(tmp_path: Path) -> None:
    """The module itself, run as `build` runs it, with a library that cannot be imported."""
    (tmp_path / "tensorrt_rtx.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(EnvironmentProblem, match=r"libcudart\.so\.13 is missing") as error:
        process.run(JOB, nothing, environment)
    assert "tensorrt-rtx-cu13-libs" in error.value.remedy
