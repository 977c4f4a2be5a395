"""Hybrid bases (Qwen3.5), from checkpoint through export and build to decoding, against
transformers in float32.

transformers cannot run a tree through recurrent layers, and cannot take a state back: the reference
of a node, or of what follows a partial acceptance, is the whole sequence from nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgespec.backends.ort.recurrent import uncommitted_bytes
from edgespec.backends.registry import open_runner
from edgespec.contract import RECURRENT_CHUNK, Limits, Role
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.lanes.embedding import EmbeddingTable
from edgespec.runtime.trees.tree import DraftTree
from tests import made, reference, toys
from tests.one_lane import OneLane
from tests.parity.conftest import Component, MakeComponent
from tests.parity.test_bases import CHAIN, PROMPT, path_to, random_tree, some_ids

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

# Largest difference of a logit or a tap in float32, whose standard deviation is about 2.5. On these
# random weights both engines are up to 1e-4 from the same model in float64, and up to 9e-4 on the
# rows with one key head or a short window.
TOLERANCE = 2e-3
SAME_ENGINE = 5e-4  # the same, between two ways of ours to the same row
AUX_LAYERS = (1, 2, 4)  # 4: the last layer's output, before the final norm
CAPACITY = 160
LONGEST_CALL = 100  # rows, of these tests

ROWS: dict[str, dict[str, Any]] = {
    "untied": {},
    "four-value-heads-a-key": {"key_heads": 1, "value_heads": 4},
    "short-convolution-one-value-head-a-key": {
        "conv_kernel": 2,
        "key_heads": 4,
        "value_heads": 4,
        "value_head_dim": 16,
    },
    "recurrent-layers-last": {
        "layer_types": ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    },
    "experts-beside-images": {
        "experts": 5,
        "per_token": 3,
        "images": True,
        "dtype": "bfloat16",
        "tied": True,
        "shards": 2,
    },
}
# For what takes long. These stand first: fixtures are shared by their place in the list.
some_rows = pytest.mark.parametrize("pair", list(ROWS)[:4], indirect=True)


class Pair:
    """The same weights twice: transformers' model and our engine."""

    def __init__(self, model: Any, component: Component) -> None:
        self.model, self.component = model, component

    def reference(self, ids: Ids) -> tuple[Floats, Floats]:
        logits, hidden = reference.base_hidden_states(self.model, torch.from_numpy(ids)[None])
        return logits[0].numpy(), reference.gather_aux_hidden_states(hidden, AUX_LAYERS)[0].numpy()


@pytest.fixture(scope="module", params=ROWS)
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_component: MakeComponent,
) -> Pair:
    path = toys.make_qwen3_5(tmp_path_factory.mktemp(request.param) / "base", **ROWS[request.param])
    return Pair(
        toys.load_base(path),
        make_component(path, Role.BASE, capacity=CAPACITY, aux_layers=AUX_LAYERS),
    )


@pytest.fixture
def decoder(pair: Pair) -> OneLane:
    return pair.component.decoder()


def assert_close(found: Floats, wanted: Floats) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= TOLERANCE  # a NaN is not within any tolerance


def test_the_engine_is_within_rounding_of_its_golden_outputs(pair: Pair) -> None:
    assert pair.component.golden_difference is not None
    assert pair.component.golden_difference < 2e-5


def test_prefill_gives_logits_and_taps_of_every_row(pair: Pair, decoder: OneLane) -> None:
    ids = some_ids(24)
    result = decoder.causal(ids, np.arange(24))
    logits, aux_layers = pair.reference(ids)
    assert_close(result.logits[0], logits)
    assert result.hidden_states is not None
    assert_close(result.hidden_states[0], aux_layers)


def test_layer_by_layer_the_export_gives_the_same_logits(pair: Pair) -> None:
    ids = some_ids(24)
    assert_close(pair.component.layer_by_layer(ids), pair.reference(ids)[0])


def test_decoding_one_token_at_a_time_equals_one_pass(pair: Pair, decoder: OneLane) -> None:
    ids = some_ids(24, seed=1)
    found = [decoder.causal(ids[:15], np.arange(15)).logits[0].copy()]
    found += [decoder.causal(ids[i : i + 1], np.array([0])).logits[0].copy() for i in range(15, 24)]
    assert_close(np.concatenate(found), pair.reference(ids)[0])


@pytest.mark.parametrize(
    "sizes",
    [(1, 23), (2, 1, 21), (RECURRENT_CHUNK, RECURRENT_CHUNK, 9), (LONGEST_CALL, 30)],
    ids=str,
)
def test_prefill_in_chunks_equals_one_pass(
    pair: Pair, decoder: OneLane, sizes: tuple[int, ...]
) -> None:
    ids = some_ids(sum(sizes), seed=2)
    chunks = np.split(ids, np.cumsum(sizes)[:-1])
    found = [decoder.causal(chunk, np.arange(len(chunk))).logits[0].copy() for chunk in chunks]
    assert_close(np.concatenate(found), pair.reference(ids)[0])


@some_rows
def test_a_token_that_is_said_over_and_over_is_read_as_steadily(
    pair: Pair, decoder: OneLane
) -> None:
    """Equal keys make the rows of a call hang on each other most."""
    ids = np.full(RECURRENT_CHUNK, 7)
    at_once = decoder.causal(ids, np.arange(len(ids))).logits[0].copy()
    decoder.reset()
    apart = [
        decoder.causal(ids[i : i + 1], np.array([0])).logits[0].copy() for i in range(len(ids))
    ]
    assert np.abs(at_once - np.concatenate(apart)).max() < SAME_ENGINE
    assert_close(at_once, pair.reference(ids)[0])


def verified(decoder: OneLane, prompt: Ids, tree: DraftTree) -> Floats:
    decoder.causal(prompt, np.array([0]))
    return (
        decoder.run(tree.tokens, len(prompt) + tree.depths, tree.mask, np.arange(len(tree)))
        .logits[0]
        .copy()
    )


@pytest.mark.parametrize("tree", [random_tree(0), CHAIN], ids=["tree", "chain"])
def test_each_tree_node_follows_its_parent(pair: Pair, decoder: OneLane, tree: DraftTree) -> None:
    prompt = some_ids(PROMPT, seed=3)
    found = verified(decoder, prompt, tree)
    for leaf in set(range(len(tree))) - {*tree.parents.tolist()}:
        path = path_to(tree, leaf)
        wanted, _ = pair.reference(np.concatenate([prompt, tree.tokens[path]]))
        assert_close(found[path], wanted[PROMPT:])


@pytest.mark.parametrize("tree", [random_tree(0), CHAIN], ids=["tree", "chain"])
@some_rows
def test_after_every_acceptance_the_state_is_that_of_the_accepted_tokens(
    pair: Pair, decoder: OneLane, tree: DraftTree
) -> None:
    """Down to each node of the tree: for a chain, every count of accepted drafts, none and all of
    them included."""
    prompt, more = some_ids(PROMPT, seed=4), some_ids(4, seed=5)
    for node in range(len(tree)):
        path = path_to(tree, node)
        decoder.reset()
        verified(decoder, prompt, tree)
        decoder.commit(path)
        found = [decoder.causal(more[i : i + 1], np.array([0])).logits[0].copy() for i in range(2)]
        found.append(decoder.causal(more[2:], np.arange(2)).logits[0].copy())
        accepted = np.concatenate([prompt, tree.tokens[path], more])
        decoder.reset()
        one_by_one = [
            decoder.causal(accepted[i : i + 1], np.array([0])).logits[0].copy()
            for i in range(len(accepted))
        ]
        assert np.abs(np.concatenate(found) - np.concatenate(one_by_one)[-4:]).max() < SAME_ENGINE
        assert_close(np.concatenate(found), pair.reference(accepted)[0][-4:])


def test_one_step_after_another_leaves_no_trace_of_what_was_rejected(
    pair: Pair, decoder: OneLane
) -> None:
    prompt, text = some_ids(PROMPT, seed=6), [*some_ids(PROMPT, seed=6).tolist()]
    decoder.causal(prompt, np.array([0]))
    rng = np.random.default_rng(0)
    for step in range(6):
        tree = random_tree(step)
        path = path_to(tree, int(rng.integers(len(tree))))
        found = (
            decoder.run(tree.tokens, len(text) + tree.depths, tree.mask, np.arange(len(tree)))
            .logits[0]
            .copy()
        )
        decoder.commit(path)
        text += tree.tokens[path].tolist()
        assert_close(found[path], pair.reference(np.array(text))[0][-len(path) :])


@some_rows
def test_a_pass_whose_rows_are_all_dropped_changes_nothing(pair: Pair, decoder: OneLane) -> None:
    prompt, more = some_ids(PROMPT, seed=7), some_ids(3, seed=8)
    verified(decoder, prompt, CHAIN)
    decoder.drop_scratch()
    verified_again = (
        decoder.run(more, PROMPT + np.arange(3), np.tri(3, dtype=bool), np.arange(3))
        .logits[0]
        .copy()
    )
    assert_close(verified_again, pair.reference(np.concatenate([prompt, more]))[0][-3:])


# Several sequences


@pytest.fixture(scope="module")
def lanes(pair: Pair) -> CachedDecoder:
    limits = Limits(3, CAPACITY, CAPACITY)
    path = made.built(limits, pair.component.onnx_dir)
    runner, config = open_runner(path, Role.BASE)
    table = EmbeddingTable(path / "embedding.safetensors", config.component)
    return CachedDecoder(runner, table, pair.component.rope)


def test_sequences_side_by_side_are_each_as_alone(pair: Pair, lanes: CachedDecoder) -> None:
    """Trees and single tokens of three lanes in one call, lanes that take no part, and one that
    moves."""
    texts = [some_ids(n, seed=n).tolist() for n in (5, 20, 11)]
    for lane, text in enumerate(texts):
        lanes.reset(lane)
        lanes.extend([lanes.causal(lane, np.array(text), np.array([0]))])
    trees = [random_tree(3), DraftTree.root_only(9), CHAIN]

    def step(members: list[int], paths: list[Ids]) -> None:
        rows = [
            replace(
                lanes.causal(m, trees[m].tokens, np.arange(len(trees[m]))),
                visible=trees[m].mask,
                positions=lanes.lanes[m].length + trees[m].depths,
            )
            for m in members
        ]
        for m, path, result in zip(members, paths, lanes.run(rows), strict=True):
            texts[m] += trees[m].tokens[path].tolist()
            wanted, _ = pair.reference(np.array(texts[m]))
            assert_close(result.logits.rows()[path], wanted[-len(path) :])
        for m, path in zip(members, paths, strict=True):
            lanes.commit(m, path)

    tree_path = path_to(trees[0], len(trees[0]) - 1)
    step([0, 1, 2], [tree_path, np.array([0]), np.arange(4)])
    step([0, 2], [path_to(trees[0], 5), np.arange(7)])  # lane 1 lies between them and takes no part
    step([0, 1, 2], [np.array([0]), np.array([0]), np.arange(1)])
    lanes.move(2, 1)
    texts[1], trees[1] = texts[2], CHAIN
    step([0, 1], [tree_path, np.arange(12)])
    step([1], [np.arange(2)])


def test_a_kept_state_goes_on_where_it_is_put(pair: Pair, lanes: CachedDecoder) -> None:
    text, more = some_ids(30, seed=9), some_ids(5, seed=10)
    lanes.reset(0)
    lanes.extend([lanes.causal(0, text[:22], np.array([0]))])
    rows = lanes.causal(0, text[22:], np.arange(8))
    lanes.run([rows])
    lanes.commit(0, np.arange(8))
    kept = lanes.snapshot(0, 30)
    lanes.extend([lanes.causal(0, more[::-1].copy(), np.array([0]))])  # the lane goes its own way
    lanes.reset(2)
    lanes.restore(2, kept)
    (found,) = lanes.extend([lanes.causal(2, more, np.arange(5))])
    assert_close(found.logits.rows(), pair.reference(np.concatenate([text, more]))[0][-5:])


@some_rows
def test_only_the_whole_of_a_state_can_be_kept(pair: Pair, lanes: CachedDecoder) -> None:
    lanes.reset(0)
    lanes.extend([lanes.causal(0, some_ids(9), np.array([0]))])
    with pytest.raises(AssertionError):
        lanes.snapshot(0, 8)
    with pytest.raises(AssertionError):
        lanes.snapshot(0, 9).prefix(8)


@some_rows
def test_what_is_remembered_of_each_lane_is_of_the_size_that_build_tells(pair: Pair) -> None:
    recurrent = pair.component.runner.recurrent
    assert recurrent is not None
    state_bytes = pair.component.runner.contract.state_bytes
    assert state_bytes == recurrent.state.nbytes + recurrent.conv.nbytes
    decoder, tree = pair.component.decoder(), random_tree(0)
    verified(decoder, some_ids(len(tree)), tree)
    decoder.commit(path_to(tree, len(tree) - 1))
    pending = sum(rows.nbytes for rows in recurrent.pending)
    pending += sum(buffer.nbytes for buffer in recurrent.buffers.values())
    assert pending <= uncommitted_bytes(recurrent.shape, 1, LONGEST_CALL)
