"""What every test has: `golden(name, text)` compares a text with the file under review (`pytest
--update-golden` writes the files anew); `modelopt_exports` are checkpoints that ModelOpt itself
quantized, `modelopt_drafts` DFlash drafts of its own and their base, both made once per run.

Sessions of ONNX Runtime have one thread here: the other core belongs to another worker. Long files
come first, so that no worker is left with one at the end.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import shared, threads

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"

# Files of more than ten seconds, the longest first.
LONG_FILES: tuple[str, ...] = ()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew; the diff is the review",
    )


def pytest_configure(config: pytest.Config) -> None:
    shared.begin()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Directories of the store are for reading: a test that changes one takes a copy."""
    if changed := shared.changed():
        pytest.exit(f"a test changed what others share: {changed}", pytest.ExitCode.TESTS_FAILED)


def pytest_unconfigure(config: pytest.Config) -> None:
    shared.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LONG_FILES first, in their order; the others as they were."""
    rank = {name: i for i, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(str(item.path.relative_to(TESTS)), len(rank)))


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_session() -> Iterator[None]:
    with threads.one_per_session():
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{name} is not there yet: pytest --update-golden"
        assert text == path.read_text(encoding="utf-8"), (
            f"{name} differs; if that is meant: pytest --update-golden"
        )

    return check


@pytest.fixture(scope="session")
def needs_modelopt() -> None:
    """Without ModelOpt these tests are skipped, but never in CI."""
    if importlib.util.find_spec("modelopt") is None:
        reason = "nvidia-modelopt is not installed (the extra [quantize])"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def modelopt_exports(needs_modelopt: None) -> Path:
    """Tiny checkpoints that ModelOpt quantised."""
    return shared.made_once(
        "modelopt exports", lambda out: run_module("tests.modelopt_exports", out)
    )


@pytest.fixture(scope="session")
def modelopt_drafts(needs_modelopt: None) -> Path:
    """`base`, and the drafts that ModelOpt made for it; see tests/modelopt_drafts.py."""
    from tests.toys import make_base

    def make(out: Path) -> None:
        run_module("tests.modelopt_drafts", make_base(out / "base", "qwen3", layers=8), out)

    return shared.made_once("modelopt drafts", make)


def run_module(name: str, *paths: Path) -> None:
    command = [sys.executable, "-m", name, *map(str, paths)]
    done = subprocess.run(command, cwd=GOLDEN.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
