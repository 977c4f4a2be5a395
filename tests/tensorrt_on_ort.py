"""Graphs that are lowered for TensorRT, run by ONNX Runtime on the CPU: a runner that keeps their
contract, and a backend of tests alone, so that a whole `build` and `infer` go through them.

Knows what a runner of TensorRT has to do beside the graph: copy the new rows of the portable
dialect into the cache, keep the native one's cache, give the hidden input that is not read as many
rows. Knows nothing of TensorRT's own calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.backends.base import (
    AccuracySpec,
    Backend,
    BuildOption,
    BuildOptions,
    EngineMemory,
    LaneRows,
    Listeners,
    OptionValue,
    PairDevice,
    PlanHints,
    Remedies,
    Runner,
    Staged,
)
from edgespec.backends.call import Call, Result
from edgespec.backends.engine_config import FP32_WEIGHTS, EngineConfig
from edgespec.backends.host import gather_idx, host_results
from edgespec.backends.onnx_dir import OnnxDir
from edgespec.backends.ort.recurrent import RecurrentCache
from edgespec.backends.rewriting import replace_output
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.lowering import lower
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import (
    RECURRENT_CHUNK,
    GraphContract,
    Limits,
    canonical_contract,
)
from tests.host_runner import DTYPES, CopiedRows, HostRunner

Array = NDArray[Any]
ELEMENTS = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int64": onnx.TensorProto.INT64,
    "bool": onnx.TensorProto.BOOL,
}
SPARE_SLOTS = 64  # for rows by which a lane is padded, and for the golden outputs of a small build


# ---- sessions


def as_bytes(model: ir.Model) -> bytes:
    """The model with its weights inside; it stays as it is."""
    values = list(model.graph.initializers.values())
    stored = [value.const_value for value in values]
    ir.external_data.load_to_model(model)
    data = ir.to_proto(model).SerializeToString()
    for value, tensor in zip(values, stored, strict=True):
        value.const_value = tensor
    return data


def open_session(model: ir.Model | bytes | Path) -> ort.InferenceSession:
    """A session of one thread that rewrites nothing but what has no kernel."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    given = as_bytes(model) if isinstance(model, ir.Model) else model
    source = str(given) if isinstance(given, Path) else given
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def widened(model: ir.Model, narrow: ir.DataType = ir.DataType.BFLOAT16) -> ir.Model:
    """The same values in float32, each rounded to a half type where the graph has it so: ONNX
    Runtime has next to no kernels for bfloat16, and those for float16 leave roundings out between
    one node and the next. Inputs and outputs are float32 then."""
    graph = model.graph

    def node(op_type: str, value: ir.Value, to: ir.DataType) -> ir.Node:
        made = ir.node(op_type, [value], {"to": int(to)}, name=f"{value.name}/{to.name}")
        made.outputs[0].name = f"{made.name}:0"
        return made

    def rounded(value: ir.Value, after: ir.Node | None) -> None:
        readers = list(value.uses())
        down = node("Cast", value, narrow)
        up = node("Cast", down.outputs[0], ir.DataType.FLOAT)
        if after is None:
            graph.insert_before(graph[0], [down, up])
        else:
            graph.insert_after(after, [down, up])
        for reader, index in readers:
            reader.replace_input_with(index, up.outputs[0])
        value.type = ir.TensorType(ir.DataType.FLOAT)
        if value.is_graph_output():
            replace_output(graph, value, up.outputs[0])

    for made in list(graph):
        if made.op_type == "Cast" and made.attributes["to"].as_int() == narrow:
            made.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        for value in made.outputs:
            if value.dtype == narrow:
                rounded(value, made)
    for value in (*graph.inputs, *graph.initializers.values()):
        if value.dtype != narrow:
            continue
        if value.is_initializer():
            readers, up = list(value.uses()), node("Cast", value, ir.DataType.FLOAT)
            graph.insert_before(graph[0], up)
            for reader, index in readers:
                reader.replace_input_with(index, up.outputs[0])
        else:
            rounded(value, None)
    return model


# ---- a runner


class GraphRunner(HostRunner):
    """A graph on ONNX Runtime, the canonical one or a lowered one: its contract says how its cache
    is written."""

    def __init__(
        self,
        session: ort.InferenceSession,
        contract: GraphContract,
        capacity: int,
        slots: int,
        lanes: int = 1,
    ) -> None:
        super().__init__(contract, capacity, slots, lanes)
        self.session, shape = session, contract.shape
        self.prefill_chunk = RECURRENT_CHUNK if shape.recurrent else 256
        self.recurrent = RecurrentCache(shape.recurrent, lanes) if shape.recurrent else None
        self.binding = session.io_binding()

    @property
    def gives_new_rows(self) -> bool:
        """Whether a present is this call's rows alone, which somebody has to copy."""
        return any(self.specs[name].shape[2] in ("S", "R") for name in self.presents.values())

    # ---- calls

    def run(self, call: Call) -> list[Result]:
        heads = self.contract.shape.heads
        if heads:
            feeds = self.feeds(call)
            out = self.execute(feeds, {"B": len(feeds["base_hidden"]), "S": call.rows})
            return host_results(call, out["logits"], None, heads)
        batch, rows = call.inputs_embeds.shape[:2]
        context = call.written - rows
        sizes = {"B": batch, "S": rows, "C": self.slots, "G": gather_idx(call).shape[1]}
        sizes |= {"L": context, "R": call.written}
        assert int(call.write_indices.max()) + call.written <= self.slots
        if self.recurrent is not None:
            starts = call.write_indices.tolist()
            self.recurrent.bind(self.binding, call.first_lane, starts, rows)
        lanes = slice(call.first_lane, call.first_lane + batch)
        feeds = self.feeds(call) | {name: rows_[lanes] for name, rows_ in self.cache.items()}
        out = self.execute(feeds, sizes)
        for past, present in self.presents.items():
            if not self.gives_new_rows:
                self.cache[past][lanes] = out[present]
                continue
            for lane, start in enumerate(call.write_indices.tolist()):
                place = self.cache[past][call.first_lane + lane]
                place[:, start : start + call.written] = out[present][lane]
        if self.recurrent is not None:
            self.recurrent.after_call(batch)
        hidden = out.get("hidden_states")
        return host_results(
            call,
            out["logits"].astype(np.float32),
            None if hidden is None else hidden.astype(np.float32),
        )

    def execute(self, feeds: dict[str, Array], sizes: dict[str, int]) -> dict[str, Array]:
        """The outputs by name, but those of recurrent layers, which are bound elsewhere."""
        kept = []
        for name, given in feeds.items():
            array = np.ascontiguousarray(given, self.dtype(name))
            kept.append(array)
            self.binding.bind_input(
                name, "cpu", 0, ELEMENTS[self.specs[name].dtype], array.shape, array.ctypes.data
            )
        recurrent = self.contract.shape.recurrent_layers
        found = {}
        for spec in self.contract.outputs:
            if recurrent and spec.name not in ("logits", "hidden_states", *self.presents.values()):
                continue
            dims = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
            found[spec.name] = array = np.empty(dims, DTYPES[spec.dtype])
            self.binding.bind_output(
                spec.name, "cpu", 0, ELEMENTS[spec.dtype], dims, array.ctypes.data
            )
        self.session.run_with_iobinding(self.binding)
        return found

    # ---- rows

    def keep_rows(self, lane: int, slots: NDArray[np.int64], start: int) -> None:
        super().keep_rows(lane, slots, start)
        if self.recurrent is not None:
            self.recurrent.keep(lane, slots - start)

    def read_rows(self, lane: int, count: int) -> CopiedRows:
        state = self.recurrent.read(lane) if self.recurrent else None
        return replace(super().read_rows(lane, count), state=state)

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        super().write_rows(lane, rows)
        if self.recurrent is not None:
            assert isinstance(rows, CopiedRows)
            self.recurrent.write(lane, rows.state, len(rows))

    def free(self, lane: int) -> None:
        if self.recurrent is not None:
            self.recurrent.free(lane)

    def close(self) -> None:
        self.__dict__.pop("binding", None)
        self.__dict__.pop("session", None)


# ---- a backend


@dataclass(frozen=True)
class LoweredOptions(BuildOptions):
    """What the graph of an engine is lowered for."""

    dialect: Dialect
    compute: Compute


class LoweredBackend(Backend):
    """Engines are lowered graphs in files; `dialect` and `compute` are options of `build` and
    cannot be read from an engine, so that a test registers one for each pair."""

    title = "ONNX Runtime, in TensorRT's place"
    suffixes = (".lowered.onnx",)
    remedies = Remedies(mismatch="The lowered graph computes another result.", too_coarse="None.")
    plan_hints = PlanHints(steps=3, block_nodes=8)
    float32_tolerance = 1e-5
    options: tuple[BuildOption, ...] = ()

    def __init__(self, dialect: Dialect, compute: Compute = "float32") -> None:
        self.name = f"{dialect.value}-{compute}"  # type: ignore[misc]
        self.dialect, self.compute = dialect, compute

    def parse_options(self, values: Mapping[str, OptionValue]) -> LoweredOptions:
        assert not values
        return LoweredOptions(self.dialect, self.compute)

    def target(self, capacity: int, max_rows: int) -> Target:
        return Target(
            dialect=self.dialect, compute=self.compute, capacity=capacity, max_rows=max_rows
        )

    def stage(
        self,
        onnx: OnnxDir,
        limits: Limits,
        options: BuildOptions,
        staging: Path,
        progress: Listeners,
    ) -> Staged:
        path = self.engine_path(staging, onnx.role)
        canonical = canonical_contract(onnx.config.graph)
        rows = max(limits.max_verify_tree_size, limits.max_draft_tree_size, limits.max_input_len)
        if onnx.config.graph.recurrent:
            rows = max(RECURRENT_CHUNK, limits.max_verify_tree_size)
        target = self.target(limits.max_kv_cache_capacity + SPARE_SLOTS, rows)
        data = as_bytes(lower(ir.load(onnx.model), canonical, target))
        progress.start(len(data))
        path.write_bytes(data)
        progress.advance(len(data))
        return Staged(
            engine=path,
            contract=lowered_contract(canonical, target),
            weights=FP32_WEIGHTS,
            accuracy=AccuracySpec(tolerance=TOLERANCES[self.compute]),
        )

    def open_staged(self, staged: Staged, capacity: int, lanes: int) -> Runner:
        return opened(staged.engine, staged.contract, capacity, lanes)

    def open(self, engine_dir: Path, config: EngineConfig, device: PairDevice) -> Runner:
        limits = config.limits
        return opened(
            self.engine_path(engine_dir, config.role),
            self.contract(config),
            limits.max_kv_cache_capacity,
            limits.max_batch_size,
        )

    def contract(self, config: EngineConfig) -> GraphContract:
        slots = config.limits.max_kv_cache_capacity + SPARE_SLOTS
        return lowered_contract(canonical_contract(config.component.graph), self.target(slots, 1))

    def fingerprint(self) -> dict[str, Any]:
        return {"onnxruntime": ort.__version__}

    def check_fingerprint(self, stored: Mapping[str, Any], name: str) -> None:
        assert stored == self.fingerprint(), name

    def memory(self, config: EngineConfig) -> EngineMemory:
        contract = self.contract(config)
        return EngineMemory(
            kv_bytes_per_token=contract.kv_bytes_per_token, state_bytes=contract.state_bytes
        )


# Relative to the largest golden value; float16 and bfloat16 as measured on random toys
TOLERANCES: dict[str, float] = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 1e-1}


def opened(path: Path, contract: GraphContract, capacity: int, lanes: int) -> GraphRunner:
    """The runner of an engine's file; its slots are those of the lowered contract."""
    masks = [spec.shape[3] for spec in contract.inputs if spec.name == "attention_mask"]
    slots = int(masks[0]) if masks else capacity
    return GraphRunner(open_session(path), contract, capacity, slots, lanes)
