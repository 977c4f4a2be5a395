"""docs/api.md leaves no public name out, and what its examples say is what happens."""

from __future__ import annotations

import doctest
import inspect
import logging
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgespec
from tests.lossless.engines import api_engines

ROOT = Path(__file__).resolve().parents[2]
PAGE = runpy.run_path(str(ROOT / "scripts" / "api_page.py"))


def documented() -> Iterator[tuple[str, Any]]:
    """The package and each name of the page, with its members."""
    yield "edgespec", edgespec
    for names in PAGE["PAGE"].values():
        for name, members in names.items():
            value = getattr(edgespec, name)
            yield name, value
            yield from ((f"{name}.{member}", getattr(value, member, None)) for member in members)


def test_page_has_every_public_name_and_every_public_method() -> None:
    names = [name for section in PAGE["PAGE"].values() for name in section]
    errors = [
        name
        for name in edgespec.__all__
        if inspect.isclass(value := getattr(edgespec, name))
        and issubclass(value, edgespec.EdgeSpecError)
    ]
    assert sorted(names + errors) == sorted(edgespec.__all__)
    page = PAGE["render"]()
    assert all(name in page for name in errors)
    for name, value in documented():
        if inspect.isfunction(value) or inspect.isclass(value):
            assert value.__doc__, name
            assert value.__doc__.splitlines()[0] in page


def test_page_is_as_the_docstrings_are() -> None:
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == PAGE["render"]()


class Checker(doctest.OutputChecker):
    """An example that shows no output may print what it likes: a model's text, for one."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with `engines`, as the examples have it. Undoes the logging that they set up."""
    made = api_engines()
    (tmp_path / "engines").symlink_to(made / "four")
    monkeypatch.chdir(tmp_path)
    root, logger = logging.getLogger(), logging.getLogger("edgespec")
    handlers, level = root.handlers[:], logger.level
    yield tmp_path
    root.handlers[:] = handlers
    logger.setLevel(level)


def test_examples_do_what_they_say(directory: Path) -> None:
    finder, ran = doctest.DocTestFinder(recurse=False), 0
    for name, value in documented():
        for test in finder.find(value, name, globs={}) if getattr(value, "__doc__", None) else ():
            failures: list[str] = []
            runner = doctest.DocTestRunner(Checker(), optionflags=doctest.ELLIPSIS)
            ran += runner.run(test, out=failures.append).attempted
            assert not failures, "".join(failures)
    assert ran > 20


def test_example_that_says_something_else_would_be_seen() -> None:
    (test,) = doctest.DocTestFinder().find(type("A", (), {"__doc__": ">>> 1\n2\n"}), "A")
    assert doctest.DocTestRunner(Checker()).run(test, out=lambda text: None).failed == 1
