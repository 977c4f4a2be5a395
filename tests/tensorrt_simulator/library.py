"""The simulated library: what a version of TensorRT's Python module has, of what the project uses.

Each rule that it keeps is one sentence in the text of its error. What a call reports is what the
real one does: False, None or -1, and a line in the log.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum, IntEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from edgespec.backends.tensorrt.versions import ATTENTION, DECODER, TENSORRT, capabilities_of
from tests.tensorrt_simulator.device import POISON, HostDevice

MAGIC = b"simulated engine\n"
ALIGNMENT = 256
Dims = tuple[int, ...]


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class DataType(Enum):
    FLOAT = onnx.TensorProto.FLOAT
    HALF = onnx.TensorProto.FLOAT16
    BF16 = onnx.TensorProto.BFLOAT16
    INT64 = onnx.TensorProto.INT64
    BOOL = onnx.TensorProto.BOOL

    @property
    def numpy(self) -> np.dtype[Any]:
        return onnx.helper.tensor_dtype_to_np_dtype(self.value)


class TensorIOMode(Enum):
    NONE, INPUT, OUTPUT = range(3)


class ExecutionContextAllocationStrategy(Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class LayerType(Enum):
    ATTENTION_INPUT, OTHER = range(2)


class NetworkDefinitionCreationFlag(IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class MemoryPoolType(Enum):
    WORKSPACE = 0


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        self.made = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class LayerInformationFormat(Enum):
    ONELINE, JSON = range(2)


class IErrorRecorder:
    def __init__(self) -> None:
        self.made = True


class IProgressMonitor:
    def __init__(self) -> None:
        self.made = True


class Faults:
    """Calls that fail: by name, how often they succeed before."""

    def __init__(self) -> None:
        self.after: dict[str, int] = {}
        self.calls: Counter[str] = Counter()

    def fails(self, name: str) -> bool:
        self.calls[name] += 1
        return name in self.after and self.calls[name] > self.after[name]


class Said:
    """Where errors go: the log, and the recorder."""

    def __init__(self, logger: ILogger) -> None:
        assert isinstance(logger, ILogger)
        assert logger.made
        self.logger = logger
        self.error_recorder: Any = None

    def error(self, text: str) -> None:
        self.logger.log(Severity.ERROR, text)
        if self.error_recorder is not None:
            self.error_recorder.report_error(1, text)


def dims_of(value: onnx.ValueInfoProto) -> Dims:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else -1
        for dim in value.type.tensor_type.shape.dim
    )


# ---- build


class Tensor:
    """A tensor of a network."""

    def __init__(self, value: onnx.ValueInfoProto) -> None:
        self.name, self.shape = value.name, dims_of(value)
        self.dtype = DataType(value.type.tensor_type.elem_type)


class Attention:
    decomposable = False


class Layer:
    """A layer of a network."""

    def __init__(self, node: onnx.NodeProto) -> None:
        is_attention = node.op_type == "Attention"
        self.name = node.name
        self.type = LayerType.ATTENTION_INPUT if is_attention else LayerType.OTHER


class IAttentionInputLayer(Layer):
    def __init__(self, node: onnx.NodeProto) -> None:
        super().__init__(node)
        self.attention = Attention()


class Network:
    """What a parser fills."""

    def __init__(self) -> None:
        self.model: onnx.ModelProto | None = None
        self.inputs: list[Tensor] = []
        self.layers: list[Layer] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_input(self, index: int) -> Tensor:
        return self.inputs[index]

    def get_layer(self, index: int) -> Layer:
        return self.layers[index]


class ParserError:
    def __init__(self, node: onnx.NodeProto, text: str) -> None:
        self.node, self.text = node, text

    def desc(self) -> str:
        return self.text

    def node_name(self) -> str:
        return self.node.name

    def node_operator(self) -> str:
        return self.node.op_type


NEVER = ("If", "Loop", "Scan", "EyeLike", "Compress", "MatMulInteger")


class Profile:
    """An optimization profile; `set_shape` reports nothing, as the real one."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[Dims, Dims, Dims]] = {}

    def set_shape(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None:
        self.shapes[input] = (tuple(min), tuple(opt), tuple(max))

    @property
    def is_valid(self) -> bool:
        return all(
            len(a) == len(b) == len(c) and all(x <= y <= z for x, y, z in zip(a, b, c, strict=True))
            for a, b, c in self.shapes.values()
        )


class Config:
    """What a build is told."""

    def __init__(self) -> None:
        self.progress_monitor: Any = None
        self.builder_optimization_level = 3
        self.num_compute_capabilities = 0
        self.capabilities: dict[int, Any] = {}
        self.pools: dict[Any, int] = {}
        self.profiles: list[Profile] = []

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self.pools[pool] = pool_size

    def set_compute_capability(self, target: Any, index: int) -> bool:
        if index >= self.num_compute_capabilities:
            return False
        self.capabilities[index] = target
        return True

    def add_optimization_profile(self, profile: Profile) -> int:
        if not profile.is_valid:
            return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Any:
        return serialized_timing_cache

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
        return True

    def get_timing_cache(self) -> Any:
        return None


def pack(model: onnx.ModelProto, profiles: Sequence[Profile], version: str, reports: bool) -> bytes:
    """An engine: a header, and the graph."""
    shapes = {value.name for value in model.graph.input}
    outputs = {value.name for value in model.graph.output}
    aliases = {
        node.output[0]: node.input[0]
        for node in model.graph.node
        if node.op_type == "TensorScatter" and node.input[0] in shapes and node.output[0] in outputs
    }
    header = {
        "version": version,
        "profiles": [profile.shapes for profile in profiles],
        "aliases": aliases if reports else {},
        "memory": 4096 * (1 + len(model.graph.node)),
    }
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text + model.SerializeToString()


# ---- run


class Engine:
    """A deserialized engine."""

    def __init__(self, said: Said, faults: Faults, header: dict[str, Any], graph: bytes) -> None:
        self.said, self.faults, self.header = said, faults, header
        model = onnx.load_from_string(graph)
        self.inputs = {v.name: Tensor(v) for v in model.graph.input}
        self.outputs = {v.name: Tensor(v) for v in model.graph.output}
        self.tensors = self.inputs | self.outputs
        self.names = [*self.tensors]
        self.graph = graph
        self.taken: dict[int, Context] = {}  # profiles, by the context that has them

    @cached_property
    def session(self) -> ort.InferenceSession:
        """What computes, made when it is first asked."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # that caches are copied here is known
        return ort.InferenceSession(self.graph, options, ["CPUExecutionProvider"])

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.header["profiles"])

    @property
    def device_memory_size_v2(self) -> int:
        return int(self.header["memory"])

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        if name not in self.tensors:
            return TensorIOMode.NONE
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.tensors[name].dtype

    def get_tensor_shape(self, name: str) -> Dims:
        return self.tensors[name].shape

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        own = self.inputs[name].shape
        shapes = self.header["profiles"][profile_index].get(name, (own, own, own))
        return [tuple(dims) for dims in shapes]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.header["aliases"].get(name)

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self)

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> Context | None:
        if self.faults.fails("create_execution_context"):
            self.said.error("[defaultAllocator.cpp] Cuda failure: out of memory")
            return None
        return Context(self, strategy)


class EngineInspector:
    """What the library tells of an engine that was built with the names of its layers alone."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def get_engine_information(self, layer_format: LayerInformationFormat) -> str:
        assert layer_format is LayerInformationFormat.JSON
        graph = onnx.load_from_string(self.engine.graph).graph
        names = [f"{node.op_type}_{i}" for i, node in enumerate(graph.node)]
        layers = [" + ".join(names[:2]), *names[2:]]
        return json.dumps({"Layers": layers, "Bindings": self.engine.names})


class OldEngine(Engine):
    """An engine of a version that does not report aliases."""

    get_aliased_input_tensor: Any = property()


class Context:
    """An execution context. Its rules are in the texts of `error`."""

    def __init__(self, engine: Engine, strategy: ExecutionContextAllocationStrategy) -> None:
        self.engine, self.strategy = engine, strategy
        self.profile: int | None = None
        self.shapes: dict[str, Dims] = {}
        self.addresses: dict[str, int] = {}
        self.memory = (0, 0)
        self.changed = True  # a shape, since the last run
        if 0 not in engine.taken:
            engine.taken[0], self.profile = self, 0

    def error(self, text: str) -> bool:
        self.engine.said.error(text)
        return False

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        device = HostDevice.current
        assert device is not None
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            return self.error(f"profile {profile_index} is out of range")
        if stream_handle not in device.streams:
            return self.error("the stream is not alive")
        if self.engine.taken.get(profile_index, self) is not self:
            return self.error(f"profile {profile_index} is in use by another context")
        if self.profile is not None:
            del self.engine.taken[self.profile]
        self.engine.taken[profile_index], self.profile = self, profile_index
        self.shapes.clear()
        self.addresses.clear()
        self.changed = True
        return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if self.engine.faults.fails("set_input_shape"):
            return self.error("set_input_shape failed")
        if name not in self.engine.inputs:
            return self.error(f"{name} is no input")
        if self.profile is None:
            return self.error("a context needs a profile before shapes")
        least, _, most = self.engine.get_tensor_profile_shape(name, self.profile)
        shape = tuple(shape)
        inside = len(shape) == len(least) and all(
            a <= x <= b for a, x, b in zip(least, shape, most, strict=True)
        )
        if not inside:
            return self.error(f"{name}: {shape} is outside of the profile: {least} to {most}")
        self.changed |= self.shapes.get(name) != shape
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if type(memory) is not int:
            raise TypeError(f"an address is an int, not {type(memory).__name__}")
        if name not in self.engine.tensors:
            return self.error(f"{name} is no input and no output")
        if memory % ALIGNMENT:
            return self.error(f"{name}: {memory:#x} is not aligned to {ALIGNMENT} bytes")
        self.addresses[name] = memory
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self.memory = (memory, size)

    def shape_of(self, name: str) -> Dims | None:
        own = self.engine.inputs[name].shape
        return self.shapes.get(name) if -1 in own else own

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if self.shape_of(name) is None]

    def execute_async_v3(self, stream_handle: int) -> bool:
        device = HostDevice.current
        assert device is not None
        if self.engine.faults.fails("execute_async_v3"):
            return self.error("[executionContext.cpp] Cuda failure: an illegal memory access")
        if stream_handle not in device.streams:
            return self.error("the stream is not alive")
        if missing := self.infer_shapes():
            return self.error(f"no shape was set for {', '.join(missing)}")
        if unbound := [name for name in self.engine.names if not self.addresses.get(name)]:
            return self.error(f"no address was set for {', '.join(unbound)}")
        managed = self.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        if managed and self.memory[1] < self.engine.device_memory_size_v2:
            return self.error("the context was given less memory than it needs")
        for output, source in self.engine.header["aliases"].items():
            if self.addresses[output] != self.addresses[source]:
                return self.error(f"{output} and {source} are one tensor and two addresses")
        stream = device.streams[stream_handle]
        if stream.kept is not None and self.changed:
            stream.broken = True
            return self.error("a run after a change of shapes cannot be captured")
        self.changed = False
        shapes = {name: self.shape_of(name) or () for name in self.engine.inputs}
        addresses, memory = dict(self.addresses), self.memory
        device.put(stream_handle, lambda: self.work(device, shapes, addresses, memory))
        return True

    def work(
        self,
        device: HostDevice,
        shapes: dict[str, Dims],
        addresses: dict[str, int],
        memory: tuple[int, int],
    ) -> None:
        """One run, when its turn comes on the stream."""
        if memory[1]:
            device.at(*memory).fill(POISON)
        feeds = {}
        for name, shape in shapes.items():
            dtype = self.engine.inputs[name].dtype.numpy
            size = int(np.prod(shape)) * dtype.itemsize
            feeds[name] = device.at(addresses[name], size).view(dtype).reshape(shape).copy()
        self.separate(addresses)
        outputs = self.engine.session.run([*self.engine.outputs], feeds)
        for name, array in zip(self.engine.outputs, outputs, strict=True):
            device.at(addresses[name], array.nbytes)[:] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )

    def separate(self, addresses: dict[str, int]) -> None:
        """Outputs that are no aliases stand apart from all inputs."""
        inputs = {addresses[name] for name in self.engine.inputs}
        for name in self.engine.outputs:
            if name not in self.engine.header["aliases"] and addresses[name] in inputs:
                raise AssertionError(f"{name} is written where an input is read")


# ---- the module


class Simulator:
    """What `import tensorrt` gives of one version."""

    def __init__(self, version: str) -> None:
        self.__version__ = version
        capabilities = capabilities_of(TENSORRT, version)
        faults = self.faults = Faults()
        operators = capabilities.operators
        aliases = capabilities.version >= (10, 15)
        module = self
        self.engines: list[Engine] = []

        class Runtime(Said):
            def deserialize_cuda_engine(self, data: Any) -> Engine | None:
                raw = bytes(memoryview(data))
                if faults.fails("deserialize_cuda_engine"):
                    self.error("Error Code 2: OutOfMemory: no memory for the weights")
                    return None
                if not raw.startswith(MAGIC):
                    self.error("Error Code 1: Serialization: magicTag does not match")
                    return None
                start = len(MAGIC) + 8
                size = int.from_bytes(raw[start - 8 : start], "little")
                header = json.loads(raw[start : start + size])
                if header["version"] != version:
                    self.error("Error Code 6: the engine is of another version")
                    return None
                kind = Engine if aliases else OldEngine
                engine = kind(self, faults, header, raw[start + size :])
                module.engines.append(engine)
                return engine

        class Builder(Said):
            def create_network(self, flags: int) -> Network | None:
                typed = flags >> NetworkDefinitionCreationFlag.STRONGLY_TYPED & 1
                return Network() if typed else None

            def create_builder_config(self) -> Config:
                return Config()

            def create_optimization_profile(self) -> Profile:
                return Profile()

            def build_serialized_network(self, network: Network, config: Config) -> bytes | None:
                monitor = config.progress_monitor
                if monitor is not None:
                    monitor.phase_start("Building", None, 2)
                    for step in range(2):
                        if monitor.step_complete("Building", step) is not True:
                            return None
                    monitor.phase_finish("Building")
                if faults.fails("build_serialized_network"):
                    self.error("Error Code 2: OutOfMemory: no memory for a tactic")
                    return None
                return self.built(network, config)

            def built(self, network: Network, config: Config) -> bytes | None:
                if network.model is None:
                    self.error("the network has no layers")
                    return None
                varying = {tensor.name for tensor in network.inputs if -1 in tensor.shape}
                if varying and not config.profiles:
                    self.error("a network with varying shapes needs a profile")
                    return None
                for profile in config.profiles:
                    if varying != set(profile.shapes):
                        self.error("a profile has a shape for each input that varies")
                        return None
                fused = any(
                    isinstance(layer, IAttentionInputLayer) and not layer.attention.decomposable
                    for layer in network.layers
                )
                if fused and all(t.dtype is DataType.FLOAT for t in caches(network.inputs)):
                    self.error("Attention operation was not supported by a dedicated kernel")
                    return None
                return pack(network.model, config.profiles, version, aliases)

        class OnnxParser:
            def __init__(self, network: Network, logger: ILogger) -> None:
                self.network, self.said = network, Said(logger)
                self.errors: list[ParserError] = []

            @property
            def num_errors(self) -> int:
                return len(self.errors)

            def get_error(self, index: int) -> ParserError:
                return self.errors[index]

            def parse_from_file(self, path: str) -> bool:
                if not Path(path).is_file():
                    return False
                model = whole(Path(path))
                self.errors = list(refused(model, operators))
                if self.errors:
                    return False
                self.network.model = model
                self.network.inputs = [Tensor(value) for value in model.graph.input]
                self.network.layers = [
                    IAttentionInputLayer(node) if node.op_type == "Attention" else Layer(node)
                    for node in model.graph.node
                ]
                return True

        self.Runtime, self.Builder, self.OnnxParser = Runtime, Builder, OnnxParser

    ILogger, IErrorRecorder, IProgressMonitor = ILogger, IErrorRecorder, IProgressMonitor
    DataType, TensorIOMode, LayerType = DataType, TensorIOMode, LayerType
    LayerInformationFormat = LayerInformationFormat
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    NetworkDefinitionCreationFlag = NetworkDefinitionCreationFlag
    MemoryPoolType, IAttentionInputLayer = MemoryPoolType, IAttentionInputLayer


def whole(path: Path) -> onnx.ModelProto:
    """A graph with its weights inside; ONNX's own reader takes no links."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            where = {entry.key: entry.value for entry in tensor.external_data}
            with (path.parent / where["location"]).open("rb") as file:
                file.seek(int(where.get("offset", 0)))
                data = file.read(int(where["length"]))
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = data
    return model


def caches(inputs: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in inputs if tensor.name.startswith("past_")]


def refused(model: onnx.ModelProto, operators: frozenset[str]) -> Iterable[ParserError]:
    """What the parser of a version with importers for these operators refuses."""
    inputs = {value.name: dims_of(value) for value in model.graph.input}
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    for node in model.graph.node:
        if node.op_type in {*NEVER, *((DECODER | ATTENTION) - operators)}:
            yield ParserError(node, f"Plugin not found: {node.op_type}")
        if node.op_type == "TensorScatter" and -1 in inputs.get(node.input[0], (0, -1))[1:]:
            text = "KV cache tensor must have a static sequence length dimension"
            yield ParserError(node, text)
        mask = node.input[3] if node.op_type == "Attention" and len(node.input) > 3 else ""
        if types.get(mask) == onnx.TensorProto.BOOL:
            yield ParserError(node, "Graph contains more than one op named mask")


@cache
def simulator(version: str) -> Simulator:
    """The library of a version in this process."""
    return Simulator(version)
