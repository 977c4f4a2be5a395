"""Puts the simulator where TensorRT would be: its bindings, its device, its process of a build."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgespec.backends.cuda.device import opening
from edgespec.backends.tensorrt import bindings, devices, process
from edgespec.backends.tensorrt import fingerprint as fingerprints
from edgespec.backends.tensorrt.devices import Device
from edgespec.backends.tensorrt.versions import Library, capabilities_of
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.library import Simulator, simulator

ROOT = Path(__file__).parents[2]
CARD = Device("simulated card", HostDevice.sm, "13.0", 8 << 30)


def install(monkeypatch: pytest.MonkeyPatch, version: str) -> Simulator:
    """Let this process and those of its builds find the simulator of a version as `tensorrt`'s
    bindings, on one simulated card."""
    found = simulator(version)

    def load(library: Library) -> bindings.Bindings:
        return bindings.Bindings(library, found, version, capabilities_of(library, version))

    monkeypatch.setattr(bindings, "load", load)
    monkeypatch.setattr(opening, "open_device", HostDevice)
    here = "device_here"
    for module in ("backend", "staging", "fingerprint"):
        monkeypatch.setattr(f"edgespec.backends.tensorrt.{module}.{here}", lambda: CARD)
    monkeypatch.setattr(fingerprints, "installed_version", lambda library: version)
    command = (sys.executable, "-m", "tests.tensorrt_simulator.build_process", version)
    monkeypatch.setattr(process.run, "__defaults__", (command,))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(found, "faults", found.faults)
    assert devices.device_here is not None
    found.faults.clear()
    return found
