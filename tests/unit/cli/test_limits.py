"""Claims about limits.py: what the shell takes away from a process is told as that."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli import limits
from edgespec.cli.main import presentable

MAIN = [sys.executable, "-m", "edgespec.cli.main"]
ENVIRON = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}


def within(mebibytes: int, *args: str) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (mebibytes << 20, mebibytes << 20))

    return subprocess.run(
        [*MAIN, *args],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("mebibytes", [60, 100, 158, 180])
def test_too_little_memory_is_the_machines_limit(tmp_path: Path, mebibytes: int) -> None:
    """From where the interpreter starts to where all libraries have been loaded."""
    done = within(mebibytes, "export", str(tmp_path), str(tmp_path / "out"))
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("error: ")
    assert "memory" in done.stderr or "address space" in done.stderr
    assert "bug in edgespec" not in done.stderr


def test_help_needs_little_memory() -> None:
    assert within(100, "--help").returncode == 0


def test_import_that_fails_for_another_reason_is_not_blamed_on_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "address_space_bytes", lambda: 1 << 30)
    assert presentable(ModuleNotFoundError("No module named 'x'")).exit_code == 1
    assert presentable(ImportError("umath failed to import")).exit_code == 4
    monkeypatch.setattr(limits, "address_space_bytes", lambda: 1 << 40)
    assert presentable(ImportError("cannot import name 'x'")).exit_code == 1
    assert presentable(ImportError("x.so: failed to map segment")).exit_code == 4
    monkeypatch.setattr(limits, "address_space_bytes", lambda: None)
    assert presentable(ImportError("umath failed to import")).exit_code == 1


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_number_of_a_closed_stream_is_given_to_no_file(tmp_path: Path, closed: int) -> None:
    """What a library prints would go into that file."""
    source = (
        f"import os; os.close({closed}); from edgespec.cli.limits import occupy_closed_streams;"
        f" occupy_closed_streams(); number = os.open({str(tmp_path / 'file')!r}, os.O_CREAT);"
        f" raise SystemExit(0 if number > 2 and os.path.samestat(os.fstat({closed}),"
        " os.stat('/dev/null')) else 9)"
    )
    done = subprocess.run([sys.executable, "-c", source], env=ENVIRON, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(("redirect", "name"), [("<&-", "stdin"), (">&-", "stdout")])
def test_chat_without_a_stream_says_so(tmp_path: Path, redirect: str, name: str) -> None:
    command = f'"$@" chat --engine-dir {tmp_path} {redirect}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *MAIN],
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[0]) == (4, f"error: {name} is closed")


@pytest.mark.parametrize(
    ("words", "redirect", "name"),
    [
        ("infer --engine-dir D --prompt hi", ">&-", "stdout"),
        ("run D --prompt hi", ">&-", "stdout"),
        ("run D", "<&-", "stdin"),
        ("eval summarize --engine-dir D --dataset F", ">&-", "stdout"),
    ],
)
def test_command_whose_answers_nobody_can_read_says_so(
    tmp_path: Path, words: str, redirect: str, name: str
) -> None:
    (tmp_path / "D").mkdir()
    (tmp_path / "F").write_text("")
    command = f'"$@" {words} {redirect}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", *MAIN],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[0]) == (4, f"error: {name} is closed")


def test_closed_stderr_is_written_to_by_nobody() -> None:
    source = (
        "import os, sys; from edgespec.cli.chat.screen import Screen;"
        " from edgespec.cli.limits import occupy_closed_streams;"
        " occupy_closed_streams(); Screen(sys.stdout).note('a'); print('answered')"
    )
    command = ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-c", source]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRON, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "answered\n")


@pytest.mark.parametrize("words", ["--help", "cache list", "help infer"])
def test_stdout_that_takes_no_more_is_named(words: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$@" {words} > /dev/full', "sh", *MAIN],
        capture_output=True,
        text=True,
        env=ENVIRON,
        timeout=60,
        check=False,
    )
    said = done.stderr.splitlines()
    assert (done.returncode, said[0]) == (4, "error: stdout: No space left on device")
    assert len(said) == 2


@pytest.mark.parametrize("kind", [PermissionError, FileNotFoundError, NotADirectoryError])
def test_input_that_cannot_be_read_is_refused_as_input(kind: type[OSError]) -> None:
    number = {PermissionError: 13, FileNotFoundError: 2, NotADirectoryError: 20}[kind]
    shown = presentable(kind(number, os.strerror(number), "some/file"))
    assert (shown.exit_code, "some/file cannot be read" in shown.what) == (3, True)
    assert shown.remedy
