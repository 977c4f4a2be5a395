"""What is installed: the list for the CPU wheel, the extras that remedies name, the entry point."""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_list_for_the_cpu_wheel_is_the_base_installation(project: dict[str, Any]) -> None:
    wanted = {
        spec.partition(" ;")[0]
        for spec in project["dependencies"]
        if not spec.startswith("onnxruntime-gpu")
    }
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    listed = [line for line in lines if line and not line.startswith("#")]
    assert set(listed) == wanted
    assert len(listed) == len(wanted)
    (line,) = re.findall(
        r"^    pip install (click .*) &&", (ROOT / "docs/install.md").read_text(), re.M
    )
    assert line.split() == [re.split(r"[<>=]", spec)[0] for spec in listed]


def test_every_extra_that_is_named_exists(project: dict[str, Any]) -> None:
    sources = [*(ROOT / "edgespec").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    named = {
        extra
        for path in sources
        for extra in re.findall(r"(?:edgespec|'\.|\"\.)\[(\w+)\]", path.read_text())
    }
    assert {"datasets", "torch"} <= named
    assert named <= set(project["optional-dependencies"])


def test_pinned_versions_are_of_packages_that_are_asked_for(project: dict[str, Any]) -> None:
    """And each package of an extra has a pin, so that what was tried can be installed again."""
    specs = [spec for extra in project["optional-dependencies"].values() for spec in extra]
    asked = {
        re.split(r"[\[<>=;, ]", spec)[0].lower() for spec in [*specs, *project["dependencies"]]
    }
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert asked - {"edgespec"} <= {pin.lower() for pin in pins}


def test_entry_point_is_there(project: dict[str, Any]) -> None:
    module, _, function = project["scripts"]["edgespec"].partition(":")
    assert callable(getattr(import_module(module), function))
