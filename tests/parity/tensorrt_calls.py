"""Calls that a canonical graph and a lowered one both take, and how far apart what they give is.

Knows calls and runners. Knows no dialect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.backends.call import Attention, Call, Value
from edgespec.backends.golden import explicit
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.target import Compute, Dialect, Target
from edgespec.contract import GraphShape, image_widths
from tests.calls import outputs_of, states_of
from tests.parity.tensorrt_graphs import CAPACITY, MAX_ROWS, Canonical
from tests.tensorrt_on_ort import GraphRunner, open_session, widened

Array = NDArray[Any]
SLOTS = CAPACITY
PARENTS = (-1, 0, 0, 2, 1, 1, 3)  # of a tree: paths with gaps in slot order
PATH = np.array([0, 2, 3, 6])  # which of its nodes are committed
LANES = 2


# ---- calls


@dataclass
class Calls:
    """Calls with random embeddings, rotations and states for one graph, of `LANES` sequences at
    once whose lengths differ by `apart`."""

    shape: GraphShape
    apart: int = 0
    lanes: int = 1
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def rows(self, count: int, width: int) -> Array:
        return self.rng.standard_normal((self.lanes, count, width), np.float32)

    def table(self, count: int, width: int) -> tuple[Array, Array]:
        angles = self.rng.uniform(-3, 3, (self.lanes, count, width // 2)).astype(np.float32)
        return np.cos(angles), np.sin(angles)

    def make(self, start: int, seen: Array, context: int = 0, *, own: bool = False) -> Call:
        """Rows behind `start` committed ones that see one another as `seen` [S, S] says, and all
        that came before; a block draft's `context` rows stand between."""
        shape, count = self.shape, len(seen)
        if shape.heads:
            return Call.of_states(states_of(self.rows(count, shape.base_features)))
        starts = np.array([start + lane * self.apart for lane in range(self.lanes)])
        all_of, near = [], []
        for first in (starts + context).tolist():
            visible = np.concatenate([np.ones((count, first), bool), seen], 1)
            all_of.append(explicit(visible))
            visible = visible.copy()
            visible[:, : max(0, first - 2)] = False
            near.append(explicit(visible))
        cos, sin = self.table(count, shape.rotary_dim)
        gathered = [np.arange(count)[::-1]] * self.lanes
        embeds = self.rows(count, shape.hidden_size)
        extras: dict[str, Value] = {"sliding_attention_mask": Attention(near)}
        if shape.local_rotary_dim:
            turned = self.table(count, shape.local_rotary_dim)
            extras |= dict(zip(("local_rope_cos", "local_rope_sin"), turned, strict=True))
        for name, width in image_widths(shape).items():
            extras[name] = self.rows(count, width)
        if shape.block:
            turned = self.table(context, shape.rotary_dim)
            extras |= dict(zip(("context_cos", "context_sin"), turned, strict=True))
            extras["target_hidden"] = states_of(self.rows(context, shape.base_features))
        elif own and shape.reads_hidden_states:
            extras["draft_hidden"] = states_of(self.rows(count, shape.features))
        elif shape.reads_hidden_states:
            extras["base_hidden"] = states_of(self.rows(count, shape.base_features))
        return Call(embeds, cos, sin, Attention(all_of), starts, gathered, extras)

    def sequence(self) -> list[Step]:
        """A prompt, a chain, a tree, and what follows the tree's committed path."""
        tree = np.eye(len(PARENTS), dtype=bool)
        for node, parent in enumerate(PARENTS[1:], start=1):
            tree[node] |= tree[parent]
        if self.shape.block:  # the block's rows are written over by the next context
            block = np.ones((5, 5), bool)
            blocks = ((0, 9), (9, 1), (10, 4))
            return [Step(self.make(start, block, rows)) for start, rows in blocks]
        after = 12 + len(PATH)
        return [
            Step(self.make(0, causal(9))),
            Step(self.make(9, causal(1))),
            Step(self.make(10, causal(2))),
            Step(self.make(12, tree, own=True), PATH),
            Step(self.make(after, causal(2))),
            Step(self.make(after + 2, causal(1), own=True)),
        ]


@dataclass(frozen=True)
class Step:
    """A call, and the rows of it that are committed where some are not."""

    call: Call
    path: Array | None = None


def causal(count: int) -> Array:
    return np.tri(count, dtype=bool)


def outputs(runner: GraphRunner, steps: list[Step]) -> list[Array]:
    """What each call gives, and all written rows of the cache behind it."""
    found = []
    for step in steps:
        result = outputs_of(runner.run(step.call))
        found += [result.logits, *([] if result.hidden_states is None else [result.hidden_states])]
        for lane, start in enumerate(step.call.write_indices.tolist()):
            path = np.arange(step.call.written) if step.path is None else step.path
            runner.keep_rows(lane, start + path, start)
            end = start + len(path)
            found += [rows[lane, :, :end].astype(np.float32) for rows in runner.cache.values()]
        if runner.recurrent is not None:
            found += [runner.recurrent.state.copy(), runner.recurrent.conv.copy()]
            found += [rows.copy() for rows in runner.recurrent.pending]
    return found


def difference(found: list[Array], wanted: list[Array]) -> float:
    """The largest difference, relative to the largest value of its array."""
    assert [a.shape for a in found] == [a.shape for a in wanted]
    assert all(np.isfinite(a).all() for a in found)
    return max(
        float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
        for a, b in zip(found, wanted, strict=True)
    )


# ---- runners: sessions are kept for the tests of one graph, and hold no state


def canonical_runner(graph: Canonical, lanes: int = 1) -> GraphRunner:
    return GraphRunner(canonical_session(graph), graph.contract, CAPACITY, SLOTS, lanes)


@lru_cache(maxsize=4)
def canonical_session(graph: Canonical) -> ort.InferenceSession:
    return open_session(graph.path)


@lru_cache(maxsize=4)
def wanted(graph: Canonical, lanes: int = 1, apart: int = 0) -> tuple[list[Step], list[Array]]:
    """A sequence of calls, and what the canonical graph gives."""
    steps = Calls(graph.contract.shape, apart, lanes).sequence()
    return steps, outputs(canonical_runner(graph, lanes), steps)


def lowered_runner(
    graph: Canonical, dialect: Dialect, compute: Compute, lanes: int = 1
) -> GraphRunner:
    """The graph in its own types."""
    session = lowered_session(graph, dialect, compute)
    return runner_of(graph, dialect, compute, session, lanes)


@lru_cache(maxsize=8)
def lowered_session(graph: Canonical, dialect: Dialect, compute: Compute) -> ort.InferenceSession:
    return open_session(graph.lowered(dialect, compute))


def rounded_runner(
    graph: Canonical, dialect: Dialect, compute: Compute, model: ir.Model | None = None
) -> GraphRunner:
    """Each value is rounded to a half type, and computed in float32."""
    model = graph.lowered(dialect, compute).clone() if model is None else model
    session = open_session(widened(model, ir.DataType[compute.upper()]))
    return runner_of(graph, dialect, "float32", session)


def runner_of(
    graph: Canonical,
    dialect: Dialect,
    compute: Compute,
    session: ort.InferenceSession,
    lanes: int = 1,
) -> GraphRunner:
    target = Target(dialect=dialect, compute=compute, capacity=CAPACITY, max_rows=MAX_ROWS)
    contract = lowered_contract(graph.contract, target)
    return GraphRunner(session, contract, CAPACITY, SLOTS, lanes)
