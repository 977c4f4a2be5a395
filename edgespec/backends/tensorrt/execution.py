"""An engine file that is open: its runtime, a context for each profile, and what is bound there.

Knows TensorRT's runtime API; every answer of it is looked at, as most of its calls report failure
by what they return. Knows addresses and shapes; knows no cache.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from edgespec.backends.cuda.bound import Bound
from edgespec.backends.cuda.device.base import DeviceMemoryFull
from edgespec.backends.cuda.workspace import Workspace, attempt
from edgespec.backends.tensorrt.bindings import TrtBindings
from edgespec.backends.tensorrt.logger import Errors, cleaned, lines_to, recorder_of
from edgespec.backends.tensorrt.process import out_of_memory
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.contract import Contract, TensorSpec
from edgespec.errors import BundleError, EnvironmentProblem, InternalError

TYPES = {
    "float32": "FLOAT",
    "float16": "HALF",
    "bfloat16": "BF16",
    "int64": "INT64",
    "bool": "BOOL",
}
BUILD_AGAIN = "Build the engine again with this version of edgespec."
DRIVER = (
    "Install NVIDIA's driver for the device, of the CUDA version that this TensorRT is for or newer"
    " (nvidia-smi says which it has)."
)
# The first error where CUDA fails itself; without a driver one more such follows any other error
NO_CUDA = re.compile(r"Error Code 1: Cuda Runtime")
LESS_MEMORY = "Close other programs, or build with a smaller `max_kv_cache_capacity`."


class OpenEngine:
    """A deserialized engine with one context for each of its profiles: to change the profile of a
    context waits for the device, and unbinds all."""

    def __init__(
        self,
        bindings: TrtBindings,
        path: Path,
        contract: Contract,
        profiles: Sequence[Profile],
        workspace: Workspace,
    ) -> None:
        self.path, self.trt, self.workspace = path, bindings.trt, workspace
        self.capabilities = bindings.capabilities
        self.errors = Errors()
        with lines_to(self.trt, self.errors.log) as logger:
            self.logger = logger
            self.recorder = recorder_of(self.trt, self.errors)
            # The library keeps bare pointers, and uses them even as its own objects end
            logger.kept.append(self.recorder)
            self.runtime = self.required(self.trt.Runtime(logger), "the runtime cannot be made")
            self.runtime.error_recorder = self.recorder
            self.engine, self.contexts = self.deserialized(path), list[ExecutionContext]()
            try:
                check_signature(self.trt, self.engine, contract, profiles, path)
                workspace.fit(scratch=max(1, int(self.engine.device_memory_size_v2)))
                for index in range(len(profiles)):
                    self.contexts.append(ExecutionContext(self, index, contract))
            except BaseException:
                self.close()  # its weights would stay as long as the error is looked at
                raise
        workspace.synchronize()

    def deserialized(self, path: Path) -> Any:
        """The engine of a file. BundleError where it is damaged, EnvironmentProblem where memory
        does not do."""
        with path.open("rb") as file:
            try:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # of an empty file
                raise BundleError(f"{path} is empty", BUILD_AGAIN) from error
            with data:
                engine = self.runtime.deserialize_cuda_engine(data)
        if engine is None:
            without_cuda = bool(NO_CUDA.search(next(iter(self.errors.lines), "")))
            said = self.said()
            if out_of_memory(said):
                raise EnvironmentProblem(f"not enough memory to load {path}{said}", LESS_MEMORY)
            if without_cuda:
                raise EnvironmentProblem(
                    f"CUDA does not work here: {path} cannot be loaded{said}", DRIVER
                )
            raise BundleError(f"TensorRT cannot load {path}{said}", BUILD_AGAIN)
        return engine

    def required(self, value: Any, failure: str) -> Any:
        """The value itself; EnvironmentProblem where the library gave none."""
        if value is None:
            said = self.said()
            remedy = LESS_MEMORY if out_of_memory(said) else "Check driver and library."
            raise EnvironmentProblem(f"{self.path}: {failure}{said}", remedy)
        return value

    def said(self) -> str:
        """The errors of the library since it was asked last, as the end of a sentence."""
        lines = cleaned(self.errors.lines, without_device=False)
        self.errors.lines.clear()
        return "".join(f"\n  {line}" for line in lines)

    def alias_of(self, output: str) -> str | None:
        """The input whose memory an output is, as the engine reports it; None: it has its own.
        Versions without this report write no input in place."""
        ask = getattr(self.engine, "get_aliased_input_tensor", None)
        return (ask(output) or None) if ask is not None else None

    def close(self) -> None:
        """Drop contexts, engine and runtime, in this order."""
        self.contexts.clear()
        self.engine = self.runtime = None


@contextmanager
def opening(
    bindings: TrtBindings,
    path: Path,
    contract: Contract,
    profiles: Sequence[Profile],
    workspace: Workspace,
    less_memory: str,
) -> Iterator[OpenEngine]:
    """An open engine, of which the block makes a runner. Where that fails, all that was taken is
    given back, so that another engine may have it, but what engines share; EnvironmentProblem with
    the remedy `less_memory` where memory does not do."""
    workspace.join()
    before, engine = frozenset(workspace.held), None
    try:
        with workspace.working():
            engine = OpenEngine(bindings, path, contract, profiles, workspace)
            yield engine
    except BaseException as error:
        with workspace.lock:
            shared = {workspace.scratch.address, workspace.inputs.address}
            attempt(
                workspace.device.activate,
                workspace.settle,
                *((engine.close,) if engine is not None else ()),
                *(partial(workspace.free, row) for row in workspace.held - before - shared),
            )
        workspace.leave()
        if isinstance(error, DeviceMemoryFull):
            message = f"the device has no memory to open {path}: {error.what}"
            raise EnvironmentProblem(message, less_memory) from error
        raise


class ExecutionContext:
    """A context of one profile, and what is bound in it."""

    def __init__(self, engine: OpenEngine, profile: int, contract: Contract) -> None:
        self.engine, self.workspace, trt = engine, engine.workspace, engine.trt
        self.varying = frozenset(
            spec.name for spec in contract.inputs if any(isinstance(d, str) for d in spec.shape)
        )
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if engine.capabilities.own_graphs:
            config = engine.engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
            made = engine.engine.create_execution_context(config)
        else:
            made = engine.engine.create_execution_context(strategy)
        self.context = engine.required(made, "no execution context can be made")
        if not self.context.set_optimization_profile_async(profile, self.workspace.stream):
            raise InternalError(f"{engine.path}: no profile {profile}{engine.said()}")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch = -1  # the version of the scratch memory that it was told
        self.bound: Sequence[Bound] = ()

    def bind(self, tensors: Sequence[Bound]) -> None:
        """Let the next run use these tensors; what is bound so already is left alone."""
        if tensors is self.bound and self.scratch == self.workspace.version:
            return
        self.bound = ()
        with lines_to(self.engine.trt, self.engine.errors.log):
            if self.scratch != self.workspace.version:
                scratch = self.workspace.scratch
                self.context.set_device_memory(scratch.address, scratch.size)
                self.scratch = self.workspace.version
            for tensor in tensors:
                name, shape = tensor.name, tensor.shape
                if shape is not None and self.shapes.get(name) != shape:
                    self.require(self.context.set_input_shape(name, shape), f"{name} as {shape}")
                    self.shapes[name] = shape
                if self.addresses.get(name) != tensor.address:
                    taken = self.context.set_tensor_address(name, tensor.address)
                    self.require(taken, f"the address of {name}")
                    self.addresses[name] = tensor.address
        self.bound = tensors

    def require(self, taken: bool, argument: str) -> None:
        """InternalError where the library refuses what it is given."""
        if not taken:
            # What stands there is not known any more
            self.shapes.clear()
            self.addresses.clear()
            engine = self.engine
            raise InternalError(f"{engine.path}: TensorRT refuses {argument}{engine.said()}")

    def enqueue(self) -> None:
        """Put a run of what is bound on the stream. EnvironmentProblem where the library cannot."""
        with lines_to(self.engine.trt, self.engine.errors.log):
            done = self.context.execute_async_v3(self.workspace.stream)
        if not done:
            said = self.engine.said()
            message = f"TensorRT failed in a call of {self.engine.path}{said}"
            raise EnvironmentProblem(
                message, LESS_MEMORY if out_of_memory(said) else "Report this."
            )


def check_signature(
    trt: Any,
    engine: Any,
    contract: Contract,
    profiles: Sequence[Profile],
    path: Path,
) -> None:
    """BundleError where an engine's tensors or profiles are not those that its config.json says."""
    difference = next(differences(trt, engine, contract, profiles), None)
    if difference is not None:
        raise BundleError(f"{path} differs from its config.json: {difference}", BUILD_AGAIN)


def differences(
    trt: Any, engine: Any, contract: Contract, profiles: Sequence[Profile]
) -> Iterator[str]:
    """What an engine has otherwise than its contract and its profiles say."""
    specs = {spec.name: spec for spec in (*contract.inputs, *contract.outputs)}
    names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    if other := names ^ specs.keys():
        yield f"inputs and outputs {', '.join(sorted(other))}"
        return
    for name, spec in specs.items():
        mode = trt.TensorIOMode.INPUT if spec in contract.inputs else trt.TensorIOMode.OUTPUT
        dtype, shape = engine.get_tensor_dtype(name).name, tuple(engine.get_tensor_shape(name))
        same = engine.get_tensor_mode(name) == mode and dtype == TYPES[spec.dtype]
        if not (same and fits(shape, spec)):
            yield f"{name!r} is {dtype} {list(shape)}, not {spec.dtype} {list(spec.shape)}"
    if engine.num_optimization_profiles != len(profiles):
        yield f"{engine.num_optimization_profiles} profiles, not {len(profiles)}"
        return
    for index, profile in enumerate(profiles):
        for name, shapes in profile.shapes.items():
            has = tuple(tuple(dims) for dims in engine.get_tensor_profile_shape(name, index))
            if has != shapes:
                yield f"the profile {profile.name} has other shapes of {name}"


def fits(shape: tuple[int, ...], spec: TensorSpec) -> bool:
    """Whether a shape is that of the contract; -1 stands for any size."""
    return len(shape) == len(spec.shape) and all(
        not isinstance(b, int) or a in (-1, b) for a, b in zip(shape, spec.shape, strict=True)
    )
