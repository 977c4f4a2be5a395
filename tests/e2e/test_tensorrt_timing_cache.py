"""What a builder has timed is used by the next build: its file is read and written, one for each
version, device and driver, and none where the user wants none."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.tensorrt_pairs import NATIVE, PORTABLE, SIZES, TREES, exported
from tests.e2e.workshop import Cli, Outcome, cli
from tests.tensorrt_simulator.installed import install

__all__ = ["cli"]

COUNTS = re.compile(r"(\d+) kernels were timed, (\d+) taken from the timing cache")
ENVIRONMENT = 4

Build = Callable[..., list[tuple[int, int]]]


@pytest.fixture
def run(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Builds a draft with the simulator of a version, for lengths of its cache."""
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))

    def done(*more: object, version: str = NATIVE, fails: str | None = None) -> Outcome:
        trt = install(monkeypatch, version)
        trt.faults.after |= {fails: 0} if fails else {}
        dirs = ["--onnx-dir", exported("eagle3")[1], "--engine-dir", tmp_path / "engines"]
        more = (*TREES, "--backend", "tensorrt", "--compute", "fp16", *more)
        return cli("build", *dirs, *SIZES, *more)

    return done


@pytest.fixture
def build(run: Callable[..., Outcome], caplog: pytest.LogCaptureFixture) -> Build:
    """The kernels that each engine of a build has timed, and those that it had not to time."""

    def counted(*more: object, version: str = NATIVE) -> list[tuple[int, int]]:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "edgespec"):
            found = run(*more, version=version)
        assert found.code == 0, found.err
        return [(int(new), int(taken)) for new, taken in COUNTS.findall(caplog.text)]

    return counted


def test_a_second_build_times_nothing(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "times"
    ((first, taken),) = build("--timing-cache", path)
    assert (first > 10, taken) == (True, 0)
    stored = path.read_bytes()
    assert build("--timing-cache", path) == [(0, first)]
    assert path.read_bytes() == stored
    assert [*path.parent.iterdir()] == [path]


def test_engines_for_several_lengths_share_what_does_not_read_the_cache(
    build: Build, tmp_path: Path
) -> None:
    (first, second) = build("--max-kv-cache-capacity", "64,128")
    assert first[1] == 0
    assert 0 < second[0] < second[1]
    assert build("--max-kv-cache-capacity", "64,128") == [(0, sum(first)), (0, sum(second))]


def test_each_version_has_a_file_of_its_own(build: Build, tmp_path: Path) -> None:
    ((first, _),) = build()
    ((other, taken),) = build(version=PORTABLE)
    assert (other > 10, taken) == (True, 0)
    names = sorted(path.name for path in (tmp_path / "cache" / "tensorrt").iterdir())
    assert len(names) == 2
    assert all(version in name for version, name in zip((PORTABLE, NATIVE), names, strict=True))
    assert build() == [(0, first)]


def test_a_file_of_another_version_is_begun_anew(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "times"
    build("--timing-cache", path)
    ((new, taken),) = build("--timing-cache", path, version=PORTABLE)
    assert (new > 10, taken) == (True, 0)
    assert PORTABLE.encode() in path.read_bytes()


def test_without_a_file_all_is_timed_again(build: Build, tmp_path: Path) -> None:
    first = build("--timing-cache", "none")
    assert build("--timing-cache", "none") == first
    assert first[0][0] > 10
    assert not (tmp_path / "cache" / "tensorrt").exists()


def test_a_build_that_fails_leaves_the_file_as_it_was(
    run: Callable[..., Outcome], build: Build, tmp_path: Path
) -> None:
    path = tmp_path / "times"
    build("--timing-cache", path)
    stored = path.read_bytes()
    longer = ("--timing-cache", path, "--max-kv-cache-capacity", "96")
    assert run(*longer, fails="build_serialized_network").code == ENVIRONMENT
    assert path.read_bytes() == stored
