"""Medusa heads of every layout, exported and built, against the slow reference of
tests/reference_medusa.py: what the heads say of the base's state, and their Cartesian trees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.backends.host import HostStates
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.medusa import CartesianPlan, MedusaDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.trees.static_tree import NAMED, StaticPlan
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests import made, toys
from tests.one_lane import OneLane
from tests.reference import final_states
from tests.reference_medusa import best_paths, logits_of, static_paths

LIMITS = Limits(max_input_len=48, max_kv_cache_capacity=96, max_verify_tree_size=64)
TOKENS = [7, 101, 33, 250, 18, 64, 199, 3, 90, 141, 222, 57]  # t_0 .. t_n; the last one is pending
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32 in another order
SEEN = 1e-2  # what another state moves logits by, at the least
STATIC = StaticPlan.of([[0], [1], [2], [1, 0], [1, 3], [2, 1], [2, 1, 0], [1, 3, 2]])

ROWS: dict[str, tuple[toys.MedusaLayout, dict[str, Any]]] = {
    "pickle": ("pickle", {"dtype": "float16", "heads": 5, "declared": 2}),
    "safetensors": ("safetensors", {}),
    "one-head": ("safetensors", {"heads": 1}),
    "two-blocks": ("safetensors", {"blocks": 2, "heads": 4}),
    "shared-head": ("shared-head", {"heads": 4}),
    "merged": ("merged", {"heads": 4, "dtype": "bfloat16"}),
    "modelopt": ("modelopt", {"heads": 4}),
}


@dataclass
class Pair:
    """An open engine and its checkpoints. `states` [n, H] are transformers' own, of TOKENS without
    the last."""

    engine: Engine
    checkpoint: Path
    base: Path
    states: torch.Tensor
    found: np.ndarray  # the same, the engine's own

    @property
    def drafter(self) -> MedusaDrafter:
        assert isinstance(self.engine.drafter, MedusaDrafter)
        return self.engine.drafter

    def logits(self, position: int = -1) -> torch.Tensor:
        return logits_of(self.checkpoint, self.base, self.states[position])

    def proposed(self, plan: DraftPlan) -> DraftTree:
        """The tree behind the engine's own states."""
        self.drafter.reset(0)
        self.drafter.observe([Observation(0, HostStates(self.found), np.array(TOKENS[1:]))])
        (tree,) = self.drafter.propose([DraftRequest(0, TOKENS[-1], plan)])
        return tree

    def within(self, plan: StaticPlan) -> StaticPlan:
        return plan.within(self.drafter.num_heads, plan.verify_size)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "base"
    return toys.make_base(path, "llama", layers=2, heads=4, kv_heads=4)


@pytest.fixture(scope="module", params=ROWS)
def pair(
    request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    layout, keys = ROWS[request.param]
    heads = toys.make_medusa(tmp_path_factory.mktemp("heads") / "heads", base, layout, **keys)
    if layout in ("merged", "modelopt"):
        out = made.exported(heads, ExportOptions(base_for="medusa"))
        parts = [out / "llm", out / "medusa_draft"]
    else:
        options = ExportOptions(base_model_dir=str(base), allow_pickle=True)
        parts = [
            made.exported(base, ExportOptions(base_for="medusa")) / "llm",
            made.exported(heads, options) / "medusa_draft",
        ]
    with Engine(made.built(LIMITS, *parts), spec_decode=True) as engine:
        prefix = np.array(TOKENS[:-1])
        said = OneLane(engine.base).causal(prefix, np.arange(len(prefix))).hidden_states
        assert said is not None
        yield Pair(engine, heads, base, final_states(base, tuple(TOKENS[:-1])), said[0].copy())


def test_the_heads_say_what_the_reference_says(pair: Pair) -> None:
    (heads,) = pair.drafter.run([HostStates(pair.found[-1:])])
    logits = heads.rows()
    np.testing.assert_allclose(logits, pair.logits().numpy(), **CLOSE)


def test_another_state_would_be_seen(pair: Pair) -> None:
    assert float((pair.logits() - pair.logits(-2)).abs().max()) > SEEN


def test_all_heads_of_the_file_are_used(pair: Pair) -> None:
    assert pair.drafter.num_heads == len(pair.logits())


def test_static_trees_are_cartesian_products(pair: Pair) -> None:
    for whole in (STATIC, StaticPlan.of(NAMED["mc_sim_7b_63"])):
        plan = pair.within(whole)
        tree = pair.proposed(plan)
        assert set(paths_in(tree)) == static_paths(pair.logits(), plan.choices)
        assert len(tree) == plan.verify_size


def test_the_most_probable_nodes_are_the_references(pair: Pair) -> None:
    depth = pair.drafter.num_heads
    plan = CartesianPlan(3, depth, 4 if depth == 1 else 12)
    tree = pair.proposed(plan)
    wanted = best_paths(pair.logits(), 3, depth, plan.verify_size - 1)
    assert set(paths_in(tree)) == wanted


def test_a_chain_is_the_best_token_of_each_head(pair: Pair) -> None:
    depth = pair.drafter.num_heads
    tree = pair.proposed(CartesianPlan(1, depth, 1 + depth))
    assert tree.tokens[1:].tolist() == pair.logits().argmax(-1).tolist()
    assert tree.parents.tolist() == list(range(-1, depth))


def paths_in(tree: DraftTree) -> list[tuple[int, ...]]:
    """The path of base ids of each node but the root, in the tree's order."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]
