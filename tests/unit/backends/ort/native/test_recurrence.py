"""GatedDeltaNet at every level of instructions: against float64 row by row, and a row in all the
calls that it may stand in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends.ort.native.library import kernels
from tests.unit.backends.ort.native.sessions import compiled, levels, session_of

Floats = NDArray[np.float32]
Array = NDArray[Any]

pytestmark = compiled

UNIT_EPSILON, NORM_EPSILON = 1e-6, 1e-5


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer."""

    keys: int = 2
    values: int = 4
    key_dim: int = 13
    value_dim: int = 22
    kernel: int = 4

    @property
    def parts(self) -> tuple[int, int, int]:
        """The widths of keys, updates and decays of a row."""
        return self.keys * self.key_dim, self.values * self.value_dim, self.values

    @property
    def channels(self) -> int:
        return 2 * self.parts[0] + self.parts[1]

    @property
    def scales(self) -> tuple[float, float]:
        """Of queries and of keys."""
        return 1 / self.key_dim, self.key_dim**-0.5


@cache
def weights(heads: Heads) -> dict[str, Floats]:
    rng = np.random.default_rng(1)
    found = {
        "taps": 0.5 * rng.standard_normal((heads.kernel, heads.channels)),
        "speed": -np.exp(rng.standard_normal(heads.values)),
        "bias": rng.standard_normal(heads.values),
        "norm": 1 + 0.1 * rng.standard_normal(heads.value_dim),
    }
    return {name: value.astype(np.float32) for name, value in found.items()}


@cache
def session(heads: Heads, threads: int = 1) -> ort.InferenceSession:
    """A session of one operator."""
    floats, width = "float32", sum(heads.parts)
    state = ["B", heads.values, heads.key_dim, heads.value_dim]
    inputs: dict[str, tuple[str, list[Any]]] = {
        "mixed": (floats, ["B", "S", heads.channels]),
        "gate": (floats, ["B", "S", heads.parts[1]]),
        "decay": (floats, ["B", "S", heads.values]),
        "rate": (floats, ["B", "S", heads.values]),
        "tree_mask": ("bool", ["B", "S", "S2"]),
        "conv_state": (floats, ["B", heads.kernel - 1, heads.channels]),
        "state": (floats, state),
        "taken": (floats, ["B", "P", width]),
    }
    outputs: dict[str, tuple[str, list[Any]]] = {
        "out": (floats, ["B", "S", heads.parts[1]]),
        "present": (floats, state),
        "left": (floats, ["B", "S", width]),
    }
    attributes = {
        "num_key_heads": heads.keys,
        "num_value_heads": heads.values,
        "unit_epsilon": UNIT_EPSILON,
        "q_scale": heads.scales[0],
        "k_scale": heads.scales[1],
        "norm_epsilon": NORM_EPSILON,
    }
    return session_of("GatedDeltaNet", inputs, outputs, attributes, weights(heads), threads=threads)


@dataclass
class Rows:
    """What the projections give of rows: mixed, gate, decay and rate."""

    mixed: Floats  # [S, C]
    gate: Floats
    decay: Floats
    rate: Floats

    @classmethod
    def some(cls, heads: Heads, count: int, seed: int = 0) -> Rows:
        rng = np.random.default_rng(seed)
        widths = heads.channels, heads.parts[1], heads.values, heads.values
        return cls(*(rng.standard_normal((count, w)).astype(np.float32) for w in widths))

    def of(self, rows: Sequence[int]) -> dict[str, Floats]:
        return {name: value[list(rows)] for name, value in vars(self).items()}

    def __len__(self) -> int:
        return len(self.mixed)


@dataclass
class Lane:
    """A sequence as the runner keeps it: a state, the last rows of the convolution, and committed
    rows that the state has not taken in."""

    heads: Heads
    conv: Floats
    state: Floats
    pending: Floats

    @classmethod
    def empty(cls, heads: Heads) -> Lane:
        state = np.zeros((heads.values, heads.key_dim, heads.value_dim), np.float32)
        conv = np.zeros((heads.kernel - 1, heads.channels), np.float32)
        return cls(heads, conv, state, np.zeros((0, sum(heads.parts)), np.float32))

    @classmethod
    def used(cls, heads: Heads, seed: int = 0) -> Lane:
        """One that has taken in a few rows."""
        lane = cls.empty(heads)
        lane.commit(*lane.call(Rows.some(heads, 9, seed + 100), range(9)), list(range(9)))
        return lane

    def copy(self) -> Lane:
        return Lane(self.heads, self.conv.copy(), self.state.copy(), self.pending.copy())

    def call(
        self, rows: Rows, own: Sequence[int], mask: Array | None = None, threads: int = 1
    ) -> tuple[Floats, Floats, Floats]:
        """Run some rows, a chain or the tree of a mask: their outputs, and what is left of them."""
        (found,) = together([self], rows, [own], [mask], threads)
        return found

    def commit(self, out: Floats, left: Floats, mixed: Floats, path: Sequence[int]) -> None:
        """Keep rows of the last call, by their places in it."""
        del out
        if not len(path):
            return
        both = np.concatenate([self.conv, mixed[list(path)]])
        self.conv = both[len(both) - self.heads.kernel + 1 :]
        self.pending = left[list(path)]


def together(
    lanes: Sequence[Lane],
    rows: Rows,
    own: Sequence[Sequence[int]],
    masks: Sequence[Array | None],
    threads: int = 1,
) -> list[tuple[Floats, Floats, Floats]]:
    """One call of several lanes; those with fewer rows are filled up by rows of their own."""
    heads, longest = lanes[0].heads, max(map(len, own))
    pending = max(1, *(len(lane.pending) for lane in lanes))
    taken = np.zeros((len(lanes), pending, sum(heads.parts)), np.float32)
    mask = np.broadcast_to(np.eye(longest, dtype=bool), (len(lanes), longest, longest)).copy()
    for b, (lane, part) in enumerate(zip(lanes, own, strict=True)):
        taken[b, : len(lane.pending)] = lane.pending
        count, given = len(part), masks[b]
        mask[b, :count, :count] = np.tri(count, dtype=bool) if given is None else given
    filled = [[*part, *[0] * (longest - len(part))] for part in own]
    parts = [rows.of(part) for part in filled]
    feeds = {name: np.stack([part[name] for part in parts]) for name in vars(rows)}
    found = session(heads, threads).run(
        None,
        feeds
        | {
            "tree_mask": mask,
            "conv_state": np.stack([lane.conv for lane in lanes]),
            "state": np.stack([lane.state for lane in lanes]),
            "taken": taken,
        },
    )
    out, present, left = found
    for b, lane in enumerate(lanes):
        lane.state, lane.pending = present[b], lane.pending[:0]
    return [
        (out[b, : len(part)], left[b, : len(part)], rows.mixed[list(part)])
        for b, part in enumerate(own)
    ]


def mask_of(parents: Sequence[int]) -> Array:
    """[S, S] of a tree by its parents."""
    mask = np.eye(len(parents), dtype=bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


def path_of(parents: Sequence[int], row: int) -> list[int]:
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


# ---- against float64


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


class Wide:
    """The layer in float64, one row after the other: the plainest form of it."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self.of = {name: value.astype(np.float64) for name, value in weights(heads).items()}
        self.state = np.zeros((heads.values, heads.key_dim, heads.value_dim))
        self.conv = np.zeros((heads.kernel - 1, heads.channels))

    def copy(self) -> Wide:
        other = Wide(self.heads)
        other.state, other.conv = self.state.copy(), self.conv.copy()
        return other

    def row(self, rows: Rows, at: int) -> Array:
        """The output of one row, which the state takes in."""
        heads, (keys, _, _) = self.heads, self.heads.parts
        mixed, gate, decay, rate = (value[at].astype(np.float64) for value in vars(rows).values())
        series = np.concatenate([self.conv, mixed[None]])
        self.conv = series[1:]
        summed = (series * self.of["taps"]).sum(0)
        q, k, v = np.split(summed * sigmoid(summed), (keys, 2 * keys))
        times = heads.values // heads.keys
        q, k = (
            np.repeat(self.unit(x.reshape(heads.keys, -1)) * scale, times, 0)
            for x, scale in zip((q, k), heads.scales, strict=True)
        )
        v, step = v.reshape(heads.values, -1), np.logaddexp(decay + self.of["bias"], 0)
        self.state *= np.exp(step * self.of["speed"])[:, None, None]
        error = v - np.einsum("hkv,hk->hv", self.state, k)
        self.state += np.einsum("hk,hv->hkv", k, sigmoid(rate)[:, None] * error)
        out = np.einsum("hkv,hk->hv", self.state, q)
        size = np.sqrt((out**2).mean(-1, keepdims=True) + NORM_EPSILON)
        return (out / size * self.of["norm"]).ravel() * gate * sigmoid(gate)

    @staticmethod
    def unit(x: Array) -> Array:
        found: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + UNIT_EPSILON)
        return found


SIZES = [
    Heads(1, 1, 1, 1, 2),
    Heads(1, 1, 5, 3, 1),
    Heads(2, 4, 13, 22, 4),
    Heads(3, 3, 32, 64, 4),
    Heads(1, 3, 37, 149, 3),
    Heads(2, 2, 128, 128, 4),
]


@pytest.mark.parametrize("heads", SIZES, ids=lambda h: f"{h.keys}x{h.key_dim}-{h.value_dim}")
def test_rows_are_those_of_float64(level: str, heads: Heads) -> None:
    """A chain in several calls, of which the last is a tree."""
    del level
    rows = Rows.some(heads, 40)
    lane, wide = Lane.empty(heads), Wide(heads)
    for first, last in ((0, 1), (1, 18), (18, 33)):
        out, left, mixed = lane.call(rows, range(first, last))
        wanted = np.stack([wide.row(rows, at) for at in range(first, last)])
        assert np.abs(out - wanted).max() <= 2e-5 * np.abs(wanted).max()
        lane.commit(out, left, mixed, range(last - first))
    parents = (-1, 0, 0, 1, 2, 2, -1)
    out, _, _ = lane.call(rows, range(33, 40), mask_of(parents))
    for row in range(7):
        branch = wide.copy()
        for node in path_of(parents, row):
            wanted = branch.row(rows, 33 + node)
        assert np.abs(out[row] - wanted).max() <= 2e-5 * np.abs(wanted).max()
    assert np.abs(lane.state - wide.state).max() <= 2e-5 * np.abs(wide.state).max()


# ---- a row in all of its calls


def test_all_levels_give_the_same_bits() -> None:
    for heads in SIZES:
        found = set()
        for name in levels():
            kernels().use_level(name)
            lane = Lane.used(heads)
            out, left, _ = lane.call(Rows.some(heads, 7), range(7), mask_of((-1, 0, 0, 1, 1, 2, 4)))
            found.add((out.tobytes(), left.tobytes(), lane.state.tobytes()))
        kernels().use_level(kernels().levels[0])
        assert len(found) == 1


HEADS = Heads(2, 4, 19, 37, 4)
ROWS = 24


@cache
def alone() -> tuple[list[bytes], bytes]:
    """The outputs of a chain behind a used lane, one row a call, and the state behind them."""
    lane, rows, found = Lane.used(HEADS), Rows.some(HEADS, ROWS), []
    for row in range(ROWS):
        out, left, mixed = lane.call(rows, [row])
        found.append(out.tobytes())
        lane.commit(out, left, mixed, [0])
    return found, with_all(lane).state.tobytes()


def with_all(lane: Lane) -> Lane:
    """The lane after a call that takes its pending rows in."""
    lane.call(Rows.some(HEADS, 1, 9), [0])
    return lane


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    cuts=st.lists(st.integers(1, ROWS - 1), max_size=6),
    threads=st.sampled_from([1, 2]),
    name=st.sampled_from(levels() or ("none",)),
    beside=st.booleans(),
)
def test_a_row_has_the_same_bits_however_rows_are_spread_over_calls(
    cuts: list[int], threads: int, name: str, *, beside: bool
) -> None:
    kernels().use_level(name)
    wanted, state = alone()
    lane, other = Lane.used(HEADS), Lane.used(HEADS, 5)
    rows, edges = Rows.some(HEADS, ROWS), sorted({0, ROWS, *cuts})
    try:
        for first, last in pairwise(edges):
            own = range(first, last)
            if beside:
                longer = [*range(ROWS)][: last - first + 2]
                parts = together([other, lane], rows, [longer, own], [None, None], threads)
                other.commit(*parts[0], longer[:-1])
                found = parts[1]
            else:
                found = lane.call(rows, own, threads=threads)
            assert [row.tobytes() for row in found[0]] == wanted[first:last]
            lane.commit(*found, range(last - first))
        assert with_all(lane).state.tobytes() == state
    finally:
        kernels().use_level(kernels().levels[0])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), threads=st.sampled_from([1, 2]), name=st.sampled_from(levels() or ("none",)))
def test_a_row_of_a_tree_has_the_bits_of_its_path_alone(
    data: st.DataObject, threads: int, name: str
) -> None:
    """And so has the row behind a path that was accepted."""
    kernels().use_level(name)
    count = data.draw(st.integers(1, ROWS - 1))
    parents = [data.draw(st.integers(-1, row - 1)) for row in range(count)]
    rows, lane = Rows.some(HEADS, ROWS), Lane.used(HEADS)
    before = lane.copy()
    try:
        found = lane.call(rows, range(count), mask_of(parents), threads)
        for row in range(count):
            path = path_of(parents, row)
            out, _, _ = before.copy().call(rows, path)
            assert found[0][row].tobytes() == out[-1].tobytes()
        path = path_of(parents, data.draw(st.integers(0, count - 1)))
        lane.commit(*found, path)
        (last, _, _) = lane.call(rows, [ROWS - 1])
        (chain, _, _) = before.copy().call(rows, [*path, ROWS - 1])
        assert last[0].tobytes() == chain[-1].tobytes()
    finally:
        kernels().use_level(kernels().levels[0])


def test_a_row_that_is_no_number_harms_its_own_path_alone(level: str) -> None:
    del level
    rows, parents = Rows.some(HEADS, 6), (-1, 0, 0, 1, 2, 1)
    clean, _, _ = Lane.used(HEADS).call(rows, range(6), mask_of(parents))
    rows.mixed[1] = np.nan
    found, _, _ = Lane.used(HEADS).call(rows, range(6), mask_of(parents))
    for row in range(6):
        if 1 in path_of(parents, row):
            assert np.isnan(found[row]).any()
        else:
            assert found[row].tobytes() == clean[row].tobytes()


def test_the_state_is_written_in_place_where_it_is_bound_so() -> None:
    lane, rows = Lane.used(HEADS), Rows.some(HEADS, 3)
    wanted = lane.copy()
    out, left, _ = wanted.call(rows, range(3))
    feeds = {name: value[None, :3] for name, value in vars(rows).items()}
    feeds |= {"conv_state": lane.conv[None], "taken": lane.pending[None].copy()}
    feeds["tree_mask"] = np.tri(3, dtype=bool)[None]
    state, binding = lane.state[None].copy(), session(HEADS).io_binding()
    found = {"out": np.zeros_like(out)[None], "left": np.zeros_like(left)[None], "present": state}
    kept = {name: np.ascontiguousarray(array) for name, array in feeds.items()} | {"state": state}
    for name, array in kept.items():
        binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    for name, array in found.items():
        binding.bind_output(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    session(HEADS).run_with_iobinding(binding)
    assert found["out"].tobytes() == out.tobytes()
    assert found["left"].tobytes() == left.tobytes()
    assert state.tobytes() == wanted.state.tobytes()


def test_a_call_of_no_sequences_gives_none() -> None:
    rows = Rows.some(HEADS, 2)
    feeds = {name: value[None][:0] for name, value in vars(rows).items()} | {
        "tree_mask": np.zeros((0, 2, 2), bool),
        "conv_state": np.zeros((0, 3, 224), np.float32),
        "state": np.zeros((0, 4, 19, 37), np.float32),
        "taken": np.zeros((0, 1, 190), np.float32),
    }
    assert [found.size for found in session(HEADS).run(None, feeds)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"tree_mask": np.ones((1, 2, 3), bool)}, "what each row follows"),
        ({"gate": np.zeros((1, 3, 148), np.float32)}, "a gate for each value"),
        ({"decay": np.zeros((2, 2, 4), np.float32)}, "a decay and a rate a head"),
        ({"taken": np.zeros((2, 1, 190), np.float32)}, "committed rows of its width"),
        ({"conv_state": np.zeros((2, 3, 224), np.float32)}, "rows before the call"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(changed: dict[str, Array], what: str) -> None:
    assert (sum(HEADS.parts), HEADS.channels) == (190, 224)
    rows = Rows.some(HEADS, 2)
    feeds = {name: value[None] for name, value in vars(rows).items()} | {
        "tree_mask": np.tri(2, dtype=bool)[None],
        "conv_state": np.zeros((1, 3, 224), np.float32),
        "state": np.zeros((1, 4, 19, 37), np.float32),
        "taken": np.zeros((1, 1, 190), np.float32),
    }
    with pytest.raises(Exception, match=what):
        session(HEADS).run(None, feeds | changed)
