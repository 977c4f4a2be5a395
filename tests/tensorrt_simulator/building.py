"""The builder's half of the simulated library: parser, network, profiles, config, timing cache.

It answers as TensorRT-RTX 1.4 and 1.7 were seen to answer the same calls (`tests/tensorrt/
test_same_calls.py` asks both), or refuses more. What its parser refuses is what the linter's rules
refuse, each proven by TensorRT-RTX too, and what no graph of ours may have. Knows no engine.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from edgespec.backends.tensorrt.checks.graph import name_of
from edgespec.backends.tensorrt.linter import lint
from edgespec.backends.tensorrt.rules import RULES, Level, Rtx
from edgespec.backends.tensorrt.versions import Capabilities

Dims = tuple[int, ...]
MAX_DIMS = 8
LEVELS = (0, 5)  # of the builder's optimization
CACHE_MAGIC = b"simulated timing cache of "
CACHED = ("Attention", "TensorScatter", "Softmax", "Where")
# Operators that none of our graphs may have, whatever a parser says
NEVER = ("If", "Loop", "Scan", "EyeLike", "Compress", "MatMulInteger")


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ErrorCodeTRT(IntEnum):
    SUCCESS = 0
    UNSPECIFIED_ERROR = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_CONFIG = 4
    FAILED_ALLOCATION = 5
    FAILED_INITIALIZATION = 6
    FAILED_EXECUTION = 7


Code = ErrorCodeTRT


class DataType(Enum):
    FLOAT = onnx.TensorProto.FLOAT
    HALF = onnx.TensorProto.FLOAT16
    BF16 = onnx.TensorProto.BFLOAT16
    INT32 = onnx.TensorProto.INT32
    INT64 = onnx.TensorProto.INT64
    INT8 = onnx.TensorProto.INT8
    UINT8 = onnx.TensorProto.UINT8
    FP8 = onnx.TensorProto.FLOAT8E4M3FN
    BOOL = onnx.TensorProto.BOOL

    @property
    def numpy(self) -> np.dtype[Any]:
        return onnx.helper.tensor_dtype_to_np_dtype(self.value)


class LayerType(Enum):
    ATTENTION_INPUT, OTHER = range(2)


class NetworkDefinitionCreationFlag(IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class MemoryPoolType(Enum):
    WORKSPACE = 0


class Checked(type):
    """Of classes that a program derives from: one whose own `__init__` leaves theirs out is
    refused, as the real bindings do."""

    def __call__(cls, *args: Any, **more: Any) -> Any:
        made = super().__call__(*args, **more)
        if not getattr(made, "made", False):
            raise TypeError(f"{cls.__name__}.__init__() must be called when overriding __init__")
        return made


class Derived(metaclass=Checked):
    def __init__(self) -> None:
        self.made = True


class ILogger(Derived):
    Severity = Severity

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class IErrorRecorder(Derived):
    """Where errors go that would go to the log otherwise."""


class IProgressMonitor(Derived):
    """What a build reports to, and asks whether it goes on."""


def checked(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """The value itself; TypeError where it is of another class, as the real bindings have it."""
    if not isinstance(value, kind):
        raise TypeError(f"{what}: incompatible arguments: {type(value).__name__}")
    return value


class Said:
    """Where errors go: to the recorder where there is one, and else to the log. Never to both: who
    reads one of them alone misses errors."""

    def __init__(self, logger: ILogger) -> None:
        self.logger: ILogger = checked(logger, ILogger, "a logger")
        self._recorder: Any = None

    @property
    def error_recorder(self) -> Any:
        return self._recorder

    @error_recorder.setter
    def error_recorder(self, recorder: Any) -> None:
        self._recorder = checked(recorder, (IErrorRecorder, type(None)), "a recorder")

    def error(self, text: str, code: ErrorCodeTRT = Code.UNSPECIFIED_ERROR) -> None:
        if self._recorder is None:
            self.logger.log(Severity.ERROR, text)
        else:
            self._recorder.report_error(code, text)


def dims_of(value: onnx.ValueInfoProto) -> Dims:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else -1
        for dim in value.type.tensor_type.shape.dim
    )


# ---- networks


class Tensor:
    """A tensor of a network."""

    def __init__(self, value: onnx.ValueInfoProto) -> None:
        self.name, self.shape = value.name, dims_of(value)
        self.dtype = DataType(value.type.tensor_type.elem_type)


class Attention:
    """`has_kernel`: whether it can be built as it is, without being decomposed."""

    def __init__(self, *, has_kernel: bool) -> None:
        self.decomposable, self.has_kernel = False, has_kernel


class Layer:
    """A layer of a network, as the bindings give it: of the class of all layers."""

    def __init__(self, node: onnx.NodeProto, *, has_kernel: bool) -> None:
        is_attention = node.op_type == "Attention"
        self.name = node.name
        self.type = LayerType.ATTENTION_INPUT if is_attention else LayerType.OTHER
        self._attention = Attention(has_kernel=has_kernel)


class IAttentionInputLayer(Layer):
    @property
    def attention(self) -> Attention:
        return self._attention


class Network:
    """What a parser fills. `refused` is what the builder will say to it."""

    def __init__(self, said: Said) -> None:
        self.said = said
        self.model: onnx.ModelProto | None = None
        self.inputs: list[Tensor] = []
        self.layers: list[Layer] = []
        self.refused: list[str] = []

    @property
    def num_inputs(self) -> int:
        return len(self.inputs)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_input(self, index: int) -> Tensor | None:
        if not 0 <= index < self.num_inputs:
            self.said.error(f"no input {index}", Code.INVALID_ARGUMENT)
            return None
        return self.inputs[index]

    def get_layer(self, index: int) -> Layer | None:
        if not 0 <= index < self.num_layers:
            self.said.error(f"no layer {index}")
            return None
        return self.layers[index]


class ParserError:
    """An error of the parser; `place` is a node and its operator, as the linter names it."""

    def __init__(self, text: str, place: str = "") -> None:
        self.text = text
        self.named = re.fullmatch(r"(.+) \((\w+)\)", place)

    def desc(self) -> str:
        return self.text

    def node_name(self) -> str:
        return self.named[1] if self.named else ""

    def node_operator(self) -> str:
        return self.named[2] if self.named else ""


class OnnxParser:
    """Reads a graph from a file. It stops at the first error, as the real one does."""

    def __init__(self, network: Network, logger: ILogger, release: Capabilities) -> None:
        self.network: Network = checked(network, Network, "a network")
        self.said = Said(logger)
        self.release = release
        self.errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> ParserError | None:
        return self.errors[index] if 0 <= index < self.num_errors else None

    def refuse(self, text: str, place: str = "") -> bool:
        self.errors.append(ParserError(text, place))
        self.said.error(f"While parsing {place or 'the file'}: {text}")
        return False

    def parse_from_file(self, path: str) -> bool:
        if not Path(path).is_file():
            return self.refuse(f"cannot be found, or is not a regular file: {path}")
        try:
            model = whole(Path(path))
        except DecodeError:
            return self.refuse("Failed to parse the ONNX model")
        except OSError as error:
            return self.refuse(f"Failed to open the weights: {error}")
        graph, network = model.graph, self.network
        try:
            network.inputs = [Tensor(value) for value in graph.input]
        except ValueError as error:
            return self.refuse(f"Unsupported ONNX data type: {error}")
        if not graph.output:
            return True  # nothing at all is taken; the builder wants an output
        for node in graph.node:
            if node.op_type in NEVER:
                return self.refuse(f"Plugin not found: {node.op_type}", name_of(node))
        findings = lint(model, self.release).findings
        places = [name_of(node) for node in graph.node]
        refused = [finding for finding in findings if finding.level is Level.REFUSED]
        # Node by node, as the real one reads; what is of no node comes first
        for finding in sorted(refused, key=lambda f: f.node in places and places.index(f.node)):
            if RULES[finding.rule].rtx is not Rtx.BUILDER:
                return self.refuse(finding.what, finding.node)
            network.refused.append(finding.what)
        slow = {finding.node for finding in findings if finding.rule == "attention-float32"}
        network.model = model
        network.layers = [
            Layer(node, has_kernel=name_of(node) not in slow) for node in model.graph.node
        ]
        return True


def whole(path: Path) -> onnx.ModelProto:
    """A graph with its weights inside; ONNX's own reader takes no links."""
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            where = {entry.key: entry.value for entry in tensor.external_data}
            with (path.parent / where["location"]).open("rb") as file:
                file.seek(int(where.get("offset", 0)))
                data = file.read(int(where["length"]))
            if len(data) < int(where["length"]):
                raise OSError(f"{where['location']} is too short for {tensor.name}")
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
            tensor.raw_data = data
    return model


# ---- profiles and config


def dims(given: Any) -> Dims:
    """Dimensions as the bindings take them; TypeError for what is none."""
    found = tuple(operator.index(dim) for dim in given)
    if len(found) > MAX_DIMS:
        raise TypeError(f"set_shape(): incompatible arguments: {len(found)} dimensions")
    return found


class Profile:
    """An optimization profile: only what is negative is refused at once."""

    def __init__(self, said: Said) -> None:
        self.said = said
        self.shapes: dict[str, tuple[Dims, Dims, Dims]] = {}

    def set_shape(
        self, input: str, min: Sequence[int], opt: Sequence[int], max: Sequence[int]
    ) -> None:
        checked(input, str, "set_shape()")
        three = (dims(min), dims(opt), dims(max))
        if any(dim < 0 for each in three for dim in each):
            self.said.error("a dimension is negative", Code.INVALID_ARGUMENT)
            raise RuntimeError("Shape provided for min is inconsistent with other shapes.")
        self.shapes[input] = three

    @property
    def is_valid(self) -> bool:
        return all(
            len(a) == len(b) == len(c) and all(x <= y <= z for x, y, z in zip(a, b, c, strict=True))
            for a, b, c in self.shapes.values()
        )


def host_memory(data: bytes) -> memoryview:
    """What a call gives in bytes: it has a size, and is read as a memoryview. One stands for it, as
    before 3.12 no class of Python's own can be read so."""
    return memoryview(data)


class ITimingCache:
    """What was timed, a kernel a line behind the version of the library that it holds for."""

    def __init__(self, data: bytes) -> None:
        self.header, *self.kernels = data.split(b"\n")

    @property
    def data(self) -> bytes:
        return b"\n".join([self.header, *sorted(self.kernels)])

    def serialize(self) -> memoryview:
        return host_memory(self.data)


class Config:
    """What a build is told. `release` names the library's version, which a timing cache is of;
    `targets` are the compute capabilities that it compiles for without such a device."""

    def __init__(self, said: Said, release: str, targets: type[Enum] | None) -> None:
        self.said, self.release, self.targets = said, release, targets
        self._level, self._monitor = 3, None
        self.num_compute_capabilities = 0
        self.capabilities: dict[int, Any] = {}
        self.pools: dict[Any, int] = {}
        self.profiles: list[Profile] = []
        self.timing: ITimingCache | None = None

    def refuse(self, text: str) -> bool:
        self.said.error(text, Code.INVALID_ARGUMENT)
        return False

    @property
    def progress_monitor(self) -> Any:
        return self._monitor

    @progress_monitor.setter
    def progress_monitor(self, monitor: Any) -> None:
        self._monitor = checked(monitor, (IProgressMonitor, type(None)), "a monitor")

    @property
    def builder_optimization_level(self) -> int:
        return self._level

    @builder_optimization_level.setter
    def builder_optimization_level(self, level: int) -> None:
        if operator.index(level) < LEVELS[0]:
            self.refuse(f"optimization level {level}")
        else:
            self._level = min(level, LEVELS[1])

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        checked(pool, MemoryPoolType, "set_memory_pool_limit()")
        if operator.index(pool_size) < 0:
            raise TypeError("set_memory_pool_limit(): incompatible arguments: a negative size")
        self.pools[pool] = pool_size

    def set_compute_capability(self, target: Any, index: int) -> bool:
        assert self.targets is not None
        checked(target, self.targets, "set_compute_capability()")
        if not 0 <= index < self.num_compute_capabilities:
            return self.refuse(f"no place {index} for a compute capability")
        self.capabilities[index] = target
        return True

    def add_optimization_profile(self, profile: Profile) -> int:
        if profile is None or not profile.is_valid:
            if profile is not None:
                self.said.error("a profile wants MIN<=OPT<=MAX", Code.INVALID_CONFIG)
            self.refuse("the profile is not valid")
            return -1
        self.profiles.append(profile)
        return len(self.profiles) - 1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache:
        data = checked(serialized_timing_cache, (bytes, bytearray), "create_timing_cache()")
        return ITimingCache(bytes(data) or CACHE_MAGIC + self.release.encode())

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        checked(cache, ITimingCache, "set_timing_cache()")
        fits = cache.header == CACHE_MAGIC + self.release.encode()
        if not fits and not ignore_mismatch:
            return self.refuse("the timing cache is of another version")
        self.timing = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self.timing


# ---- builds


PHASES = (("Cloning network graph", 3), ("Building engine from subgraph", 4))
WHOLE_BUILD = "Building engine"


def goes_on(monitor: Any) -> bool:
    """Whether a build's monitor lets it come to its end. Phases stand in one another, and each that
    began ends, where the build is cancelled too."""
    if monitor is None:
        return True
    monitor.phase_start(WHOLE_BUILD, None, len(PHASES))
    for done, (name, steps) in enumerate(PHASES):
        monitor.phase_start(name, WHOLE_BUILD, steps)
        well = all(monitor.step_complete(name, step) is True for step in range(steps))
        monitor.phase_finish(name)
        if not (well and monitor.step_complete(WHOLE_BUILD, done) is True):
            monitor.phase_finish(WHOLE_BUILD)
            return False
    monitor.phase_finish(WHOLE_BUILD)
    return True


class Builder(Said):
    """Makes what a build is made of. `release` names a version, `fails` says whether a call of a
    name is to fail now, `pack` makes an engine of a graph and its profiles."""

    def __init__(
        self,
        logger: ILogger,
        release: str,
        targets: type[Enum] | None,
        fails: Callable[[str], bool],
        pack: Callable[[onnx.ModelProto, Sequence[Profile]], bytes],
    ) -> None:
        super().__init__(logger)
        self.release, self.targets, self.fails, self.pack = release, targets, fails, pack

    def create_network(self, flags: int) -> Network | None:
        typed = NetworkDefinitionCreationFlag.STRONGLY_TYPED
        if operator.index(flags) >> typed & 1 == 0 or flags >= 2 << typed:
            self.error("a network is strongly typed, and no more", Code.INVALID_ARGUMENT)
            return None
        return Network(self)

    def create_builder_config(self) -> Config | None:
        if self.fails("create_builder_config"):
            return None
        return Config(self, self.release, self.targets)

    def create_optimization_profile(self) -> Profile:
        return Profile(self)

    def build_serialized_network(self, network: Network, config: Config) -> memoryview | None:
        checked(network, Network, "build_serialized_network()")
        checked(config, Config, "build_serialized_network()")
        if why := next(iter(wrong_profiles(network, config)), ""):
            self.error(f"Error Code 4: API Usage Error ({why})", Code.INVALID_CONFIG)
            return None
        if not goes_on(config.progress_monitor):
            what = "Error Code 7: BuildCanceled (Build canceled by user)"
            self.error(what, Code.FAILED_EXECUTION)
            return None
        if self.fails("build_serialized_network"):
            self.error("Error Code 2: OutOfMemory: no memory for a tactic", Code.FAILED_ALLOCATION)
            return None
        for why in (*network.refused, *lacks_kernels(network.layers)):
            self.error(f"Error Code 9: {why}")
            return None
        assert network.model is not None
        self.time_kernels(network.model, config)
        return host_memory(self.pack(network.model, config.profiles))

    def time_kernels(self, model: onnx.ModelProto, config: Config) -> None:
        """Time the kernels that the config's timing cache does not know, and say how many."""
        known = [] if config.timing is None else config.timing.kernels
        wanted = kernels_of(model, config.profiles)
        new = sorted(wanted - set(known))
        known += new
        taken = len(wanted) - len(new)
        text = f"{len(new)} kernels were timed, {taken} taken from the timing cache"
        self.logger.log(Severity.INFO, text)


def kernels_of(model: onnx.ModelProto, profiles: Sequence[Profile]) -> set[bytes]:
    """The kernels of a graph: one for each operator and each number of rows, and those that read a
    cache for each of its lengths too."""
    found = set()
    for profile in profiles:
        lengths = {three[1][2] for name, three in profile.shapes.items() if "past_" in name}
        rows = [three[1][:2] for name, three in profile.shapes.items() if "past_" not in name]
        for node in model.graph.node:
            reads_cache = node.op_type in CACHED
            sizes = (rows[0], *(sorted(lengths) if reads_cache else ()))
            found.add(f"{node.op_type} {sizes}".encode())
    return found


def wrong_profiles(network: Network, config: Config) -> Iterable[str]:
    """Why a network cannot be built with the profiles of a config."""
    if network.model is None:
        yield "Network must have at least one output"
    varying = {tensor.name for tensor in network.inputs if -1 in tensor.shape}
    if varying and not config.profiles:
        yield "Network has dynamic inputs, but no optimization profile has been defined"
    own = {tensor.name: tensor.shape for tensor in network.inputs}
    for profile in config.profiles:
        for name in varying - set(profile.shapes):
            yield f"Dynamic input tensor {name} is missing dimensions in a profile"
        for name, three in profile.shapes.items():
            if name not in own:  # the real one does not look
                yield f"a profile has a shape for {name}, which is no input"
                continue
            for each in three:
                same = len(each) == len(own[name]) and all(
                    a in (-1, b) for a, b in zip(own[name], each, strict=True)
                )
                if not same:
                    yield f"Dimension mismatch for tensor {name}: {each} for {own[name]}"


def lacks_kernels(layers: Iterable[Layer]) -> Iterable[str]:
    """What a builder says to attention that it can neither build nor decompose."""
    for layer in layers:
        attention = layer._attention
        if not attention.has_kernel and not attention.decomposable:
            yield (
                f"{layer.name}: CHECK(composite_op->is_decomposable()) failed. Attention operation"
                " was not supported by a dedicated kernel"
            )
