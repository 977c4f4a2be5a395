"""Bindings: missing ones, and those of another version than their library."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest

from edgespec.backends.tensorrt import bindings
from edgespec.backends.tensorrt.versions import RTX, TENSORRT
from edgespec.errors import MissingDependency

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


def test_loaded_bindings_have_the_row_of_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(ABSENT.module)
    module.__version__ = "10.13.3.9"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, ABSENT.module, module)
    monkeypatch.setattr(bindings, "capabilities_of", lambda _, text: f"row of {text}")
    found = bindings.load(ABSENT)
    assert (found.version, found.capabilities) == ("10.13.3.9", "row of 10.13.3.9")
