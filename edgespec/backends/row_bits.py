"""Whether a row has the same bits in every call of an open engine: alone, among 2 to 64 rows, in a
tree of any order, behind a path of it that was accepted, and beside another sequence.

Recurrent layers cannot drop a row: there the rows before one run again, or are put back.

Calls are made of the contract alone, with small random numbers. Knows rows and trees. Knows no
engine library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.backends.base import LaneRows, Runner, noop
from edgespec.backends.call import Attention, Call, Floats, Ids, LaneAttention, Result
from edgespec.backends.made_calls import made_values
from edgespec.contract import GraphShape, Kind, TensorSpec, graph_inputs

Done = Callable[[], None]
NUM_ROWS = 64  # slots that the calls need
CHUNKS = (1, 2, 3, 4, 5, 7, 8, 13, 21)  # rows of calls, one behind the other: NUM_ROWS in all
ALONE = (63, 50, 33, 17, 8, 1, 0)  # rows that are computed by themselves, the last one first
TREE_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 6, 6, 8, 5)
TREE_START = NUM_ROWS - len(TREE_PARENTS)
# The same tree in two other orders; a parent stands before its children in all of them
ORDERS = ((0, 2, 5, 11, 1, 4, 3, 7, 6, 9, 8, 10), (0, 1, 3, 6, 8, 10, 2, 5, 11, 9, 7, 4))
LEAVES = (10, 11, 9, 4)
BESIDE = 9  # rows of each of two sequences


def num_passes(lanes: int, *, recurrent: bool = False) -> int:
    """The calls of `first_difference`; `recurrent`: whether the engine has recurrent layers."""
    paths = sum(len(path_of(leaf)) for leaf in LEAVES)
    again = sum(row > 0 for row in ALONE) if recurrent else 0
    chains = 2 + len(CHUNKS) + len(ALONE) + again
    return chains + 1 + len(ORDERS) + 2 * len(LEAVES) + paths + (2 if lanes > 1 else 0)


def first_difference(runner: Runner, done: Done = noop) -> str | None:
    """In which call a row had other bits than in the first one; None where there is none. `done` is
    called after each of `num_passes`."""
    material = Material.of(runner.contract.shape)
    trial = BitsTrial(runner, material, done)
    return trial.chain() or trial.tree() or (trial.beside() if runner.lanes > 1 else None)


def path_of(node: int) -> list[int]:
    """The nodes from the root to this one."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = TREE_PARENTS[node]
    return path


@dataclass(frozen=True, slots=True)
class Material:
    """What rows are made of: of a chain, and of the nodes of a tree behind its first rows."""

    shape: GraphShape
    rows: Mapping[str, Floats]  # [NUM_ROWS + nodes, width] by input

    @classmethod
    def of(cls, shape: GraphShape) -> Material:
        """The same numbers for the same shape."""
        rng, count = np.random.default_rng(0), NUM_ROWS + len(TREE_PARENTS)
        specs = [row.spec(shape) for row in graph_inputs(shape, Kind.ROWS, Kind.STATES)]
        dims = {spec.name: spec.dims(B=1, S=count, S_base=count, S_draft=count) for spec in specs}
        rows = {name: 0.5 * rng.standard_normal(n, np.float32)[0] for name, n in dims.items()}
        return cls(shape, rows)

    def call(self, *lanes: TrialRows) -> Call:
        """One call of neighboring lanes, which have as many rows each."""
        rows = np.stack([part.rows for part in lanes])
        positions = np.stack([part.positions for part in lanes])
        attention = Attention([part.attention for part in lanes])

        def numbers(spec: TensorSpec) -> Floats:
            return self.rows[spec.name][rows]

        return Call.of(
            made_values(self.shape, {"S": positions}, attention, numbers),
            np.array([part.start for part in lanes], np.int64),
            [np.arange(len(own)) for own in rows],
        )


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Rows of one lane: which, where they are written, and what they attend to."""

    rows: Ids
    positions: Ids
    start: int
    attention: LaneAttention


def chain(first: int, last: int) -> TrialRows:
    """Rows [first, last) of the chain, behind those before them."""
    rows = np.arange(first, last)
    return TrialRows(rows, rows, first, LaneAttention(first, np.tri(len(rows), dtype=bool), rows))


def nodes(order: Sequence[int]) -> TrialRows:
    """The tree's nodes in an order, behind the first rows of the chain."""
    paths = [set(path_of(node)) for node in order]
    visible = np.array([[other in path for other in order] for path in paths])
    positions = np.array([TREE_START + len(path) - 1 for path in paths])
    return TrialRows(
        np.array(order) + NUM_ROWS,
        positions,
        TREE_START,
        LaneAttention(TREE_START, visible, positions),
    )


def node_behind(path: Sequence[int]) -> TrialRows:
    """The last node of a path alone; those before it are in the cache, committed or not."""
    depth = len(path) - 1
    positions, visible = TREE_START + np.arange(depth + 1), np.ones((1, depth + 1), bool)
    return TrialRows(
        np.array([path[-1]]) + NUM_ROWS,
        positions[-1:],
        TREE_START + depth,
        LaneAttention(TREE_START, visible, positions),
    )


class BitsTrial:
    """The calls on one engine; `seen` are the outputs of rows as their first call gave them."""

    def __init__(self, runner: Runner, material: Material, done: Done) -> None:
        self.runner, self.material, self.done = runner, material, done
        self.recurrent = runner.contract.shape.recurrent is not None
        self.seen: dict[int, bytes] = {}

    def chain(self) -> str | None:
        """All rows at once, in chunks, and some alone."""
        if difference := self.differs(chain(0, NUM_ROWS)):
            return difference
        first = 0
        for count in CHUNKS:
            if difference := self.differs(chain(first, first + count)):
                return difference
            first += count
        return next((said for row in ALONE if (said := self.alone(row))), None)

    def alone(self, row: int) -> str | None:
        """One row of the chain behind those before it."""
        if self.recurrent and row > 0 and (difference := self.differs(chain(0, row))):
            return difference
        return self.differs(chain(row, row + 1))

    def tree(self) -> str | None:
        """The tree at once, in other orders, behind paths of it that were accepted, and node by
        node."""
        if difference := self.differs(chain(0, TREE_START)):
            return difference
        before = self.runner.read_rows(0, TREE_START)
        for order in (range(len(TREE_PARENTS)), *ORDERS):
            if difference := self.differs(nodes(order)):
                return difference
        for leaf in LEAVES:
            self.runner.write_rows(0, before)
            if difference := self.accepted(leaf) or self.node_by_node(leaf, before):
                return difference
        return None

    def accepted(self, leaf: int) -> str | None:
        """A leaf alone, where the tree was run and the path to it was kept."""
        order, path = ORDERS[0], path_of(leaf)
        if difference := self.differs(nodes(order)):
            return difference
        kept = TREE_START + np.array([order.index(node) for node in path[:-1]])
        self.runner.keep_rows(0, kept, TREE_START)
        return self.differs(node_behind(path))

    def node_by_node(self, leaf: int, before: LaneRows) -> str | None:
        """The nodes of a path, each alone."""
        path = path_of(leaf)
        self.runner.write_rows(0, before)
        for length in range(1, len(path) + 1):
            part = node_behind(path[:length])
            if difference := self.differs(part):
                return difference
            if self.recurrent:
                self.runner.keep_rows(0, np.array([part.start]), part.start)
        return None

    def beside(self) -> str | None:
        """Rows of the chain beside other rows, in either of two lanes."""
        own = chain(0, BESIDE)
        other = TrialRows(own.rows[::-1].copy(), own.positions, 0, own.attention)
        for lane in (0, 1):
            parts = (own, other) if lane == 0 else (other, own)
            results = self.runner.run(self.material.call(*parts))
            self.done()
            if difference := self.compare(own, results[lane], "beside another sequence"):
                return difference
        return None

    def differs(self, part: TrialRows) -> str | None:
        """Run rows of one lane; the first of them that has other bits than before."""
        (result,) = self.runner.run(self.material.call(part))
        self.done()
        count = len(part.rows)
        difference = self.compare(part, result, "alone" if count == 1 else f"among {count} rows")
        if part.rows[0] < NUM_ROWS:
            self.runner.keep_rows(0, part.start + np.arange(count), part.start)
        return difference

    def compare(self, part: TrialRows, result: Result, where: str) -> str | None:
        """Which row has other bits than it had first; rows that are new are kept."""
        outputs = [result.logits.rows().reshape(len(part.rows), -1)]
        if result.hidden_states is not None:
            outputs.append(result.hidden_states.numpy())
        for i, row in enumerate(part.rows.tolist()):
            bits = b"".join(output[i].tobytes() for output in outputs)
            if self.seen.setdefault(row, bits) != bits:
                return f"row {row} has other bits {where} than in another call"
        return None
