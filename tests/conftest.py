"""What every test has: `golden(name, text)` compares a text with the file under review (`pytest
--update-golden` writes the files anew); `modelopt_exports` are checkpoints that ModelOpt itself
quantized, `modelopt_drafts` DFlash drafts of its own and their base, both made once per run.

Engines are built without their costs being measured, but where a test is about that. Sessions of
ONNX Runtime have one thread here: the other core belongs to another worker. Long files
come first, so that no worker is left with one at the end.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgespec.backends.cuda.device.opening import check_driver
from edgespec.cli import environment
from edgespec.errors import EnvironmentProblem
from tests import shared, threads

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"

# The dearest files, so that none is left for the end; before them the one that has ModelOpt make
# what others need as well.
LONG_FILES = (
    "unit/backends/ort/native/test_arm.py",  # where QEMU is
    "parity/test_quantised_export.py",
    "lossless/test_quantised.py",
    "lossless/test_batches.py",
    "lossless/test_tensorrt_runner.py",
    "lossless/test_lossless.py",
    "lossless/test_capacities.py",
    "parity/test_bases.py",
    "e2e/test_verify.py",
    "e2e/test_tune.py",
    "e2e/test_vlm.py",
    "unit/quantize/test_work.py",
    "unit/backends/tensorrt/test_stand_in.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden anew; the diff is the review",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ[environment.MEASURE_COSTS] = "0"  # also in the processes that tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    shared.begin()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Directories of the store are for reading: a test that changes one takes a copy."""
    if changed := shared.changed():
        pytest.exit(f"a test changed what others share: {changed}", pytest.ExitCode.TESTS_FAILED)


def pytest_unconfigure(config: pytest.Config) -> None:
    shared.end()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """tests/tensorrt is left out of a whole run where there is neither compiler nor device: each
    test would be skipped."""
    whole = not any("tensorrt" in argument for argument in config.args)
    return True if whole and collection_path == TESTS / "tensorrt" and not can_ask() else None


def can_ask() -> bool:
    """Whether one of NVIDIA's compilers or a driver of CUDA is here."""
    try:
        check_driver()
    except EnvironmentProblem:
        return any(map(importlib.util.find_spec, ("tensorrt", "tensorrt_rtx")))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The modules and the items stay to the end: no collection of garbage looks at them again, and
    of what the tests make it looks at ten thousand objects at once, not at 700."""
    gc.disable()
    yield
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """LONG_FILES first, in their order; the others as they were."""
    assert all((TESTS / name).is_file() for name in LONG_FILES)
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
def modelopt_made(needs_modelopt: None) -> Path:
    """What tests/modelopt_made.py makes, once per run."""
    from tests.toys import make_base

    def make(out: Path) -> None:
        base = make_base(out / "drafts" / "base", "qwen3", layers=8)
        command = [sys.executable, "-m", "tests.modelopt_made", str(base), str(out)]
        done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    return shared.made_once("modelopt", make)


@pytest.fixture(scope="session")
def modelopt_exports(modelopt_made: Path) -> Path:
    """Tiny checkpoints that ModelOpt quantized."""
    return modelopt_made / "exports"


@pytest.fixture(scope="session")
def modelopt_drafts(modelopt_made: Path) -> Path:
    """`base`, and the drafts that ModelOpt made for it; see tests/modelopt_drafts.py."""
    return modelopt_made / "drafts"
