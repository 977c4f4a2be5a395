"""What an engine's config.json says of it, read back, and what it is bound to."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from edgespec.backends.tensorrt import fingerprint
from edgespec.backends.tensorrt.devices import DeviceModel
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.settings import EngineSettings
from edgespec.backends.tensorrt.target import Dialect
from edgespec.backends.tensorrt.versions import RTX
from edgespec.contract import GraphContract, GraphShape, Role, TensorSpec
from edgespec.errors import BundleError, EngineMismatch, MissingDependency

SHAPE = GraphShape(Role.BASE, 8, 1, 1, 8, 8, 10)
CONTRACT = GraphContract((TensorSpec("x", "float32", ("B", "S", 8)),), (), SHAPE)
SETTINGS = EngineSettings(
    library="tensorrt_rtx",
    version="1.7.1.116",
    sm=120,
    dialect=Dialect.NATIVE,
    compute="bfloat16",
    capacity=320,
    max_rows=128,
    decomposed_attention=False,
    profiles=(Profile("prefill", {"x": ((1, 1, 8), (1, 4, 8), (2, 9, 8))}),),
)


def stored() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(SETTINGS.to_dict()))
    return found


def test_settings_are_the_same_after_their_way_through_config_json() -> None:
    assert EngineSettings.read(stored(), CONTRACT, "config.json") == SETTINGS


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dialect", "own"),
        ("compute", "fp16"),
        ("cache_slots", 0),
        ("max_rows", None),
        ("library", 7),
        ("decomposed_attention", "no"),
        ("profiles", []),
        ("profiles", [{"name": "a"}]),
        ("profiles", [{"name": "a", "shapes": {"y": [[1], [1], [1]]}}]),
        ("profiles", [{"name": "a", "shapes": {"x": [[1, 1, 8], [1, 4, 8]]}}]),
        ("profiles", [{"name": "a", "shapes": {"x": [[1, 1], [1, 4], [2, 9]]}}]),
        ("profiles", [{"name": "a", "shapes": {"x": [[1, 1, 8], [1, 4, 8], [2, 3, 8]]}}]),
        ("profiles", [{"name": "a", "shapes": {"x": [[0, 1, 8], [1, 4, 8], [2, 9, 8]]}}]),
        ("profiles", [{"name": "a", "shapes": {"x": [[1, 1, 8], [1, True, 8], [2, 9, 8]]}}]),
    ],
)
def test_a_wrong_key_is_named(key: str, value: object) -> None:
    with pytest.raises(BundleError, match=f"config.json .backend_config.*{key}"):
        EngineSettings.read(stored() | {key: value}, CONTRACT, "config.json")


# ---- the machine that an engine is bound to

HERE = DeviceModel("RTX 5090", 120, "13.2", 32 << 30)
BOUND = fingerprint.fingerprint_of(RTX, "1.7.1.116", 120)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(fingerprint, "device_here", lambda: HERE)
    monkeypatch.setattr(fingerprint, "installed_version", lambda library: "1.7.1.116")
    return monkeypatch


def test_an_engine_of_this_machine_is_taken(machine: pytest.MonkeyPatch) -> None:
    fingerprint.check(BOUND, RTX, "the base engine")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("compute_capability", 89, "built for SM89 .*, this is SM120 .RTX 5090."),
        ("version", "1.4.0.76", "built with NVIDIA TensorRT-RTX 1.4.0.76, here is 1.7.1.116"),
        ("machine", "riscv64", "built for riscv64"),
        ("system", "win32", "built for win32"),
    ],
)
def test_an_engine_of_another_machine_is_refused(
    machine: pytest.MonkeyPatch, key: str, value: object, said: str
) -> None:
    with pytest.raises(EngineMismatch, match=f"the base engine was {said}"):
        fingerprint.check(BOUND | {key: value}, RTX, "the base engine")


def test_a_fingerprint_that_says_less_is_refused(machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineMismatch, match="does not say for which machine"):
        fingerprint.check({"version": "1.7.1.116"}, RTX, "the base engine")


def test_without_a_device_or_the_library_an_engine_does_not_run(
    machine: pytest.MonkeyPatch,
) -> None:
    machine.setattr(fingerprint, "installed_version", lambda library: None)
    with pytest.raises(MissingDependency, match="TensorRT-RTX is not installed"):
        fingerprint.check(BOUND, RTX, "the base engine")
    machine.setattr(fingerprint, "device_here", lambda: None)
    with pytest.raises(EngineMismatch, match="no CUDA device is here"):
        fingerprint.check(BOUND, RTX, "the base engine")


def test_a_library_is_found_by_the_names_of_its_packages() -> None:
    absent = replace(RTX, module="numpy_that_nobody_has")
    assert fingerprint.installed_version(absent) is None
    assert fingerprint.installed_version(replace(RTX, module="numpy")) is not None
