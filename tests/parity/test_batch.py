"""An engine for several sequences against the engine for one: each sequence of a batch is as if it
were alone.

Lanes have prompts of different lengths and random trees of different sizes, padded to the largest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.artifacts import file_names
from edgespec.backends.base import BuildOptions
from edgespec.backends.call import Attention, Call, LaneAttention, Result
from edgespec.backends.golden import joined
from edgespec.backends.host import gather_idx
from edgespec.backends.masks import attention_mask
from edgespec.backends.ort.lane_rows import OrtLaneRows
from edgespec.backends.ort.options import FP32
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.registry import open_runner
from edgespec.contract import GraphShape, Limits, Role, past_names
from edgespec.export.components import ExportOptions
from edgespec.rope import RopeTable
from tests import made, toys
from tests.calls import outputs_of, states_of

Array = NDArray[Any]
Tree = tuple[Array, Array]  # parents [N], -1 at the root; rows kept of it, ascending

CAPACITY, TREE_SIZE, LANES = 48, 12, 4
TOLERANCE = 1e-5  # of the largest value


# Engines


@dataclass(frozen=True)
class Pair:
    """Engines of one checkpoint: for one sequence, which is the judge, and for several."""

    onnx_dir: Path
    one: OrtRunner
    many: OrtRunner
    rope: RopeTable

    @property
    def shape(self) -> GraphShape:
        return self.many.contract.shape


BASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "dtype": "bfloat16"},
    "qwen3-qk-norm": {"family": "qwen3", "head_dim": 32, "heads": 6, "kv_heads": 2},
    "qwen2-bias": {"family": "qwen2"},
}
COMPONENTS = (*BASES, "draft")


@pytest.fixture(scope="module", params=COMPONENTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    yield from made_pair(tmp_path_factory.mktemp("pair"), request.param)


@pytest.fixture(scope="module", params=["default", "onnxruntime"])
def llama(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """On the kernels that are the default here, and on ONNX Runtime's."""
    options = FP32 if request.param == "onnxruntime" else None
    yield from made_pair(tmp_path_factory.mktemp("llama"), "llama", options)


def made_pair(work: Path, name: str, build: BuildOptions | None = None) -> Iterator[Pair]:
    checkpoint = toys.make_base(work / "base", layers=7, **BASES.get(name, {}))
    role, options = Role.BASE, ExportOptions(base_for="eagle3")
    if name == "draft":
        role, options = Role.DRAFT, ExportOptions(base_model_dir=str(checkpoint))
        checkpoint = toys.make_draft(work / "draft", checkpoint, layout="modelopt", layers=2)
    (onnx_dir,) = made.exported(checkpoint, options).iterdir()
    runners = []
    for lanes in (1, LANES):
        limits = Limits(lanes, CAPACITY, CAPACITY, TREE_SIZE, TREE_SIZE)
        runner, config = open_runner(made.built(limits, onnx_dir, options=build), role)
        runners.append(runner)
    yield Pair(onnx_dir, *runners, RopeTable.of(config.component.rope, CAPACITY))
    for runner in runners:
        runner.close()


# Sequences


def random_tree(rng: np.random.Generator, size: int) -> Tree:
    parents = np.array([-1, *(int(rng.integers(node)) for node in range(1, size))])
    path = [size - 1]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    return parents, np.array(path)


def visible_nodes(parents: Array) -> Array:
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        seen[node] |= seen[parent]
    return seen


@dataclass
class Sequence:
    """One sequence: makes its calls, and remembers what the engine for one said to them."""

    pair: Pair
    rng: np.random.Generator
    length: int = 0  # committed rows
    calls: list[tuple[Call, Array]] = field(
        default_factory=list
    )  # each with the rows that were kept of it

    def prompt(self, count: int) -> Call:
        return self.call(np.arange(count), np.tri(count, dtype=bool))

    def tree(self, parents: Array) -> Call:
        seen = visible_nodes(parents)
        return self.call(seen.sum(1) - 1, seen, own_state=self.length > 0)

    def call(self, depths: Array, seen: Array, *, own_state: bool = False) -> Call:
        count, shape = len(depths), self.pair.shape
        cos, sin = self.pair.rope.rows(self.length + depths[None])
        seen_of = Attention([LaneAttention(self.length, seen, self.length + depths)])
        start, gather = np.array([self.length]), [np.arange(count)]
        call = Call(self.made(count, shape.hidden_size), cos, sin, seen_of, start, gather)
        if shape.role is not Role.DRAFT:
            return call
        if own_state:
            return replace(
                call, extras={"draft_hidden": states_of(self.made(count, shape.features))}
            )
        return replace(
            call, extras={"base_hidden": states_of(self.made(count, shape.base_features))}
        )

    def made(self, count: int, width: int) -> Array:
        return self.rng.standard_normal((1, count, width), np.float32)

    def keep(self, call: Call, kept: Array) -> None:
        self.calls.append((call, kept))
        self.length += len(kept)

    def alone(self) -> tuple[Array, Array | None, Array]:
        """What the engine for one says to the last call, and the KV rows of all after it, before
        any is moved."""
        runner, length = self.pair.one, 0
        for call, kept in self.calls:
            result = outputs_of(runner.run(call))
            hidden = None if result.hidden_states is None else result.hidden_states[0].copy()
            end = length + call.inputs_embeds.shape[1]
            found = result.logits[0].copy(), hidden, runner.read_rows(0, end).kv
            runner.keep_rows(0, length + kept, length)
            length += len(kept)
        return found


def padded(call: Call, rows: int, junk: float) -> Call:
    """The call with rows of junk behind its own, each seeing itself alone."""
    count = call.rows
    missing = rows - count
    (lane,) = call.attention.lanes
    seen = np.zeros((rows, rows), bool)
    seen[:count, :count] = lane.visible
    seen[np.arange(count, rows), np.arange(count, rows)] = True
    own = LaneAttention(lane.length, seen, np.append(lane.positions, np.zeros(missing, np.int64)))

    def filled(array: Array) -> Array:
        extra = np.full((1, missing, array.shape[2]), junk, np.float32)
        return np.concatenate([array, extra], axis=1)

    arrays = {
        name: filled(getattr(call, name)) for name in ("inputs_embeds", "rope_cos", "rope_sin")
    }
    states = {
        name: states_of(filled(given[0].numpy()[None]))
        for name in ("base_hidden", "draft_hidden")
        if (given := call.states(name)) is not None
    }
    junk_is_seen_by_nobody = junk_alone(lane.length, own, count)
    return replace(
        call,
        attention=junk_is_seen_by_nobody,
        gather=[np.arange(rows)],
        extras={**call.extras, **states},
        **arrays,
    )


def junk_alone(length: int, lane: LaneAttention, count: int) -> Attention:
    """Everything said slot by slot: rows behind the first `count` see not even what is
    committed."""
    rows = len(lane.visible)
    known = np.broadcast_to(np.arange(rows)[:, None] < count, (rows, length))
    visible = np.concatenate([known, lane.visible], 1)
    return Attention([LaneAttention(0, visible, np.append(np.arange(length), lane.positions))])


def batch_of(calls: list[Call], first_lane: int = 0, junk: float = 0.5) -> Call:
    rows = max(call.rows for call in calls)
    calls = [padded(call, rows, junk) for call in calls]
    return replace(functools.reduce(joined, calls), first_lane=first_lane)


def close(found: Array, wanted: Array) -> bool:
    assert found.shape == wanted.shape
    return bool(np.abs(found - wanted).max() <= TOLERANCE * np.abs(wanted).max())


def assert_as_if_alone(
    pair: Pair, sequences: list[Sequence], results: list[Result], first_lane: int = 0
) -> None:
    """Logits, hidden states and KV rows of each sequence after its last call, whose rows are not
    yet moved."""
    result = outputs_of(results)
    for member, sequence in enumerate(sequences):
        logits, hidden, rows = sequence.alone()
        count = len(logits)
        assert close(result.logits[member, :count], logits)
        assert result.hidden_states is not None
        assert hidden is not None
        assert close(result.hidden_states[member, :count], hidden)
        assert close(pair.many.read_rows(first_lane + member, rows.shape[2]).kv, rows)


def started(pair: Pair, lengths: tuple[int, ...], first_lane: int = 0) -> list[Sequence]:
    """Sequences with their prompts in neighbouring lanes, each run on its own."""
    sequences = [Sequence(pair, np.random.default_rng(length)) for length in lengths]
    for lane, (sequence, length) in enumerate(zip(sequences, lengths, strict=True), first_lane):
        call = sequence.prompt(length)
        result = pair.many.run(replace(call, first_lane=lane))
        sequence.keep(call, np.arange(length))
        assert_as_if_alone(pair, [sequence], result, lane)
    return sequences


def run_trees(
    pair: Pair, sequences: list[Sequence], trees: list[Tree], first_lane: int = 0
) -> None:
    """A ragged call of one tree a sequence, compared, and the kept rows moved down."""
    calls = [
        sequence.tree(parents) for sequence, (parents, _) in zip(sequences, trees, strict=True)
    ]
    result = pair.many.run(batch_of(calls, first_lane))
    starts = [sequence.length for sequence in sequences]
    for sequence, call, (_, kept) in zip(sequences, calls, trees, strict=True):
        sequence.keep(call, kept)
    assert_as_if_alone(pair, sequences, result, first_lane)
    for lane, (start, (_, kept)) in enumerate(zip(starts, trees, strict=True), first_lane):
        pair.many.keep_rows(lane, start + kept, start)


# Batches


@pytest.mark.parametrize("seed", range(3))
def test_each_sequence_of_a_ragged_batch_is_as_if_alone(pair: Pair, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = started(pair, tuple(rng.integers(2, 20, LANES).tolist()))
    for _ in range(3):
        trees = [random_tree(rng, int(size)) for size in rng.integers(1, TREE_SIZE + 1, LANES)]
        run_trees(pair, sequences, trees)


def test_lanes_outside_the_call_are_untouched(pair: Pair) -> None:
    outer = started(pair, (6,)), started(pair, (8,), first_lane=3)
    inner = started(pair, (5, 11), first_lane=1)
    before = pair.many.read_rows(0, 6).kv, pair.many.read_rows(3, 8).kv
    rng = np.random.default_rng(0)
    for _ in range(2):
        run_trees(pair, inner, [random_tree(rng, 9), random_tree(rng, 3)], first_lane=1)
    after = pair.many.read_rows(0, 6).kv, pair.many.read_rows(3, 8).kv
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    for lane, (sequence,) in zip((0, 3), outer, strict=True):
        run_trees(pair, [sequence], [random_tree(rng, 5)], first_lane=lane)


def test_rows_before_a_call_s_own_are_untouched(llama: Pair) -> None:
    sequences = started(llama, (5, 11))
    before = llama.many.read_rows(0, 5).kv, llama.many.read_rows(1, 11).kv
    trees = [random_tree(np.random.default_rng(0), size) for size in (9, 4)]
    llama.many.run(
        batch_of([s.tree(parents) for s, (parents, _) in zip(sequences, trees, strict=True)])
    )
    np.testing.assert_array_equal(llama.many.read_rows(0, 5).kv, before[0])
    np.testing.assert_array_equal(llama.many.read_rows(1, 11).kv, before[1])


def test_what_stands_in_padding_rows_changes_nothing(pair: Pair) -> None:
    sequences = started(pair, (5, 11))
    rng = np.random.default_rng(0)
    calls = [s.tree(random_tree(rng, size)[0]) for s, size in zip(sequences, (3, 9), strict=True)]
    found = []
    for junk in (0.0, 1000.0):
        result = outputs_of(pair.many.run(batch_of(calls, junk=junk)))
        found.append([result.logits[0, :3].copy(), result.logits[1].copy(), *kept_rows(pair)])
    for clean, dirty in zip(*found, strict=True):
        np.testing.assert_array_equal(clean, dirty)


def kept_rows(pair: Pair) -> tuple[Array, Array]:
    return pair.many.read_rows(0, 5 + 3).kv, pair.many.read_rows(1, 11 + 9).kv


@pytest.mark.parametrize("tree_size", [TREE_SIZE, TREE_SIZE + 1])
def test_a_lane_at_its_capacity_is_padded_to_its_neighbour_s_tree(
    pair: Pair, tree_size: int
) -> None:
    """The last slot of one lane is written while another runs its largest tree, the root
    included."""
    sequences = started(pair, (CAPACITY - 1, 7))
    rng = np.random.default_rng(0)
    run_trees(pair, sequences, [random_tree(rng, 1), random_tree(rng, tree_size)])


def test_sequences_of_growing_length_keep_their_rows(llama: Pair) -> None:
    """With ONNX Runtime's Attention rows move as the cache widens; a lane that is not in the calls
    keeps its own."""
    sequences = started(llama, (3, 4))
    strides = {llama.many.cache.stride}
    rng = np.random.default_rng(0)
    while sequences[0].length < 40:
        run_trees(llama, sequences[:1], [random_tree(rng, 4)])
        strides.add(llama.many.cache.stride)
    run_trees(llama, sequences, [random_tree(rng, 2), random_tree(rng, 6)])
    assert (len(strides) > 1) == llama.many.cache.following
    assert llama.many.cache.following != llama.many.attends_trees


def test_a_lane_that_is_used_again_shows_nothing_of_the_sequence_before(llama: Pair) -> None:
    run_trees(llama, started(llama, (17, 19)), [random_tree(np.random.default_rng(0), 9)] * 2)
    rng = np.random.default_rng(1)
    run_trees(llama, started(llama, (4, 6)), [random_tree(rng, 5), random_tree(rng, 8)])


# Lanes


def test_a_copied_lane_goes_on_as_the_one_it_was_copied_from(pair: Pair) -> None:
    (sequence,) = started(pair, (13,))
    started(pair, (20,), first_lane=2)
    pair.many.copy_lane(0, 2, 9)
    copy = Sequence(
        pair, np.random.default_rng(9), 9, [(cut(sequence.calls[0][0], 9), np.arange(9))]
    )
    np.testing.assert_array_equal(pair.many.read_rows(2, 9).kv, pair.many.read_rows(0, 9).kv)
    run_trees(pair, [copy], [random_tree(np.random.default_rng(0), 6)], first_lane=2)
    run_trees(pair, [sequence], [random_tree(np.random.default_rng(1), 6)])


def cut(call: Call, rows: int) -> Call:
    """The first rows of a prompt."""
    arrays = {
        name: np.ascontiguousarray(getattr(call, name)[:, :rows])
        for name in ("inputs_embeds", "rope_cos", "rope_sin")
    }
    first, (lane,) = np.arange(rows), call.attention.lanes
    extras = {
        name: [states.take(first) for states in call.states(name) or []] for name in call.extras
    }
    seen = LaneAttention(0, lane.visible[:rows, :rows], lane.positions[:rows])
    return replace(call, attention=Attention([seen]), gather=[first], extras=extras, **arrays)


def test_rows_that_were_read_go_on_where_they_are_written(pair: Pair) -> None:
    (sequence,) = started(pair, (13,))
    rows = pair.many.read_rows(0, 13).kv
    assert rows.shape == (
        2 * pair.shape.num_layers,
        pair.shape.num_kv_heads,
        13,
        pair.shape.head_dim,
    )
    started(pair, (20, 3))  # over it
    pair.many.write_rows(3, OrtLaneRows(rows))
    np.testing.assert_array_equal(pair.many.read_rows(3, 13).kv, rows)
    run_trees(pair, [sequence], [random_tree(np.random.default_rng(0), 6)], first_lane=3)


def test_rows_of_one_engine_go_on_in_the_other(llama: Pair) -> None:
    """A prefix that was kept from an engine for several sequences serves an engine for one, and
    back."""
    (sequence,) = started(llama, (13,))
    theirs = llama.many.read_rows(0, 13).kv
    llama.one.write_rows(0, OrtLaneRows(theirs))
    np.testing.assert_array_equal(llama.one.read_rows(0, 13).kv, theirs)
    call = sequence.tree(random_tree(np.random.default_rng(0), 6)[0])
    wanted = outputs_of(llama.one.run(call)).logits.copy()
    assert close(outputs_of(llama.many.run(call)).logits, wanted)


IMPOSSIBLE: dict[str, Callable[[Call], Call]] = {
    "no-such-lane": lambda call: replace(call, first_lane=LANES - 1),
    "a-lane-that-sees-nothing": lambda call: replace(
        call, attention=Attention(call.attention.lanes[:1])
    ),
    "behind-the-padding": lambda call: replace(call, write_indices=call.write_indices + CAPACITY),
    "an-index-short": lambda call: replace(call, write_indices=call.write_indices[:1]),
    "before-the-first-slot": lambda call: replace(call, write_indices=call.write_indices - 100),
}


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_a_call_that_contradicts_itself_is_our_own_mistake(llama: Pair, change: str) -> None:
    sequences = started(llama, (5, 11))
    call = batch_of([sequence.tree(np.array([-1, 0, 0])) for sequence in sequences])
    llama.many.run(call)
    with pytest.raises(AssertionError):
        llama.many.run(IMPOSSIBLE[change](call))


def test_an_engine_for_one_sequence_writes_the_last_rows_that_it_reads_and_no_others(
    llama: Pair,
) -> None:
    call = Sequence(llama, np.random.default_rng(0)).prompt(5)
    llama.one.run(call)
    with pytest.raises(AssertionError):
        llama.one.run(replace(call, first_lane=1))


# Beside the canonical graph


def test_a_ragged_batch_is_what_the_canonical_graph_computes(llama: Pair) -> None:
    """The same call over caches at their full capacity."""
    sequences = started(llama, (5, 11))
    rng = np.random.default_rng(0)
    call = batch_of(
        [s.tree(random_tree(rng, size)[0]) for s, size in zip(sequences, (9, 4), strict=True)]
    )
    session = ort.InferenceSession(
        str(llama.onnx_dir / file_names.MODEL), providers=["CPUExecutionProvider"]
    )
    slab = np.zeros((14, 2, 2, CAPACITY, 16), np.float32)
    slab[:, 0, :, :5], slab[:, 1, :, :11] = (
        llama.many.read_rows(0, 5).kv,
        llama.many.read_rows(1, 11).kv,
    )
    feeds = {name: getattr(call, name) for name in ("inputs_embeds", "rope_cos", "rope_sin")}
    feeds["gather_idx"] = gather_idx(call)
    mask = np.empty((2, 1, call.rows, CAPACITY), bool)
    feeds["attention_mask"] = attention_mask(call, call.attention, mask)
    feeds["write_indices"] = call.write_indices
    feeds |= {name: slab[2 * i + half] for i in range(7) for half, name in enumerate(past_names(i))}
    (wanted,) = session.run(["logits"], feeds)
    assert close(outputs_of(llama.many.run(call)).logits, wanted)
