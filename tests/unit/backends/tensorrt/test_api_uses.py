"""Each name of TensorRT's API that the backend uses is there, in this form, in each version of the
bindings for which the line runs."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.backends.tensorrt import staging
from edgespec.backends.tensorrt.devices import DeviceModel
from edgespec.backends.tensorrt.options import TensorRTOptions
from edgespec.backends.tensorrt.target import Target
from edgespec.backends.tensorrt.versions import RELEASES, Capabilities

ROOT = Path(__file__).resolve().parents[4]
sys.path.insert(0, str(ROOT / "scripts"))

import tensorrt_api  # noqa: E402
import tensorrt_uses  # noqa: E402

API = tensorrt_api.stored()
SAMPLE = tensorrt_api.SAMPLE

# Conditions of the backend that hold for some versions alone -> the field of `Capabilities` that
# says for which; a test below holds that jobs are made so
CONDITIONS = {
    "job.compute_capability is not None": "compiles_for",
    "job.timing_cache is not None": "timing_cache",
    "self.job.timing_cache is not None": "timing_cache",
    "self.job.decompose_attention": "has_attention",
}


def guard(text: str) -> frozenset[str] | None:
    """The versions for which a condition holds: a field of a capability table, or a row of
    CONDITIONS; None for any other."""
    owner, _, name = text.rpartition(".")
    field = name if owner.rpartition(".")[2] == "capabilities" else CONDITIONS.get(text)
    if field is None:
        return None
    return frozenset(v for v in API.versions if getattr(RELEASES[v], field))


def problems(uses: list[tensorrt_uses.Use]) -> list[tuple[str, str]]:
    return [problem for use in uses for problem in use.problems(API)]


@functools.cache
def package_uses() -> list[tensorrt_uses.Use]:
    return tensorrt_uses.uses_in(tensorrt_api.package_files(), API, guard)


def test_every_use_of_the_backend_is_right_in_every_version() -> None:
    assert problems(package_uses()) == []


def test_the_uses_are_found() -> None:
    """Types are followed far enough: constructors, attributes, arguments and lists."""
    names = Counter(name for use in package_uses() for name in use.names)
    assert {
        "Builder.build_serialized_network",  # an attribute of an object of ours
        "IBuilderConfig.set_timing_cache",  # an argument of a function of another file
        "INetworkDefinition.get_input",  # what a function passes on
        "ParserError.desc",
        "ITensor.shape",  # elements of a list
        "IOptimizationProfile.set_shape",
        "IProgressMonitor.step_complete",  # what a class of ours overrides
        "IAttention.decomposable",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
    } <= names.keys()


def test_nothing_is_used_that_the_data_does_not_know() -> None:
    used = {name for use in package_uses() for name in use.names}
    unknown = sorted(used - API.known)
    assert unknown == [], "a wrong name, or a new one: run scripts/tensorrt_api.py"


def test_planted_wrong_uses_are_found_in_exactly_their_versions() -> None:
    planted = {
        (version, number)
        for number, line in enumerate(SAMPLE.read_text().splitlines(), 1)
        if "# wrong: " in line
        for version in versions_of(line.partition("# wrong: ")[2])
    }
    uses = tensorrt_uses.uses_in({"sample": SAMPLE}, API, guard)
    found = {(version, int(text.split(":")[1])) for version, text in problems(uses)}
    assert found == planted
    assert len(planted) > 60


@pytest.mark.parametrize("release", RELEASES)
def test_conditions_hold_for_the_versions_that_they_stand_for(
    release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs of a build have what a version lacks in no form."""
    row = RELEASES[release]
    device = DeviceModel("a device", 120, "13.0", 2**34)
    for here in (None, device):
        monkeypatch.setattr(staging, "device_here", lambda found=here: found)
        job = staging.job_of(plan(row), TensorRTOptions(), Path("graph"), Path("engine"))
        assert (job.compute_capability is not None) <= bool(row.compiles_for)
        assert (job.timing_cache is not None) <= row.timing_cache
        assert job.decompose_attention == row.has_attention


def plan(row: Capabilities) -> Any:
    """What a job is made of, for a graph in float32."""
    target = Target(dialect=row.dialect, compute="float32", capacity=64, max_rows=8)
    version = f"{row.version[0]}.{row.version[1]}"
    return SimpleNamespace(
        capabilities=row, library=row.library, version=version, sm=120, target=target, profiles=()
    )


def test_without_the_guards_the_backend_would_be_wrong() -> None:
    uses = tensorrt_uses.uses_in(tensorrt_api.package_files(), API)
    assert ("10.13", "ComputeCapability") in {
        (version, text.rpartition(" ")[2]) for version, text in problems(uses)
    }


@pytest.mark.parametrize("version", [v for v in API.versions if RELEASES[v].compiles_for])
def test_the_compute_capabilities_of_the_table_are_those_of_the_bindings(version: str) -> None:
    members = {name for name in API.known if name.startswith("ComputeCapability.SM")}
    known = {name for name in members if API.member(version, name) is not None}
    assert {f"ComputeCapability.SM{sm}" for sm in RELEASES[version].compiles_for} == known


def versions_of(text: str) -> tuple[str, ...]:
    return API.versions if text.strip() == "all" else tuple(text.split())


@pytest.mark.parametrize("version", API.versions)
def test_the_data_is_of_versions_that_are_supported(version: str) -> None:
    assert version in RELEASES
