"""Runs an engine of TensorRT: inputs go to the device in one copy, keys and values stay there.

Knows calls, sizes and what is bound where. `execution` knows the library, `caches` and `recurrent`
what lanes hold. Knows nothing of tokens or trees.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import LaneRows, Table
from edgespec.backends.call import Attention, Call, Floats, HiddenStates, Ids, Result
from edgespec.backends.host import gather_idx, host_results
from edgespec.backends.masks import tree_mask
from edgespec.backends.tensorrt.bindings import Bindings
from edgespec.backends.tensorrt.caches import DeviceRows, KvCache, Rows
from edgespec.backends.tensorrt.device.base import DeviceMemoryFull
from edgespec.backends.tensorrt.execution import LESS_MEMORY, Bound, Context, OpenEngine
from edgespec.backends.tensorrt.kernels import (
    CONVERT_BLOCKS,
    FINITE_BLOCKS,
    MASK_THREADS,
    THREADS,
)
from edgespec.backends.tensorrt.profiles import Profile
from edgespec.backends.tensorrt.recurrent import RecurrentCache
from edgespec.backends.tensorrt.settings import EngineSettings
from edgespec.backends.tensorrt.states import DTYPES, KINDS, DeviceStates, put
from edgespec.backends.tensorrt.target import Dialect
from edgespec.backends.tensorrt.visibility import Visibility
from edgespec.backends.tensorrt.workspace import Buffer, Pinned, Workspace, aligned, put_table
from edgespec.contract import (
    ITEM_BYTES,
    GraphContract,
    TensorSpec,
    past_names,
    present_names,
)
from edgespec.errors import EnvironmentProblem, LimitError

MAX_PLANS = 64  # shapes of calls that are remembered, with their graphs
HIDDEN = ("base_hidden", "draft_hidden")
STATES = (*HIDDEN, "target_hidden")
HALVES = ("float16", "bfloat16")
Sizes = Mapping[str, int]  # by symbol


@dataclass
class Plan:
    """A call of one size: its context, where its inputs stand in the block that is copied, and
    what is bound. `uses` counts the calls; `graph` is what they come to, once captured."""

    context: Context
    arrays: dict[str, NDArray[Any]]  # of the pinned block, by input or part of a mask
    upload_bytes: int
    masks: list[dict[str, int]]  # the structures of the kernel that makes them
    converts: list[dict[str, int]]  # those of the kernel that rounds
    bound: list[Bound]
    downloads: list[tuple[int, int, int]]  # host, device, bytes
    logits: Floats
    finite: dict[str, int]  # the structure of the kernel that looks for NaN and Inf
    not_finite: NDArray[np.int32]  # by lane
    uses: int = 0
    graph: int | None = None
    can_capture: bool = True


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
        self.table: Table | None = None
        self.ranges = [ranges_of(contract, profile) for profile in settings.profiles]
        self.plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
        self.inputs, self.states, self.made_inputs = (Buffer(workspace) for _ in range(3))
        self.flags = Buffer(workspace)  # of lanes with NaN or Inf
        self.upload, self.download = Pinned(workspace), Pinned(workspace)
        self.outputs: dict[str, Buffer] = {}
        self.in_place = check_aliases(engine, contract, settings.dialect)
        self.closed, self.scratch = False, workspace.version
        self.engine_s = 0.0
        read = "L" if contract.shape.block else "S"
        self.prefill_chunk = max(ranges[read][1] for ranges in self.ranges)
        self.max_rows = max(ranges.get("G", ranges["S"])[1] for ranges in self.ranges)
        shape = contract.shape
        attention = 0 if shape.heads else len(shape.attention_layers)
        row_bytes = shape.head_dim * ITEM_BYTES[settings.compute]
        self.cache = None
        if attention:
            dims = (2 * attention, lanes, shape.num_kv_heads, settings.capacity, row_bytes)
            try:
                self.cache = KvCache(workspace, *dims)
            except DeviceMemoryFull as error:
                raise cache_too_large(int(np.prod(dims)), capacity, lanes) from error
        self.recurrent = (
            RecurrentCache(workspace, shape.recurrent, lanes, settings.max_rows)
            if shape.recurrent
            else None
        )
        self.new_rows = 0  # the table of this call's rows, where the cache is not written in place
        self.allocate(lanes)
        workspace.synchronize()

    # ---- memory

    def allocate(self, lanes: int) -> None:
        """Memory for the outputs of the largest call, and for an input that a call leaves out."""
        most = {
            symbol: max(ranges.get(symbol, (0, 0))[1] for ranges in self.ranges)
            for symbol in ("B", "S", "G", "L", "P")
        }
        most["B"] = lanes
        most["R"] = most["S"] + most["L"]
        for spec in self.contract.outputs:
            if spec.name in self.in_place or is_memory(spec.name):
                continue
            self.outputs[spec.name] = Buffer(self.workspace)
            self.outputs[spec.name].fit(spec.num_bytes(**most))
        specs = [spec for spec in self.contract.inputs if spec.name in STATES]
        self.states.fit(sum(aligned(spec.num_bytes(**most)) for spec in specs))
        self.flags.fit(4 * lanes)
        names = [n for i in self.contract.shape.attention_layers for n in present_names(i)]
        if self.cache is not None and not self.in_place:
            addresses = [self.outputs[name].address for name in names]
            self.new_rows = put_table(self.workspace, addresses)

    # ---- a call

    def run(self, call: Call) -> list[Result]:
        """Run one call, a result for each lane; its KV rows are in the cache afterwards.
        EnvironmentProblem where the device or the library fails, LimitError where no profile has
        its sizes."""
        began = time.perf_counter()
        call = with_context(call)
        with self.workspace.working():
            if self.scratch != self.workspace.version:  # graphs have its old address
                self.drop_all()
                self.scratch = self.workspace.version
            kinds = attentions_of(call, self.contract)
            seen = {name: Visibility.of(call, kind) for name, kind in kinds}
            starts: list[int] = call.write_indices.tolist()
            self.check(call, starts)
            taken = 0
            if self.recurrent is not None:
                taken = self.recurrent.prepare(call.first_lane, starts, call.rows)
            plan = self.plan_of(call, seen, taken)
            self.fill(plan, call, seen)
            self.put_states(call)
            self.execute(plan)
            if self.cache is not None and not self.in_place:
                self.append_rows(call, starts)
            if self.recurrent is not None:
                self.recurrent.after_call(len(starts))
            self.workspace.synchronize()
            if plan.uses > 1 and plan.graph is None and plan.can_capture:
                self.capture(plan)
            self.engine_s += time.perf_counter() - began
            return self.results(plan, call)

    def check(self, call: Call, starts: Sequence[int]) -> None:
        """Assert that all rows have a slot: our own mistake otherwise."""
        assert not self.closed
        assert 0 <= call.first_lane <= call.first_lane + len(starts) <= self.lanes
        if self.cache is not None:
            assert 0 <= min(starts) <= max(starts) + call.written <= self.cache.slots

    def plan_of(self, call: Call, seen: Mapping[str, Visibility], taken: int) -> Plan:
        """The plan of a call of this size, made where there is none yet."""
        sizes = sizes_of(call, taken)
        widths = tuple(part.visible.shape[2] for part in seen.values())
        side = 0 if self.recurrent is None else self.recurrent.side[call.first_lane]
        given = call.base_hidden is not None
        key = (*sizes.items(), *widths, given, call.first_lane, side)
        plan = self.plans.get(key)
        if plan is None:
            index = self.profile_of(sizes)
            shapes = {spec.name: shape_of(spec, sizes) for spec in self.contract.inputs}
            self.fit_blocks(call, seen, shapes, sizes)
            plan = self.plans[key] = self.made(index, call, seen, shapes, sizes, taken)
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
        what = f"{self.engine.path} was not built for a call of {has}"
        raise LimitError(what, "Build it with a larger --max-input-len or tree size.")

    def parts(
        self, call: Call, seen: Mapping[str, Visibility], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Shape and type of all that is copied to the device for a call, by name, in order."""
        parts: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        for spec in self.contract.inputs:
            if spec.name in seen:
                of = seen[spec.name]
                for name, array in mask_parts(spec.name, of):
                    parts[name] = (array.shape, array.dtype)
            elif not is_memory(spec.name) and spec.name not in STATES:
                dtype = "float32" if spec.dtype in HALVES else spec.dtype
                parts[spec.name] = (shapes[spec.name], DTYPES[dtype])
        return parts

    def made_sizes(
        self, seen: Mapping[str, Visibility], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, int]:
        """Bytes of the inputs that kernels make of what is copied, by name: masks, and what comes
        in float32 and is read in another type."""
        return {
            spec.name: nbytes(shapes[spec.name], DTYPES[spec.dtype])
            for spec in self.contract.inputs
            if spec.name in seen or is_converted(spec)
        }

    def state_places(self, sizes: Sizes) -> dict[str, int]:
        """Where the hidden states that a call reads stand on the device; of two that a draft reads,
        only one counts, and both may be the same."""
        places, at = {}, self.states.address
        for spec in self.contract.inputs:
            if spec.name in STATES:
                places[spec.name] = at
                at += aligned(spec.num_bytes(**sizes))
        return places

    def put_states(self, call: Call) -> None:
        """Copy the hidden states of a call to where its engine reads them: on the device, where
        they are there already. Rows that only fill up are zeros."""
        specs = {spec.name: spec for spec in self.contract.inputs}
        places = self.state_places(sizes_of(call, 0))
        for name, lanes in states_of(call):
            spec, at = specs[name], places[name]
            rows = call.context_rows if name == "target_hidden" else call.rows
            width = spec.shape[-1]
            assert isinstance(width, int)
            row_bytes = width * ITEM_BYTES[spec.dtype]
            for states in lanes:
                put(states, self.workspace, at, spec.dtype)
                if len(states) < rows:  # a NaN there would stay in the cache
                    behind = at + len(states) * row_bytes
                    filling = (rows - len(states)) * row_bytes
                    self.workspace.device.zero(behind, filling, self.workspace.stream)
                at += rows * row_bytes

    def fit_blocks(
        self,
        call: Call,
        seen: Mapping[str, Visibility],
        shapes: Mapping[str, tuple[int, ...]],
        sizes: Sizes,
    ) -> None:
        """Have room for a call of this size; plans are void where memory moves."""
        upload = sum(
            aligned(nbytes(shape, dtype))
            for shape, dtype in self.parts(call, seen, shapes).values()
        )
        made = sum(map(aligned, self.made_sizes(seen, shapes).values()))
        specs = [spec for spec in self.contract.outputs if spec.name in ("logits", "hidden_states")]
        download = aligned(specs[0].num_bytes(**sizes)) + 4 * self.lanes
        states = [spec for spec in self.contract.inputs if spec.name in STATES]
        moved = [
            bool(upload) and self.inputs.fit(upload),
            bool(upload) and self.upload.fit(upload),
            bool(made) and self.made_inputs.fit(made),
            self.download.fit(download),
            self.states.fit(sum(aligned(spec.num_bytes(**sizes)) for spec in states)),
        ]
        moved += [self.outputs[spec.name].fit(spec.num_bytes(**sizes)) for spec in specs]
        if any(moved):
            self.drop_all()

    def made(
        self,
        index: int,
        call: Call,
        seen: Mapping[str, Visibility],
        shapes: Mapping[str, tuple[int, ...]],
        sizes: Sizes,
        taken: int,
    ) -> Plan:
        """A plan in blocks that have room for it."""
        context = self.engine.contexts[index]
        arrays, at, offset = {}, {}, 0
        for name, (shape, dtype) in self.parts(call, seen, shapes).items():
            arrays[name] = self.upload.view(offset, shape, dtype)
            at[name] = self.inputs.address + offset
            offset += aligned(nbytes(shape, dtype))
        upload_bytes, made_at = offset, {}
        offset = self.made_inputs.address
        for name, size in self.made_sizes(seen, shapes).items():
            made_at[name] = offset
            offset += aligned(size)
        masks, converts = [], []
        for name, of in seen.items():
            rows, slots = shapes[name][2:]
            parts = {part: at[f"{name}/{part}"] for part in ("lengths", "firsts", "visible")}
            width = of.visible.shape[2]
            mask = {"mask": made_at[name], "rows": rows, "width": width, "slots": slots}
            masks.append(parts | mask)
        for spec in self.contract.inputs:
            if is_converted(spec):
                count = int(np.prod(shapes[spec.name]))
                ends = {"source": at[spec.name], "target": made_at[spec.name]}
                converts.append(ends | {"count": count, "kind": KINDS[spec.dtype]})
        at |= made_at
        at |= self.state_places(sizes)
        bound = [
            Bound(
                spec.name,
                at[spec.name],
                shapes[spec.name] if spec.name in context.varying else None,
            )
            for spec in self.contract.inputs
            if not is_memory(spec.name)
        ]
        bound += self.memory_bound(call, taken)
        bound += [Bound(name, buffer.address) for name, buffer in self.outputs.items()]
        specs = {spec.name: spec for spec in self.contract.outputs}
        shape, batch = shape_of(specs["logits"], sizes), sizes["B"]
        logits = self.download.view(0, shape, DTYPES["float32"])
        flags_at = aligned(logits.nbytes)
        not_finite = self.download.view(flags_at, (batch,), np.dtype(np.int32))
        downloads = [
            (self.download.address, self.outputs["logits"].address, logits.nbytes),
        ]
        finite: dict[str, int] = {}
        if "hidden_states" in specs:
            downloads.append((self.download.address + flags_at, self.flags.address, 4 * batch))
            spec = specs["hidden_states"]
            finite = {
                "values": self.outputs["hidden_states"].address,
                "flags": self.flags.address,
                "count": spec.num_bytes(**sizes) // ITEM_BYTES[spec.dtype] // batch,
                "kind": KINDS[spec.dtype],
            }
        return Plan(
            context,
            arrays,
            upload_bytes,
            masks,
            converts,
            bound,
            downloads,
            logits,
            finite,
            not_finite,
        )

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

    def fill(self, plan: Plan, call: Call, seen: Mapping[str, Visibility]) -> None:
        """Write the inputs of a call to the block that is copied."""
        for name, of in seen.items():
            for part, array in mask_parts(name, of):
                plan.arrays[part][...] = array
        for name, array in self.feeds(call):
            plan.arrays[name][...] = array

    def feeds(self, call: Call) -> list[tuple[str, Any]]:
        """The inputs that are copied, beside hidden states and what masks are made of."""
        shape = self.contract.shape
        if shape.heads:
            return []
        names = ["inputs_embeds", "rope_cos", "rope_sin", "write_indices"]
        if shape.local_rotary_dim:
            names += ["local_rope_cos", "local_rope_sin"]
        if shape.block:
            names += ["context_cos", "context_sin"]
        out = [(name, getattr(call, name)) for name in names]
        out.append(("gather_idx", gather_idx(call)))
        if shape.recurrent:
            out.append(("tree_mask", tree_mask(call)))
        if shape.reads_hidden_states:
            out.append(("use_base_hidden", call.base_hidden is not None))
        return out

    def execute(self, plan: Plan) -> None:
        """Put a call on the stream: as a graph from its third time on."""
        plan.uses += 1
        if plan.graph is not None:
            self.workspace.device.launch_graph(plan.graph, self.workspace.stream)
            return
        plan.context.bind(plan.bound)
        self.enqueue(plan)

    def capture(self, plan: Plan) -> None:
        """Keep a call that has just run as a graph. The library does what a change of shapes asks
        for in the next run, which therefore cannot be captured."""
        plan.graph = self.captured(plan) if self.workspace.device.can_capture else None
        plan.can_capture = plan.graph is not None

    def captured(self, plan: Plan) -> int | None:
        """The graph of a call; None where it cannot be captured."""
        device, stream = self.workspace.device, self.workspace.stream
        device.begin_capture(stream)
        try:
            self.enqueue(plan)
        except EnvironmentProblem:
            # What cannot be captured may still run
            graph = device.end_capture(stream)
            if graph is not None:
                device.free_graph(graph)
            return None
        return device.end_capture(stream)

    def enqueue(self, plan: Plan) -> None:
        """Copy the inputs, make the masks, run, copy the outputs."""
        device, stream = self.workspace.device, self.workspace.stream
        if plan.upload_bytes:
            device.upload(self.inputs.address, self.upload.address, plan.upload_bytes, stream)
        for mask in plan.masks:
            batch = len(plan.arrays["write_indices"])
            grid = (-(-mask["slots"] // MASK_THREADS), mask["rows"], batch)
            self.workspace.launch("attention_mask", grid, MASK_THREADS, **mask)
        for convert in plan.converts:
            self.workspace.launch("convert", (CONVERT_BLOCKS, 1, 1), THREADS, **convert)
        plan.context.enqueue()
        if plan.finite:
            batch = len(plan.not_finite)
            device.zero(self.flags.address, 4 * batch, stream)
            grid = (FINITE_BLOCKS, 1, batch)
            self.workspace.launch("not_finite", grid, THREADS, **plan.finite)
        for target, source, size in plan.downloads:
            device.download(target, source, size, stream)

    def append_rows(self, call: Call, starts: Sequence[int]) -> None:
        """Copy this call's keys and values into the cache."""
        assert self.cache is not None
        head_bytes = call.written * self.cache.size.row_bytes
        for place, start in enumerate(starts):
            offset = place * self.cache.size.heads * head_bytes
            source = Rows(self.new_rows, head_bytes, offset)
            self.cache.append(call.first_lane + place, start, source, call.written)

    def results(self, plan: Plan, call: Call) -> list[Result]:
        """The outputs of a call that is done, lane by lane."""
        results = host_results(call, plan.logits, None, self.contract.shape.heads)
        if not plan.finite:
            return results
        spec = next(spec for spec in self.contract.outputs if spec.name == "hidden_states")
        width, address = spec.shape[-1], self.outputs["hidden_states"].address
        assert isinstance(width, int)
        out = []
        for result, lane, bad in zip(
            results, call.attention.lanes, plan.not_finite.tolist(), strict=True
        ):
            rows, finite = len(lane.visible), not bad
            states = DeviceStates(self.workspace, address, rows, width, spec.dtype, finite)
            out.append(Result(result.logits, states))
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

    def drop(self, plan: Plan) -> None:
        """Free the graph of a plan that is not remembered."""
        if plan.graph is not None:
            self.workspace.synchronize()
            self.workspace.device.free_graph(plan.graph)

    def drop_all(self) -> None:
        """Forget all plans."""
        while self.plans:
            self.drop(self.plans.popitem()[1])

    def close(self) -> None:
        """Release the engine and its memory; closing twice is harmless."""
        if self.closed:
            return
        self.closed = True
        with self.workspace.working():
            self.workspace.synchronize()
            self.drop_all()
            self.engine.close()
            for buffer in (
                self.inputs,
                self.states,
                self.made_inputs,
                self.flags,
                *self.outputs.values(),
            ):
                buffer.free()
            for pinned in (self.upload, self.download):
                pinned.free()
            if self.new_rows:
                self.workspace.free(self.new_rows)
            if self.cache is not None:
                self.cache.free()
            if self.recurrent is not None:
                self.recurrent.close()
        self.workspace.leave()


def open_runner(
    bindings: Bindings,
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
    workspace.join()
    before, engine = frozenset(workspace.held), None
    try:
        with workspace.working():
            engine = OpenEngine(bindings, path, contract, settings.profiles, workspace)
            return TensorRTRunner(engine, contract, settings, workspace, capacity, lanes)
    except DeviceMemoryFull as error:
        give_up(workspace, before, engine)
        what = f"the device has no memory to open {path}: {error.what}"
        raise EnvironmentProblem(what, LESS_MEMORY) from error
    except BaseException:
        give_up(workspace, before, engine)
        raise


def give_up(workspace: Workspace, before: frozenset[int], engine: OpenEngine | None) -> None:
    """Give back what an engine that cannot be opened has taken, so that another may have it: all
    but what was there `before`, and what engines work in."""
    with workspace.working():
        workspace.synchronize()
        if engine is not None:
            engine.close()
        for address in workspace.held - before - {workspace.scratch}:
            workspace.free(address)
    workspace.leave()


def cache_too_large(size: int, capacity: int, lanes: int) -> EnvironmentProblem:
    """The error for a cache of so many bytes that the device has no room for."""
    of = f"{lanes} sequences of {capacity} tokens" if lanes > 1 else f"{capacity} tokens"
    flags = (
        "--max-batch-size or --max-kv-cache-capacity" if lanes > 1 else "--max-kv-cache-capacity"
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


def shape_of(spec: TensorSpec, sizes: Sizes) -> tuple[int, ...]:
    """The shape of a tensor in a call of these sizes."""
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)


def nbytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    return int(np.prod(shape)) * dtype.itemsize


def with_context(call: Call) -> Call:
    """A call of a block whose context has a row at least, as profiles have no size of 0: one that
    only fills up stands before the block, and no row sees it."""
    if call.context_rows or call.target_hidden is None:
        return call
    assert call.context_cos is not None
    batch, _, width = call.context_cos.shape
    row = np.zeros((batch, 1, width), np.float32)
    return replace(call, context_cos=row, context_sin=row)


def is_memory(name: str) -> bool:
    """Whether a tensor is what layers keep, or what a recurrent layer leaves of its rows."""
    return name.startswith(
        (
            *("past_", "conv_state_", "recurrent_state_", "committed_rows_"),
            *("conv_rows_", "delta_rows_", "present_recurrent_state_"),
        )
    )


def is_converted(spec: TensorSpec) -> bool:
    """Whether an input comes from the host in float32 and is read in another type."""
    return spec.dtype in HALVES and spec.name not in STATES and not is_memory(spec.name)


# ---- masks


def attentions_of(call: Call, contract: GraphContract) -> list[tuple[str, Attention]]:
    """What each mask that the graph reads is made of."""
    if contract.shape.heads:
        return []
    out = [("attention_mask", call.attention)]
    if contract.shape.sliding:
        assert call.sliding_attention is not None
        out.append(("sliding_attention_mask", call.sliding_attention))
    return out


def states_of(call: Call) -> list[tuple[str, Sequence[HiddenStates]]]:
    """The hidden states of a call, lane by lane."""
    return [(name, lanes) for name in STATES if (lanes := getattr(call, name)) is not None]


def mask_parts(name: str, of: Visibility) -> list[tuple[str, NDArray[Any]]]:
    """What is copied of a mask, by names of its own."""
    return [(f"{name}/{part}", getattr(of, part)) for part in ("lengths", "firsts", "visible")]


# ---- what is written in place


def check_aliases(engine: OpenEngine, contract: GraphContract, dialect: Dialect) -> frozenset[str]:
    """The outputs that are the cache itself, as the engine reports it. EnvironmentProblem where it
    does not report all of a dialect that writes in place."""
    if dialect is Dialect.PORTABLE or contract.shape.heads:
        return frozenset()
    found = set()
    for layer in contract.shape.attention_layers:
        for past, present in zip(past_names(layer), present_names(layer), strict=True):
            alias = engine.alias_of(present)
            if alias != past:
                what = f"{engine.path} does not write its cache in place: {present} is of its own"
                remedy = "Build it again, and report this with the library's version."
                raise EnvironmentProblem(what, remedy)
            found.add(present)
    return frozenset(found)
