"""JetSpec and DSpark drafts of every layout, exported and built, against slow references.

A row of DRAFTS is a checkpoint as someone publishes it. What is claimed of the layers themselves
stands in `test_dflash`; here is what these methods make of a block: causal rows and the tree that
grows best node first, the Markov walk and the length that the confidences allow.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.backends.build import build
from edgespec.backends.host import HostStates
from edgespec.contract import Limits
from edgespec.errors import BundleError, LimitError
from edgespec.export.components import ExportOptions, export
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.block_drafter import BlockTreeDrafter
from edgespec.runtime.drafters.dspark import DSparkDrafter
from edgespec.runtime.drafters.jetspec import grown_best_first
from edgespec.runtime.engine import Engine
from edgespec.runtime.trees.tree import BlockPlan, DraftTree
from tests import reference, toys
from tests.parity.dflash_reference import DFlashReference
from tests.parity.dspark_reference import DSparkReference

LIMITS = Limits(
    max_input_len=48, max_kv_cache_capacity=64, max_verify_tree_size=64, max_draft_tree_size=16
)
TOKENS = [7, 101, 33, 250, 18, 64, 199, 3, 90, 141, 222, 57, 12]  # the last one is pending
PIECES = (5, 1, 6)  # how the context comes in: a prompt, and two steps
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Draft:
    name: str
    make: Callable[..., Path]
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return self.name.partition("-")[0]


JETSPEC = (
    Draft("jetspec", toys.make_jetspec, {"block_size": 6}),
    Draft(
        "jetspec-edgellm-windows",
        toys.make_jetspec,
        {"section": "jetspec_config", "layer_types": MIXED, "window": 4, "block_size": 5},
    ),
)
DSPARK = (
    Draft("dspark-deepspec", toys.make_dspark),
    Draft(
        "dspark-specforge-gated",
        toys.make_dspark,
        {"layout": "specforge", "kind": "gated", "contained": True, "dtype": "bfloat16"},
    ),
    Draft("dspark-modelopt-rnn", toys.make_dspark, {"layout": "modelopt", "kind": "rnn"}),
    Draft(
        "dspark-speculators-from-the-second-slot",
        toys.make_dspark,
        {
            "layout": "speculators",
            "draft_vocab": 96,
            "from_anchor": False,
            "with_markov": False,
            "kind": "rnn",
        },
    ),
    Draft("dspark-bare", toys.make_dspark, {"rank": 0, "confidence": False}),
)
BY_NAME = {draft.name: draft for draft in (*JETSPEC, *DSPARK)}


@dataclass
class Pair:
    """An open engine and its reference; `states` [n, k*H] are the base's aux hidden states of
    TOKENS without the last, by transformers."""

    engine: Engine
    ref: DFlashReference
    states: np.ndarray

    def proposed(self, plan: BlockPlan) -> DraftTree:
        """The drafts behind all of the context, which came in pieces with a block between."""
        drafter, start = self.engine.drafter, 0
        assert drafter is not None
        drafter.reset(0)
        for count in PIECES:
            part = slice(start, start + count)
            tokens = np.array(TOKENS[start + 1 : start + count + 1])
            drafter.observe([Observation(0, HostStates(self.states[part]), tokens)])
            start += count
            (tree,) = drafter.propose([DraftRequest(0, TOKENS[start], plan)])
        return tree


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories by a draft's name: `base`, `draft`, `out` and `engine`."""
    root = tmp_path_factory.mktemp("blocks")
    base = toys.make_base(root / "base", "qwen3", layers=8)

    def make(name: str) -> Path:
        path = root / name
        if path.exists():
            return path
        draft = BY_NAME[name].make(path / "draft", base, **BY_NAME[name].keys)
        (path / "base").symlink_to(base)
        method = BY_NAME[name].method
        by = {"draft_dir": str(draft)}
        export(str(base), path / "out", ExportOptions(base_for=method, golden=False, **by))
        export(str(base), path / "out", ExportOptions(draft_for=method, **by))
        for component in ("llm", f"{method}_draft"):
            build(path / "out" / component, path / "engine", LIMITS)
        return path

    return make


@pytest.fixture(scope="module")
def open_pair(made: Callable[[str], Path]) -> Iterator[Callable[[str], Pair]]:
    pairs: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in pairs:
            path = made(name)
            kind = DSparkReference if BY_NAME[name].method == "dspark" else DFlashReference
            ref = kind(path / "draft", path / "base")
            model = toys.load_base(path / "base")
            _, hidden = reference.base_hidden_states(model, torch.tensor([TOKENS[:-1]]))
            states = reference.gather_aux_hidden_states(hidden, ref.aux_layers)[0]
            pairs[name] = Pair(Engine(path / "engine", spec_decode=True), ref, states.numpy())
        return pairs[name]

    yield get
    for pair in pairs.values():
        pair.engine.close()


# JetSpec


@pytest.fixture(params=[draft.name for draft in JETSPEC])
def jetspec(request: pytest.FixtureRequest, open_pair: Callable[[str], Pair]) -> Pair:
    pair = open_pair(request.param)
    assert isinstance(pair.engine.drafter, BlockTreeDrafter)
    assert pair.engine.drafter.search is grown_best_first
    return pair


def said(pair: Pair) -> torch.Tensor:
    """[D, V], the log-probabilities of the block's slots behind the anchor's."""
    states = torch.from_numpy(pair.states)
    return pair.ref.block(states, TOKENS[-1], pair.ref.block_size)[1:].log_softmax(-1)


def test_a_jetspec_chain_is_the_best_token_of_each_causal_slot(jetspec: Pair) -> None:
    drafts = jetspec.ref.block_size - 1
    tree = jetspec.proposed(BlockPlan(1, drafts, drafts + 1))
    assert tree.tokens.tolist() == [TOKENS[-1], *said(jetspec).argmax(-1).tolist()]
    assert tree.parents.tolist() == list(range(-1, drafts))


def test_rows_that_see_later_ones_would_be_seen(jetspec: Pair) -> None:
    right, causal = said(jetspec), jetspec.ref.causal
    try:
        jetspec.ref.causal = [False] * len(causal)
        wrong = said(jetspec)
    finally:
        jetspec.ref.causal = causal
    assert float((right[:-1] - wrong[:-1]).abs().max()) > 1e-2


def test_a_shorter_block_begins_as_the_whole_one_does(jetspec: Pair) -> None:
    """Slots know nothing of what is behind them."""
    whole = jetspec.proposed(BlockPlan(1, 4, 5)).tokens.tolist()
    assert jetspec.proposed(BlockPlan(1, 2, 3)).tokens.tolist() == whole[:3]


@pytest.mark.parametrize(("top_k", "size"), [(2, 9), (3, 20), (7, 40)])
def test_a_jetspec_tree_grows_by_all_children_of_its_best_leaf(
    jetspec: Pair, top_k: int, size: int
) -> None:
    tree = jetspec.proposed(BlockPlan(top_k, jetspec.ref.block_size - 1, size))
    tokens, parents = grown(said(jetspec), top_k, size)
    assert tree.tokens.tolist() == [TOKENS[-1], *tokens]
    assert tree.parents.tolist() == [-1, *parents]


def grown(log_probs: torch.Tensor, top_k: int, size: int) -> tuple[list[int], list[int]]:
    """By looking at all leaves for each step."""
    best = log_probs.double().topk(top_k, dim=-1)
    nodes: list[tuple[int, int, int, float]] = [(-1, -1, 0, 0.0)]  # token, parent, depth, score
    leaves = [0]
    while leaves and len(nodes) < size:
        node = max(leaves, key=lambda leaf: nodes[leaf][3])
        leaves.remove(node)
        _, _, depth, score = nodes[node]
        if depth == len(log_probs):
            continue
        for rank in range(top_k):
            if len(nodes) == size:
                break
            leaves.append(len(nodes))
            value = score + float(best.values[depth, rank])
            nodes.append((int(best.indices[depth, rank]), node, depth + 1, value))
    return [node[0] for node in nodes[1:]], [node[1] for node in nodes[1:]]


# DSpark


@pytest.fixture(params=[draft.name for draft in DSPARK])
def dspark(request: pytest.FixtureRequest, open_pair: Callable[[str], Pair]) -> Iterator[Pair]:
    pair = open_pair(request.param)
    drafter = pair.engine.drafter
    assert isinstance(drafter, DSparkDrafter)
    kept = drafter.threshold
    yield pair
    drafter.threshold = kept


def with_threshold(pair: Pair, threshold: float, drafts: int) -> list[int]:
    drafter = pair.engine.drafter
    assert isinstance(drafter, DSparkDrafter)
    drafter.threshold = threshold
    tree = pair.proposed(BlockPlan(1, drafts, drafts + 1, drafter.decoder.first_slot))
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    assert tree.tokens[0] == TOKENS[-1]
    return tree.tokens[1:].tolist()


def test_a_block_is_walked_and_cut_as_the_reference_does(dspark: Pair) -> None:
    assert isinstance(dspark.ref, DSparkReference)
    whole = dspark.ref.block_size - dspark.ref.first_slot
    assert whole == (4 if dspark.ref.first_slot else 5)
    states = torch.from_numpy(dspark.states)
    for drafts in (whole, 2, 1):
        wanted = dspark.ref.draft(states, TOKENS[-1], drafts)
        assert with_threshold(dspark, 0.0, drafts) == wanted.tokens
        edges = sorted({0.0, 1.0, *wanted.confidences})
        for low, high in itertools.pairwise(edges):
            threshold = (low + high) / 2
            assert with_threshold(dspark, threshold, drafts) == wanted.kept(threshold)


def test_the_heads_are_what_makes_the_difference(open_pair: Callable[[str], Pair]) -> None:
    """A draft whose Markov head was left out would say something else."""
    pair = open_pair("dspark-deepspec")
    states, anchor = torch.from_numpy(pair.states), TOKENS[-1]
    alone = pair.ref.block(states, anchor, 5).argmax(-1).tolist()
    assert with_threshold(pair, 0.0, 5) != alone


def test_a_dspark_draft_makes_chains_alone(dspark: Pair) -> None:
    with pytest.raises(LimitError, match=r"top_k 2: a DSpark draft makes chains"):
        dspark.engine.plan(top_k=2)
    with pytest.raises(LimitError, match="a DSpark draft makes its block in one step"):
        dspark.engine.plan(steps=3)
    whole = dspark.ref.block_size - getattr(dspark.ref, "first_slot", 1)
    plan = dspark.engine.plan()
    assert (plan.top_k, plan.steps, plan.verify_size) == (1, whole, whole + 1)
    assert plan.depth_words == f"blocks of {dspark.ref.block_size}"


# What stands beside the graph


def rewritten(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Other heads in an export, and a manifest that lists them."""
    save_file(arrays, path / file_names.HEADS)
    manifest = json_files.read_json(path / file_names.MANIFEST)
    manifest["files"] = hashes.file_entries(path, {})
    json_files.write_json(path / file_names.MANIFEST, manifest)


W1 = "markov_head.markov_w1.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({W1: np.ones((256, 7), np.float32)}, r"is float32 \[256, 7\], not float32 \[256, 8\]"),
        ({W1: np.ones((256, 8), np.int32)}, "is int32"),
        ({"another": np.ones(3, np.float32)}, "'another' is not one that config.json declares"),
        ({W1: None}, "markov_w1.weight' is missing"),
        (None, "draft_heads.safetensors"),
    ],
    ids=str,
)
def test_other_heads_than_declared_are_refused_at_build(
    made: Callable[[str], Path], tmp_path: Path, change: dict[str, Any] | None, said: str
) -> None:
    path = Path(
        shutil.copytree(made("dspark-deepspec") / "out" / "dspark_draft", tmp_path / "draft")
    )
    arrays = load_file(path / file_names.HEADS)
    if change is None:
        (path / file_names.HEADS).unlink()
        rewritten_without(path)
    else:
        rewritten(path, {k: v for k, v in (arrays | change).items() if v is not None})
    with pytest.raises(BundleError, match=said):
        build(path, tmp_path / "engine", LIMITS)


def rewritten_without(path: Path) -> None:
    manifest = json_files.read_json(path / file_names.MANIFEST)
    del manifest["files"][file_names.HEADS]
    json_files.write_json(path / file_names.MANIFEST, manifest)
