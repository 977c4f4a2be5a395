"""Claims about standard streams that are closed or full, and about errors of the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.main import presentable
from tests.forked import COMMAND, Forked

ENVIRON = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_number_of_a_closed_stream_is_given_to_no_file(tmp_path: Path, closed: int) -> None:
    """What a library prints would go into that file."""
    source = (
        f"import os; os.close({closed}); from edgespec.cli.streams import occupy_closed_streams;"
        f" occupy_closed_streams(); number = os.open({str(tmp_path / 'file')!r}, os.O_CREAT);"
        f" raise SystemExit(0 if number > 2 and os.path.samestat(os.fstat({closed}),"
        " os.stat('/dev/null')) else 9)"
    )
    done = subprocess.run([sys.executable, "-c", source], env=ENVIRON, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("chat --engine-dir D", "stdin"),
        ("chat --engine-dir D", "stdout"),
        ("infer --engine-dir D --prompt hi", "stdout"),
        ("run D --prompt hi", "stdout"),
        ("run D", "stdin"),
        ("eval summarize --engine-dir D --dataset F", "stdout"),
    ],
)
def test_command_without_its_stream_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, name: str
) -> None:
    (tmp_path / "D").mkdir()
    (tmp_path / "F").write_text("")
    monkeypatch.chdir(tmp_path)
    # As an interpreter begins whose stream is closed
    closing = f"import os, sys; os.close(sys.{name}.fileno()); sys.{name} = None; "
    with Forked(closing + COMMAND, *words.split()) as child:
        _, said = child.communicate()
    assert (child.wait(), said.splitlines()[0]) == (4, f"error: {name} is closed")


def test_closed_stderr_is_written_to_by_nobody() -> None:
    source = (
        "import os, sys; from edgespec.cli.chat.screen import Screen;"
        " from edgespec.cli.streams import occupy_closed_streams;"
        " occupy_closed_streams(); Screen(sys.stdout).note('a'); print('answered')"
    )
    command = ["sh", "-c", '"$@" 2>&-', "sh", sys.executable, "-c", source]
    done = subprocess.run(
        command, capture_output=True, text=True, env=ENVIRON, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "answered\n")


@pytest.mark.parametrize("words", ["--help", "cache list", "help infer"])
def test_stdout_that_takes_no_more_is_named(words: str) -> None:
    with (
        Path("/dev/full").open("w") as full,
        Forked(COMMAND, *words.split(), stdout=full.fileno()) as child,
    ):
        _, said = child.communicate()
    assert child.wait() == 4
    assert len(said.splitlines()) == 2
    assert said.startswith("error: stdout: No space left on device\n")


@pytest.mark.parametrize("kind", [PermissionError, FileNotFoundError, NotADirectoryError])
def test_input_that_cannot_be_read_is_refused_as_input(kind: type[OSError]) -> None:
    number = {PermissionError: 13, FileNotFoundError: 2, NotADirectoryError: 20}[kind]
    shown = presentable(kind(number, os.strerror(number), "some/file"))
    assert (shown.exit_code, "some/file cannot be read" in shown.what) == (3, True)
    assert shown.remedy
