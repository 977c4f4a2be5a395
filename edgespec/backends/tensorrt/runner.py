"""Runs an engine of TensorRT: inputs go to the device in one copy, what is known of the logits
comes back in one, and all else stays there.

Knows calls, lanes and what is bound where. `plans` says how a call stands in memory, `execution`
knows the library, `caches` and `recurrent` what lanes hold. Knows nothing of tokens or trees.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from edgespec.backends.base import LaneRows, Table
from edgespec.backends.call import Attention, Call, Ids, Result
from edgespec.backends.cuda.bound import Bound
from edgespec.backends.cuda.caches import DeviceRows, KvCache, RowTable
from edgespec.backends.cuda.device.base import DeviceMemoryFull
from edgespec.backends.cuda.logits import DeviceLogits, Wanted
from edgespec.backends.cuda.recurrent import RecurrentCache
from edgespec.backends.cuda.states import DeviceStates, on_device
from edgespec.backends.cuda.visibility import width_of
from edgespec.backends.cuda.workspace import Workspace, attempt
from edgespec.backends.feeds import reader_of
from edgespec.backends.tensorrt.bindings import TrtBindings
from edgespec.backends.tensorrt.contract import memory_names
from edgespec.backends.tensorrt.execution import LESS_MEMORY, OpenEngine, opening
from edgespec.backends.tensorrt.plans import MemoryLayout, MemoryPlan, Sizes, plan_of
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.settings import EngineSettings
from edgespec.backends.tensorrt.target import Dialect
from edgespec.contract import (
    ITEM_BYTES,
    GraphContract,
    Kind,
    graph_inputs,
    inputs_named,
    past_names,
    present_names,
)
from edgespec.errors import EnvironmentProblem, LimitError

logger = logging.getLogger(__name__)
MAX_PLANS = 64  # shapes of calls that are remembered, with their graphs


class TensorRTRunner:
    """An open engine with its caches on a device. `capacity` is less than the slots of a lane:
    those behind are for rows that only fill up."""

    def __init__(
        self,
        engine: OpenEngine,
        contract: GraphContract,
        settings: EngineSettings,
        workspace: Workspace,
        capacity: int,
        lanes: int,
    ) -> None:
        self.engine, self.contract, self.settings = engine, contract, settings
        self.workspace, self.capacity, self.lanes = workspace, capacity, lanes
        rows = graph_inputs(contract.shape)
        self.masks = [row.name for row in rows if row.kind is Kind.MASK]
        copied = [row for row in rows if row.kind not in (Kind.MASK, Kind.STATES)]
        self.inputs = [(row, reader_of(row)) for row in copied]
        self.table: Table | None = None
        self.ranges = [ranges_of(contract, profile) for profile in settings.profiles]
        self.plans: OrderedDict[tuple[object, ...], MemoryPlan] = OrderedDict()
        self.in_place = check_aliases(engine, contract, settings.dialect)
        self.closed, self.version = False, workspace.version
        self.engine_s = 0.0
        read = "L" if contract.shape.block else "S"
        self.prefill_chunk = max(ranges[read][1] for ranges in self.ranges)
        self.max_rows = max(ranges.get("G", ranges["S"])[1] for ranges in self.ranges)
        shape = contract.shape
        self.wanted = Wanted(1, shape.vocab_size)
        attention = 0 if shape.heads else len(shape.attention_layers)
        row_bytes = shape.head_dim * ITEM_BYTES[settings.compute]
        self.cache = None
        if attention:
            dims = (2 * attention, lanes, shape.num_kv_heads, settings.capacity, row_bytes)
            try:
                self.cache = KvCache(workspace, *dims)
            except DeviceMemoryFull as error:
                raise cache_too_large(prod(dims), capacity, lanes) from error
        self.recurrent = (
            RecurrentCache(workspace, shape.recurrent, lanes, settings.max_rows)
            if shape.recurrent
            else None
        )
        self.outputs = self.allocated()
        self.new_rows = 0  # the table of this call's rows, where the cache is not written in place
        if self.cache is not None and not self.in_place:
            names = [name for i in shape.attention_layers for name in present_names(i)]
            self.new_rows = workspace.table([self.outputs[name] for name in names])
        workspace.synchronize()

    # ---- memory

    def allocated(self) -> dict[str, int]:
        """Memory for the outputs of the largest call, by name. What calls go through has room for
        one sequence in each profile, and for all lanes where trees are."""
        most = [{symbol: ends[1] for symbol, ends in ranges.items()} for ranges in self.ranges]
        for sizes in most:
            sizes["R"] = sizes.get("S", 0) + sizes.get("L", 0)
            sizes["B"] = self.lanes if sizes is most[-1] else 1
            widths = dict.fromkeys(inputs_named(Kind.MASK), sizes["R"])
            MemoryLayout(self.contract, sizes, widths, self.wanted).fit(self.workspace)
        largest = {symbol: max(sizes.get(symbol, 0) for sizes in most) for symbol in most[-1]}
        memory, out = memory_names(self.contract.shape), {}
        for spec in self.contract.outputs:
            if spec.name not in self.in_place and spec.name not in memory:
                size = spec.num_bytes(**largest)
                out[spec.name] = self.workspace.alloc(size)
                self.workspace.device.zero(out[spec.name], size, self.workspace.stream)
        return out

    # ---- a call

    def run(self, call: Call) -> list[Result]:
        """Run one call, a result for each lane; its KV rows are in the cache afterwards.
        EnvironmentProblem where the device or the library fails, LimitError where no profile has
        its sizes."""
        call = with_context(call)
        workspace, device = self.workspace, self.workspace.device
        with workspace.working():
            attentions = {name: call.attended(name) for name in self.masks}
            starts: list[int] = call.write_indices.tolist()
            self.check(call, starts)
            states = self.states_of(call)
            taken = 0
            if self.recurrent is not None:
                taken = self.recurrent.prepare(call.first_lane, starts, call.rows)
            plan = self.plan_of(call, attentions, taken)
            self.fill(plan, call, attentions)
            device.record(workspace.begin, workspace.stream)
            self.copy_states(plan, call, states)
            self.execute(plan)
            if self.new_rows:
                self.append_rows(call, starts)
            if self.recurrent is not None:
                self.recurrent.after_call(len(starts))
            device.record(workspace.end, workspace.stream)
            device.wait(workspace.end)
            self.engine_s += device.elapsed_ms(workspace.begin, workspace.end) / 1000
            results = self.results(plan, call)
            if plan.uses > 1 and plan.graph is None and plan.can_capture:
                self.capture(plan)
            return results

    def check(self, call: Call, starts: Sequence[int]) -> None:
        """Assert that all rows have a slot: our own mistake otherwise."""
        assert not self.closed
        assert 0 <= call.first_lane <= call.first_lane + len(starts) <= self.lanes
        if self.cache is not None:
            assert 0 <= min(starts) <= max(starts) + call.written <= self.cache.slots

    def plan_of(self, call: Call, attentions: Mapping[str, Attention], taken: int) -> MemoryPlan:
        """The plan of a call of this size, made where there is none yet."""
        if self.version != self.workspace.version:  # another engine has moved what is shared
            self.drop_all()
        sizes = sizes_of(call, taken)
        widths = {name: width_of(call, kind) for name, kind in attentions.items()}
        side = 0 if self.recurrent is None else self.recurrent.side[call.first_lane]
        wanted = (self.wanted.count, self.wanted.ids)
        key = (*sizes.values(), *widths.values(), call.first_lane, side, *wanted)
        plan = self.plans.get(key)
        if plan is None:
            context = self.engine.contexts[self.profile_of(sizes)]
            layout = MemoryLayout(self.contract, sizes, widths, self.wanted)
            layout.fit(self.workspace)
            if self.version != self.workspace.version:
                self.drop_all()
            memory = self.memory_bound(call, taken)
            plan = plan_of(layout, self.workspace, context, self.outputs, memory)
            self.plans[key] = plan
            if len(self.plans) > MAX_PLANS:
                self.drop(self.plans.popitem(last=False)[1])
        self.plans.move_to_end(key)
        return plan

    def profile_of(self, sizes: Sizes) -> int:
        """The profile that a call runs in, generation before prefill. LimitError where none has its
        sizes."""
        for index in reversed(range(len(self.ranges))):
            ranges = self.ranges[index]
            if all(least <= sizes[s] <= most for s, (least, most) in ranges.items()):
                return index
        has = ", ".join(f"{symbol}={size}" for symbol, size in sizes.items() if size)
        message = f"{self.engine.path} was not built for a call of {has}"
        raise LimitError(message, "Build it with a larger `max_input_len` or tree size.")

    def memory_bound(self, call: Call, taken: int) -> list[Bound]:
        """What a call binds of caches and states."""
        batch, shape = len(call.inputs_embeds), self.contract.shape
        out = [] if self.recurrent is None else self.recurrent.bound(batch, taken)
        if self.cache is None:
            return out
        dims = (batch, shape.num_kv_heads, self.cache.slots, shape.head_dim)
        tensor = 0
        for layer in shape.attention_layers:
            for past, present in zip(past_names(layer), present_names(layer), strict=True):
                address = self.cache.address(tensor, call.first_lane)
                out.append(Bound(past, address, dims))
                if present in self.in_place:
                    out.append(Bound(present, address))
                tensor += 1
        return out

    def states_of(self, call: Call) -> dict[str, list[DeviceStates]]:
        """The hidden states of a call on the device, where they are already, lane by lane."""
        dtype, given = self.settings.compute, {}
        for name in inputs_named(Kind.STATES):
            if (lanes := call.states(name)) is not None:
                given[name] = [on_device(lane, self.workspace, dtype) for lane in lanes]
        return given

    def copy_states(
        self, plan: MemoryPlan, call: Call, given: Mapping[str, Sequence[DeviceStates]]
    ) -> None:
        """Copy the hidden states of a call to where its engine reads them. Rows that only fill up
        are zeros: a NaN there would stay in the cache."""
        device, stream = self.workspace.device, self.workspace.stream
        for name, lanes in given.items():
            at, rows = plan.states[name], plan.layout.shapes[name][1]
            for states in lanes:
                if states.nbytes:
                    device.copy(at, states.address, states.nbytes, stream)
                if filling := (rows - len(states)) * states.row_bytes:
                    device.zero(at + states.nbytes, filling, stream)
                at += rows * states.row_bytes

    def fill(self, plan: MemoryPlan, call: Call, attentions: Mapping[str, Attention]) -> None:
        """Write the inputs of a call to the block that is copied."""
        for name, kind in attentions.items():
            plan.masks[name].fill(call, kind)
        for row, read in self.inputs:  # one default is as good as many
            array = read(call)
            plan.arrays[row.name][...] = row.default if array is None else array

    def execute(self, plan: MemoryPlan) -> None:
        """Put a call on the stream: as a graph from its third time on."""
        plan.uses += 1
        if plan.graph is not None:
            self.workspace.device.launch_graph(plan.graph, self.workspace.stream)
            return
        plan.context.bind(plan.bound)
        self.enqueue(plan)

    def capture(self, plan: MemoryPlan) -> None:
        """Keep a call that has just run as a graph, unless the library makes graphs of its own. It
        does what a change of shapes asks for in the next run, which therefore cannot be captured.
        """
        can = self.workspace.device.can_capture and not self.engine.capabilities.own_graphs
        plan.graph = self.captured(plan) if can else None
        plan.can_capture = plan.graph is not None

    def captured(self, plan: MemoryPlan) -> int | None:
        """The graph of a call; None where it cannot be captured."""
        device, stream, whole = self.workspace.device, self.workspace.stream, False
        device.begin_capture(stream)
        try:
            self.enqueue(plan)
            whole = True
        except EnvironmentProblem as error:
            logger.debug("a call runs without a CUDA graph: %s", error.what)
        finally:
            graph = device.end_capture(stream)
            if graph is not None and not whole:
                device.free_graph(graph)
        return graph if whole else None

    def enqueue(self, plan: MemoryPlan) -> None:
        """Copy the inputs, make what kernels make of them, run, and copy back what is found."""
        workspace, device, stream = self.workspace, self.workspace.device, self.workspace.stream
        if plan.arrays:
            device.upload(*plan.upload, stream)
        for launch in plan.before:
            workspace.run(launch)
        plan.context.enqueue()
        if plan.flags[0]:
            device.zero(*plan.flags, stream)
        for launch in plan.after:
            workspace.run(launch)
        device.download(*plan.download, stream)

    def append_rows(self, call: Call, starts: Sequence[int]) -> None:
        """Copy this call's keys and values into the cache."""
        assert self.cache is not None
        head_bytes = call.written * self.cache.size.row_bytes
        for place, start in enumerate(starts):
            offset = place * self.cache.size.heads * head_bytes
            source = RowTable(self.new_rows, head_bytes, offset)
            self.cache.append(call.first_lane + place, start, source, call.written)

    def results(self, plan: MemoryPlan, call: Call) -> list[Result]:
        """The outputs of a call that is done, lane by lane: what came back is copied."""
        search, heads = plan.layout.search, max(1, self.contract.shape.heads)
        top, per_lane = search.read(plan.returned["top"]), search.rows // len(call.gather)
        row_bytes = ITEM_BYTES["float32"] * search.stride
        out = []
        for i, (gathered, states) in enumerate(
            zip(call.gather, self.hidden_states(plan, call), strict=True)
        ):
            first, count = i * per_lane, len(gathered) * heads
            address = self.outputs["logits"] + first * row_bytes
            part = top.part(slice(first, first + count))
            ids = search.stride
            logits = DeviceLogits(self.workspace, address, count, ids, ids, self.wanted, part)
            out.append(Result(logits, states))
        return out

    def hidden_states(self, plan: MemoryPlan, call: Call) -> list[DeviceStates] | list[None]:
        """Those that a call gives, lane by lane."""
        spec, lanes = plan.layout.hidden_states, call.attention.lanes
        if spec is None:
            return [None] * len(lanes)
        width, address = spec.shape[-1], self.outputs["hidden_states"]
        assert isinstance(width, int)
        out = []
        for lane, bad in zip(lanes, plan.returned["not finite"].tolist(), strict=True):
            rows, finite = len(lane.visible), not bad
            states = DeviceStates(self.workspace, address, rows, width, spec.dtype, finite)
            out.append(states)
            address += call.rows * states.row_bytes
        return out

    # ---- lanes

    def keep_rows(self, lane: int, slots: Ids, start: int) -> None:
        """Commit rows of the last call: move them to `start` and behind, in all layers."""
        with self.workspace.working():
            if self.cache is not None:
                self.cache.keep(lane, slots, start)
            if self.recurrent is not None:
                self.recurrent.keep(lane, slots - start)

    def read_rows(self, lane: int, count: int) -> DeviceRows:
        """A copy of a lane's first `count` rows on the device; with recurrent layers that is all of
        them."""
        assert self.cache is not None
        with self.workspace.working():
            rows = self.cache.read(lane, count)
            if self.recurrent is None:
                return rows
            assert count == self.recurrent.lengths[lane]
            state = self.recurrent.read(lane)
            return DeviceRows(rows.memory, rows.size, rows.stored, count, state)

    def write_rows(self, lane: int, rows: LaneRows) -> None:
        """Begin a lane with a copy that `read_rows` made."""
        assert isinstance(rows, DeviceRows)
        assert self.cache is not None
        with self.workspace.working():
            self.cache.write(lane, rows)
            if self.recurrent is not None:
                self.recurrent.write(lane, rows.state, len(rows))

    def free(self, lane: int) -> None:
        """Drop all rows of a lane and its recurrent state."""
        if self.recurrent is not None:
            with self.workspace.working():
                self.recurrent.free(lane)

    def zero(self, lane: int) -> None:
        """Drop all rows of a lane and overwrite them with zeros."""
        with self.workspace.working():
            if self.cache is not None:
                self.cache.zero(lane)
            if self.recurrent is not None:
                self.recurrent.free(lane)

    def copy_lane(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` rows of one lane to another, with the recurrent state."""
        with self.workspace.working():
            if self.cache is not None:
                self.cache.copy_lane(source, target, count)
            if self.recurrent is not None:
                assert count == self.recurrent.lengths[source]
                self.recurrent.copy_lane(source, target)

    # ---- the end

    def drop(self, plan: MemoryPlan) -> None:
        """Free the graph of a plan that is not remembered."""
        graph, plan.graph = plan.graph, None
        if graph is not None:
            self.workspace.settle()
            self.workspace.device.free_graph(graph)

    def drop_all(self) -> None:
        """Forget all plans: memory has moved."""
        while self.plans:
            self.drop(self.plans.popitem()[1])
        self.version = self.workspace.version

    def close(self) -> None:
        """Release the engine and its memory, as far as the device still does it; closing twice is
        harmless."""
        if self.closed:
            return
        self.closed = True
        workspace, plans = self.workspace, [*self.plans.values()]
        self.plans.clear()
        with workspace.lock:
            attempt(
                workspace.device.activate,
                workspace.settle,
                *(partial(self.drop, plan) for plan in plans),
                self.engine.close,
                *(partial(workspace.free, address) for address in self.outputs.values()),
                *((partial(workspace.free, self.new_rows),) if self.new_rows else ()),
                *((self.cache.free,) if self.cache is not None else ()),
                *((self.recurrent.close,) if self.recurrent is not None else ()),
            )
        workspace.leave()


def open_runner(
    bindings: TrtBindings,
    path: Path,
    contract: GraphContract,
    settings: EngineSettings,
    workspace: Workspace,
    capacity: int,
    lanes: int,
) -> TensorRTRunner:
    """The runner of an engine file with room for so many tokens and sequences; `contract` is the
    lowered one. BundleError where the file is not what its settings say, EnvironmentProblem where
    memory does not do."""
    profiles = settings.profiles
    with opening(bindings, path, contract, profiles, workspace, LESS_MEMORY) as engine:
        return TensorRTRunner(engine, contract, settings, workspace, capacity, lanes)


def cache_too_large(size: int, capacity: int, lanes: int) -> EnvironmentProblem:
    """The error for a cache of so many bytes that the device has no room for."""
    of = f"{lanes} sequences of {capacity} tokens" if lanes > 1 else f"{capacity} tokens"
    flags = (
        "`max_batch_size` or `max_kv_cache_capacity`" if lanes > 1 else "`max_kv_cache_capacity`"
    )
    return EnvironmentProblem(
        f"the device has no memory for a KV cache of {size / 1e9:.1f} GB ({of})",
        f"Build the engine with a smaller {flags}.",
    )


# ---- sizes


def ranges_of(contract: GraphContract, profile: Profile) -> dict[str, tuple[int, int]]:
    """The least and the largest size of each symbol in a profile."""
    return {
        dim: (profile.shapes[spec.name][0][i], profile.shapes[spec.name][2][i])
        for spec in contract.inputs
        for i, dim in enumerate(spec.shape)
        if isinstance(dim, str)
    }


def sizes_of(call: Call, taken: int) -> dict[str, int]:
    """The size of each symbol in a call; `taken` is P."""
    return {
        "B": len(call.inputs_embeds),
        "S": call.rows,
        "G": max(1, *map(len, call.gather)),
        "L": call.context_rows,
        "P": taken,
        "R": call.written,
    }


def with_context(call: Call) -> Call:
    """A call of a block whose context has a row at least, as profiles have no size of 0: one that
    only fills up stands before the block, and no row sees it."""
    if call.context_rows or not call.is_block:
        return call
    rows = {
        name: np.zeros((len(value), 1, *value.shape[2:]), np.float32)
        for name, value in call.extras.items()
        if isinstance(value, np.ndarray) and not value.shape[1]
    }
    return replace(call, extras={**call.extras, **rows})


# ---- what is written in place


def check_aliases(engine: OpenEngine, contract: GraphContract, dialect: Dialect) -> frozenset[str]:
    """The outputs that are the cache itself, as the engine reports it. EnvironmentProblem where it
    does not report all of a dialect that writes in place."""
    if dialect is Dialect.PORTABLE or contract.shape.heads:
        return frozenset()
    names = set()
    for layer in contract.shape.attention_layers:
        for past, present in zip(past_names(layer), present_names(layer), strict=True):
            alias = engine.alias_of(present)
            if alias != past:
                message = (
                    f"{engine.path} does not write its cache in place: {present} is of its own"
                )
                remedy = "Build it again, and report this with the library's version."
                raise EnvironmentProblem(message, remedy)
            names.add(present)
    return frozenset(names)
