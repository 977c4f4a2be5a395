"""The library of kernels as it is found, loaded and refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.backends.ort.native import library
from edgespec.errors import EnvironmentProblem
from tests.unit.backends.ort.native.sessions import compiled


def test_a_missing_or_damaged_library_says_why(tmp_path: Path) -> None:
    assert library.load(tmp_path / "none.so") == (
        "edgespec's own kernels were not compiled when it was installed"
    )
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"no library")
    assert "cannot be loaded" in str(library.load(damaged))


@pytest.mark.skipif(not os.environ.get("CI"), reason="a desk may have no compiler; CI may not")
def test_ci_tests_the_kernels() -> None:
    assert library.why_missing() is None


@compiled
def test_portable_kernels_are_always_usable() -> None:
    kernels = library.kernels()
    assert kernels.levels[-1] == "portable"
    assert kernels.level in kernels.levels


@compiled
def test_an_unknown_level_is_refused_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EnvironmentProblem, match="no level 'mmx'") as found:
        library.kernels().use_level("mmx")
    assert "portable" in found.value.remedy
    monkeypatch.setenv(library.LEVEL_VARIABLE, "mmx")
    with pytest.raises(EnvironmentProblem, match="no level 'mmx'"):
        library.load(library.PATH.parent / "." / library.PATH.name)
