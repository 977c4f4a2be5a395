"""A type checker sees the API from a directory of its user's, also in an editable install."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """\
import edgespec
from edgespec import Chunk, EdgeSpecError, Message, Response, SamplingParams


def right(engine: edgespec.Engine, sampling: SamplingParams) -> list[Response]:
    chunks: list[Chunk] = list(engine.stream([Message("user", "Hi")], plan=edgespec.PLAIN))
    engine.generate([{"role": "user", "content": chunks[0].text}], sampling, engine.plan(1, 3, 4))
    for end in engine.generate_batch(["a", [5, 6]], [sampling, None], return_exceptions=True):
        print(end.what if isinstance(end, EdgeSpecError) else end.text)
    return engine.generate_batch(["a", "b"], sampling)


async def right_too(engine: edgespec.Engine) -> str:
    async with engine.astream("Hi") as stream:
        async for chunk in stream:
            print(chunk.text)
    return (await stream.result()).text


def wrong(engine: edgespec.Engine) -> int:
    engine.generate(5)
    return engine.generate("a").text
"""


@pytest.mark.deep
def test_user_s_program_is_checked_by_the_types_of_the_api(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "program.py"]
    env = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    *errors, last = done.stdout.splitlines()
    lines = len(PROGRAM.splitlines())
    assert [error.split(": ")[0] for error in errors] == [
        f"program.py:{line}" for line in (lines - 1, lines)
    ], done.stdout + done.stderr
    assert 'to "generate" of "Engine" has incompatible type "int"' in errors[0]
    assert 'got "str", expected "int"' in errors[1]
    assert last.startswith("Found 2 errors")


def test_editable_install_is_a_path_and_no_import_hook() -> None:
    """Which setuptools makes it where `package-dir` says that all packages stand below one
    directory, and mypy does not follow the hook that it makes otherwise."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert tool["package-dir"] == {"": "."}
    assert "py.typed" in tool["package-data"]["edgespec"]
