"""Every base, from checkpoint through export and build to decoding, against transformers in eager
float32.

One row of `ROWS` is a family with a feature, or some that meet in no code. Three claims about the
whole path are checked for every row (a prefill, a tree, decoding on after its commit), the others
for six of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import MinistralConfig, MinistralForCausalLM

from edgespec.contract import Role
from edgespec.runtime.trees.tree import DraftTree
from tests import reference, toys
from tests.calls import Outputs
from tests.one_lane import OneLane
from tests.parity.conftest import Component, MakeComponent

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

TOLERANCE = (
    2e-4  # largest difference of a logit or a tap in float32; their standard deviation is about 2.5
)
LAYERS = 4
AUX_LAYERS = (1, 2, 3)
PROMPT = 20  # tokens before a tree
WINDOW = 7  # sliding: shorter than a prompt, and than a chain of 12 drafts

LINEAR = {"rope_type": "linear", "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}


@dataclass(frozen=True)
class Row:
    """A base checkpoint to be made, and how transformers loads it."""

    make: Callable[..., Path]
    options: dict[str, Any]
    load: Callable[[Path], Any] = toys.load_base

    @property
    def windows(self) -> dict[str, int | None] | int | None:
        """What all layers see, or what those of each kind see."""
        window = self.options.get("sliding_window")
        mixed = self.make in KINDS_OF_MASKS or "layer_types" in self.options
        return {"full_attention": None, "sliding_attention": window} if mixed else window


def row(family: toys.Family, **options: Any) -> Row:
    return Row(partial(toys.make_base, family=family), options)


def load_ministral(path: Path) -> Any:
    """A Mistral checkpoint whose layers mix windows: transformers reads them by other classes."""
    raw = json.loads((path / "config.json").read_text())
    config = MinistralConfig(**{k: v for k, v in raw.items() if k not in NAMES_OF_CLASS})
    model = MinistralForCausalLM.from_pretrained(
        path, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


# Families whose classes of transformers take a mask for each kind of layer
KINDS_OF_MASKS = (toys.make_gemma3, toys.make_qwen2_5_vl)
NAMES_OF_CLASS = ("model_type", "architectures")
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
MIXED_LAYERS = {"sliding_window": WINDOW, "layer_types": MIXED}


def phi3(**options: Any) -> Row:
    return Row(toys.make_phi3, options)


def gemma3(**options: Any) -> Row:
    return Row(toys.make_gemma3, {"sliding_window": WINDOW, **options})


def vl(make: Callable[..., Path], **options: Any) -> Row:
    """The text part alone: a prompt without images."""
    return Row(make, options, toys.load_vl)


ROWS = {
    "llama": row("llama"),
    "mistral-window": row("mistral", sliding_window=WINDOW),
    "qwen2": row("qwen2"),
    "qwen3-window": row("qwen3", head_dim=32, sliding_window=WINDOW),
    "llama-tied-bfloat16": row("llama", tied=True, dtype="bfloat16"),
    "rope-dynamic-old": row("llama", rope=DYNAMIC),
    "llama-one-kv-head-biases-float16": row(
        "llama", kv_heads=1, attention_bias=True, mlp_bias=True, dtype="float16"
    ),
    "llama-all-kv-heads-theta-new": row(
        "llama", kv_heads=4, rope={"rope_theta": 300.0}, rope_spelling="new"
    ),
    "qwen3-biases": row("qwen3", head_dim=32, attention_bias=True),
    "mistral-mixed": Row(
        partial(toys.make_base, family="mistral"),
        {"head_dim": 16, **MIXED_LAYERS},
        load_ministral,
    ),
    "qwen3-mixed": row("qwen3", head_dim=32, **MIXED_LAYERS),
    "phi3-window": phi3(sliding_window=WINDOW, dtype="bfloat16"),
    "phi4-mini": phi3(longrope=64, partial_rotary=0.75, tied=True, kv_heads=1),
    "phi4-mini-long": phi3(longrope=16, partial_rotary=0.75, tied=True, kv_heads=1),
    "gemma3": gemma3(rope=LINEAR),
    "gemma3-float16": gemma3(dtype="float16", hidden=64),  # whose root no type rounds
    "gemma3-nested": gemma3(rope=LINEAR, stack="nested", spelling="new", pattern=2, tied=False),
    "gemma3-published": gemma3(stack="published"),
    "qwen3-moe-fused": Row(toys.make_qwen3_moe, {"fused": True, "dtype": "bfloat16", "shards": 2}),
    "qwen3-moe-some-layers": Row(
        toys.make_qwen3_moe,
        {"sparse_step": 2, "dense_layers": (3,), "normalized": False, "sliding_window": WINDOW},
    ),
    "qwen2.5-vl": vl(toys.make_qwen2_5_vl, sliding_window=WINDOW),
    "qwen2.5-vl-mixed": vl(
        toys.make_qwen2_5_vl, form="nested", sliding_window=WINDOW, max_window_layers=3, tied=True
    ),
    "qwen3-vl": vl(toys.make_qwen3_vl, deepstack=(0, 1, 2)),
    "rope-dynamic-new": row("llama", rope=DYNAMIC, rope_spelling="new"),
    "rope-llama3-new": row("llama", rope=LLAMA3, rope_spelling="new"),
    "rope-yarn-new": row("qwen3", rope=YARN, rope_spelling="new", head_dim=32),
}
# For claims about masks and caches, which hang on no weight. These stand first: fixtures are shared
# by their place in the list.
REPRESENTATIVE = list(ROWS)[:6]
representative = pytest.mark.parametrize("pair", REPRESENTATIVE, indirect=True)


@dataclass(frozen=True)
class Pair:
    """The same weights twice: transformers' model and our engine."""

    model: Any
    component: Component
    windows: dict[str, int | None] | int | None = None

    def masks(self, mask: NDArray[np.bool_], positions: Ids) -> Any:
        """The mask [S, S] as transformers takes it, cut to the window of each kind of layer."""
        distance = positions[:, None] - positions

        def cut(window: int | None) -> torch.Tensor:
            near = mask if window is None else mask & (distance < window)
            return torch.from_numpy(near)[None, None]

        if isinstance(self.windows, dict):
            return {kind: cut(window) for kind, window in self.windows.items()}
        return cut(self.windows)

    def reference(self, ids: Ids) -> tuple[Floats, Floats]:
        """Logits [S, V] and taps [S, k*H] of the whole sequence at once, under the model's own
        mask."""
        logits, hidden = reference.base_hidden_states(self.model, torch.from_numpy(ids)[None])
        return logits[0].numpy(), reference.gather_aux_hidden_states(hidden, AUX_LAYERS)[0].numpy()


@pytest.fixture(scope="module", params=ROWS)
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_component: MakeComponent,
) -> Pair:
    wanted = ROWS[request.param]
    path = wanted.make(
        tmp_path_factory.mktemp(request.param) / "base", layers=LAYERS, **wanted.options
    )
    component = make_component(path, Role.BASE, aux_layers=AUX_LAYERS)
    return Pair(wanted.load(path), component, wanted.windows)


@pytest.fixture
def decoder(pair: Pair) -> OneLane:
    return pair.component.decoder()


def some_ids(count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(3, 256, count)


def assert_close(found: Floats, wanted: Floats) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= TOLERANCE  # a NaN is not within any tolerance


# Plain decoding


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


@representative
def test_decoding_one_token_at_a_time_equals_one_pass(pair: Pair, decoder: OneLane) -> None:
    ids = some_ids(24, seed=1)
    logits, aux_layers = pair.reference(ids)
    decoder.causal(ids[:15], np.array([14]))
    for i in range(15, 24):
        result = decoder.causal(ids[i : i + 1], np.array([0]))
        assert_close(result.logits[0], logits[i : i + 1])
        assert result.hidden_states is not None
        assert_close(result.hidden_states[0], aux_layers[i : i + 1])


@pytest.mark.parametrize("first", [1, 9, 23])
@representative
def test_prefill_in_two_chunks_equals_one_pass(pair: Pair, decoder: OneLane, first: int) -> None:
    ids = some_ids(24, seed=2)
    chunks = [
        decoder.causal(chunk, np.arange(len(chunk))).logits[0].copy()
        for chunk in (ids[:first], ids[first:])
    ]
    assert_close(np.concatenate(chunks), pair.reference(ids)[0])


# Trees


CHAIN = DraftTree(some_ids(12, seed=7), np.arange(-1, 11))  # deeper than the window is wide


def random_tree(seed: int) -> DraftTree:
    """12 nodes in any order that has parents first."""
    rng = np.random.default_rng(seed)
    parents = np.array([-1, *(rng.integers(0, node) for node in range(1, 12))])
    return DraftTree(rng.integers(3, 256, 12), parents)


def path_to(tree: DraftTree, node: int) -> Ids:
    """Nodes from the root down to `node`."""
    path = [node]
    while path[-1] != 0:
        path.append(int(tree.parents[path[-1]]))
    return np.array(path[::-1])


def deepest_path_with_gaps(tree: DraftTree) -> Ids:
    paths = [path_to(tree, node) for node in range(12)]
    return max((p for p in paths if (np.diff(p) > 1).any()), key=len)


def tree_in_one_pass(pair: Pair, prompt: Ids, tree: DraftTree) -> tuple[Floats, Floats]:
    """transformers' logits [N, V] and taps [N, k*H] of the nodes, by an explicit mask over prompt
    and tree."""
    start, total = len(prompt), len(prompt) + len(tree)
    positions = np.concatenate([np.arange(start), start + tree.depths])
    mask = np.tri(total, dtype=bool)
    mask[start:, start:] = [
        [column in path_to(tree, node) for column in range(12)] for node in range(12)
    ]
    ids = torch.from_numpy(np.concatenate([prompt, tree.tokens]))[None]
    logits, hidden = reference.base_hidden_states(
        pair.model, ids, pair.masks(mask, positions), torch.from_numpy(positions)[None]
    )
    return logits[0, start:].numpy(), reference.gather_aux_hidden_states(hidden, AUX_LAYERS)[
        0, start:
    ].numpy()


def verify(decoder: OneLane, prompt: Ids, tree: DraftTree) -> Outputs:
    decoder.causal(prompt, np.array([0]))
    return decoder.run(tree.tokens, len(prompt) + tree.depths, tree.mask, np.arange(len(tree)))


def test_each_tree_node_sees_the_prompt_and_its_ancestors_alone(
    pair: Pair, decoder: OneLane
) -> None:
    assert_nodes_see_their_ancestors(pair, decoder, random_tree(0))


@pytest.mark.parametrize("tree", [random_tree(1), CHAIN], ids=["other-tree", "chain"])
@representative
def test_nodes_of_other_trees_see_their_ancestors_alone(
    pair: Pair, decoder: OneLane, tree: DraftTree
) -> None:
    assert_nodes_see_their_ancestors(pair, decoder, tree)


def assert_nodes_see_their_ancestors(pair: Pair, decoder: OneLane, tree: DraftTree) -> None:
    prompt = some_ids(PROMPT, seed=3)
    result = verify(decoder, prompt, tree)
    logits, aux_layers = tree_in_one_pass(pair, prompt, tree)
    assert_close(result.logits[0], logits)
    assert result.hidden_states is not None
    assert_close(result.hidden_states[0], aux_layers)


@representative
def test_verifying_a_chain_equals_reading_its_tokens(pair: Pair, decoder: OneLane) -> None:
    prompt = some_ids(PROMPT, seed=3)
    result = verify(decoder, prompt, CHAIN)
    assert_close(
        result.logits[0], pair.reference(np.concatenate([prompt, CHAIN.tokens]))[0][PROMPT:]
    )


def test_after_a_commit_the_rejected_branches_leave_no_trace(pair: Pair, decoder: OneLane) -> None:
    """The accepted path's rows move; decoding on equals a computation from scratch that never saw
    the tree."""
    prompt, tree, more = some_ids(PROMPT, seed=4), random_tree(0), some_ids(4, seed=5)
    path = deepest_path_with_gaps(tree)
    verify(decoder, prompt, tree)
    decoder.commit(path)
    found = [decoder.causal(more[i : i + 1], np.array([0])).logits[0].copy() for i in range(2)]
    found.append(decoder.causal(more[2:], np.arange(2)).logits[0].copy())
    logits, _ = pair.reference(np.concatenate([prompt, tree.tokens[path], more]))
    assert_close(np.concatenate(found), logits[-4:])


@representative
def test_a_tree_grown_call_by_call_equals_one_pass_over_it(pair: Pair, decoder: OneLane) -> None:
    """What drafters do: each level sees scratch rows of the levels before it."""
    prompt, tree = some_ids(PROMPT, seed=6), random_tree(2)
    decoder.causal(prompt, np.array([0]))
    found = []
    for start, end in ((0, 5), (5, 6), (6, 12)):
        positions, visible = PROMPT + tree.depths[start:end], tree.mask[start:end, :end]
        result = decoder.run(tree.tokens[start:end], positions, visible, np.arange(end - start))
        found.append(result.logits[0].copy())
    assert_close(np.concatenate(found), tree_in_one_pass(pair, prompt, tree)[0])


# What only some bases have


def test_the_engine_is_within_rounding_of_its_golden_outputs(pair: Pair) -> None:
    assert pair.component.golden_difference is not None
    assert pair.component.golden_difference < 1e-5


@pytest.fixture
def base(tmp_path: Path) -> Callable[..., Path]:
    return lambda **options: toys.make_base(tmp_path / "base", layers=LAYERS, **options)


def test_the_tap_above_the_last_layer_is_taken_before_the_final_norm(
    base: Callable[..., Path], make_component: MakeComponent
) -> None:
    path = base()
    aux_layers = (1, 3, LAYERS)
    decoder = make_component(path, Role.BASE, aux_layers=aux_layers).decoder()
    ids = some_ids(12)
    result = decoder.causal(ids, np.array([11]))
    _, hidden = reference.base_hidden_states(toys.load_base(path), torch.from_numpy(ids)[None])
    assert result.hidden_states is not None
    assert_close(
        result.hidden_states[0], reference.gather_aux_hidden_states(hidden, aux_layers)[0].numpy()
    )


def test_a_plain_decoder_has_the_same_logits_and_emits_no_taps(
    base: Callable[..., Path], make_component: MakeComponent
) -> None:
    path = base(tied=True)
    ids = some_ids(12)
    result = make_component(path, Role.LLM).decoder().causal(ids, np.arange(12))
    logits, _ = reference.base_hidden_states(toys.load_base(path), torch.from_numpy(ids)[None])
    assert_close(result.logits[0], logits[0].numpy())
    assert result.hidden_states is None


# Dynamic RoPE beyond its original length: each token turns by the length that it was read at

ORIGINAL = 12


def token_by_token(model: Any, ids: Ids) -> Floats:
    """transformers' logits [S, V], one token a call into its own cache."""
    cache, rows = None, []
    with torch.no_grad():
        for token in ids:
            out = model(
                input_ids=torch.tensor([[int(token)]]), past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            rows.append(out.logits[0, -1].numpy())
    return np.stack(rows)


@pytest.fixture
def stretched(base: Callable[..., Path], make_component: MakeComponent) -> Pair:
    path = base(rope=DYNAMIC, max_position=ORIGINAL)
    return Pair(toys.load_base(path), make_component(path, Role.BASE, aux_layers=AUX_LAYERS))


def test_dynamic_rope_beyond_its_length_equals_decoding_token_by_token(stretched: Pair) -> None:
    ids = some_ids(32)
    wanted = token_by_token(stretched.model, ids)
    decoder = stretched.component.decoder()
    found = [decoder.causal(ids[:20], np.arange(20)).logits[0].copy()]
    found += [decoder.causal(ids[i : i + 1], np.array([0])).logits[0].copy() for i in range(20, 32)]
    assert_close(np.concatenate(found), wanted)
    whole, _ = stretched.reference(ids)
    assert (
        np.abs(wanted - whole).max() > 100 * TOLERANCE
    )  # or this test would not tell the two rules apart


def test_dynamic_rope_gives_a_tree_node_the_rows_of_its_own_length(stretched: Pair) -> None:
    prompt, tree = some_ids(PROMPT), random_tree(0)
    found = verify(stretched.component.decoder(), prompt, tree).logits[0]
    for node in (7, 11):
        path = path_to(tree, node)
        ids = np.concatenate([prompt, tree.tokens[path]])
        assert_close(found[path], token_by_token(stretched.model, ids)[PROMPT:])
