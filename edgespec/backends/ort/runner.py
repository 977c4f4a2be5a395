"""Runs a lowered engine on ONNX Runtime over a KV cache in host memory.

Knows bindings and addresses: past and present of a layer are the same memory, so that a call writes
only its own rows. `cache` knows where rows stand. Knows nothing of tokens or trees.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast
from weakref import WeakSet

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.backends.base import (
    Interrupted,
    Interruptible,
    LaneRows,
    PacksRows,
    Table,
    noop,
)
from edgespec.backends.call import Attention, Call, Result
from edgespec.backends.engine_config import (
    BUILD_AGAIN,
    EngineConfig,
    EngineFields,
    EngineWeights,
)
from edgespec.backends.feeds import reader_of
from edgespec.backends.host import host_results
from edgespec.backends.masks import attention_mask
from edgespec.backends.ort.bindings import Bindings
from edgespec.backends.ort.cache import KvCache, padding_of
from edgespec.backends.ort.contract import (
    FOUND,
    SEARCH,
    WRITTEN,
    CacheType,
    attention_inputs,
    lowered_contract,
)
from edgespec.backends.ort.head import Found, Head, HeadLogits
from edgespec.backends.ort.head_form import HeadForm, read_layout
from edgespec.backends.ort.lane_rows import LayerState, OrtLaneRows
from edgespec.backends.ort.low_bit_matmul import PackedTable
from edgespec.backends.ort.matmul_nbits import LmHeadTable, NBitsKernel
from edgespec.backends.ort.native.library import kernels, why_missing
from edgespec.backends.ort.options import NATIVE
from edgespec.backends.ort.pair_weights import PairWeights, Shared, data_of, file_of
from edgespec.backends.ort.recurrent import RecurrentCache
from edgespec.backends.ort.session import NO_FALLBACK, session_options
from edgespec.backends.ort.settings import settings_of
from edgespec.backends.ort.visibility import visibility
from edgespec.contract import (
    RECURRENT_CHUNK,
    Contract,
    Dim,
    GraphContract,
    GraphInput,
    Kind,
    canonical_contract,
    graph_inputs,
    past_names,
    present_names,
)
from edgespec.errors import BundleError, EnvironmentProblem

PROVIDERS = ["CPUExecutionProvider"]
PREFILL_CHUNK = 256  # rows of a call: bounds the mask and the activations of a long prompt
RUNNERS: WeakSet[OrtRunner] = WeakSet()


class OrtRunner(Interruptible, PacksRows):
    """An engine of this backend; with more than one lane, of the batched form.

    `padding` are slots behind the capacity for the rows by which a lane near its capacity is padded
    to its neighbors. `shared` are weights that the engines of a pair have in common. `head` is an
    lm_head that searches its logits, where the graph has one.
    """

    def __init__(
        self,
        path: Path,
        contract: GraphContract,
        capacity: int,
        lanes: int = 1,
        padding: int = 0,
        shared: Shared | None = None,
        head: Head | None = None,
    ) -> None:
        self.head = head
        self.contract, self.capacity, self.lanes = contract, capacity, lanes
        self.specs, shape = {spec.name: spec for spec in contract.inputs}, contract.shape
        self.masks = {  # and what TreeAttention reads instead of each
            row.name: tuple(spec.name for spec in attention_inputs(row.name))
            for row in graph_inputs(shape, Kind.MASK)
        }
        rows = [row for row in graph_inputs(shape) if row.name not in self.masks]
        self.inputs = [(row, reader_of(row)) for row in rows if row.name in self.specs]
        self.prefill_chunk = RECURRENT_CHUNK if shape.recurrent else PREFILL_CHUNK
        self.max_rows, self.engine_s = capacity, 0.0
        self.session = open_session(path, shared)
        self.shared = shared or {}  # the session reads this memory
        check_signature(self.session, contract, path)
        try:
            self.batched = bool(shape.heads) or "write_indices" in self.specs
            self.attends_trees = not shape.heads and "attention_mask" not in self.specs
            following = self.batched and not self.attends_trees
            self.cache = KvCache(shape, lanes, capacity + padding, following, cache_type(contract))
        except MemoryError:
            raise cache_too_large(contract, capacity, lanes) from None
        self.recurrent = RecurrentCache(shape.recurrent, lanes) if shape.recurrent else None
        self.bindings = Bindings(self.session)
        RUNNERS.add(self)
        self.table: Table | None = None
        # The sizes for which the head is bound, what it is asked, and what it finds
        self.head_bound: tuple[tuple[int, ...], int] | None = None
        self.requested: list[NDArray[Any]] = []
        self.head_outputs: list[NDArray[Any]] = []
        self.run_options: ort.RunOptions | None = None  # by which calls can be ended
        self.bound = (0, 0, 0)  # first lane, lanes and stride of the cache as it is bound

    @property
    def slab(self) -> NDArray[Any]:
        """The KV cache as one array [2*attention layers, lanes, Hkv, stride, row]."""
        return self.cache.slab

    def run(self, call: Call) -> list[Result]:
        """Run one call, a result for each lane; its KV rows are in the cache afterwards.
        EnvironmentProblem where ONNX Runtime fails."""
        began = time.perf_counter()
        batch, rows = call.inputs_embeds.shape[:2]
        starts: list[int] = call.write_indices.tolist()
        width = max(starts) + call.written
        check_call(call, starts, width, self.lanes, self.cache.slots, batched=self.batched)
        self.cache.reserve(call.first_lane, starts, call.written, width)
        self.bind_cache(call.first_lane, batch)
        if self.recurrent is not None:
            self.recurrent.bind(self.bindings.binding, call.first_lane, starts, rows)
        shape, bindings = self.contract.shape, self.bindings
        gathered = batch, max(1, *map(len, call.gather))
        for name, array in self.feeds(call, width).items():
            bindings.write(name, array)
        logits = bindings.output("logits", (*gathered, shape.logits_width))
        hidden = None
        if shape.features:
            hidden = bindings.output("hidden_states", (batch, rows, shape.features))
        if self.head is not None:
            self.bind_head(self.head, call.first_lane, gathered)
        try:
            self.session.run_with_iobinding(bindings.binding, self.run_options)
        except RuntimeError as error:
            if self.run_options is not None and self.run_options.terminate:
                raise Interrupted from error
            remedy = (
                "If memory ran out, close other programs or build with a smaller"
                " `max_kv_cache_capacity`."
            )
            message = f"ONNX Runtime failed in a call of {batch} x {rows} rows: {error}"
            raise EnvironmentProblem(message, remedy) from error
        if self.recurrent is not None:
            self.recurrent.after_call(batch)
        self.engine_s += time.perf_counter() - began
        results = host_results(call, logits, hidden, shape.heads)
        if self.head is None:
            return results
        return self.with_found(self.head, call, logits, results)

    @contextmanager
    def interruptible(self) -> Iterator[Callable[[], None]]:
        """What ends calls between two operators; nothing does with recurrent layers, whose states a
        call writes in place."""
        if self.recurrent is not None:
            yield noop
            return
        self.run_options = options = ort.RunOptions()
        try:
            yield lambda: setattr(options, "terminate", True)
        finally:
            self.run_options = None

    def bind_head(self, head: Head, first_lane: int, gathered: tuple[int, ...]) -> None:
        """Say what a call's logits [B, G] are searched for and which lanes' are written, and bind
        room for what is found, where it is not bound yet."""
        if self.head_bound != (gathered, head.count):
            sizes = {"B": gathered[0], "G": gathered[1], "K": head.count}
            self.requested = [
                self.bindings.input(spec.name, spec.dims(**sizes), spec.dtype)
                for spec in (WRITTEN, SEARCH)
            ]
            self.head_outputs = [
                self.bindings.output(spec.name, spec.dims(**sizes), spec.dtype)
                for spec in (*FOUND, head.rows_spec)
            ]
            self.head_bound = gathered, head.count
        head.write_request(first_lane, *self.requested)

    def with_found(
        self,
        head: Head,
        call: Call,
        logits: NDArray[np.float32],
        results: list[Result],
    ) -> list[Result]:
        """The results of a call with what was found of their logits [B, G, V]."""
        *top, x = self.head_outputs
        written = self.requested[0].tolist()
        best_ids, best_values = (array[..., 0].tolist() for array in top[:2])
        are_all = head.ids == logits.shape[2]
        out = []
        for place, (gathered, result) in enumerate(zip(call.gather, results, strict=True)):
            own = place, slice(len(gathered))
            here = HeadLogits(
                head,
                call.first_lane + place,
                logits.shape[2],
                x[own],
                Found(head.ids, head.sums, *(array[own] for array in top)),
                logits[own] if written[place] else None,
                (best_ids[place], best_values[place]) if are_all else None,
            )
            out.append(Result(here, result.hidden_states))
        return out

    def bind_cache(self, first_lane: int, batch: int) -> None:
        """Bind these lanes, where they are not bound yet: it takes tens of microseconds."""
        if self.bound == (first_lane, batch, self.cache.stride):
            return
        self.bound = (first_lane, batch, self.cache.stride)
        slab, binding = self.slab, self.bindings.binding
        dims, address = [batch, *slab.shape[2:]], slab.ctypes.data + first_lane * slab.strides[1]
        for layer in self.contract.shape.attention_layers:
            for past, present in zip(past_names(layer), present_names(layer), strict=True):
                binding.bind_input(past, "cpu", 0, slab.dtype, dims, address)
                binding.bind_output(present, "cpu", 0, slab.dtype, dims, address)
                address += slab.strides[0]

    def feeds(self, call: Call, width: int) -> dict[str, NDArray[Any]]:
        """The graph's inputs by name, beside caches and recurrent states; a call writes slots up to
        `width`."""
        feeds: dict[str, NDArray[Any]] = {}
        for name, names in self.masks.items():
            attention = call.attended(name)
            if self.attends_trees:
                seen = visibility(call, attention)
                feeds.update(zip(names, (seen.lengths, seen.visible, seen.first), strict=True))
            else:
                feeds[name] = self.mask(name, call, attention, width)
        for row, read in self.inputs:
            array = read(call)
            feeds[row.name] = self.default(row, call) if array is None else array
        return feeds

    def default(self, row: GraphInput, call: Call) -> NDArray[Any]:
        """What an input reads that a call does not give: its default, or hidden states of no
        row."""
        width = cast(int, self.specs[row.name].shape[2])
        rows = 0 if row.kind is Kind.STATES else call.rows
        array = self.bindings.input(row.name, (len(call.inputs_embeds), rows, width))
        array.fill(row.default or 0)
        return array

    def mask(self, name: str, call: Call, attention: Attention, width: int) -> NDArray[np.bool_]:
        """A mask [B, 1, S, T] of a call. T is the cache's stride in the batched form, else the
        slots up to the last that is written."""
        slots = self.cache.stride if self.batched else width
        dims = (len(attention.lanes), 1, call.rows, slots)
        return attention_mask(call, attention, self.bindings.input(name, dims, np.bool_))

    def keep_rows(self, lane: int, slots: NDArray[np.int64], start: int) -> None:
        """Commit rows of the last call: move them to `start` and behind, in all layers."""
        self.cache.move_rows(lane, slots, start)
        if self.recurrent is not None:
            self.recurrent.keep(lane, slots - start)

    def read_rows(self, lane: int, count: int) -> OrtLaneRows:
        """A copy of a lane's first `count` rows; with recurrent layers that is all of them."""
        if self.recurrent is None:
            return OrtLaneRows(self.cache.read_rows(lane, count))
        assert count == self.recurrent.lengths[lane]
        return OrtLaneRows(self.cache.read_rows(lane, count), self.recurrent.read(lane))

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        """Begin a lane with a copy that `read_rows` made."""
        assert isinstance(rows, OrtLaneRows)
        self.cache.write_rows(lane, rows.kv)
        if self.recurrent is not None:
            assert rows.state is not None
            self.recurrent.write(lane, rows.state, len(rows))

    def pack(self, rows: LaneRows) -> dict[str, NDArray[Any]]:
        """The arrays of a copy that `read_rows` made."""
        assert isinstance(rows, OrtLaneRows)
        if (state := rows.state) is None:
            return {"kv": rows.kv}
        return {"kv": rows.kv, "conv": state.conv, "state": state.state, "pending": state.pending}

    def unpack(self, arrays: Mapping[str, NDArray[Any]]) -> OrtLaneRows:
        """Such a copy of its arrays."""
        rows = dict(arrays)
        kv = rows.pop("kv")
        return OrtLaneRows(kv, LayerState(**rows) if rows else None)

    def free(self, lane: int) -> None:
        """Drop all rows of a lane and its recurrent state."""
        self.cache.free(lane)
        if self.head is not None:
            self.head.begin(lane)
        if self.recurrent is not None:
            self.recurrent.free(lane)

    def zero(self, lane: int) -> None:
        """Drop all rows of a lane and overwrite them with zeros."""
        self.cache.zero(lane)
        if self.recurrent is not None:
            self.recurrent.free(lane)

    def copy_lane(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of one lane to another, with the recurrent state."""
        self.cache.copy_lane(source, target, count)
        if self.recurrent is not None:
            assert count == self.recurrent.lengths[source]
            self.recurrent.copy_lane(source, target)

    def close(self) -> None:
        """Release the engine; nothing can be run afterwards, and closing twice is harmless."""
        self.__dict__.pop("bindings", None)
        self.__dict__.pop("session", None)


def keep_sessions() -> None:
    """In a fork: never free a session, which would wait for ever for threads that are not there."""
    for runner in RUNNERS:
        for name in {"bindings", "session"} & vars(runner).keys():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(vars(runner)[name]))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=keep_sessions)


def check_call(
    call: Call, starts: list[int], width: int, lanes: int, slots: int, *, batched: bool
) -> None:
    """Assert that shapes agree and that all rows have a slot: our own mistake otherwise."""
    batch, rows = call.inputs_embeds.shape[:2]
    assert len(call.attention.lanes) == len(starts) == len(call.gather) == batch
    assert 0 <= call.first_lane <= call.first_lane + batch <= lanes
    assert min(starts) >= 0
    assert width <= slots
    # The kernel for one sequence writes the last rows that it reads
    assert batched or starts == [width - rows]


def open_engine(path: Path, config: EngineConfig, pair: PairWeights) -> OrtRunner:
    """The runner of a finished engine; `pair` has the weights of the engine beside it.
    EnvironmentProblem where it cannot be opened, or has kernels of our own that were not compiled
    here."""
    lanes, weights, shape = config.limits.max_batch_size, config.weights, config.component.graph
    own = settings_of(config)
    if own.kernels == NATIVE:
        kernels()  # or the reason why there are none
    runner = OrtRunner(
        path,
        lowered_contract(canonical_contract(shape), lanes > 1, own.tree_cache, own.head_width),
        config.limits.max_kv_cache_capacity,
        lanes,
        padding_of(config.limits, block=shape.block),
        shared=pair.shared(path, weights.largest),
        head=open_head(path, own.head, weights, pair),
    )
    runner.table = lm_head_table(path, weights, shape.hidden_size)
    return runner


def open_head(
    path: Path, form: HeadForm | None, weights: EngineWeights, pair: PairWeights
) -> Head | None:
    """The lm_head of an engine that searches its logits, as `pair` has it; None where there is
    none. BundleError where its file is too short, or config.json does not say where it is."""
    if form is None:
        return None
    if weights.largest is None or weights.largest.shape != form.layout.shape:
        raise BundleError(f"the config of {path} does not describe its lm_head", BUILD_AGAIN)
    return Head(form, pair.array(path, weights.largest))


def lm_head_table(path: Path, weights: EngineWeights, hidden_size: int) -> Table | None:
    """The embedding table that an engine's config places in its lm_head; None where it does not."""
    shared, largest = weights.embedding, weights.largest
    if shared is None:
        return None
    if shared.scales_offset is None:
        keys = {"bits": shared.bits, "block": shared.block} | dict(shared.form or {})
        layout = read_layout(EngineFields(keys, f"{path} (embedding)"), hidden_size, shared.rows)
        data = data_of(path) if largest is None else file_of(path, largest)
        return PackedTable(data, layout, shared.offset)
    bits: Literal[4, 8] = 4 if shared.bits == 4 else 8
    kernel = NBitsKernel(bits, shared.block, hidden_size, shared.rows)
    return LmHeadTable(data_of(path), kernel, shared.offset, shared.scales_offset)


def open_session(path: Path, shared: Shared | None = None) -> ort.InferenceSession:
    """A session of an engine, with the operators of our own where they were compiled, which reads
    `shared` in place of its own weights. BundleError where its file is damaged, EnvironmentProblem
    where memory does not suffice."""
    options = session_options()
    for name, value in (shared or {}).items():
        options.add_initializer(name, value)
    if why_missing() is None:
        kernels().register(options)
    try:
        session = ort.InferenceSession(str(path), options, PROVIDERS, **NO_FALLBACK)
    except MemoryError as error:
        remedy = "Close other programs, or use a smaller model or machine with more memory."
        raise EnvironmentProblem(f"not enough memory to load {path}", remedy) from error
    except Exception as error:  # ONNX Runtime raises its own untyped family; the cause is kept
        # It may have several lines, and empty ones at the end
        reason = " ".join(str(error).split())
        if "alloc" in reason.lower():
            remedy = "Close other programs, or use a smaller model or machine with more memory."
            raise EnvironmentProblem(
                f"not enough memory to load {path}: {reason}", remedy
            ) from error
        # The engine was built by this very version, for this CPU: the file is damaged
        message = f"ONNX Runtime cannot load {path}: {reason}"
        raise BundleError(message, "Build the engine again on this machine.") from error
    if session.get_providers() != PROVIDERS:
        raise EnvironmentProblem(
            f"ONNX Runtime chose {session.get_providers()} where {PROVIDERS} was asked for",
            "Reinstall onnxruntime for this machine.",
        )
    return session


def check_signature(session: ort.InferenceSession, contract: Contract, path: Path) -> None:
    """BundleError where inputs or outputs have other names, types or sizes than those of the
    contract, which its config.json says."""
    remedy = "Build the engine again with this version of edgespec."
    for kind, values, wanted in (
        ("inputs", session.get_inputs(), contract.inputs),
        ("outputs", session.get_outputs(), contract.outputs),
    ):
        differing = {v.name for v in values} ^ {spec.name for spec in wanted}
        if differing:
            message = (
                f"{path}: {kind} that differ from the contract: {', '.join(sorted(differing))}"
            )
            raise BundleError(message, remedy)
        specs = {spec.name: spec for spec in wanted}
        for value in values:
            spec = specs[value.name]
            if value.type != ORT_TYPES[spec.dtype] or not fits(value.shape, spec.shape):
                is_ = f"{value.type} {value.shape}"
                should = f"{spec.dtype} {list(spec.shape)}"
                message = f"{path}: {kind} that differ from config.json: {value.name!r} is {is_}"
                raise BundleError(f"{message}, not {should}", remedy)


ORT_TYPES = {
    "float32": "tensor(float)",
    "float16": "tensor(float16)",
    "int8": "tensor(int8)",
    "int64": "tensor(int64)",
    "bool": "tensor(bool)",
}


def cache_type(contract: GraphContract) -> CacheType:
    """The type of the KV cache that a graph reads; float32 where it reads none."""
    layers = contract.shape.attention_layers
    dtypes = {spec.dtype for i in layers for spec in contract.inputs if spec.name in past_names(i)}
    return cast(CacheType, dtypes.pop()) if dtypes else "float32"


def fits(shape: Sequence[int | str | None], wanted: Sequence[Dim]) -> bool:
    """Whether sizes that both know are the same."""
    return len(shape) == len(wanted) and all(
        a == b
        for a, b in zip(shape, wanted, strict=True)
        if isinstance(a, int) and isinstance(b, int)
    )


def cache_too_large(contract: GraphContract, capacity: int, lanes: int) -> EnvironmentProblem:
    """The error for a KV cache that cannot be allocated, with its size in GB."""
    size = lanes * capacity * contract.kv_bytes_per_token
    sequences, flags = "", "`max_kv_cache_capacity`"
    if lanes > 1:
        sequences, flags = f"{lanes} sequences of ", "`max_batch_size` or `max_kv_cache_capacity`"
    return EnvironmentProblem(
        f"no memory for a KV cache of {size / 1e9:.1f} GB ({sequences}{capacity} tokens)",
        f"Build the engine with a smaller {flags}.",
    )
