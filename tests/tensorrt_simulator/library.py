"""The simulated library: what a version of TensorRT's Python module has, of what the project uses.

Each rule that it keeps is one sentence in the text of its error. What a call reports is what the
real one does: False, None or -1, and a line in the recorder or in the log. Here stands the
runtime's half; the builder's is in `building`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache, cached_property
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort

from edgespec.backends.tensorrt.versions import RTX, TENSORRT, Library, capabilities_of, release_of
from tests.tensorrt_on_ort import widened
from tests.tensorrt_simulator import building
from tests.tensorrt_simulator.building import (
    DataType,
    Dims,
    ErrorCodeTRT,
    IAttentionInputLayer,
    IErrorRecorder,
    ILogger,
    IProgressMonitor,
    LayerType,
    MemoryPoolType,
    Network,
    NetworkDefinitionCreationFlag,
    Profile,
    Said,
    Tensor,
)
from tests.tensorrt_simulator.device import POISON, HostDevice
from tests.tensorrt_simulator.wrong_results import GIVES, READS, Arrays, Change

MAGIC = b"simulated engine\n"
ALIGNMENT = 256


class TensorIOMode(Enum):
    NONE, INPUT, OUTPUT = range(3)


class ExecutionContextAllocationStrategy(Enum):
    STATIC, ON_PROFILE_CHANGE, USER_MANAGED = range(3)


class CudaGraphStrategy(Enum):
    DISABLED, WHOLE_GRAPH_CAPTURE = range(2)


class RuntimeConfig:
    """How a context runs."""

    strategy = ExecutionContextAllocationStrategy.STATIC
    cuda_graph_strategy = CudaGraphStrategy.DISABLED

    def set_execution_context_allocation_strategy(
        self, strategy: ExecutionContextAllocationStrategy
    ) -> None:
        self.strategy = strategy


class EngineStat(Enum):
    TOTAL_WEIGHTS_SIZE, STRIPPED_WEIGHTS_SIZE = range(2)


class LayerInformationFormat(Enum):
    ONELINE, JSON = range(2)


class Faults:
    """Calls that fail: by name, how often they succeed before, and in which words where those are
    others than usual. `wrong` names what engines compute wrongly (`wrong_results`)."""

    def __init__(self) -> None:
        self.after: dict[str, int] = {}
        self.words: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.wrong: set[str] = set()

    def clear(self) -> None:
        """Let everything be as it should be."""
        for kept in (self.after, self.words, self.calls, self.wrong):
            kept.clear()

    def plant(self, name: str) -> None:
        """Let engines compute something wrongly."""
        assert name in READS | GIVES
        self.wrong.add(name)

    def change(self, changes: Mapping[str, Change], arrays: Arrays) -> None:
        """Make the changes that are switched on."""
        for name in self.wrong & changes.keys():
            changes[name](arrays)

    def fails(self, name: str) -> bool:
        self.calls[name] += 1
        return name in self.after and self.calls[name] > self.after[name]


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
        """What computes, made when it is first asked. ONNX Runtime has no kernels for bfloat16: in
        its place each value is rounded to it, and computed in float32."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # that caches are copied here is known
        graph = self.graph
        if self.is_widened:
            model = ir.serde.deserialize_model(onnx.load_from_string(graph))
            graph = ir.to_proto(widened(model)).SerializeToString()
        return ort.InferenceSession(graph, options, ["CPUExecutionProvider"])

    @cached_property
    def is_widened(self) -> bool:
        return any(tensor.dtype is DataType.BF16 for tensor in self.tensors.values())

    def computed(self, feeds: Arrays) -> Arrays:
        """The outputs of a run by name, each in its own type."""
        if self.is_widened:
            feeds = {
                name: array.astype(np.float32) if array.dtype == DataType.BF16.numpy else array
                for name, array in feeds.items()
            }
        found = self.session.run([*self.outputs], feeds)
        return {
            name: array.astype(tensor.dtype.numpy, copy=False)
            for (name, tensor), array in zip(self.outputs.items(), found, strict=True)
        }

    @property
    def num_io_tensors(self) -> int:
        return len(self.names)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.header["profiles"])

    @property
    def device_memory_size_v2(self) -> int:
        return int(self.header["memory"])

    def get_engine_stat(self, stat: EngineStat) -> int:
        assert stat is EngineStat.TOTAL_WEIGHTS_SIZE
        weights = onnx.load_from_string(self.graph).graph.initializer
        return sum(onnx.numpy_helper.to_array(weight).nbytes for weight in weights)

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

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(
        self, strategy: ExecutionContextAllocationStrategy | RuntimeConfig
    ) -> Context | None:
        if self.faults.fails("create_execution_context"):
            self.said.error("[defaultAllocator.cpp] Cuda failure: out of memory")
            return None
        if isinstance(strategy, RuntimeConfig):
            context = Context(self, strategy.strategy)
            context.own_graphs = strategy.cuda_graph_strategy is not CudaGraphStrategy.DISABLED
            return context
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
    """An engine of a version that reports neither aliases nor the size of its weights."""

    get_aliased_input_tensor: Any = property()
    get_engine_stat: Any = property()


class Context:
    """An execution context. Its rules are in the texts of `error`."""

    def __init__(self, engine: Engine, strategy: ExecutionContextAllocationStrategy) -> None:
        self.engine, self.strategy = engine, strategy
        self.profile: int | None = None
        self.shapes: dict[str, Dims] = {}
        self.addresses: dict[str, int] = {}
        self.memory = (0, 0)
        self.changed = True  # a shape, since the last run
        self.own_graphs = False
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
        if device.lost is not None:
            return self.error(f"[executionContext.cpp] Cuda failure: {device.lost.what}")
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
        if stream.kept is not None and self.own_graphs:
            stream.broken = True
            return self.error("a run that captures itself cannot be captured")
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
        self.engine.faults.change(READS, feeds)
        found = self.engine.computed(feeds)
        self.engine.faults.change(GIVES, found)
        for name, array in found.items():
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
    """What `import tensorrt` gives of one version, or `import tensorrt_rtx`."""

    def __init__(self, version: str, library: Library = TENSORRT) -> None:
        self.__version__ = version
        capabilities = capabilities_of(library, version)
        release = release_of(f"rtx-{version}" if library is RTX else version)
        faults = self.faults = Faults()
        aliases = library is RTX or capabilities.version >= (10, 15)
        module = self
        self.engines: list[Engine] = []
        targets: type[Enum] | None = None
        if capabilities.compiles_for:
            names = [f"SM{sm}" for sm in capabilities.compiles_for]
            targets = self.ComputeCapability = Enum("ComputeCapability", names)  # type: ignore[misc]

        class Runtime(Said):
            def deserialize_cuda_engine(self, data: Any) -> Engine | None:
                raw = bytes(memoryview(data))
                if faults.fails("deserialize_cuda_engine"):
                    usual = "Error Code 2: OutOfMemory: no memory for the weights"
                    self.error(faults.words.get("deserialize_cuda_engine", usual))
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

        def packed(model: onnx.ModelProto, profiles: Sequence[Profile]) -> bytes:
            return pack(model, profiles, version, aliases)

        class Builder(building.Builder):
            def __init__(self, logger: ILogger) -> None:
                super().__init__(logger, version, targets, faults.fails, packed)

        class OnnxParser(building.OnnxParser):
            def __init__(self, network: Network, logger: ILogger) -> None:
                super().__init__(network, logger, release)

        self.Runtime, self.Builder, self.OnnxParser = Runtime, Builder, OnnxParser

    ILogger, IErrorRecorder, IProgressMonitor = ILogger, IErrorRecorder, IProgressMonitor
    DataType, TensorIOMode, LayerType = DataType, TensorIOMode, LayerType
    LayerInformationFormat, ErrorCodeTRT = LayerInformationFormat, ErrorCodeTRT
    EngineStat = EngineStat
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    NetworkDefinitionCreationFlag = NetworkDefinitionCreationFlag
    MemoryPoolType, IAttentionInputLayer = MemoryPoolType, IAttentionInputLayer
    CudaGraphStrategy = CudaGraphStrategy
    ComputeCapability: type[Enum]


@cache
def simulator(version: str, library: Library = TENSORRT) -> Simulator:
    """The library of a version in this process."""
    return Simulator(version, library)
