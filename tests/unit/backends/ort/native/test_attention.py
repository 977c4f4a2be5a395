"""TreeAttention at every level of instructions: against float64, and a row in all the calls that
it may stand in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgespec.backends.ort.native.library import kernels
from tests.unit.backends.ort.native.sessions import Port, compiled, levels, session_of

Floats = NDArray[np.float32]
Array = NDArray[Any]

pytestmark = compiled

OPERATORS = {
    "float32": "TreeAttention",
    "float16": "TreeAttentionFloat16",
    "int8": "TreeAttentionInt8",
}
SCALE_BYTES = 4  # of a row of int8 codes


@dataclass(frozen=True)
class Heads:
    """The sizes of an attention, and its cache's type."""

    num: int = 4
    kv: int = 2
    dim: int = 24
    cache: str = "float32"
    scale: float = 0.3
    rotary: int = 0
    epsilon: float | None = None  # of norms of queries and keys

    @property
    def row(self) -> int:
        """Elements of a row of the cache."""
        return self.dim + (SCALE_BYTES if self.cache == "int8" else 0)


@cache
def session(heads: Heads, threads: int = 1) -> ort.InferenceSession:
    """A session of one operator."""
    floats, ids = "float32", "int64"
    kept = (heads.cache, ["B", heads.kv, "C", heads.row])
    inputs: dict[str, Port | None] = {
        "q": (floats, ["B", "S", heads.num * heads.dim]),
        "k": (floats, ["B", "R", heads.kv * heads.dim]),
        "v": (floats, ["B", "R", heads.kv * heads.dim]),
        "past_key": kept,
        "past_value": kept,
        "write_indices": (ids, ["B"]),
        "lengths": (ids, ["B"]),
        "visible": ("bool", ["B", "S", "V"]),
        "first": (ids, ["B", "S"]),
    }
    if heads.rotary:
        inputs |= {name: (floats, ["B", "R", heads.rotary // 2]) for name in ("cos", "sin")}
    if heads.epsilon is not None:
        inputs |= {} if heads.rotary else {"cos": None, "sin": None}
        inputs |= {name: (floats, ["D"]) for name in ("q_norm", "k_norm")}
    outputs = {
        "out": (floats, ["B", "S", heads.num * heads.dim]),
        "present_key": kept,
        "present_value": kept,
    }
    attributes = {"num_heads": heads.num, "kv_num_heads": heads.kv, "scale": heads.scale}
    attributes |= {} if heads.epsilon is None else {"norm_epsilon": heads.epsilon}
    return session_of(OPERATORS[heads.cache], inputs, outputs, attributes, threads=threads)


@dataclass
class Lanes:
    """Caches of a few sequences. What was never written is NaN, or codes with a scale of NaN."""

    heads: Heads
    keys: Array
    values: Array

    @classmethod
    def of(cls, heads: Heads, batch: int, slots: int) -> Lanes:
        dims = (batch, heads.kv, slots, heads.row)
        if heads.cache == "int8":
            return cls(heads, np.full(dims, -1, np.int8), np.full(dims, -1, np.int8))
        dtype = np.dtype(heads.cache)
        return cls(heads, np.full(dims, np.nan, dtype), np.full(dims, np.nan, dtype))

    def run(
        self,
        q: Floats,
        k: Floats,
        v: Floats,
        lengths: list[int],
        visible: Array,
        first: Array | None = None,
        *,
        starts: list[int] | None = None,
        threads: int = 1,
        turned: tuple[Floats, Floats] | None = None,
        norms: tuple[Floats, Floats] | None = None,
    ) -> Floats:
        """One call: q [B, S, N, D], k and v [B, R, Nkv, D] -> [B, S, N, D]."""
        flat = [x.reshape(*x.shape[:2], -1).astype(np.float32) for x in (q, k, v)]
        feeds = dict(zip("qkv", flat, strict=True)) | {
            "past_key": self.keys,
            "past_value": self.values,
            "write_indices": np.array(lengths if starts is None else starts, np.int64),
            "lengths": np.array(lengths, np.int64),
            "visible": visible,
            "first": np.zeros(visible.shape[:2], np.int64) if first is None else first,
        }
        if turned is not None:
            feeds |= dict(zip(("cos", "sin"), turned, strict=True))
        if norms is not None:
            feeds |= dict(zip(("q_norm", "k_norm"), norms, strict=True))
        found = session(self.heads, threads).run(None, feeds)
        self.keys, self.values = found[1], found[2]
        out: Floats = found[0].reshape(q.shape)
        return out

    def numbers(self, rows: Array) -> NDArray[np.float64]:
        """What cached rows mean."""
        if self.heads.cache != "int8":
            return rows.astype(np.float64)
        scales = np.ascontiguousarray(rows[..., -SCALE_BYTES:]).view(np.float32)
        return rows[..., :-SCALE_BYTES].astype(np.float64) * scales

    def move(self, lane: int, slots: list[int], start: int) -> None:
        """Put rows to `start`, `start` + 1, ..."""
        targets = np.arange(start, start + len(slots))
        for of in (self.keys, self.values):
            of[lane, :, targets] = of[lane, :, slots]


def reference(
    lanes: Lanes, q: Floats, lengths: list[int], visible: Array, first: Array | None = None
) -> NDArray[np.float64]:
    """Attention in float64 over what stands in the caches."""
    heads, out = lanes.heads, np.zeros(q.shape)
    for b, length in enumerate(lengths):
        for row, seen in enumerate(visible[b]):
            path = np.concatenate([np.arange(length), length + np.flatnonzero(seen)])
            path = path if first is None else path[first[b, row] :]
            if not seen.any():
                continue
            for head in range(heads.num):
                group = head // (heads.num // heads.kv)
                keys, values = (
                    lanes.numbers(of[b, group][path]) for of in (lanes.keys, lanes.values)
                )
                scores = keys @ q[b, row, head].astype(np.float64) * np.float32(heads.scale)
                weights = np.exp(scores - scores.max())
                out[b, row, head] = weights @ values / weights.sum()
    return out


def some(rng: np.random.Generator, *dims: int) -> Floats:
    return rng.standard_normal(dims).astype(np.float32)


def tree_of(parents: list[int]) -> NDArray[np.bool_]:
    """What each node of a tree sees of it; -1 is the parent of roots."""
    visible = np.zeros((len(parents), len(parents)), bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, node] = True
    return visible


def filled(heads: Heads, rng: np.random.Generator, lengths: list[int], slots: int) -> Lanes:
    """Caches with rows of some earlier calls, and NaN behind them."""
    lanes = Lanes.of(heads, len(lengths), slots)
    for b, length in enumerate(lengths):
        if not length:
            continue
        own = Lanes(heads, lanes.keys[b : b + 1], lanes.values[b : b + 1])
        k, v = some(rng, 2, 1, length, heads.kv, heads.dim)
        own.run(some(rng, 1, 1, heads.num, heads.dim), k, v, [0], np.ones((1, 1, 1), bool))
        lanes.keys[b], lanes.values[b] = own.keys[0], own.values[0]
    return lanes


# ---- against float64

# dim, heads of a KV head: those of models, and others that fill no vector
SHAPES = [(64, 1), (80, 2), (96, 3), (128, 2), (256, 4), (8, 8), (20, 5), (17, 6), (1, 7)]


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize(("dim", "group"), SHAPES)
def test_output_is_that_of_float64(level: str, kind: str, dim: int, group: int) -> None:
    rng = np.random.default_rng(dim + group)
    heads = Heads(2 * group, 2, dim, kind, scale=dim**-0.5)
    lengths, rows = [300, 0, 17], 7
    lanes = filled(heads, rng, lengths, 310)
    visible = np.stack([tree_of([-1, 0, 0, 1, 2, 2, 5])] * 3)
    visible[1, 6] = False  # a row that fills up
    first = np.zeros((3, rows), np.int64)
    first[2] = [3, 4, 4, 5, 5, 5, 18]  # windows, the last one within the tree
    q = 3 * some(rng, 3, rows, heads.num, dim)
    k, v = some(rng, 2, 3, rows, heads.kv, dim)
    found = lanes.run(q, k, v, lengths, visible, first)
    wanted = reference(lanes, q, lengths, visible, first)
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()
    assert not found[1, 6].any()


@pytest.mark.parametrize("kind", OPERATORS)
def test_rows_are_written_where_they_belong_and_nowhere_else(level: str, kind: str) -> None:
    rng = np.random.default_rng(1)
    heads = Heads(cache=kind)
    lanes = filled(heads, rng, [5, 9], 20)
    before = lanes.keys.copy(), lanes.values.copy()
    k, v = some(rng, 2, 2, 3, heads.kv, heads.dim)
    visible = np.broadcast_to(np.eye(3, dtype=bool), (2, 3, 3)).copy()
    lanes.run(some(rng, 2, 3, 4, heads.dim), k, v, [5, 9], visible)
    steps = {"float32": 0.0, "float16": 2.0**-11, "int8": 1 / 127}  # of the largest
    for of, was, rows in zip((lanes.keys, lanes.values), before, (k, v), strict=True):
        for b, start in enumerate((5, 9)):
            own = lanes.numbers(of[b, :, start : start + 3])
            wanted = rows[b].transpose(1, 0, 2)
            assert np.abs(own - wanted).max() <= steps[kind] * np.abs(wanted).max()
            of[b, :, start : start + 3] = was[b, :, start : start + 3]
        assert of.tobytes() == was.tobytes()


def test_a_block_sees_later_rows_and_context_is_only_written(level: str) -> None:
    rng = np.random.default_rng(2)
    heads = Heads()
    lanes = filled(heads, rng, [6], 20)
    q = some(rng, 1, 4, heads.num, heads.dim)
    k, v = some(rng, 2, 1, 7, heads.kv, heads.dim)  # three of context, four of the block
    visible = np.ones((1, 4, 4), bool)
    found = lanes.run(q, k, v, [9], visible, starts=[6])
    wanted = reference(lanes, q, [9], visible)
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


def test_scratch_rows_of_earlier_calls_are_seen_through_a_gap(level: str) -> None:
    rng = np.random.default_rng(3)
    heads = Heads()
    lanes = filled(heads, rng, [12], 24)
    visible = np.zeros((1, 2, 10), bool)  # slots from 8 on: four of scratch, four unwritten, own
    visible[0, 0, [1, 3, 8]] = visible[0, 1, [0, 9]] = True
    q = some(rng, 1, 2, heads.num, heads.dim)
    k, v = some(rng, 2, 1, 2, heads.kv, heads.dim)
    found = lanes.run(q, k, v, [8], visible, starts=[16])
    wanted = reference(lanes, q, [8], visible)
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


def test_rotation_is_that_of_halves(level: str) -> None:
    rng = np.random.default_rng(4)
    heads = Heads(rotary=16)
    angles = rng.uniform(0, 6, (1, 5, 8))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    q = some(rng, 1, 3, heads.num, heads.dim)  # the last three of the five rows
    k, v = some(rng, 2, 1, 5, heads.kv, heads.dim)

    def rotated(x: Floats, rows: slice) -> Floats:
        out, c, s = x.copy(), cos[:, rows, None], sin[:, rows, None]
        a, b = x[..., :8], x[..., 8:16]
        out[..., :8], out[..., 8:16] = a * c - b * s, a * s + b * c
        return out

    visible = np.tri(3, dtype=bool)[None]
    lanes, plain = (Lanes.of(of, 1, 8) for of in (heads, replace(heads, rotary=0)))
    found = lanes.run(q, k, v, [2], visible, starts=[0], turned=(cos, sin))
    turned = rotated(q, slice(2, 5)), rotated(k, slice(0, 5)), v
    np.testing.assert_allclose(
        found, plain.run(*turned, [2], visible, starts=[0]), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(lanes.keys, plain.keys, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rotary", [0, 16])
def test_heads_are_normed_before_they_are_turned(level: str, rotary: int) -> None:
    """To the bit as RmsNorm and the same attention without norms do it, on any number of
    threads."""
    rng = np.random.default_rng(6)
    heads = Heads(rotary=rotary, epsilon=1e-5)
    angles = rng.uniform(0, 6, (1, 40, 8))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turned = (cos, sin) if rotary else None
    weights = (some(rng, heads.dim), some(rng, heads.dim))
    q = some(rng, 1, 38, heads.num, heads.dim)  # the last rows
    k, v = some(rng, 2, 1, 40, heads.kv, heads.dim)
    visible = np.tri(38, dtype=bool)[None]
    norm = session_of(
        "RmsNorm",
        {"x": ("float32", ["n", "d"]), "inner": None, "residual": None, "w": ("float32", ["d"])},
        {"y": ("float32", ["n", "d"])},
        {"epsilon": heads.epsilon},
    )
    normed = [
        norm.run(None, {"x": x.reshape(-1, heads.dim), "w": w})[0].reshape(x.shape)
        for x, w in zip((q, k), weights, strict=True)
    ]
    plain = Lanes.of(replace(heads, epsilon=None), 1, 40)
    wanted = plain.run(*normed, v, [2], visible, starts=[0], turned=turned)
    for threads in (1, 2):
        lanes = Lanes.of(heads, 1, 40)
        given = {"starts": [0], "turned": turned, "norms": weights, "threads": threads}
        found = lanes.run(q, k, v, [2], visible, **given)
        assert found.tobytes() == wanted.tobytes()
        assert lanes.keys.tobytes() == plain.keys.tobytes()
        assert lanes.values.tobytes() == plain.values.tobytes()


def test_weights_of_another_width_norm_no_heads() -> None:
    rng = np.random.default_rng(7)
    lanes = Lanes.of(Heads(epsilon=1e-5), 1, 4)
    q, k = some(rng, 1, 1, 4, 24), some(rng, 1, 1, 2, 24)
    norms = some(rng, 24), some(rng, 12)
    with pytest.raises(Exception, match="it needs weights for the norms of queries and of keys"):
        lanes.run(q, k, k, [0], np.ones((1, 1, 1), bool), norms=norms)


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_nan_harms_the_rows_alone_that_see_it(level: str, kind: str) -> None:
    rng = np.random.default_rng(5)
    heads = Heads(cache=kind)
    lanes = filled(heads, rng, [9], 20)
    visible = tree_of([-1, 0, 0, 2, 1])[None]
    q = some(rng, 1, 5, heads.num, heads.dim)
    k, v = some(rng, 2, 1, 5, heads.kv, heads.dim)
    clean = Lanes(heads, lanes.keys.copy(), lanes.values.copy()).run(q, k, v, [9], visible)
    k[0, 2, 0, 3] = np.nan
    v[0, 2, 1, 3] = np.inf
    found = lanes.run(q, k, v, [9], visible)
    assert found[0, [0, 1, 4]].tobytes() == clean[0, [0, 1, 4]].tobytes()
    assert not np.isfinite(found[0, [2, 3]]).all((1, 2)).any()


def test_weights_far_below_the_largest_are_zero_and_large_scores_do_not_overflow(
    level: str,
) -> None:
    heads = Heads(num=1, kv=1, dim=2, scale=1.0)
    lanes = Lanes.of(heads, 1, 4)
    k = np.array([[[[300.0, 0]], [[200.0, 0]], [[-300.0, 0]]]], np.float32)
    v = np.array([[[[1.0, 2]], [[3.0, 4]], [[5.0, 6]]]], np.float32)
    q = np.array([[[[1.0, 0]], [[1.0, 0]], [[100.0, 0]]]], np.float32)
    found = lanes.run(q, k, v, [0], np.tri(3, dtype=bool)[None])
    assert found[0, 0, 0].tolist() == found[0, 1, 0].tolist() == found[0, 2, 0].tolist() == [1, 2]


# ---- the bits of a row


@dataclass(frozen=True)
class Story:
    """A sequence of `length` tokens and a tree behind it: queries, keys and values by token; node i
    of the tree is token length + i."""

    heads: Heads
    length: int
    parents: list[int]
    seed: int
    window: int | None = None
    tokens: tuple[Floats, Floats, Floats] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        rng, count = np.random.default_rng(self.seed), self.length + len(self.parents)
        made = tuple(
            2 * some(rng, count, num, self.heads.dim)
            for num in (self.heads.num, self.heads.kv, self.heads.kv)
        )
        object.__setattr__(self, "tokens", made)

    def rows(self, tokens: Array | list[int]) -> list[Floats]:
        """[1, S, heads, D] of q, k and v."""
        return [of[None, tokens] for of in self.tokens]

    def path(self, node: int) -> list[int]:
        """The nodes from a root to a node."""
        nodes = []
        while node >= 0:
            nodes.insert(0, node)
            node = self.parents[node]
        return nodes

    def first(self, positions: Array | list[int]) -> NDArray[np.int64]:
        """[1, S] by the window."""
        own = np.asarray(positions)[None]
        return np.maximum(0, own - (self.window or 1 << 30) + 1)

    def prefilled(self, slots: int, cuts: list[int], threads: int = 1) -> tuple[Lanes, Floats]:
        """Caches after the sequence was read in pieces that end at `cuts`, and all outputs."""
        lanes, begin = Lanes.of(self.heads, 1, slots), 0
        out = [np.zeros((0, self.heads.num, self.heads.dim), np.float32)]
        for end in (*sorted({cut for cut in cuts if 0 < cut < self.length}), self.length):
            if begin == end:
                continue
            here = np.arange(begin, end)
            visible = np.tri(end - begin, dtype=bool)[None]
            rows = lanes.run(*self.rows(here), [begin], visible, self.first(here), threads=threads)
            out.append(rows[0])
            begin = end
        return lanes, np.concatenate(out)

    def decoded(self, lanes: Lanes, nodes: list[int]) -> list[bytes]:
        """The outputs of a path by one row after another."""
        own, found = Lanes(self.heads, lanes.keys.copy(), lanes.values.copy()), []
        for depth, node in enumerate(nodes):
            here = self.length + depth
            row = self.rows([self.length + node])
            out = own.run(*row, [here], np.ones((1, 1, 1), bool), self.first([here]))
            found.append(out.tobytes())
        return found


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Sequences about the edges of chunks and vectors, and trees of any form."""
    kind = draw(st.sampled_from(sorted(OPERATORS)))
    kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    heads = Heads(kv * group, kv, draw(st.sampled_from([3, 16, 40, 64])), kind)
    length = draw(st.one_of(st.integers(0, 40), st.integers(250, 260), st.integers(508, 515)))
    count = draw(st.integers(1, 14))
    parents = [draw(st.integers(-1, node - 1)) if node else -1 for node in range(count)]
    window = draw(st.one_of(st.none(), st.integers(1, 300)))
    return Story(heads, length, parents, draw(st.integers(0, 99)), window)


SETTINGS = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@SETTINGS
@given(story=stories(), data=st.data())
def test_a_node_has_the_bits_of_plain_decoding_in_any_tree(
    story: Story, data: st.DataObject
) -> None:
    """In any order that has parents first, in a batch, on any threads, at any level; and its path
    goes on with the same bits when it has been committed."""
    heads, count = story.heads, len(story.parents)
    plain, _ = story.prefilled(story.length + count + 2, [])
    wanted = {node: story.decoded(plain, story.path(node))[-1] for node in range(count)}
    # children may come in any order behind their parents
    order: list[int] = []
    while len(order) < count:
        ready = [
            node
            for node in range(count)
            if node not in order and (story.parents[node] < 0 or story.parents[node] in order)
        ]
        order.append(data.draw(st.sampled_from(ready)))
    place = {node: i for i, node in enumerate(order)}
    visible = np.zeros((1, count, count), bool)
    for node in order:
        visible[0, place[node], [place[other] for other in story.path(node)]] = True
    positions = [story.length + len(story.path(node)) - 1 for node in order]
    first = story.first(positions)
    q, k, v = story.rows([story.length + node for node in order])
    threads = data.draw(st.sampled_from([1, 2]))
    cuts = data.draw(st.lists(st.integers(1, 515), max_size=3))
    lanes, _ = story.prefilled(story.length + count + 30, cuts, threads)
    kernels().use_level(data.draw(st.sampled_from(levels())))
    try:
        batch = data.draw(st.sampled_from([1, 2, 3]))
        here = data.draw(st.integers(0, batch - 1))
        lengths = [data.draw(st.integers(0, story.length)) for _ in range(batch)]
        lengths[here] = story.length
        together = Lanes(heads, *(np.repeat(of, batch, 0) for of in (lanes.keys, lanes.values)))
        others = np.random.default_rng(7)
        rows = [np.concatenate([some(others, *of.shape)] * batch) for of in (q, k, v)]
        for of, own in zip(rows, (q, k, v), strict=True):
            of[here] = own[0]
        seen = np.repeat(visible, batch, 0)
        out = together.run(*rows, lengths, seen, np.repeat(first, batch, 0), threads=threads)[here]
        for node in order:
            assert out[place[node]].tobytes() == wanted[node], f"node {node}"
        goal = data.draw(st.integers(0, count - 1))
        path = story.path(goal)
        own = Lanes(heads, together.keys[here : here + 1], together.values[here : here + 1])
        own.move(0, [story.length + place[node] for node in path], story.length)
        last = story.decoded(own, path)[-1]
        assert last == wanted[goal]
    finally:
        kernels().use_level(kernels().levels[0])


@SETTINGS
@given(
    story=stories(), cuts=st.lists(st.integers(1, 515), max_size=4), threads=st.sampled_from([1, 2])
)
def test_a_prompt_has_the_same_bits_however_it_is_cut(
    story: Story, cuts: list[int], threads: int
) -> None:
    whole, wanted = story.prefilled(story.length + 1, [])
    kernels().use_level(levels()[-1] if story.length < 50 else levels()[0])
    try:
        pieces, found = story.prefilled(story.length + 9, cuts, threads)
    finally:
        kernels().use_level(kernels().levels[0])
    assert found.tobytes() == wanted.tobytes()
    slots = slice(0, story.length)
    assert pieces.keys[:, :, slots].tobytes() == whole.keys[:, :, slots].tobytes()
    assert pieces.values[:, :, slots].tobytes() == whole.values[:, :, slots].tobytes()


def test_long_paths_are_shared_by_threads_without_a_change() -> None:
    """One KV head and 3000 positions: chunks are cut among pieces."""
    rng = np.random.default_rng(6)
    heads = Heads(3, 1, 32)
    lanes = filled(heads, rng, [3000], 3010)
    q = some(rng, 1, 4, heads.num, heads.dim)
    k, v = some(rng, 2, 1, 4, heads.kv, heads.dim)
    visible, first = tree_of([-1, 0, 0, 1])[None], np.array([[0, 700, 2999, 3002]])
    found = []
    for name in levels():
        kernels().use_level(name)
        for threads in (1, 2):
            nothing = Lanes.of(heads, 1, 3010)  # its NaN are no part of the next call
            nothing.run(q, k, v, [3000], visible, threads=threads)
            own = Lanes(heads, lanes.keys, lanes.values)
            found.append(own.run(q, k, v, [3000], visible, first, threads=threads).tobytes())
    kernels().use_level(kernels().levels[0])
    # four sequences have pieces enough: their chunks are not cut
    four = Lanes(heads, *(np.repeat(of, 8, 0) for of in (lanes.keys, lanes.values)))
    rows = [np.repeat(of, 8, 0) for of in (q, k, v)]
    whole = four.run(*rows, [3000] * 8, np.repeat(visible, 8, 0), np.repeat(first, 8, 0))
    found += [row.tobytes() for row in whole[:, None]]
    assert len(set(found)) == 1
    wanted = reference(own, q, [3000], visible, first)
    assert np.abs(whole[:1] - wanted).max() <= 2e-6 * np.abs(wanted).max()


def test_caches_are_written_in_place_where_they_are_bound_so() -> None:
    rng = np.random.default_rng(8)
    heads = Heads()
    lanes = filled(heads, rng, [4], 12)
    q = some(rng, 1, 2, heads.num, heads.dim)
    k, v = some(rng, 2, 1, 2, heads.kv, heads.dim)
    visible, ids = np.tri(2, dtype=bool)[None], np.array([4], np.int64)
    copied = Lanes(heads, lanes.keys.copy(), lanes.values.copy())
    wanted = copied.run(q, k, v, [4], visible)
    binding, out = session(heads).io_binding(), np.zeros_like(wanted)
    flat = dict(zip("qkv", (x.reshape(1, 2, -1) for x in (q, k, v)), strict=True))
    indices = {"write_indices": ids, "lengths": ids, "first": np.zeros((1, 2), np.int64)}
    inputs = {**flat, **indices, "past_key": lanes.keys, "past_value": lanes.values}
    for name, array in {**inputs, "visible": visible}.items():
        binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    outputs = {"out": out.reshape(1, 2, -1), "present_key": lanes.keys}
    for name, array in {**outputs, "present_value": lanes.values}.items():
        binding.bind_output(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
    session(heads).run_with_iobinding(binding)
    assert out.tobytes() == wanted.tobytes()
    assert lanes.keys.tobytes() == copied.keys.tobytes()


# ---- refused


@pytest.mark.parametrize(
    ("lengths", "starts", "visible", "what"),
    [
        ([4], [11], np.ones((1, 2, 2), bool), "rows from slot 11 on go behind a cache of 12"),
        ([4], [-1], np.ones((1, 2, 2), bool), "rows from slot -1 on"),
        ([13], [4], np.ones((1, 2, 2), bool), "no 13 rows in a cache of 12"),
        ([4], [4], np.ones((1, 2, 9), bool), "a row sees a slot behind a cache of 12"),
        ([4], [4], np.full((1, 2, 9), 2, np.uint8).view(bool), "a byte that is neither 0 nor 1"),
        ([4], [4], np.ones((1, 3, 2), bool), "what each row sees"),
        ([4, 4], [4], np.ones((1, 2, 2), bool), "a length for each sequence"),
    ],
)
def test_indices_that_lead_out_of_a_cache_are_refused(
    lengths: list[int], starts: list[int], visible: Array, what: str
) -> None:
    heads = Heads()
    lanes = Lanes.of(heads, 1, 12)
    q, (k, v) = np.zeros((1, 2, 4, 24), np.float32), np.zeros((2, 1, 2, 2, 24), np.float32)
    with pytest.raises(Exception, match=what):
        lanes.run(q, k, v, lengths, visible, np.zeros((1, 2), np.int64), starts=starts)
