"""What a runner on a device keeps, shares and gives back, and its end where the device fails."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.backends.cuda.device.base import DeviceMemoryFull, DeviceProblem
from edgespec.backends.cuda.workspace import Memory, Workspace
from edgespec.backends.tensorrt.execution import ExecutionContext
from edgespec.backends.tensorrt.runner import TensorRTRunner
from edgespec.backends.tensorrt.target import Dialect
from edgespec.backends.tensorrt.versions import RTX, capabilities_of
from edgespec.errors import EnvironmentProblem, InternalError
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.host_time import call_of, opened


class FailingDevice(HostDevice):
    """After `failed` each call fails, as after an illegal access in a kernel."""

    failed = False

    def __getattribute__(self, name: str) -> Any:
        fails = object.__getattribute__(self, "failed") and name in CALLS
        return fail if fails else object.__getattribute__(self, name)


CALLS = (
    *("activate", "alloc", "free", "free_pinned", "synchronize", "wait"),
    *("free_event", "free_stream", "free_graph"),
)


def fail(*args: object) -> None:
    raise DeviceProblem("CUDA: cudaErrorIllegalAddress")


@pytest.fixture
def workspace() -> Workspace:
    return Workspace(FailingDevice(idle=True), shared=True)


@pytest.fixture(params=Dialect)
def runner(request: pytest.FixtureRequest, workspace: Workspace, tmp_path: Path) -> TensorRTRunner:
    return open_one(workspace, tmp_path / "base.engine", request.param)


def open_one(
    workspace: Workspace, path: Path, dialect: Dialect, capacity: int = 512, **more: Any
) -> TensorRTRunner:
    given = {"features": True, "workspace": workspace, **more}
    return opened(path, 2, capacity, dialect, "float16", **given)


def device_of(workspace: Workspace) -> FailingDevice:
    assert isinstance(workspace.device, FailingDevice)
    return workspace.device


def run(runner: TensorRTRunner, rows: int, start: int = 100) -> None:
    runner.run(call_of(runner.contract.shape, start, rows))


def test_engines_of_a_pair_share_what_their_calls_go_through(
    workspace: Workspace, tmp_path: Path
) -> None:
    runners = [open_one(workspace, tmp_path / f"{i}.engine", Dialect.NATIVE) for i in range(2)]
    for one in runners:
        run(one, 8)
    device = device_of(workspace)
    assert len(device.blocks) == 2  # one up, one down
    size = len(device.memory)
    runners[0].close()
    run(runners[1], 8)
    assert len(device.memory) < size
    runners[1].close()
    workspace.close()
    assert device.closed
    left = (device.memory, device.blocks, device.events, device.streams)
    assert not any(left)


def test_calls_of_one_engine_go_on_after_the_other_has_moved_their_memory(
    workspace: Workspace, tmp_path: Path
) -> None:
    first, other = (open_one(workspace, tmp_path / f"{i}.engine", Dialect.NATIVE) for i in "ab")
    for _ in range(3):
        run(first, 8)
    (plan,) = first.plans.values()
    assert plan.graph is not None
    workspace.fit(inputs=workspace.inputs.size + 1, upload=workspace.upload.size + 1)
    run(other, 8)
    run(first, 8)
    (again,) = first.plans.values()
    assert again is not plan
    assert again.upload[0] >= workspace.inputs.address
    assert len(device_of(workspace).graphs) == 0


def test_no_plan_is_left_in_memory_that_was_given_back(
    runner: TensorRTRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that finds no memory leaves none to those before it."""
    workspace = runner.workspace
    run(runner, 8)
    device = device_of(workspace)
    held = sum(size for _, size in device.memory.values())
    monkeypatch.setattr(device, "limit", held + 1)
    with pytest.raises(DeviceMemoryFull):
        workspace.fit(upload=workspace.upload.size + 1, inputs=workspace.inputs.size + 4096)
    monkeypatch.setattr(device, "limit", 1 << 40)
    run(runner, 8)
    (plan,) = runner.plans.values()
    assert plan.upload[0] - workspace.inputs.address < workspace.inputs.size
    assert workspace.inputs.address in device.memory
    assert plan.download[0] in device.blocks


@pytest.mark.parametrize("when", ["in a call", "before the end"])
def test_an_end_after_an_error_that_stays_says_nothing(runner: TensorRTRunner, when: str) -> None:
    """The error of the call is what the user reads."""
    workspace, device = runner.workspace, device_of(runner.workspace)
    for _ in range(3):
        run(runner, 8)
    device.failed = True
    if when == "in a call":
        with pytest.raises(DeviceProblem, match="IllegalAddress"):
            run(runner, 8)
    runner.close()
    workspace.close()
    assert workspace.users == 0
    assert device.closed
    assert not runner.plans


def test_memory_that_is_dropped_does_not_break_a_capture(workspace: Workspace) -> None:
    """Nobody knows when the last reference goes."""
    device, stream = workspace.device, workspace.stream
    kept = Memory(workspace, 64)
    device.begin_capture(stream)
    del kept
    gc.collect()
    graph = device.end_capture(stream)
    assert graph is not None
    workspace.alloc(64)
    assert len(device_of(workspace).memory) == 1  # what was dropped went back before


def test_engine_time_is_the_devices_own(
    runner: TensorRTRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostDevice, "elapsed_ms", lambda self, begin, end: 2.5)
    run(runner, 1)
    run(runner, 8)
    assert runner.engine_s == pytest.approx(0.005)
    runner.keep_rows(0, np.array([100, 102]), 100)
    assert runner.engine_s == pytest.approx(0.005)


def test_a_library_that_makes_graphs_of_its_own_makes_them(
    workspace: Workspace, tmp_path: Path
) -> None:
    """TensorRT-RTX runs other kernels until those of a shape are compiled: a graph of a call would
    keep the first ones for ever."""
    row = capabilities_of(RTX, "1.7.1.116")
    path = tmp_path / "base.engine"
    runner = open_one(workspace, path, Dialect.NATIVE, capabilities=row)
    for _ in range(4):
        run(runner, 8)
    (plan,) = runner.plans.values()
    assert (plan.uses, plan.graph) == (4, None)
    assert "graph" not in device_of(workspace).launched
    assert all(context.context.own_graphs for context in runner.engine.contexts)
    runner.close()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), DeviceProblem("CUDA: no"), InternalError("broken")]
)
def test_a_capture_ends_whatever_happens_in_it(
    runner: TensorRTRunner, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A stream that stays captured does nothing any more."""
    run(runner, 8)
    device, enqueue = device_of(runner.workspace), ExecutionContext.enqueue

    def broken(self: ExecutionContext) -> None:
        enqueue(self)
        if device.streams[runner.workspace.stream].kept is not None:
            raise error

    monkeypatch.setattr(ExecutionContext, "enqueue", broken)
    if isinstance(error, DeviceProblem):
        run(runner, 8)  # what cannot be captured runs without
    else:
        with pytest.raises(type(error)):
            run(runner, 8)
    assert device.streams[runner.workspace.stream].kept is None
    assert not device.graphs
    run(runner, 9)
    runner.close()


def test_an_engine_that_finds_no_memory_leaves_the_others_as_they_were(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever memory ends, also in what engines share."""
    first = open_one(workspace, tmp_path / "first.engine", Dialect.NATIVE, max_input_len=64)
    run(first, 8)
    device = device_of(workspace)
    held = sum(size for _, size in device.memory.values())
    sizes = sorted(size for _, size in device.memory.values())
    kinds: set[tuple[bool, ...]] = set()  # which of them had grown
    for more in range(0, 1 << 30, 1 << 20):
        monkeypatch.setattr(device, "limit", held + more)
        try:
            path = tmp_path / "other.engine"
            other = open_one(workspace, path, Dialect.NATIVE, capacity=2048, scratch=1 << 22)
        except EnvironmentProblem:
            own = sorted(size for _, size in device.memory.values())
            assert len(own) == len(sizes)
            kinds |= {tuple(a < b for a, b in zip(sizes, own, strict=True))}
            run(first, 8)
        else:
            break
    assert len(kinds) > 1
    run(other, 8)
    run(first, 8)
