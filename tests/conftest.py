"""`golden(name, text)` compares a text with the file under review; `pytest --update-golden` writes
the files anew. `modelopt_exports` are checkpoints that ModelOpt itself quantised, `modelopt_drafts`
DFlash drafts of its own and their base; both are made once a run.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew; the diff is the review",
    )


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
def modelopt_exports(needs_modelopt: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny checkpoints that ModelOpt quantised."""
    out = tmp_path_factory.mktemp("modelopt")
    run_module("tests.modelopt_exports", out)
    return out


@pytest.fixture(scope="session")
def modelopt_drafts(needs_modelopt: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, and the drafts that ModelOpt made for it; see tests/modelopt_drafts.py."""
    from tests.toys import make_base

    out = tmp_path_factory.mktemp("modelopt_drafts")
    run_module("tests.modelopt_drafts", make_base(out / "base", "qwen3", layers=8), out)
    return out


def run_module(name: str, *paths: Path) -> None:
    command = [sys.executable, "-m", name, *map(str, paths)]
    done = subprocess.run(command, cwd=GOLDEN.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
