"""The same calls of the builder's half to NVIDIA's TensorRT-RTX and to the simulator, and what came
of each, as JSON on stdout:

    python -m tests.tensorrt.same_calls real
    python -m tests.tensorrt.same_calls 1.7.1.116      # the simulator of a version

A process of its own: the library keeps pointers into Python's objects to the very end. What no
table can hold is left out: the texts of errors, the number of layers, the size of an engine, and
the lines that follow where no driver is. Nothing of the runtime's half is here: without a GPU an
engine cannot be opened.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from edgespec.backends.tensorrt.versions import RTX
from tests.tensorrt_simulator.library import Simulator
from tests.tensorrt_simulator.small_graph import MOST, SLOTS, small_graph

REAL, SM = "real", "SM120"
NO_DRIVER = "Cuda Runtime (In"  # of each error where no driver is
Shapes = dict[str, tuple[tuple[int, ...], ...]]


class Bench:
    """A library with one builder, its log and its recorder."""

    def __init__(self, trt: Any, directory: Path) -> None:
        self.trt, self.directory = trt, directory
        self.log, self.recorder, self.kept = log_of(trt), recorder_of(trt), []
        self.builder = trt.Builder(self.log)
        self.builder.error_recorder = self.recorder

    @property
    def typed(self) -> int:
        return 1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)

    def parse(self, model: onnx.ModelProto | bytes | Path) -> tuple[bool, Any, Any]:
        """Whether a model is taken, the network and the parser."""
        path = self.directory / "model.onnx" if not isinstance(model, Path) else model
        if isinstance(model, onnx.ModelProto):
            onnx.save(model, path)
        elif isinstance(model, bytes):
            path.write_bytes(model)
        network = self.builder.create_network(self.typed)
        parser = self.trt.OnnxParser(network, self.log)
        self.kept.append((network, parser))
        return parser.parse_from_file(str(path)), network, parser

    def network(self, **more: Any) -> Any:
        taken, network, _ = self.parse(small_graph(**more))
        assert taken
        return network

    def profile(self, shapes: Shapes) -> Any:
        made = self.builder.create_optimization_profile()
        for name, three in shapes.items():
            made.set_shape(name, *three)
        return made

    def config(self, *profiles: Shapes) -> Any:
        """A config for one compute capability, with these profiles."""
        config = self.builder.create_builder_config()
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(self.trt.ComputeCapability, SM), 0)
        for shapes in profiles:
            config.add_optimization_profile(self.profile(shapes))
        return config

    def builds(self, network: Any, config: Any) -> bool:
        """Whether an engine comes of it; if so, it is some bytes."""
        engine = self.builder.build_serialized_network(network, config)
        if engine is None:
            return False
        data = memoryview(engine)
        assert data.nbytes == len(bytes(data)) > 0
        return True

    def said(self) -> dict[str, Any]:
        """Who was told of errors, and by which code; what follows of a missing driver left out."""
        codes = [code for code, text in self.recorder.found if NO_DRIVER not in text]
        return {
            "log": any(NO_DRIVER not in line for line in self.log.lines),
            "recorder": list(dict.fromkeys(code.name for code in codes)),
        }


def log_of(trt: Any) -> Any:
    """A logger that keeps the lines of errors."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.lines: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity.name in ("ERROR", "INTERNAL_ERROR"):
                self.lines.append(msg)

    return Log()


def recorder_of(trt: Any) -> Any:
    class Recorder(trt.IErrorRecorder):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.found: list[tuple[Any, str]] = []

        def report_error(self, code: Any, desc: str) -> None:
            self.found.append((code, desc))

        def num_errors(self) -> int:
            return len(self.found)

        def get_error_code(self, index: int) -> Any:
            return self.found[index][0]

        def get_error_desc(self, index: int) -> str:
            return self.found[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            self.found.clear()

    return Recorder()


def monitor_of(trt: Any, answer: Callable[[int], Any]) -> Any:
    """A monitor that keeps what it is told; `answer` gets the number of the step."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0
            self.told: list[tuple[Any, ...]] = []

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.told.append(("start", phase_name, parent_phase, num_steps))

        def step_complete(self, phase_name: str, step: int) -> Any:
            self.told.append(("step", phase_name, step))
            self.steps += 1
            return answer(self.steps)

        def phase_finish(self, phase_name: str) -> None:
            self.told.append(("finish", phase_name))

    return Monitor()


# ---- the calls

Case = Callable[[Bench], Any]
CASES: dict[str, Case] = {}


def case(call: Case) -> Case:
    CASES[call.__name__] = call
    return call


def cases_of(**more: Case) -> None:
    """Calls that need no name of their own."""
    CASES.update(more)


ROWS = ((1, 1, 1, 2), (1, 1, MOST, 2), (1, 1, MOST, 2))
INDICES, PAST = ((1,),) * 3, ((1, 1, SLOTS, 2),) * 3
WHOLE: Shapes = {"rows": ROWS, "write_indices": INDICES, "past_key_0": PAST}
HEADS, WIDE = 4, 64  # of attention that has kernels: one head has none in 1.7
ATTENTION: Shapes = {
    "rows": ((1, HEADS, 1, WIDE), (1, HEADS, MOST, WIDE), (1, HEADS, MOST, WIDE)),
    "write_indices": INDICES,
    "past_key_0": ((1, HEADS, SLOTS, WIDE),) * 3,
    "mask": ((1, 1, 1, SLOTS), (1, 1, MOST, SLOTS), (1, 1, MOST, SLOTS)),
}


def attending(attention: str = "additive", dtype: int = TensorProto.FLOAT16) -> onnx.ModelProto:
    return small_graph(attention=attention, dtype=dtype, heads=HEADS, width=WIDE)


def attempt(call: Callable[[], Any]) -> Any:
    """What a call gives, as JSON: an object by whether it is there, an exception by its type."""
    try:
        return plain(call())
    except Exception as error:
        return f"raises {type(error).__name__}"


def plain(value: Any) -> Any:
    if isinstance(value, Enum) or (hasattr(value, "name") and hasattr(value, "value")):
        return value.name
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return "an object"


# ---- builder, network


@case
def builders(bench: Bench) -> Any:
    class Unmade(bench.trt.ILogger):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            """Without its own class's."""

    return [
        attempt(lambda: bench.trt.Builder(None)),
        attempt(lambda: bench.trt.Builder("log")),
        attempt(lambda: bench.trt.Builder(Unmade())),
        attempt(lambda: bench.trt.Builder(bench.log)),
        attempt(lambda: setattr(bench.builder, "error_recorder", "recorder")),
    ]


@case
def networks(bench: Bench) -> Any:
    network = bench.builder.create_network(bench.typed)
    return [
        attempt(lambda: bench.builder.create_network(1 << 20)),
        attempt(lambda: bench.builder.create_network("typed")),
        (network.num_inputs, network.num_layers),
        attempt(lambda: network.get_input(0)),
        attempt(lambda: network.get_layer(0)),
        attempt(lambda: bench.trt.OnnxParser(None, bench.log)),
        attempt(lambda: bench.trt.OnnxParser(network, None)),
    ]


@case
def an_empty_network(bench: Bench) -> Any:
    network = bench.builder.create_network(bench.typed)
    return bench.builds(network, bench.config())


# ---- parser


def parsed(model: Callable[[], onnx.ModelProto | bytes | Path]) -> Case:
    def call(bench: Bench) -> Any:
        taken, _, parser = bench.parse(model())
        if taken:
            return [taken, parser.num_errors == 0]
        error = parser.get_error(0)
        named = (error.node_name(), error.node_operator())
        return [taken, parser.num_errors > 0, *named, bool(error.desc())]

    return call


@case
def what_a_network_has(bench: Bench) -> Any:
    taken, network, parser = bench.parse(attending())
    tensors = [network.get_input(i) for i in range(network.num_inputs)]
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    attends = [layer for layer in layers if layer.type == bench.trt.LayerType.ATTENTION_INPUT]
    return [
        taken,
        [plain((tensor.name, tuple(tensor.shape), tensor.dtype)) for tensor in tensors],
        network.num_layers > 0,
        len(attends),
        attempt(lambda: network.get_input(99)),
        attempt(lambda: network.get_layer(9999)),
        attempt(lambda: parser.get_error(0)),
    ]


def attention_of(model: Callable[[], onnx.ModelProto], decomposable: bool | None = None) -> Case:
    """A build of attention, which the network lets be decomposed, or not; None: says nothing of."""

    def call(bench: Bench) -> Any:
        taken, network, _ = bench.parse(model())
        found = [taken]
        for i in range(network.num_layers if decomposable is not None else 0):
            layer = network.get_layer(i)
            if layer.type == bench.trt.LayerType.ATTENTION_INPUT:
                found.append(isinstance(layer, bench.trt.IAttentionInputLayer))
                layer.__class__ = bench.trt.IAttentionInputLayer
                found.append(layer.attention.decomposable)
                layer.attention.decomposable = decomposable
        return [*found, bench.builds(network, bench.config(ATTENTION))]

    return call


def let_decompose() -> onnx.ModelProto:
    """In float32, and the graph itself allows it: as `--emit-onnx` writes it."""
    model = attending(dtype=TensorProto.FLOAT)
    node = next(node for node in model.graph.node if node.op_type == "Attention")
    node.attribute.append(onnx.helper.make_attribute("TRT_decomposable", 1))
    return model


def in_float32() -> onnx.ModelProto:
    return attending(dtype=TensorProto.FLOAT)


cases_of(
    attention_in_float16=attention_of(attending),
    attention_in_bfloat16=attention_of(lambda: attending(dtype=TensorProto.BFLOAT16)),
    attention_with_one_bool_mask=attention_of(lambda: attending("bool")),
    attention_in_float32=attention_of(in_float32),
    attention_in_float32_that_must_not_be_decomposed=attention_of(in_float32, decomposable=False),
    attention_in_float32_that_may_be_decomposed=attention_of(in_float32, decomposable=True),
    attention_in_float32_that_its_graph_lets_decompose=attention_of(let_decompose),
)


def lacking_weights() -> onnx.ModelProto:
    """Weights in a file that is not there."""
    model = small_graph()
    tensor = TensorProto(name="far", data_type=TensorProto.FLOAT, dims=[2], data_location=1)
    for key, value in (("location", "nowhere.data"), ("offset", "0"), ("length", "8")):
        tensor.external_data.add(key=key, value=value)
    model.graph.initializer.append(tensor)
    model.graph.node.append(onnx.helper.make_node("Add", ["rows", "far"], ["y"], name="adds"))
    model.graph.output.append(
        onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", 1, "S", 2])
    )
    return model


def of_another_domain() -> onnx.ModelProto:
    model = small_graph(extra="FusedMatMul")
    model.graph.node[-1].domain = "com.microsoft"
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    return model


cases_of(
    a_good_graph=parsed(small_graph),
    a_cache_of_no_fixed_length=parsed(lambda: small_graph(slots="C")),
    an_unknown_operator=parsed(lambda: small_graph(extra="NoSuchOperator")),
    an_operator_of_another_domain=parsed(of_another_domain),
    eye_like=parsed(lambda: small_graph(extra="EyeLike")),
    compress=parsed(lambda: small_graph(extra="Compress")),
    mat_mul_integer=parsed(lambda: small_graph(extra="MatMulInteger")),
    scan=parsed(lambda: small_graph(extra="Scan")),
    weights_that_are_missing=parsed(lacking_weights),
    no_file=parsed(lambda: Path("/nonexistent/model.onnx")),
    no_onnx=parsed(lambda: b"no graph at all"),
    an_empty_file=parsed(lambda: b""),
    half_a_file=parsed(lambda: small_graph().SerializeToString()[:-40]),
    a_cache_of_double=parsed(lambda: small_graph(dtype=TensorProto.DOUBLE)),
    a_cache_of_int32=parsed(lambda: small_graph(dtype=TensorProto.INT32)),
    a_cache_of_fp8=parsed(lambda: small_graph(dtype=TensorProto.FLOAT8E4M3FN)),
    a_cache_of_strings=parsed(lambda: small_graph(dtype=TensorProto.STRING)),
    rows_of_another_type=parsed(lambda: small_graph(rows=TensorProto.FLOAT16)),
    bfloat16=parsed(lambda: small_graph(dtype=TensorProto.BFLOAT16)),
)


# ---- profiles


def built(*profiles: Shapes) -> Case:
    return lambda bench: bench.builds(bench.network(), bench.config(*profiles))


@case
def shapes_of_a_profile(bench: Bench) -> Any:
    made = bench.builder.create_optimization_profile()
    return [
        attempt(lambda: made.set_shape("x", [1], [2], [3])),
        attempt(lambda: made.set_shape("x", (np.int64(1),), (2,), (3,))),
        attempt(lambda: made.set_shape("x", (1.5,), (2,), (3,))),
        attempt(lambda: made.set_shape("x", 1, 2, 3)),
        attempt(lambda: made.set_shape("x", (-1,), (2,), (3,))),
        attempt(lambda: made.set_shape(3, (1,), (2,), (3,))),
        attempt(lambda: made.set_shape("x", (1,) * 9, (2,) * 9, (3,) * 9)),
    ]


@case
def profiles_that_are_added(bench: Bench) -> Any:
    config = bench.config()
    inverted: Shapes = {"x": ((5,), (2,), (2,))}
    ranks: Shapes = {"x": ((1,), (2, 2), (2,))}
    return [
        attempt(lambda: config.add_optimization_profile(bench.profile(inverted))),
        attempt(lambda: config.add_optimization_profile(bench.profile(ranks))),
        attempt(lambda: config.add_optimization_profile(bench.profile(WHOLE))),
        attempt(lambda: config.add_optimization_profile(bench.profile(WHOLE))),
        attempt(lambda: config.add_optimization_profile(None)),
        attempt(lambda: config.num_optimization_profiles),
    ]


cases_of(
    one_profile=built(WHOLE),
    two_profiles=built(WHOLE, WHOLE | {"rows": ((1, 1, 1, 2),) * 3}),
    no_profile=built(),
    an_empty_profile=built({}),
    a_profile_that_lacks_an_input=built({name: WHOLE[name] for name in ("rows", "past_key_0")}),
    the_second_profile_lacks_an_input=built(WHOLE, {"rows": ROWS}),
    a_fixed_size_that_differs=built(WHOLE | {"past_key_0": ((1, 1, SLOTS + 1, 2),) * 3}),
    a_fixed_size_with_a_range=built(
        WHOLE | {"past_key_0": ((1, 1, 1, 2), (1, 1, SLOTS, 2), (1, 1, SLOTS, 2))}
    ),
    a_shape_of_another_rank=built(WHOLE | {"rows": ((1, 1, 2),) * 3}),
    no_rows_at_least=built(WHOLE | {"rows": ((1, 1, 0, 2), *ROWS[1:])}),
)


# ---- configs


@case
def settings_of_a_config(bench: Bench) -> Any:
    config = bench.builder.create_builder_config()
    pool = bench.trt.MemoryPoolType.WORKSPACE
    found = [attempt(lambda: config.builder_optimization_level)]
    for level in (0, 5, 7, -1):
        found.append(attempt(lambda n=level: setattr(config, "builder_optimization_level", n)))
        found.append(config.builder_optimization_level)
    return [
        *found,
        attempt(lambda: setattr(config, "builder_optimization_level", "high")),
        attempt(lambda: config.set_memory_pool_limit(pool, 1 << 28)),
        attempt(lambda: config.set_memory_pool_limit(pool, -1)),
        attempt(lambda: config.set_memory_pool_limit("workspace", 1 << 28)),
        attempt(lambda: config.progress_monitor),
        attempt(lambda: setattr(config, "progress_monitor", "monitor")),
        attempt(lambda: setattr(config, "progress_monitor", None)),
    ]


@case
def compute_capabilities(bench: Bench) -> Any:
    config, sm = bench.builder.create_builder_config(), getattr(bench.trt.ComputeCapability, SM)
    found = [
        config.num_compute_capabilities,
        attempt(lambda: config.set_compute_capability(sm, 0)),
        attempt(lambda: setattr(config, "num_compute_capabilities", 1)),
    ]
    for index in (0, 1, -1):
        found.append(attempt(lambda i=index: config.set_compute_capability(sm, i)))
    return [*found, attempt(lambda: config.set_compute_capability(120, 0))]


@case
def the_compute_capabilities_by_name(bench: Bench) -> Any:
    names = (f"SM{sm}" for sm in (75, 80, 86, 87, 89, 100, 110, 120, 121))
    return [name for name in names if hasattr(bench.trt.ComputeCapability, name)]


@case
def a_small_workspace_and_another_level(bench: Bench) -> Any:
    config = bench.config(WHOLE)
    config.set_memory_pool_limit(bench.trt.MemoryPoolType.WORKSPACE, 1 << 20)
    config.builder_optimization_level = 0
    return bench.builds(bench.network(), config)


@case
def timing_caches(bench: Bench) -> Any:
    config = bench.config(WHOLE)
    none = attempt(config.get_timing_cache)
    made = config.create_timing_cache(b"")
    found = [
        none,
        attempt(lambda: config.create_timing_cache("text")),
        attempt(lambda: config.set_timing_cache(None, False)),
        attempt(lambda: config.set_timing_cache(b"", False)),
        attempt(lambda: config.set_timing_cache(made, False)),
        attempt(config.get_timing_cache),
        bench.builds(bench.network(), config),
    ]
    stored = bytes(memoryview(config.get_timing_cache().serialize()))
    again = bench.config().create_timing_cache(stored)
    return [*found, len(stored) > 0, attempt(lambda: config.set_timing_cache(again, False))]


# ---- builds


@case
def a_builder_used_again(bench: Bench) -> Any:
    """After a success, a failure and a cancelled build, with one network and with another."""
    network, config = bench.network(), bench.config(WHOLE)
    stops = bench.config(WHOLE)
    bench.kept.append(monitor_of(bench.trt, lambda step: False))
    stops.progress_monitor = bench.kept[-1]
    return [
        bench.builds(network, config),
        bench.builds(network, config),
        bench.builds(network, bench.config()),
        bench.builds(network, stops),
        bench.builds(network, config),
        bench.builds(bench.network(extra="Abs"), bench.config(WHOLE)),
    ]


@case
def two_builders(bench: Bench) -> Any:
    other = Bench(bench.trt, bench.directory)
    bench.kept.append(other)
    return [
        other.builds(other.network(), other.config(WHOLE)),
        bench.builds(bench.network(), bench.config(WHOLE)),
    ]


def monitored(answer: Callable[[int], Any]) -> Case:
    """A build whose monitor answers so: whether it goes on to its end, whether each phase that
    began has ended, how phases stand in each other, and how often it is asked."""

    def call(bench: Bench) -> Any:
        monitor = monitor_of(bench.trt, answer)
        bench.kept.append(monitor)
        config = bench.config(WHOLE)
        config.progress_monitor = monitor
        built = bench.builds(bench.network(), config)
        return [built, *shape_of(monitor.told), monitor.steps if not built else monitor.steps > 5]

    return call


def shape_of(told: list[tuple[Any, ...]]) -> Iterator[Any]:
    """What holds of any build's phases, whatever they are called."""
    began = [event for event in told if event[0] == "start"]
    ended = [event for event in told if event[0] == "finish"]
    yield ("each that began has ended", sorted(b[1] for b in began) == sorted(e[1] for e in ended))
    yield ("the first has no parent", began[0][2] is None)
    yield ("others stand in one that is known", {b[2] for b in began[1:]} <= {b[1] for b in began})
    yield ("there are others", len(began) > 1)
    yield ("the first to begin is the last to end", ended[-1][1] == began[0][1])
    steps = {b[1]: b[3] for b in began}
    within = all(event[2] < steps[event[1]] for event in told if event[0] == "step")
    yield ("steps are below what was said", within)


cases_of(
    a_monitor_that_goes_on=monitored(lambda step: True),
    a_monitor_that_stops=monitored(lambda step: False),
    a_monitor_that_stops_later=monitored(lambda step: step < 4),
    a_monitor_that_says_nothing=monitored(lambda step: None),
    a_monitor_that_says_something_else=monitored(lambda step: "go on"),
)


@case
def a_refused_build_reports_nothing(bench: Bench) -> Any:
    monitor = monitor_of(bench.trt, lambda step: True)
    bench.kept.append(monitor)
    config = bench.config()
    config.progress_monitor = monitor
    return [bench.builds(bench.network(), config), monitor.told]


@case
def callbacks_that_are_not_made(bench: Bench) -> Any:
    class Monitor(bench.trt.IProgressMonitor):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            """Without its own class's."""

    class Recorder(bench.trt.IErrorRecorder):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            """Without its own class's."""

    config = bench.config()
    return [
        attempt(lambda: setattr(config, "progress_monitor", Monitor())),
        attempt(lambda: setattr(bench.builder, "error_recorder", Recorder())),
    ]


def found_by(trt: Any, directory: Path) -> Iterator[tuple[str, Any]]:
    """Each case with its outcome."""
    for name, call in CASES.items():
        bench = Bench(trt, directory)
        KEPT.append(bench)
        outcome = attempt(lambda call=call, bench=bench: call(bench))  # type: ignore[misc]
        yield name, {"outcome": outcome, **bench.said()}


KEPT: list[Bench] = []  # to the end of the process


def main() -> None:
    warnings.simplefilter("ignore", DeprecationWarning)  # timing caches of TensorRT-RTX
    which = sys.argv[1]
    trt = import_module(RTX.module) if which == REAL else Simulator(which, RTX)
    with tempfile.TemporaryDirectory() as directory:
        for name, found in found_by(trt, Path(directory)):
            sys.stdout.write(f"{json.dumps([name, found])}\n")
            sys.stdout.flush()
    os._exit(0)  # destructors of the library use what Python has freed


if __name__ == "__main__":
    main()
