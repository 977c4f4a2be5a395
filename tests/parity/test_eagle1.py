"""EAGLE-1 drafts of both layouts, exported and built, against the slow reference of
tests/reference_eagle1.py: what the base emits, what a draft says, its static and dynamic trees."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.artifacts import json_files
from edgespec.backends.build import build
from edgespec.backends.host import HostStates
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.tree_drafter import TreeDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.trees.static_tree import NAMED, StaticPlan
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests import made, toys
from tests.one_lane import OneLane
from tests.reference import final_states
from tests.reference_eagle1 import MISTAKES, Eagle1Reference, dynamic_tree, static_tree

LIMITS = Limits(
    max_input_len=48, max_kv_cache_capacity=96, max_verify_tree_size=64, max_draft_tree_size=24
)
TOKENS = [7, 101, 33, 250, 18, 64, 199, 3, 90, 141, 222, 57]  # t_0 .. t_n; the last one is pending
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32 in another order; logits are of size 1 to 10
SEEN = 1e-2  # what a wrong reading moves logits by, at the least
STATIC = StaticPlan.of([[0], [1], [2], [1, 0], [1, 3], [2, 1], [2, 1, 0], [1, 3, 2]])
DYNAMIC = DraftPlan(3, 4, 14)

# Bases: Llama-2's form, Llama-3's (grouped heads, RoPE scaled), one whose lm_head is its embedding
BASES: dict[str, dict[str, Any]] = {
    "llama-2": {"family": "llama", "kv_heads": 4, "heads": 4},
    "llama-3": {
        "family": "llama",
        "rope": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "tied": {"family": "qwen3", "tied": True, "head_dim": 32, "seed": 5},
}


@dataclass(frozen=True)
class Row:
    """A draft as someone publishes it."""

    base: str
    layout: toys.Eagle1Layout
    keys: tuple[tuple[str, Any], ...] = ()


ROWS = {
    "safe-ai-lab": Row("llama-2", "eagle"),
    "safe-ai-lab-pickled": Row("llama-2", "eagle", (("pickle", True), ("dtype", "float16"))),
    "safe-ai-lab-llama-3": Row(
        "llama-3", "eagle", (("names_bias", True), ("rope_theta", 500000.0))
    ),
    "safe-ai-lab-without-bias": Row(
        "llama-2", "eagle", (("fc_bias", False), ("names_bias", True), ("qkv_bias", True))
    ),
    "safe-ai-lab-own-embedding": Row("llama-2", "eagle", (("embedding", "own"),)),
    "safe-ai-lab-tied": Row("tied", "eagle"),
    "modelopt": Row("llama-3", "modelopt"),
    "modelopt-norms": Row(
        "llama-3",
        "modelopt",
        (("first_norm", True), ("last_norm", True), ("fc_bias", True), ("head_dim", 24)),
    ),
    "modelopt-norm-output": Row(
        "llama-2", "modelopt", (("last_norm", True), ("norm_output", True))
    ),
    "modelopt-reduced": Row(
        "llama-2", "modelopt", (("draft_vocab", 96), ("own_head", True), ("layers", 2))
    ),
}


@dataclass
class Pair:
    """An open engine and its reference. `states` [n, H] are transformers' own, of TOKENS without
    the last."""

    engine: Engine
    engine_dir: Path
    checkpoint: Path
    base: Path
    states: torch.Tensor
    found: np.ndarray  # the same, the engine's own

    @property
    def drafter(self) -> TreeDrafter:
        assert isinstance(self.engine.drafter, TreeDrafter)
        return self.engine.drafter

    def reference(self, mistake: str | None = None) -> Eagle1Reference:
        return Eagle1Reference(self.checkpoint, self.base, mistake)

    def proposed(self, plan: DraftPlan) -> DraftTree:
        """The tree behind the engine's own states."""
        self.drafter.reset(0)
        observation = Observation(0, HostStates(self.found), np.array(TOKENS[1:]))
        self.drafter.observe([observation])
        (tree,) = self.drafter.propose([DraftRequest(0, TOKENS[-1], plan)])
        return tree


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        name: toys.make_base(root / name, layers=2, **options) for name, options in BASES.items()
    }


@pytest.fixture(scope="module", params=ROWS)
def pair(
    request: pytest.FixtureRequest,
    bases: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    row = ROWS[request.param]
    base = bases[row.base]
    work = tmp_path_factory.mktemp("draft")
    draft = toys.make_eagle1(work / "draft", base, row.layout, **dict(row.keys))
    options = ExportOptions(base_model_dir=str(base), allow_pickle=True)
    of_base = made.built(LIMITS, made.exported(base, ExportOptions(base_for="eagle1")) / "llm")
    engines = Path(shutil.copytree(of_base, work / "engines"))
    build(made.exported(draft, options) / "llm", engines, LIMITS)
    with Engine(engines, spec_decode=True) as engine:
        prefix = np.array(TOKENS[:-1])
        said = OneLane(engine.base).causal(prefix, np.arange(len(prefix))).hidden_states
        assert said is not None
        yield Pair(
            engine, engines, draft, base, final_states(base, tuple(TOKENS[:-1])), said[0].copy()
        )


def test_the_base_emits_its_state_after_the_last_norm(pair: Pair) -> None:
    np.testing.assert_allclose(pair.found, pair.states.numpy(), **CLOSE)


def test_the_draft_says_what_the_reference_says(pair: Pair) -> None:
    pair.proposed(DYNAMIC)
    logits, states = pair.reference().forward(TOKENS[1:], pair.states)
    last = pair.drafter.lanes[0]
    assert last.last_logits is not None
    assert last.last_hidden is not None
    np.testing.assert_allclose(last.last_logits.row(0), logits[-1].numpy(), **CLOSE)
    np.testing.assert_allclose(last.last_hidden.numpy()[0], states[-1].numpy(), **CLOSE)


def test_another_reading_would_be_seen(pair: Pair) -> None:
    """Each mistake that a draft of this form can show."""
    right = pair.reference()
    same = {
        "no bias": "fc.bias" not in right.weights,
        "norm before attention": "layers.0.input_layernorm.weight" in right.weights,
    }
    said = right.forward(TOKENS[1:], pair.states)[0][-1]
    for mistake in MISTAKES:
        other = pair.reference(mistake).forward(TOKENS[1:], pair.states)[0][-1]
        assert ((said - other).abs().max() > SEEN) != same.get(mistake, False)


def test_static_trees_are_the_references(pair: Pair) -> None:
    tree = pair.proposed(STATIC)
    wanted = static_tree(pair.reference(), pair.states, TOKENS[1:], STATIC.choices)
    assert paths_in(tree) == wanted


def test_dynamic_trees_are_the_references(pair: Pair) -> None:
    tree = pair.proposed(DYNAMIC)
    wanted = dynamic_tree(
        pair.reference(), pair.states, TOKENS[1:], DYNAMIC.top_k, DYNAMIC.steps, 13
    )
    assert set(paths_in(tree)) == wanted
    assert len(tree) == DYNAMIC.verify_size


def test_the_tree_of_63_nodes_is_drafted_whole(pair: Pair) -> None:
    plan = StaticPlan.of(NAMED["mc_sim_7b_63"])
    tree = pair.proposed(plan)
    wanted = static_tree(pair.reference(), pair.states, TOKENS[1:], plan.choices)
    assert paths_in(tree) == wanted
    assert len(tree) == 64


def test_an_embedding_that_is_the_bases_is_not_stored_again(pair: Pair) -> None:
    config = json_files.read_json(pair.engine_dir / "draft_config.json")
    own = "embed_tokens.weight" in pair.reference().weights
    is_own = own and not torch.equal(
        pair.reference().embed_tokens, Eagle1Reference(pair.checkpoint, pair.base).base_table
    )
    assert config["pair"]["own_embedding"] == is_own
    assert (pair.engine_dir / "draft_embedding.safetensors").exists() == is_own


def paths_in(tree: DraftTree) -> list[tuple[int, ...]]:
    """The path of base ids of each node but the root, in the tree's order."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]
