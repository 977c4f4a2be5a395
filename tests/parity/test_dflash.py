"""DFlash drafts of every layout, exported and built, against the slow reference of
`dflash_reference`.

A row of DRAFTS is a checkpoint as someone publishes it; all of them pass the same claims: the
logits of blocks behind contexts that came in pieces, and what is proposed from them.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import load_file, save_file

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.backends.build import build
from edgespec.backends.host import HostStates
from edgespec.backends.ort.options import WeightFormat
from edgespec.contract import Limits
from edgespec.errors import BuildError
from edgespec.export.components import ExportOptions, export
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.block_drafter import BlockTreeDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.block import BlockRows
from edgespec.runtime.trees.tree import BlockPlan, DraftTree
from tests import reference, toys
from tests.one_lane import OneLane
from tests.parity.dflash_reference import DFlashReference

LIMITS = Limits(
    max_input_len=48, max_kv_cache_capacity=64, max_verify_tree_size=32, max_draft_tree_size=16
)
LAYERS = 8
TOKENS = [7, 101, 33, 250, 18, 64, 199, 3, 90, 141, 222, 57, 12]  # the last one is pending
PIECES = (5, 1, 4, 2)  # how the context comes in: a prompt, and three steps
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32 in another order; toy logits are of size 1 to 10
SEEN = 1e-2  # what a wrong reading moves logits by, at the least
BASES: dict[str, dict[str, Any]] = {
    "qwen3": {"family": "qwen3"},
    "tied": {"family": "qwen3", "tied": True, "head_dim": 32, "seed": 5},
    "llama": {"family": "llama"},
}
MIXED = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Draft:
    name: str
    layout: toys.Layout
    keys: dict[str, Any] = field(default_factory=dict)
    base: str = "qwen3"


DRAFTS = (
    Draft("z-lab", "z-lab"),
    Draft("z-lab-five-layers", "z-lab", {"layers": 5, "block_size": 8}),
    Draft("z-lab-one-layer", "z-lab", {"layers": 1, "aux_layers": (1, 4, 8)}),
    Draft("z-lab-inner-block", "z-lab", {"block_in": "inner", "block_size": 6}),
    Draft("z-lab-on-a-tied-base", "z-lab", base="tied"),
    Draft("z-lab-on-llama", "z-lab", {"heads": 3, "kv_heads": 1, "head_dim": 24}, base="llama"),
    Draft("z-lab-sliding", "z-lab", {"layer_types": MIXED, "window": 4}),
    Draft(
        "z-lab-sliding-not-causal", "z-lab", {"layer_types": MIXED, "window": 4, "causal": False}
    ),
    Draft("z-lab-all-sliding", "z-lab", {"use_swa": True, "window": 3}),
    Draft("z-lab-causal", "z-lab", {"causal": True}),
    Draft("z-lab-theta", "z-lab", {"rope_theta": 1e6, "mask_token": 9}),
    Draft("z-lab-bfloat16-sharded", "z-lab", {"dtype": "bfloat16", "shards": 2}),
    Draft("modelopt", "modelopt", {"aux_layers": (2, 5, 7)}),
    Draft("modelopt-sliding-causal", "modelopt", {"use_swa": True, "window": 5, "causal": True}),
    Draft("renamed-and-fused", "z-lab", {"renamed": True, "fused": True, "attention_bias": True}),
    Draft(
        "speculators",
        "speculators",
        {"draft_vocab": 96, "own_embedding": True, "aux_layers": (1, 3, 6)},
    ),
    Draft("speculators-whole-vocabulary", "speculators", {"aux_layers": (2, 4)}),
    Draft(
        "speculators-sliding",
        "speculators",
        {"aux_layers": (2, 4), "layer_types": MIXED, "window": 4, "draft_vocab": 64},
    ),
)
BY_NAME = {draft.name: draft for draft in DRAFTS}


@dataclass
class Pair:
    """An open engine and its reference; `features` [n, k*H] are the engine's own, of TOKENS without
    the last."""

    engine: Engine
    ref: DFlashReference
    model: Any
    features: np.ndarray

    @property
    def drafter(self) -> BlockTreeDrafter:
        assert isinstance(self.engine.drafter, BlockTreeDrafter)
        return self.engine.drafter

    def truth(self, aux_layers: tuple[int, ...]) -> torch.Tensor:
        """What transformers says of taps: [n, k*H]."""
        _, hidden_states = reference.base_hidden_states(self.model, torch.tensor([TOKENS[:-1]]))
        return reference.gather_aux_hidden_states(hidden_states, aux_layers)[0]


@dataclass
class Workshop:
    root: Path

    def base(self, name: str) -> Path:
        path = self.root / "bases" / name
        return path if path.exists() else toys.make_base(path, layers=LAYERS, **BASES[name])

    def checkpoint(self, draft: Draft) -> Path:
        path = self.root / "drafts" / draft.name
        return (
            path
            if path.exists()
            else toys.make_dflash(path, self.base(draft.base), draft.layout, **draft.keys)
        )

    def base_engine(self, draft: Draft, aux_layers: Sequence[int]) -> Path:
        """The engine of a base, made for the first draft that reads these layers of it."""
        at = self.root / "-".join(map(str, (draft.base, *aux_layers)))
        if not at.exists():
            named = str(self.checkpoint(draft))
            options = ExportOptions(base_for="dflash", draft_dir=named, golden=False)
            export(str(self.base(draft.base)), at / "onnx", options)
            build(at / "onnx" / "llm", at / "engine", LIMITS)
        return at / "engine"

    def pair(self, draft: Draft) -> Pair:
        base, checkpoint, at = (
            self.base(draft.base),
            self.checkpoint(draft),
            self.root / "made" / draft.name,
        )
        named = str(checkpoint)
        export(str(base), at / "draft", ExportOptions(draft_for="dflash", draft_dir=named))
        ref = DFlashReference(checkpoint, base)
        shutil.copytree(self.base_engine(draft, ref.aux_layers), at / "engine")
        build(at / "draft" / "dflash_draft", at / "engine", LIMITS)
        engine = Engine(at / "engine", spec_decode=True)
        prefix = np.array(TOKENS[:-1])
        found = OneLane(engine.base).causal(prefix, np.arange(len(prefix))).hidden_states
        assert found is not None
        return Pair(engine, ref, load_base(base), found[0].copy())


load_base = functools.cache(toys.load_base)


@pytest.fixture(scope="module")
def open_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """Pairs by row name, opened once a module."""
    pairs: dict[str, Pair] = {}
    workshop = Workshop(tmp_path_factory.mktemp("dflash"))

    def get(name: str) -> Pair:
        if name not in pairs:
            pairs[name] = workshop.pair(BY_NAME[name])
        pairs[name].drafter.reset(0)
        return pairs[name]

    yield get
    for pair in pairs.values():
        pair.engine.close()


@pytest.fixture(params=[draft.name for draft in DRAFTS])
def pair(request: pytest.FixtureRequest, open_pair: Callable[[str], Pair]) -> Pair:
    return open_pair(request.param)


def said_by_engine(pair: Pair) -> list[np.ndarray]:
    """Logits of a block behind each piece of the context; a block's rows must leave no trace in the
    next."""
    said, start, decoder = [], 0, pair.drafter.decoder
    for count in PIECES:
        block = np.full(pair.ref.block_size, pair.ref.mask_token)
        block[0] = TOKENS[start + count]
        (found,) = decoder.run(
            [BlockRows(0, HostStates(pair.features[start : start + count]), block)]
        )
        said.append(found.logits.rows().copy())
        start += count
    decoder.reset(0)
    return said


def said_by_reference(pair: Pair, features: torch.Tensor | None = None) -> list[np.ndarray]:
    """The same blocks, each from all features before it."""
    given = pair.truth(pair.ref.aux_layers) if features is None else features
    ends = itertools.accumulate(PIECES)
    return [pair.ref.block(given[:n], TOKENS[n], pair.ref.block_size)[1:].numpy() for n in ends]


def difference(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))


# Claims that hold for every row


def test_base_emits_the_layers_that_the_draft_means(pair: Pair) -> None:
    np.testing.assert_allclose(pair.features, pair.truth(pair.ref.aux_layers).numpy(), **CLOSE)
    assert pair.engine.config.component.spec.aux_layer_ids == tuple(pair.ref.aux_layers)


def test_every_block_has_the_references_logits(pair: Pair) -> None:
    for found, wanted in zip(said_by_engine(pair), said_by_reference(pair), strict=True):
        np.testing.assert_allclose(found, wanted, **CLOSE)


def test_a_chain_is_the_best_token_of_each_slot(pair: Pair) -> None:
    pair.drafter.observe([Observation(0, HostStates(pair.features), np.array(TOKENS[1:]))])
    size = pair.ref.block_size
    (tree,) = pair.drafter.propose([DraftRequest(0, TOKENS[-1], BlockPlan(1, size - 1, size))])
    best = said_by_reference(pair)[-1].argmax(1)
    assert tree.tokens.tolist() == [TOKENS[-1], *pair.ref.d2t[best].tolist()]
    assert tree.parents.tolist() == list(range(-1, size - 1))


@pytest.mark.parametrize(("top_k", "size"), [(2, 5), (3, 12), (4, 20)])
def test_a_tree_holds_the_most_probable_paths(pair: Pair, top_k: int, size: int) -> None:
    pair.drafter.observe([Observation(0, HostStates(pair.features), np.array(TOKENS[1:]))])
    (tree,) = pair.drafter.propose(
        [DraftRequest(0, TOKENS[-1], BlockPlan(top_k, pair.ref.block_size - 1, size))]
    )
    rows = min(pair.ref.block_size, size)
    found = {path_to(tree, node) for node in range(1, len(tree))}
    assert len(tree) == min(size, sum(top_k**d for d in range(rows)))
    assert found == most_probable(pair, top_k, len(tree), rows)
    assert tree.depths.max() < rows


def path_to(tree: DraftTree, node: int) -> tuple[int, ...]:
    return () if node == 0 else (*path_to(tree, tree.parents[node]), int(tree.tokens[node]))


def most_probable(pair: Pair, top_k: int, size: int, rows: int) -> set[tuple[int, ...]]:
    """By scoring every path there is."""
    logits = pair.ref.block(pair.truth(pair.ref.aux_layers), TOKENS[-1], rows)[1:]
    best = logits.double().log_softmax(-1).topk(top_k, dim=-1)
    scored = {}
    for depth in range(1, min(rows, size)):
        for ranks in itertools.product(range(top_k), repeat=depth):
            path = tuple(
                int(pair.ref.d2t[best.indices[level, rank]]) for level, rank in enumerate(ranks)
            )
            scored[path] = sum(float(best.values[level, rank]) for level, rank in enumerate(ranks))
    return set(sorted(scored, key=lambda path: -scored[path])[: size - 1])


def test_a_shorter_block_is_a_block_of_that_length(pair: Pair) -> None:
    pair.drafter.observe([Observation(0, HostStates(pair.features), np.array(TOKENS[1:]))])
    (tree,) = pair.drafter.propose([DraftRequest(0, TOKENS[-1], BlockPlan(1, 2, 3))])
    logits = pair.ref.block(pair.truth(pair.ref.aux_layers), TOKENS[-1], 3)[1:].numpy()
    assert tree.tokens.tolist() == [TOKENS[-1], *pair.ref.d2t[logits.argmax(1)].tolist()]


# These tests would see a wrong reading


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_tap_one_layer_off_would_be_seen(
    open_pair: Callable[[str], Pair], index: int, step: int
) -> None:
    pair = open_pair("modelopt")
    off = list(pair.ref.aux_layers)
    off[index] += step
    assert difference(said_by_engine(pair), said_by_reference(pair, pair.truth(tuple(off)))) > SEEN


def test_taps_in_another_order_would_be_seen(open_pair: Callable[[str], Pair]) -> None:
    pair = open_pair("modelopt")
    assert (
        difference(
            said_by_engine(pair), said_by_reference(pair, pair.truth(pair.ref.aux_layers[::-1]))
        )
        > SEEN
    )


WRONG_READINGS = (
    ("z-lab", "theta", 1e5),
    ("z-lab-theta", "theta", 1e4),
    ("z-lab", "norms_context", False),
    ("z-lab", "causal", [True, True]),
    ("z-lab-causal", "causal", [False, False]),
    ("z-lab-sliding", "causal", [False, False]),
    ("z-lab-sliding", "windows", [None, None]),
    ("z-lab-sliding", "windows", [5, None]),
    ("z-lab-sliding", "windows", [3, None]),
    ("z-lab-sliding", "windows", [4, 4]),
    ("z-lab-all-sliding", "windows", [None, None]),
    ("modelopt-sliding-causal", "windows", [None, None]),
    ("speculators-sliding", "windows", [None, None]),
    ("z-lab", "mask_token", 3),
    ("z-lab-five-layers", "num_layers", 4),
)


@pytest.mark.parametrize(("name", "attribute", "value"), WRONG_READINGS)
def test_a_wrong_reading_of_the_config_would_be_seen(
    open_pair: Callable[[str], Pair], name: str, attribute: str, value: object
) -> None:
    pair = open_pair(name)
    found, right = said_by_engine(pair), getattr(pair.ref, attribute)
    assert right != value
    setattr(pair.ref, attribute, value)
    try:
        wrong = said_by_reference(pair)
    finally:
        setattr(pair.ref, attribute, right)
    assert difference(found, wrong) > SEEN


def test_a_block_that_stayed_in_the_cache_would_be_seen(open_pair: Callable[[str], Pair]) -> None:
    """The second block again, behind the first one's rows as if they were context."""
    pair = open_pair("z-lab")
    decoder, first, second = pair.drafter.decoder, PIECES[0], PIECES[0] + PIECES[1]
    block = np.full(pair.ref.block_size, pair.ref.mask_token)
    decoder.run([BlockRows(0, HostStates(pair.features[:first]), block)])
    decoder.lanes[0].length += 1
    (wrong,) = decoder.run(
        [
            BlockRows(
                0, HostStates(pair.features[first:second]), np.append(TOKENS[second], block[1:])
            )
        ]
    )
    wrong = wrong.logits.rows().copy()
    decoder.reset(0)
    assert difference([said_by_engine(pair)[1]], [wrong]) > SEEN


# Several sequences at once


def test_lanes_of_one_call_do_not_know_of_each_other(tmp_path: Path) -> None:
    """Contexts and blocks of different lengths, a lane between them that takes no part, and one
    that is nearly full."""
    base = toys.make_base(tmp_path / "base", "qwen3", layers=LAYERS)
    draft = toys.make_dflash(tmp_path / "draft", base, block_size=6, layer_types=MIXED, window=4)
    export(str(draft), tmp_path, ExportOptions(base_model_dir=str(base)))
    export(str(base), tmp_path, ExportOptions(base_for="dflash", draft_dir=str(draft)))
    limits = Limits(
        max_kv_cache_capacity=32, max_input_len=32, max_draft_tree_size=6, max_batch_size=4
    )
    for component in ("dflash_draft", "llm"):
        build(tmp_path / component, tmp_path / "engine", limits)
    ref, rng = DFlashReference(draft, base), np.random.default_rng(3)
    with Engine(tmp_path / "engine", spec_decode=True) as engine:
        assert isinstance(engine.drafter, BlockTreeDrafter)
        decoder = engine.drafter.decoder
        known = [
            rng.standard_normal((0, decoder.runner.contract.shape.base_features), np.float32)
        ] * 4
        for lanes, counts, sizes in (
            ((0, 2), (7, 2), (6, 3)),
            ((1, 2, 3), (3, 1, 6), (2, 6, 4)),
            ((0, 3), (1, 5), (5, 6)),
            ((0,), (21,), (2,)),
            (
                (0, 1),
                (1, 6),
                (2, 6),
            ),  # the first lane's last two slots, and its mate's rows fill it up by ten
        ):
            parts = []
            for lane, count, size in zip(lanes, counts, sizes, strict=True):
                features = rng.standard_normal((count, known[lane].shape[1]), np.float32)
                known[lane] = np.concatenate([known[lane], features])
                tokens = np.full(size, ref.mask_token)
                tokens[0] = 10 + lane
                parts.append(BlockRows(lane, HostStates(features), tokens))
            for part, found in zip(parts, decoder.run(parts), strict=True):
                wanted = ref.block(
                    torch.tensor(known[part.lane]), 10 + part.lane, len(part.tokens)
                )[1:]
                np.testing.assert_allclose(found.logits.rows(), wanted.numpy(), **CLOSE)


# What builds may round


ROUNDED = [WeightFormat("int4", 32), WeightFormat("int8", 128), WeightFormat("int8", 0)]


@pytest.mark.parametrize("weight_format", ROUNDED, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fc_is_a_float32_product_whatever_a_build_rounds(
    tmp_path: Path, weight_format: WeightFormat, dtype: toys.Dtype
) -> None:
    base = toys.make_base(tmp_path / "base", "qwen3", layers=LAYERS, dtype=dtype)
    draft = toys.make_dflash(tmp_path / "draft", base, dtype=dtype)
    export(str(draft), tmp_path, ExportOptions(base_model_dir=str(base)))
    built = build(tmp_path / "dflash_draft", tmp_path / "engine", LIMITS, options=weight_format)
    assert built.golden_cosine is not None
    graph = onnx.load(tmp_path / "engine" / "spec_draft.onnx", load_external_data=False).graph
    floats = [node for node in graph.node if node.op_type == "MatMul"]
    assert [node.name for node in floats] == ["context/fc"]
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert types[floats[0].input[1]] == onnx.TensorProto.FLOAT
    # The layers' Linears and the head are all rounded: q, and k with v, and so on may be one
    # product.
    products = [
        node
        for node in graph.node
        if node.op_type in ("MatMulNBits", "MatMulIntegerToFloat", "MatMulInteger")
    ]
    assert len(products) > 2 * 4


def test_features_beyond_the_range_of_halves_are_read(open_pair: Callable[[str], Pair]) -> None:
    """Taps of 2e4 are known of published bases; their sums in fc go beyond 65504."""
    pair = open_pair("z-lab-bfloat16-sharded")
    large = pair.features * np.float32(3e4 / np.abs(pair.features).max())
    large[:, 0] = 6e4
    block = np.full(pair.ref.block_size, pair.ref.mask_token)
    (found,) = pair.drafter.decoder.run([BlockRows(0, HostStates(large), block)])
    wanted = pair.ref.block(torch.tensor(large), pair.ref.mask_token, pair.ref.block_size)[1:]
    assert (torch.tensor(large) @ pair.ref.weights["fc.weight"].T).abs().max() > 1e4
    np.testing.assert_allclose(found.logits.rows(), wanted.numpy(), **CLOSE)


def test_a_block_graph_keeps_standard_attention_for_one_sequence(tmp_path: Path) -> None:
    """GroupQueryAttention would let no row of a block see the later ones."""
    base = toys.make_base(tmp_path / "base", "qwen3", layers=LAYERS)
    draft = toys.make_dflash(tmp_path / "draft", base)
    export(str(draft), tmp_path, ExportOptions(base_model_dir=str(base), golden=False))
    build(tmp_path / "dflash_draft", tmp_path / "engine", LIMITS, options=WeightFormat())
    graph = onnx.load(tmp_path / "engine" / "spec_draft.onnx", load_external_data=False).graph
    kinds = {node.op_type for node in graph.node}
    assert "GroupQueryAttention" not in kinds
    assert {"Attention", "TensorScatter"} <= kinds


@pytest.mark.parametrize(
    "name", ["attention_mask", "sliding_attention_mask", "target_hidden", "inputs_embeds"]
)
@pytest.mark.parametrize("label", ["prompt", "tree"])
def test_an_engine_that_computes_something_else_is_not_kept(
    tmp_path: Path, name: str, label: str
) -> None:
    """What the golden calls of a block draft show: each input of each call matters."""
    base = toys.make_base(tmp_path / "base", "qwen3", layers=LAYERS)
    draft = toys.make_dflash(tmp_path / "draft", base, layer_types=MIXED, window=4)
    export(str(draft), tmp_path, ExportOptions(base_model_dir=str(base)))
    onnx_dir = tmp_path / "dflash_draft"
    golden = load_file(onnx_dir / file_names.GOLDEN)
    golden[f"{label}_{name}"] = np.ascontiguousarray(golden[f"{label}_{name}"][:, :, ::-1])
    if name == "attention_mask":
        golden[f"{label}_{name}"][..., :3] = False
    save_file(golden, onnx_dir / file_names.GOLDEN)
    manifest = json_files.read_json(onnx_dir / file_names.MANIFEST)
    manifest["files"] = hashes.file_entries(onnx_dir, {})
    manifest["files"].pop(file_names.MANIFEST, None)
    json_files.write_json(onnx_dir / file_names.MANIFEST, manifest)
    with pytest.raises(BuildError, match=f"golden {label}"):
        build(onnx_dir, tmp_path / "engine", LIMITS)
