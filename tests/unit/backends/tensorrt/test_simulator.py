"""The rules of the simulated library, each broken once: a test that would pass without a rule shows
nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgespec.backends.cuda.device.base import DeviceLost, DeviceMemoryFull, DeviceProblem
from tests.tensorrt_simulator import building
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.library import Context, Engine, Simulator
from tests.tensorrt_simulator.small_graph import MOST, SLOTS, small_graph

NATIVE, PORTABLE = "10.16.2.10", "10.13.3.9"


class Log(building.ILogger):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, severity: building.Severity, msg: str) -> None:
        self.lines.append(msg)


def profile(builder: Any, least: int = 1, most: int = MOST) -> Any:
    found = builder.create_optimization_profile()
    found.set_shape("rows", (1, 1, least, 2), (1, 1, most, 2), (1, 1, most, 2))
    found.set_shape("write_indices", (1,), (1,), (1,))
    found.set_shape("past_key_0", *[(1, 1, SLOTS, 2)] * 3)
    return found


def parsed(tmp_path: Path, version: str = NATIVE, **more: Any) -> tuple[Any, Any, Any, Log]:
    """A builder with its network, and the parser that filled it."""
    trt, log, path = Simulator(version), Log(), tmp_path / "model.onnx"
    onnx.save(small_graph(**more), path)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    parser.parse_from_file(str(path))
    return builder, network, parser, log


def built(tmp_path: Path, *profiles: tuple[int, int]) -> bytes:
    builder, network, _, log = parsed(tmp_path)
    config = builder.create_builder_config()
    for least, most in profiles or ((1, MOST),):
        assert config.add_optimization_profile(profile(builder, least, most)) >= 0
    data = builder.build_serialized_network(network, config)
    assert data is not None, log.lines
    return bytes(data)


# ---- the builder's half


@pytest.mark.parametrize(
    ("version", "more", "said"),
    [
        (PORTABLE, {}, "TensorScatter is imported from 10.15 on"),
        (NATIVE, {"slots": "C"}, "the length of a cache is static"),
        (NATIVE, {"extra": "EyeLike"}, "Plugin not found: EyeLike"),
    ],
)
def test_the_parser_refuses(tmp_path: Path, version: str, more: Any, said: str) -> None:
    _, network, parser, _ = parsed(tmp_path, version, **more)
    assert [said in parser.get_error(i).desc() for i in range(parser.num_errors)] == [True]
    assert network.num_layers == 0


def test_a_network_is_typed(tmp_path: Path) -> None:
    trt = Simulator(NATIVE)
    assert trt.Builder(Log()).create_network(0) is None


def test_a_profile_is_in_order_and_complete(tmp_path: Path) -> None:
    builder, network, _, log = parsed(tmp_path)
    config = builder.create_builder_config()
    assert config.add_optimization_profile(profile(builder, 5, 2)) == -1
    assert builder.build_serialized_network(network, config) is None
    assert "no optimization profile" in log.lines[-1]
    lacking = builder.create_optimization_profile()
    lacking.set_shape("rows", *[(1, 1, 1, 2)] * 3)
    config.add_optimization_profile(lacking)
    assert builder.build_serialized_network(network, config) is None
    assert "is missing dimensions in a profile" in log.lines[-1]


def test_a_monitor_that_says_nothing_cancels(tmp_path: Path) -> None:
    class Silent(building.IProgressMonitor):
        def phase_start(self, *of: Any) -> None: ...
        def step_complete(self, *of: Any) -> None: ...
        def phase_finish(self, *of: Any) -> None: ...

    builder, network, _, _ = parsed(tmp_path)
    config = builder.create_builder_config()
    config.add_optimization_profile(profile(builder))
    config.progress_monitor = Silent()
    assert builder.build_serialized_network(network, config) is None


# ---- the runtime's half


class Bench:
    """An engine with one context and memory for its tensors."""

    def __init__(self, data: bytes, version: str = NATIVE, limit: int = 1 << 30) -> None:
        self.device = HostDevice(limit)
        self.device.activate()
        self.stream, self.log = self.device.stream(), Log()
        self.trt = Simulator(version)
        self.runtime = self.trt.Runtime(self.log)
        self.engine: Engine = self.runtime.deserialize_cuda_engine(data)
        self.context = self.new_context()

    def new_context(self) -> Context:
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self.engine.create_execution_context(strategy)
        assert context is not None
        return context

    def bind(self) -> None:
        """All that a run of two rows needs."""
        size = self.engine.device_memory_size_v2
        self.context.set_device_memory(self.device.alloc(size), size)
        for name, shape in (
            ("rows", (1, 1, 2, 2)),
            ("write_indices", (1,)),
            ("past_key_0", (1, 1, SLOTS, 2)),
        ):
            assert self.context.set_input_shape(name, shape)
        for name in ("rows", "write_indices", "past_key_0", "sums"):
            address = self.device.alloc(256)
            self.device.zero(address, 256, self.stream)
            assert self.context.set_tensor_address(name, address)
        self.context.set_tensor_address("present_key_0", self.context.addresses["past_key_0"])

    def runs(self) -> bool:
        return self.context.execute_async_v3(self.stream)

    @property
    def said(self) -> str:
        return self.log.lines[-1] if self.log.lines else ""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(built(tmp_path))
    bench.bind()
    return bench


def test_a_run_writes_the_cache_in_place_when_it_is_waited_for(bench: Bench) -> None:
    rows = np.array([1, 2, 3, 4], np.float32)
    block = bench.device.pinned(rows.nbytes)
    block.array[:] = rows.view(np.uint8)
    address = bench.context.addresses["rows"]
    bench.device.upload(address, block.address, rows.nbytes, bench.stream)
    cache = bench.context.addresses["past_key_0"]
    assert bench.runs()
    assert np.isnan(bench.device.at(cache, 16).view(np.float32)).all()  # nobody has waited
    bench.device.synchronize(bench.stream)
    assert bench.device.at(cache, 16).view(np.float32).tolist() == [1, 2, 3, 4]
    sums = bench.context.addresses["sums"]
    assert bench.device.at(sums, 8).view(np.float32).tolist() == [4, 6]


RULES: dict[str, tuple[Callable[[Bench], object], str]] = {
    "beyond the profile": (
        lambda b: b.context.set_input_shape("rows", (1, 1, MOST + 1, 2)),
        "outside of the profile",
    ),
    "of another rank": (
        lambda b: b.context.set_input_shape("rows", (1, 2, 2)),
        "outside of the profile",
    ),
    "a shape of an output": (lambda b: b.context.set_input_shape("sums", (1,)), "no input"),
    "an unknown tensor": (lambda b: b.context.set_tensor_address("other", 256), "no output"),
    "an odd address": (
        lambda b: b.context.set_tensor_address("rows", b.context.addresses["rows"] + 8),
        "not aligned",
    ),
    "an unknown profile": (
        lambda b: b.context.set_optimization_profile_async(1, b.stream),
        "out of range",
    ),
    "a stream that ended": (lambda b: b.context.execute_async_v3(7), "not alive"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_call_is_refused(bench: Bench, rule: str) -> None:
    call, said = RULES[rule]
    assert call(bench) is False
    assert said in bench.said


def test_a_run_needs_every_shape_and_address(bench: Bench) -> None:
    del bench.context.shapes["rows"]
    assert (bench.runs(), bench.said) == (False, "no shape was set for rows")
    bench.context.set_input_shape("rows", (1, 1, 2, 2))
    del bench.context.addresses["sums"]
    assert (bench.runs(), bench.said) == (False, "no address was set for sums")


def test_a_run_needs_memory_to_work_in(bench: Bench) -> None:
    bench.context.set_device_memory(bench.context.memory[0], 16)
    assert not bench.runs()
    assert "less memory" in bench.said


def test_an_alias_is_one_address(bench: Bench) -> None:
    bench.context.set_tensor_address("present_key_0", bench.device.alloc(256))
    assert not bench.runs()
    assert "one tensor and two addresses" in bench.said


def test_what_is_no_alias_stands_apart(bench: Bench) -> None:
    bench.engine.header["aliases"] = {}
    assert bench.runs()
    with pytest.raises(AssertionError, match="written where an input is read"):
        bench.device.synchronize(bench.stream)


def test_an_address_is_a_plain_number(bench: Bench) -> None:
    with pytest.raises(TypeError):
        bench.context.set_tensor_address("rows", np.int64(256))  # type: ignore[arg-type]


def test_memory_that_is_too_small_or_gone_is_an_illegal_access(bench: Bench) -> None:
    bench.context.set_tensor_address("sums", small := bench.device.alloc(4))
    assert bench.runs()
    with pytest.raises(DeviceProblem, match="illegal access"):
        bench.device.synchronize(bench.stream)
    assert not bench.runs()
    assert "illegal access" in bench.said
    bench.device.free(small)
    bench.device.lost = None
    assert bench.runs()
    with pytest.raises(DeviceProblem, match="illegal access"):
        bench.device.synchronize(bench.stream)


def test_another_profile_unbinds_all(tmp_path: Path) -> None:
    bench = Bench(built(tmp_path, (1, 2), (1, MOST)))
    bench.bind()
    assert bench.runs()
    assert bench.context.set_optimization_profile_async(1, bench.stream)
    assert not bench.runs()
    assert "no shape was set" in bench.said


def test_a_profile_has_one_context(tmp_path: Path) -> None:
    bench = Bench(built(tmp_path, (1, 2), (1, MOST)))
    second = bench.new_context()
    assert not second.set_optimization_profile_async(0, bench.stream)
    assert "in use" in bench.said
    assert second.set_optimization_profile_async(1, bench.stream)


def test_a_context_without_a_profile_takes_no_shapes(bench: Bench) -> None:
    second = bench.new_context()
    assert not second.set_input_shape("rows", (1, 1, 2, 2))
    assert "needs a profile" in bench.said


def test_an_engine_is_of_one_version_and_whole(tmp_path: Path) -> None:
    data, log = built(tmp_path), Log()
    assert Simulator("10.15.1.29").Runtime(log).deserialize_cuda_engine(data) is None
    assert "another version" in log.lines[-1]
    assert Simulator(NATIVE).Runtime(log).deserialize_cuda_engine(data[4:]) is None
    assert "magicTag" in log.lines[-1]


def test_old_versions_report_no_aliases(tmp_path: Path) -> None:
    old = "10.13.2.10"
    data = built(tmp_path).replace(NATIVE.encode(), old.encode())
    engine = Simulator(old).Runtime(Log()).deserialize_cuda_engine(data)
    assert not hasattr(engine, "get_aliased_input_tensor")


# ---- the device's half


def test_memory_ends(bench: Bench) -> None:
    device = HostDevice(1024)
    device.activate()
    device.alloc(1000)
    with pytest.raises(DeviceMemoryFull):
        device.alloc(100)


def test_memory_is_freed_once(bench: Bench) -> None:
    address = bench.device.alloc(8)
    bench.device.free(address)
    with pytest.raises(DeviceProblem, match="not allocated"):
        bench.device.free(address)


def test_a_graph_does_again_what_was_captured(bench: Bench) -> None:
    assert bench.runs()
    bench.device.synchronize(bench.stream)
    bench.device.begin_capture(bench.stream)
    assert bench.runs()
    graph = bench.device.end_capture(bench.stream)
    assert graph is not None
    sums, rows = bench.context.addresses["sums"], bench.context.addresses["rows"]
    bench.device.at(rows, 16).view(np.float32)[:] = [1, 2, 3, 4]
    bench.device.synchronize(bench.stream)
    assert bench.device.at(sums, 8).view(np.float32).tolist() == [0, 0]
    bench.device.launch_graph(graph, bench.stream)
    bench.device.synchronize(bench.stream)
    assert bench.device.at(sums, 8).view(np.float32).tolist() == [4, 6]


def test_a_capture_breaks_where_shapes_have_changed(bench: Bench) -> None:
    bench.device.begin_capture(bench.stream)
    assert not bench.runs()
    assert "cannot be captured" in bench.said
    assert bench.device.end_capture(bench.stream) is None


@pytest.mark.parametrize("call", ["alloc", "synchronize"])
def test_a_capture_breaks_where_the_device_is_waited_for(bench: Bench, call: str) -> None:
    bench.device.begin_capture(bench.stream)
    with pytest.raises(DeviceProblem, match="captured"):
        getattr(bench.device, call)(bench.stream)
    assert bench.device.end_capture(bench.stream) is None


def test_a_lost_device_refuses_all_but_what_gives_back(bench: Bench) -> None:
    device, stream = bench.device, bench.stream
    block, address, event = device.pinned(8), device.alloc(8), device.event()
    device.work_left = 1
    device.zero(address, 8, stream)
    device.record(event, stream)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        device.synchronize(stream)
    for refused in (
        lambda: device.synchronize(stream),
        lambda: device.upload(address, block.address, 8, stream),
        lambda: device.alloc(8),
        lambda: device.wait(event),
    ):
        with pytest.raises(DeviceLost, match="illegal memory access"):
            refused()
    device.settle(stream)
    device.free(address)
    device.free_pinned(block)
    device.free_event(event)


def test_a_device_that_is_lost_as_it_is_settled_is_told_and_not_raised(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    address = bench.device.alloc(8)
    bench.device.work_left = 0
    bench.device.zero(address, 8, bench.stream)
    bench.device.settle(bench.stream)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "illegal memory access" in caplog.text
    with pytest.raises(DeviceLost):
        bench.device.synchronize(bench.stream)


def test_an_event_has_its_time_once_its_stream_has_come_to_it(bench: Bench) -> None:
    device, stream = bench.device, bench.stream
    begin, end = device.event(), device.event()
    device.wait(begin)  # not recorded: nothing to wait for
    address = device.alloc(8)
    device.record(begin, stream)
    device.zero(address, 8, stream)
    device.record(end, stream)
    device.zero(address, 8, stream)  # behind the event
    with pytest.raises(DeviceProblem, match="not ready"):
        device.elapsed_ms(begin, end)
    device.wait(end)
    device.at(address, 8)[:] = 1
    assert device.elapsed_ms(begin, end) > 0
    device.synchronize(stream)
    assert not device.at(address, 8).any()
    device.record(begin, stream)
    with pytest.raises(DeviceProblem, match="not ready"):
        device.elapsed_ms(begin, end)
    device.free_event(begin)
    device.free_event(end)
    assert not device.events


@pytest.mark.parametrize("call", ["record", "wait"])
def test_an_event_breaks_a_capture(bench: Bench, call: str) -> None:
    event = bench.device.event()
    bench.device.begin_capture(bench.stream)
    with pytest.raises(DeviceProblem, match="captured"):
        getattr(bench.device, call)(event, *[bench.stream] * (call == "record"))
    assert bench.device.end_capture(bench.stream) is None
