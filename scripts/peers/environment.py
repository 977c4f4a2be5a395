"""Where peers are installed, converted and measured: folders, virtual environments, commands.

Knows the folders below --work; knows no engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Prepared:
    """What is measured: a command, the files that it opens, and of these those that every token
    reads from beginning to end (none where they also have what is not read). `divergence` is what
    the format costs, as edgespec measures it; None: it was not measured."""

    command: list[str]
    files: list[Path]
    read: tuple[Path, ...] = ()
    divergence: dict[str, float] | None = None


@dataclass(frozen=True)
class Place:
    """The folders of one comparison: environments are shared by all shapes, models are not."""

    work: Path
    shape: str
    # By the name of an environment: a Python, a source tree or a build that is there already.
    given: dict[str, Path] = field(default_factory=dict)

    @property
    def models(self) -> Path:
        """The folder of this shape: `base` and `draft` are the checkpoints."""
        return self.work / self.shape

    def python(self, name: str, *requirements: str) -> Path:
        """Returns the Python of an environment that has these requirements; makes it once."""
        if name in self.given:
            return self.given[name]
        path = self.work / "environments" / name
        python, whole = path / "bin" / "python", path / "whole"
        if not whole.is_file():  # made where it stays: its scripts name their Python by its path
            shutil.rmtree(path, ignore_errors=True)
            run([sys.executable, "-m", "venv", path])
            run([python, "-m", "pip", "install", "-q", *requirements])
            whole.touch()
        return python


def run(command: list[str | Path], **variables: str) -> None:
    """Runs a command with further environment variables; its output goes to stderr."""
    print("+", *command, file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=sys.stderr, env=os.environ | variables)
    if done.returncode:
        raise SystemExit(f"The command above failed with exit status {done.returncode}.")


def size_mb(path: Path) -> float:
    """Returns the size of a file, or of all files below a directory, in MB."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return round(sum(file.stat().st_size for file in files) / 1e6, 1)
