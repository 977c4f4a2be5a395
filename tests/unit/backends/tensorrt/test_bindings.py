"""Bindings: missing ones, and those of another version than their library."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from edgespec.backends.tensorrt import bindings
from edgespec.backends.tensorrt.versions import RTX, TENSORRT
from edgespec.errors import EnvironmentProblem, MissingDependency

ABSENT = replace(TENSORRT, module="tensorrt_that_nobody_has")


def test_a_missing_library_is_named_with_what_to_install() -> None:
    with pytest.raises(MissingDependency) as error:
        bindings.load(ABSENT)
    assert "tensorrt_that_nobody_has" in error.value.what
    assert "python3-libnvinfer" in error.value.remedy
    assert error.value.exit_code == 4


def test_the_remedy_for_rtx_names_three_exact_wheels_and_the_licence() -> None:
    for package in ("libs", "bindings"):
        assert f"tensorrt-rtx-cu13-{package}==1.7.1.116" in RTX.remedy
    assert " tensorrt-rtx-cu13==1.7.1.116" in RTX.remedy
    assert "NVIDIA's proprietary licence" in RTX.remedy


@pytest.mark.parametrize(
    ("ours", "loaded", "fits"),
    [
        ("10.13.3.9", "10.13.3", True),
        ("10.13.3.9", None, True),
        ("10.13.2.6", "10.13.3", False),
        ("11.4.0.106", "11.3.0", False),
    ],
)
def test_bindings_and_library_must_be_of_one_version(
    ours: str, loaded: str | None, fits: bool
) -> None:
    if fits:
        bindings.check_skew(TENSORRT, ours, loaded)
        return
    with pytest.raises(EnvironmentProblem, match=f"{ours}, the library is {loaded}"):
        bindings.check_skew(TENSORRT, ours, loaded)


def test_loaded_bindings_have_the_row_of_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(ABSENT.module)
    module.__version__ = "10.13.3.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ABSENT.module, module)
    monkeypatch.setattr(bindings, "capabilities_of", lambda _, text: f"row of {text}")
    found = bindings.load(ABSENT)
    assert (found.version, found.capabilities) == ("10.13.3.9", "row of 10.13.3.9")


def test_the_loaded_file_is_found_by_its_name(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 0 08:01 1    /usr/lib/libnvinfer_plugin.so.10\n"
        "7f02-7f03 rw-p 0 00:00 0\n"
        "7f04-7f05 r-xp 0 08:01 2    /usr/lib/a b/libnvinfer.so.10.13.3\n"
    )
    found = bindings.loaded_path(TENSORRT.shared_object, maps)
    assert found == Path("/usr/lib/a b/libnvinfer.so.10.13.3")
    assert bindings.loaded_path(RTX.shared_object, maps) is None
