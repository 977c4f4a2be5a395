"""The host's own time of a step of TensorRT's runner, whatever the device does meanwhile:
python -m tests.tensorrt_simulator.host_time

A step is a call that verifies a tree and the commit of its accepted rows, of a base shaped like
Llama 3.1 8B. The simulated device does nothing, and what the simulated library takes to look for
mistakes is taken off, so what is left is what Python does. It is the thread's own time: others may
be busy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from edgespec.backends.call import Attention, Call, LaneAttention
from edgespec.backends.cuda.workspace import Workspace
from edgespec.backends.engine_config import EngineLimits
from edgespec.backends.tensorrt import bindings, runner
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.profiles import max_rows, profiles_of, slots_of
from edgespec.backends.tensorrt.settings import EngineSettings
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.backends.tensorrt.versions import TENSORRT, Capabilities, capabilities_of
from edgespec.contract import (
    GraphContract,
    GraphShape,
    Limits,
    Role,
    TensorSpec,
    canonical_contract,
    past_names,
    present_names,
)
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.library import MAGIC, Context, DataType, simulator

VERSIONS = {Dialect.NATIVE: "10.16.2.10", Dialect.PORTABLE: "10.13.3.9"}
TYPES = {
    "float32": DataType.FLOAT,
    "float16": DataType.HALF,
    "bfloat16": DataType.BF16,
    "int64": DataType.INT64,
    "bool": DataType.BOOL,
}


@dataclass(frozen=True)
class Times:
    """Milliseconds of the median step: its call, and its commit."""

    call_ms: float
    commit_ms: float

    @property
    def total_ms(self) -> float:
        """Both."""
        return self.call_ms + self.commit_ms


def shape_of(layers: int, features: bool) -> GraphShape:
    """Llama 3.1 8B's, with so many layers."""
    return GraphShape(
        role=Role.BASE,
        hidden_size=4096,
        num_layers=layers,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        vocab_size=32000,
        features=3 * 4096 if features else 0,
    )


def engine_bytes(contract: GraphContract, settings: EngineSettings, scratch: int) -> bytes:
    """An engine of these inputs and outputs that computes nothing."""

    def value(spec: TensorSpec) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(spec.name, TYPES[spec.dtype].value, spec.shape)

    inputs, outputs = [*map(value, contract.inputs)], [*map(value, contract.outputs)]
    model = helper.make_model(helper.make_graph([], "empty", inputs, outputs))
    pairs = [
        pair
        for layer in contract.shape.attention_layers
        for pair in zip(present_names(layer), past_names(layer), strict=True)
    ]
    header = {
        "version": settings.version,
        "profiles": [dict(profile.shapes) for profile in settings.profiles],
        "aliases": dict(pairs) if settings.dialect is Dialect.NATIVE else {},
        "memory": scratch,
    }
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(8, "little") + text + model.SerializeToString()


def opened(
    path: Path,
    layers: int,
    capacity: int,
    dialect: Dialect,
    compute: Compute,
    *,
    features: bool,
    workspace: Workspace | None = None,
    capabilities: Capabilities | None = None,
    max_input_len: int = 1024,
    scratch: int = 1 << 20,
) -> runner.TensorRTRunner:
    """A runner of such an engine, on an idle device of its own where none is given."""
    sizes = Limits(max_kv_cache_capacity=capacity, max_input_len=min(max_input_len, capacity))
    limits = EngineLimits.of(sizes, Role.BASE)
    shape = shape_of(layers, features)
    target = Target(
        dialect=dialect,
        compute=compute,
        capacity=slots_of(limits),
        max_rows=max_rows(shape, limits),
    )
    contract = lowered_contract(canonical_contract(shape), target)
    version = VERSIONS[dialect]
    settings = EngineSettings(
        library=TENSORRT.module,
        version=version,
        sm=HostDevice.sm,
        dialect=dialect,
        compute=compute,
        capacity=target.capacity,
        max_rows=target.max_rows,
        decomposed_attention=False,
        profiles=profiles_of(contract, limits),
    )
    path.write_bytes(engine_bytes(contract, settings, scratch))
    trt = simulator(version)
    capabilities = capabilities or capabilities_of(TENSORRT, version)
    found = bindings.TrtBindings(capabilities.library, trt, version, capabilities)
    workspace = workspace or Workspace(HostDevice(idle=True))
    return runner.open_runner(found, path, contract, settings, workspace, capacity, 1)


def call_of(shape: GraphShape, start: int, rows: int) -> Call:
    """A tree of so many nodes behind `start` committed tokens."""
    rng = np.random.default_rng(0)
    rope = np.zeros((1, rows, shape.rotary_dim // 2), np.float32)
    visible = np.tri(rows, dtype=bool)
    lane = LaneAttention(start, visible, start + np.arange(rows))
    return Call(
        rng.standard_normal((1, rows, shape.hidden_size), np.float32),
        rope,
        rope,
        Attention([lane]),
        np.array([start], np.int64),
        [np.arange(rows)],
    )


@contextmanager
def library_time() -> Iterator[list[float]]:
    """Seconds that the simulated library has taken for each run, within the block."""
    taken: list[float] = []
    run = Context.execute_async_v3

    def timed(self: Context, stream_handle: int) -> bool:
        began = time.thread_time()
        done = run(self, stream_handle)
        taken.append(time.thread_time() - began)
        return done

    Context.execute_async_v3 = timed  # type: ignore[method-assign]
    try:
        yield taken
    finally:
        Context.execute_async_v3 = run  # type: ignore[method-assign]


def measure(open_runner: runner.TensorRTRunner, rows: int, steps: int) -> Times:
    """The median of so many steps, after the calls that make the graph."""
    shape, start = open_runner.contract.shape, 500
    path = np.array([0, 2, 5, 9])
    calls, commits = [], []
    call = call_of(shape, start, rows)  # what the runtime makes of tokens is not the runner's time
    for i in range(steps + 3):
        with library_time() as taken:
            began = time.thread_time()
            open_runner.run(call)
            ran = time.thread_time()
            open_runner.keep_rows(0, start + path[path < rows], start)
            ended = time.thread_time()
        if i >= 3:
            calls.append(ran - began - sum(taken))
            commits.append(ended - ran)
    return Times(1e3 * statistics.median(calls), 1e3 * statistics.median(commits))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 60])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--no-graphs", action="store_true", help="as pycuda runs, which has none")
    args = parser.parse_args()
    HostDevice.can_capture = not args.no_graphs
    for dialect in Dialect:
        for compute in ("float16", "bfloat16"):
            for features in (False, True):
                with tempfile.TemporaryDirectory() as directory:
                    path = Path(directory) / "base.engine"
                    found = opened(path, args.layers, 1024, dialect, compute, features=features)
                    for rows in args.rows:
                        times = measure(found, rows, args.steps)
                        what = "with features" if features else "plain"
                        print(  # noqa: T201
                            f"{dialect.value} {compute} {what}, {args.layers} layers, {rows} rows:"
                            f" {times.call_ms:.3f} + {times.commit_ms:.3f} ms"
                        )
                    found.close()


if __name__ == "__main__":
    main()
