"""Puts the simulator where TensorRT would be: its bindings, its device, its builds."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.backends.cuda.device import opening
from edgespec.backends.tensorrt import bindings, process
from edgespec.backends.tensorrt import fingerprint as fingerprints
from edgespec.backends.tensorrt.build_job import BuildJob, BuildReport
from edgespec.backends.tensorrt.build_process import Reports, work
from edgespec.backends.tensorrt.devices import DeviceModel
from edgespec.backends.tensorrt.logger import logger_of
from edgespec.backends.tensorrt.progress_monitor import BuildProgress
from edgespec.backends.tensorrt.versions import Library, capabilities_of
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.library import Simulator, simulator

ROOT = Path(__file__).parents[2]
CARD = DeviceModel("simulated card", HostDevice.sm, "13.0", 8 << 30)
run_in_process = process.run


def install(
    monkeypatch: pytest.MonkeyPatch, version: str, *, own_process: bool = False
) -> Simulator:
    """Let the simulator of a version be found as `tensorrt`'s bindings, on one simulated card.

    Builds run here, or each in a process of its own, as those of the real library do.
    """
    found = simulator(version)

    def load(library: Library) -> bindings.TrtBindings:
        return bindings.TrtBindings(library, found, version, capabilities_of(library, version))

    monkeypatch.setattr(bindings, "load", load)
    monkeypatch.setattr(opening, "open_device", HostDevice)
    here = "device_here"
    for module in ("backend", "staging", "fingerprint"):
        monkeypatch.setattr(f"edgespec.backends.tensorrt.{module}.{here}", lambda: CARD)
    monkeypatch.setattr(fingerprints, "installed_version", lambda library: version)
    command = (sys.executable, "-m", "tests.tensorrt_simulator.build_process", version)
    monkeypatch.setattr(run_in_process, "__defaults__", (command,))
    monkeypatch.setattr(process, "run", run_in_process if own_process else run_here)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found.faults.clear()
    found.engines.clear()
    logger_of(found).kept.clear()  # builds of before
    return found


def run_here(
    job: BuildJob, advance: Callable[[float], None], environment: Mapping[str, str]
) -> BuildReport:
    """What `process.run` does, without a process: both sides' words are written and read."""
    written = io.StringIO()
    reports = Reports(written)
    progress = BuildProgress(lambda share, phase: reports.say("progress", share=share, phase=phase))
    code = work(BuildJob.from_json(job.to_json()), progress, reports)
    child: Any = SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO(written.getvalue()))
    return process.outcome(process.listen(child, job, advance), code, "")
