"""Every draft layout on disk, exported and built, against the slow reference of tests/reference.py.

A row of DRAFTS is a checkpoint as someone publishes it. Three claims about the whole path are
checked for all of them (which layers the base emits, the logits of an extend pass, the first tree),
the others for six.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from edgespec.backends.build import build
from edgespec.backends.host import HostStates
from edgespec.contract import Limits
from edgespec.errors import PairingError
from edgespec.export.components import ExportOptions, export
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.tree_drafter import TreeDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests import reference, toys
from tests.one_lane import OneLane

LIMITS = Limits(
    max_input_len=48, max_kv_cache_capacity=96, max_verify_tree_size=16, max_draft_tree_size=16
)
PLAN = DraftPlan(top_k=4, steps=3, verify_size=12)
LAYERS = 8
DEFAULT_AUX_LAYERS = (2, 4, 5)  # 2, L//2, L-3
TOKENS = [7, 101, 33, 250, 18, 64, 199, 3, 90, 141, 222, 57]  # t_0 .. t_n; the last one is pending
CLOSE = {"rtol": 1e-4, "atol": 1e-4}  # float32 in another order; toy logits are of size 1 to 10
SEEN = 1e-2  # what a wrong reading moves logits by, at the least

BASES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "tied": {"family": "qwen3", "tied": True, "head_dim": 32, "seed": 5},
}


@dataclass(frozen=True)
class Draft:
    """A checkpoint to make, and what its taps mean as hidden_states indices."""

    name: str
    layout: toys.DraftLayout
    keys: dict[str, Any] = field(default_factory=dict)
    aux_layers: tuple[int, ...] = DEFAULT_AUX_LAYERS
    base: str = "llama"


# A width of its own needs an embedding and a head of its own.
NARROW = {"hidden": 48, "heads": 3, "kv_heads": 3, "own_embedding": True}
WIDE_HEADS = {"heads": 4, "kv_heads": 1, "head_dim": 24}

DRAFTS = (
    Draft("eagle", "eagle"),
    Draft("eagle-without-t2d", "eagle", {"t2d": False}),
    Draft("eagle-absolute-d2t", "eagle", {"d2t": "absolute"}),
    Draft("eagle-whole-vocabulary", "eagle", {"draft_vocab": None}),
    Draft("eagle-whole-vocabulary-named", "eagle", {"draft_vocab": 256}),
    Draft("eagle-borrowed-head", "eagle", {"draft_vocab": None, "own_head": False}),
    Draft(
        "eagle-borrowed-head-of-a-tied-base",
        "eagle",
        {"draft_vocab": None, "own_head": False},
        base="tied",
    ),
    Draft("eagle-own-embedding", "eagle", {"own_embedding": True}),
    Draft("eagle-narrower-than-its-base", "eagle", NARROW),
    Draft("eagle-theta", "eagle", {"rope_theta": 500000.0}),
    Draft("eagle-head-dim", "eagle", WIDE_HEADS),
    Draft("eagle-pickled", "eagle", {"pickle": True, "dtype": "float16"}),
    Draft("specforge-taps", "specforge", {"aux_layers": (1, 3, 6)}, (1, 3, 6)),
    Draft("specforge-norm-output", "specforge", {"norm_output": True}),
    Draft("specforge-3.1", "specforge", {"norm_output": True, "fc_norm": True}),
    Draft("modelopt-taps", "modelopt", {"aux_layers": (1, 4, 7)}, (1, 4, 7)),
    Draft("modelopt-last-layer", "modelopt", {"aux_layers": (3, 8)}, (3, 8)),
    Draft("modelopt-two-layers", "modelopt", {"layers": 2, "rope_theta": 1e6}),
    Draft("speculators", "speculators"),
    Draft("speculators-taps", "speculators", {"aux_layers": (1, 2, 5, 7)}, (1, 2, 5, 7)),
    Draft("speculators-of-old", "speculators", {"speculators_version": "0.1.0"}),
    Draft("speculators-norm-before-residual", "speculators", {"norm_before_residual": True}),
    Draft("speculators-norm-before-fc", "speculators", {"norm_before_fc": True}),
    Draft("speculators-norm-output", "speculators", {"norm_output": True}),
    Draft(
        "speculators-qk-norm",
        "speculators",
        {"qk_norm": True, "rope_theta": 1e6, "rope_spelling": "new"},
    ),
    Draft("speculators-absolute-d2t", "speculators", {"d2t": "absolute", "own_embedding": True}),
    Draft(
        "speculators-everything",
        "speculators",
        {
            **NARROW,
            "layers": 2,
            "qk_norm": True,
            "norm_before_residual": True,
            "fc_norm": True,
            "norm_output": True,
            "rope_theta": 50000.0,
            "aux_layers": (2, 5, 8),
        },
        (2, 5, 8),
    ),
)
BY_NAME = {draft.name: draft for draft in DRAFTS}
REPRESENTATIVE = (
    "eagle",
    "specforge-3.1",
    "modelopt-two-layers",
    "speculators-norm-before-residual",
    "speculators-norm-output",
    "speculators-everything",
)
representative = pytest.mark.parametrize("pair", REPRESENTATIVE, indirect=True)


@dataclass
class Pair:
    """An open engine and its reference. `features` [n, k*H] are the engine's own, of TOKENS without
    the last."""

    draft: Draft
    engine: Engine
    ref: reference.Eagle3Reference
    model: Any
    hidden_states: tuple[torch.Tensor, ...]  # of transformers, each [1, n, H]
    features: np.ndarray

    @property
    def drafter(self) -> TreeDrafter:
        assert self.engine.drafter is not None
        return self.engine.drafter

    @property
    def truth(self) -> torch.Tensor:
        """What the reference's base says of the draft's taps: [1, n, k*H]."""
        return reference.gather_aux_hidden_states(self.hidden_states, self.draft.aux_layers)


@dataclass
class Workshop:
    """Makes checkpoints and engine directories; what several rows share is made once."""

    root: Path

    def base(self, name: str) -> Path:
        path = self.root / "bases" / name
        return path if path.exists() else toys.make_base(path, layers=LAYERS, **BASES[name])

    def base_engine(self, name: str, aux_layers: tuple[int, ...]) -> Path:
        """An engine directory with the base alone; taps other than the default ones are named."""
        at = self.root / f"{name}-{'-'.join(map(str, aux_layers))}"
        if not at.exists():
            named = None if aux_layers == DEFAULT_AUX_LAYERS else aux_layers
            export(
                str(self.base(name)),
                at / "onnx",
                ExportOptions(base_for="eagle3", aux_layers=named, golden=False),
            )
            build(at / "onnx" / "llm", at / "engine", LIMITS)
        return at / "engine"

    def checkpoint(self, draft: Draft) -> Path:
        path = self.root / "drafts" / draft.name
        return (
            path
            if path.exists()
            else toys.make_draft(path, self.base(draft.base), draft.layout, **draft.keys)
        )

    def engine(self, draft: Draft, aux_layers: tuple[int, ...] | None = None) -> Path:
        """Base and draft together. `aux_layers` other than the draft's own are asked for by
        --aux-layers on both sides."""
        engine = self.root / "engines" / f"{draft.name}{aux_layers or ''}"
        onnx = self.root / "onnx" / f"{draft.name}{aux_layers or ''}"
        shutil.copytree(self.base_engine(draft.base, aux_layers or draft.aux_layers), engine)
        options = ExportOptions(
            base_model_dir=str(self.base(draft.base)), aux_layers=aux_layers, allow_pickle=True
        )
        export(str(self.checkpoint(draft)), onnx, options)
        build(onnx / "llm", engine, LIMITS)
        return engine

    def pair(self, draft: Draft, aux_layers: tuple[int, ...] | None = None) -> Pair:
        engine = Engine(self.engine(draft, aux_layers), spec_decode=True)
        ref = reference.Eagle3Reference(self.checkpoint(draft), self.base(draft.base))
        model = load_base(self.base(draft.base))
        prefix = np.array(TOKENS[:-1])
        _, hidden_states = reference.base_hidden_states(model, torch.tensor([TOKENS[:-1]]))
        found = OneLane(engine.base).causal(prefix, np.arange(len(prefix))).hidden_states
        assert found is not None
        return Pair(draft, engine, ref, model, hidden_states, found[0].copy())


load_base = functools.cache(toys.load_base)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("drafts"))


@pytest.fixture(scope="module")
def open_pair(workshop: Workshop) -> Iterator[Callable[[str], Pair]]:
    """Pairs by row name, opened once a module."""
    pairs: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in pairs:
            pairs[name] = workshop.pair(BY_NAME[name])
        pairs[name].drafter.reset(0)
        return pairs[name]

    yield get
    for pair in pairs.values():
        pair.engine.close()


@pytest.fixture(params=BY_NAME)
def pair(request: pytest.FixtureRequest, open_pair: Callable[[str], Pair]) -> Pair:
    return open_pair(request.param)


# What the reference and the drafter say of one prefix


@dataclass(frozen=True)
class Said:
    """Logits [S, Vd] and hidden states to recycle [S, Hd] of the extend pass and of one level of
    drafts behind it."""

    extend: np.ndarray
    recycled: np.ndarray
    level: np.ndarray
    level_recycled: np.ndarray


SIBLINGS = (5, 77)  # two tokens of the first level, and below
CHILD = 130  # one that follows the second of them


@torch.no_grad()
def said_by_reference(
    ref: reference.Eagle3Reference, features: torch.Tensor, *, first: int = 0
) -> Said:
    """`features` [1, n, k*H] with TOKENS[1:], then SIBLINGS and CHILD fed with the draft's own
    states."""
    n = features.shape[1]
    positions = first + torch.arange(n)[None]
    causal = torch.ones(1, n, n, dtype=torch.bool).tril()
    embeds = ref.embed_tokens[torch.tensor(TOKENS[1:])][None]
    logits, out, cache = ref.forward(embeds, ref.fuse(features), positions, causal)

    seen = torch.zeros(1, 2, n + 2, dtype=torch.bool)
    seen[:, :, :n] = True
    seen[:, [0, 1], [n, n + 1]] = True
    state = out[:, -1:].expand(-1, 2, -1)
    embeds = ref.embed_tokens[torch.tensor(SIBLINGS)][None]
    level, level_out, cache = ref.forward(embeds, state, torch.full((1, 2), first + n), seen, cache)

    seen = torch.ones(1, 1, n + 3, dtype=torch.bool)
    seen[0, 0, n] = False
    embeds = ref.embed_tokens[torch.tensor([CHILD])][None]
    second, second_out, _ = ref.forward(
        embeds, level_out[:, 1:], torch.full((1, 1), first + n + 1), seen, cache
    )
    return Said(
        logits[0].numpy(),
        out[0].numpy(),
        torch.cat([level[0], second[0]]).numpy(),
        torch.cat([level_out[0], second_out[0]]).numpy(),
    )


def said_by_engine(pair: Pair) -> Said:
    """The same through the draft's engine and its cache."""
    decoder, n = OneLane(pair.drafter.decoder), len(TOKENS) - 1
    decoder.reset()
    first = decoder.causal(np.array(TOKENS[1:]), np.arange(n), pair.features)
    logits, hidden = copies(first)
    state = np.repeat(hidden[-1:], 2, 0)
    both = decoder.run(
        np.array(SIBLINGS), np.full(2, n), np.eye(2, dtype=bool), np.arange(2), draft_hidden=state
    )
    level, level_out = copies(both)
    seen = np.array([[False, True, True]])
    last = decoder.run(
        np.array([CHILD]), np.array([n + 1]), seen, np.arange(1), draft_hidden=level_out[1:]
    )
    second, second_out = copies(last)
    decoder.drop_scratch()
    return Said(
        logits, hidden, np.concatenate([level, second]), np.concatenate([level_out, second_out])
    )


def copies(result: Any) -> tuple[np.ndarray, np.ndarray]:
    return result.logits[0].copy(), result.hidden_states[0].copy()


def difference(one: Said, other: Said, *names: str) -> float:
    return max(float(np.abs(getattr(one, name) - getattr(other, name)).max()) for name in names)


# Claims that hold for every layout


def test_base_emits_the_layers_that_the_layout_means(pair: Pair) -> None:
    assert pair.engine.config.component.spec.aux_layer_ids == tuple(pair.draft.aux_layers)
    np.testing.assert_allclose(pair.features, pair.truth[0].numpy(), **CLOSE)


def test_export_reads_the_taps_as_the_layout_counts_them(pair: Pair) -> None:
    asked = pair.engine.draft_config.component.pair
    assert asked.aux_layer_ids == tuple(pair.draft.aux_layers)
    assert pair.ref.aux_layer_ids(LAYERS) == pair.draft.aux_layers


def test_extend_pass_gives_the_references_logits(pair: Pair) -> None:
    np.testing.assert_allclose(
        said_by_engine(pair).extend, said_by_reference(pair.ref, pair.truth).extend, **CLOSE
    )


@representative
def test_extend_pass_recycles_the_references_hidden_states(pair: Pair) -> None:
    found, wanted = said_by_engine(pair), said_by_reference(pair.ref, pair.truth)
    np.testing.assert_allclose(found.recycled, wanted.recycled, **CLOSE)


@representative
def test_levels_fed_with_own_states_give_the_references_logits(pair: Pair) -> None:
    found, wanted = said_by_engine(pair), said_by_reference(pair.ref, pair.truth)
    np.testing.assert_allclose(found.level, wanted.level, **CLOSE)
    np.testing.assert_allclose(found.level_recycled, wanted.level_recycled, **CLOSE)


def test_first_tree_is_the_references(pair: Pair) -> None:
    pair.drafter.observe([Observation(0, HostStates(pair.features), np.array(TOKENS[1:]))])
    (tree,) = pair.drafter.propose([DraftRequest(0, TOKENS[-1], PLAN)])
    with torch.no_grad():
        tokens, parents, depths = reference.draft_tree(
            pair.ref,
            pair.ref.embed_tokens,
            pair.truth[0],
            TOKENS[1:],
            PLAN.top_k,
            PLAN.steps,
            PLAN.verify_size,
        )
    assert len(tokens) == PLAN.verify_size
    assert tree.tokens.tolist() == tokens
    assert tree.parents.tolist() == parents
    assert tree.depths.tolist() == depths


@representative
def test_features_in_pieces_leave_the_drafter_where_all_at_once_do(pair: Pair) -> None:
    """Prefill, three, one; a tree is drafted after each, and its rows must leave no trace."""
    drafter, following = pair.drafter, np.array(TOKENS[1:])
    for start, end in ((0, 7), (7, 10), (10, 11)):
        drafter.observe(
            [Observation(0, HostStates(pair.features[start:end]), following[start:end])]
        )
        drafter.propose([DraftRequest(0, int(following[end - 1]), PLAN)])
    assert drafter.decoder.lanes[0].length == len(following)
    wanted = said_by_reference(pair.ref, pair.truth)
    np.testing.assert_allclose(drafter.lanes[0].last_logits.row(0), wanted.extend[-1], **CLOSE)
    np.testing.assert_allclose(
        drafter.lanes[0].last_hidden.numpy()[0], wanted.recycled[-1], **CLOSE
    )


# After acceptance


PROMPT = TOKENS[:6]


class Oracle:
    """Proposes what plain decoding goes on with, among wrong siblings; everything else is the real
    drafter's."""

    def __init__(self, drafter: TreeDrafter, known: list[int]) -> None:
        self.drafter, self.known = drafter, known
        self.ended: tuple[int, Any] = 0, None  # rows and state of the sequence that ended last

    def reset(self, lane: int) -> None:
        """Keeps what the drafter is about to forget."""
        if length := self.drafter.decoder.lanes[lane].length:
            self.ended = length, self.drafter.lanes[lane]
        self.drafter.reset(lane)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Each level is a wrong token before the true one, so that accepted rows have to move."""
        ((pending, plan),) = [(request.pending, request.plan) for request in requests]
        self.drafter.propose([DraftRequest(0, pending, PLAN)])
        place = self.drafter.decoder.lanes[0].length - len(PROMPT)
        assert self.known[place] == pending
        tokens, parents = [pending], [-1]
        for token in self.known[place + 1 : place + 1 + min(plan.steps, 2)]:
            parent = len(tokens) - 1
            tokens += [(token + 1) % 256, token]
            parents += [parent, parent]
        return [DraftTree(np.array(tokens), np.array(parents))]


@pytest.mark.parametrize("name", ["eagle", "modelopt-two-layers", "speculators-everything"])
def test_accepted_branches_are_replayed_with_true_features(
    open_pair: Callable[[str], Pair], name: str
) -> None:
    pair = open_pair(name)
    engine, greedy = pair.engine, SamplingParams(temperature=0.0, max_generate_length=10)
    known = engine.plainly(PROMPT, greedy).token_ids
    assert len(known) == 10
    engine.session.drafter = oracle = Oracle(pair.drafter, known)
    try:
        stream = engine.stream(PROMPT, greedy, PLAN)
        chunks, last = [*stream], stream.result()
    finally:
        engine.session.drafter = pair.drafter
    assert last.token_ids == known
    assert [chunk.accepted for chunk in chunks] == [0, 2, 2, 2]

    num_rows, ended = oracle.ended
    committed = [*PROMPT, *known][:num_rows]
    # The last step ended the run, so it was committed and not replayed.
    assert len(committed) == engine.base.lanes[0].length - 3
    _, hidden_states = reference.base_hidden_states(pair.model, torch.tensor([committed]))
    features = reference.gather_aux_hidden_states(hidden_states, pair.draft.aux_layers)
    following = torch.tensor([*PROMPT, *known][1 : len(committed) + 1])
    n = len(committed)
    with torch.no_grad():
        logits, out, _ = pair.ref.forward(
            pair.ref.embed_tokens[following][None],
            pair.ref.fuse(features),
            torch.arange(n)[None],
            torch.ones(1, n, n, dtype=torch.bool).tril(),
        )
    np.testing.assert_allclose(ended.last_logits.row(0), logits[0, -1].numpy(), **CLOSE)
    np.testing.assert_allclose(ended.last_hidden.numpy()[0], out[0, -1].numpy(), **CLOSE)


# These tests would see a wrong reading


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_tap_one_layer_off_would_be_seen(
    open_pair: Callable[[str], Pair], index: int, step: int
) -> None:
    pair = open_pair("modelopt-taps")
    off = list(pair.draft.aux_layers)
    off[index] += step
    wrong = reference.gather_aux_hidden_states(pair.hidden_states, tuple(off))
    assert difference(said_by_engine(pair), said_by_reference(pair.ref, wrong), "extend") > SEEN


def test_the_normed_last_state_of_transformers_would_be_seen(
    open_pair: Callable[[str], Pair],
) -> None:
    pair = open_pair("modelopt-last-layer")
    normed = pair.model.model.norm(pair.hidden_states[LAYERS]).detach()
    wrong = torch.cat([pair.hidden_states[3], normed], dim=-1)
    assert difference(said_by_engine(pair), said_by_reference(pair.ref, wrong), "extend") > SEEN


def test_taps_in_another_order_would_be_seen(open_pair: Callable[[str], Pair]) -> None:
    pair = open_pair("eagle")
    wrong = reference.gather_aux_hidden_states(pair.hidden_states, DEFAULT_AUX_LAYERS[::-1])
    assert difference(said_by_engine(pair), said_by_reference(pair.ref, wrong), "extend") > SEEN


def test_tokens_paired_with_their_own_features_would_be_seen(
    open_pair: Callable[[str], Pair],
) -> None:
    pair = open_pair("eagle")
    pair.drafter.observe([Observation(0, HostStates(pair.features), np.array(TOKENS[:-1]))])
    wanted = said_by_reference(pair.ref, pair.truth).extend[-1]
    assert pair.drafter.lanes[0].last_logits is not None
    assert np.abs(pair.drafter.lanes[0].last_logits.row(0) - wanted).max() > SEEN


WRONG_READINGS = (
    # row, attribute of the reference, its other value, what of the outputs shows it
    ("eagle", "norm_before_residual", True, ("extend", "recycled", "level")),
    (
        "speculators-norm-before-residual",
        "norm_before_residual",
        False,
        ("extend", "recycled", "level"),
    ),
    ("speculators-of-old", "norm_before_residual", False, ("extend", "recycled", "level")),
    ("speculators-norm-before-fc", "norm_before_fc", False, ("extend", "recycled", "level")),
    ("specforge-3.1", "fc_norm", False, ("extend", "recycled", "level")),
    ("specforge-3.1", "norm_output", False, ("recycled", "level")),
    ("specforge-norm-output", "norm_output", True, ("recycled", "level")),
    ("speculators-norm-output", "norm_output", False, ("recycled", "level")),
    ("eagle", "theta", 500000.0, ("extend", "recycled", "level")),
    ("eagle-theta", "theta", 10000.0, ("extend", "recycled", "level")),
    ("modelopt-two-layers", "num_layers", 1, ("extend", "recycled", "level")),
)


@pytest.mark.parametrize(("name", "attribute", "value", "shown"), WRONG_READINGS)
def test_a_wrong_reading_of_the_config_would_be_seen(
    open_pair: Callable[[str], Pair],
    name: str,
    attribute: str,
    value: object,
    shown: tuple[str, ...],
) -> None:
    pair = open_pair(name)
    found = said_by_engine(pair)
    right = getattr(pair.ref, attribute)
    assert right != value
    setattr(pair.ref, attribute, value)
    try:
        wrong = said_by_reference(pair.ref, pair.truth)
    finally:
        setattr(pair.ref, attribute, right)
    for output in shown:
        assert difference(found, wrong, output) > SEEN, output


@pytest.mark.parametrize("name", ["eagle-own-embedding", "eagle-borrowed-head"])
def test_the_wrong_ones_table_would_be_seen(
    open_pair: Callable[[str], Pair], workshop: Workshop, name: str
) -> None:
    """The base's embedding where the draft has its own, and a head that is not the base's where it
    borrows it."""
    pair = open_pair(name)
    tables = reference.Eagle3Reference(
        workshop.checkpoint(BY_NAME["eagle"]), workshop.base("llama")
    )
    right = pair.ref.embed_tokens, pair.ref.lm_head
    pair.ref.embed_tokens = tables.embed_tokens
    if name == "eagle-borrowed-head":
        pair.ref.lm_head = tables.embed_tokens
    try:
        wrong = said_by_reference(pair.ref, pair.truth)
    finally:
        pair.ref.embed_tokens, pair.ref.lm_head = right
    assert difference(said_by_engine(pair), wrong, "extend") > SEEN


def test_tree_without_the_vocabulary_map_would_be_seen(open_pair: Callable[[str], Pair]) -> None:
    pair = open_pair("eagle")
    pair.drafter.observe([Observation(0, HostStates(pair.features), np.array(TOKENS[1:]))])
    (right,), offsets = pair.drafter.propose([DraftRequest(0, TOKENS[-1], PLAN)]), pair.drafter.d2t
    pair.drafter.d2t = np.zeros_like(offsets)
    try:
        (wrong,) = pair.drafter.propose([DraftRequest(0, TOKENS[-1], PLAN)])
    finally:
        pair.drafter.d2t = offsets
    assert right.tokens.tolist() != wrong.tokens.tolist()


# Vocabulary maps: three ways to store one


@pytest.mark.parametrize("keys", [{}, {"d2t": "absolute"}, {"t2d": False}, {"d2t": None}], ids=str)
def test_every_stored_form_of_a_vocabulary_map_gives_one_table(
    workshop: Workshop, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """Toys of one seed share their vocabulary; that of the plain one is told by its t2d."""
    plain = load_file(workshop.checkpoint(BY_NAME["eagle"]) / "model.safetensors")
    draft = toys.make_draft(tmp_path / "draft", workshop.base("llama"), "eagle", **keys)
    export(
        str(draft),
        tmp_path / "onnx",
        ExportOptions(base_model_dir=str(workshop.base("llama")), golden=False),
    )
    offsets = load_file(tmp_path / "onnx" / "llm" / "d2t.safetensors")["d2t"]
    assert (offsets + torch.arange(96)).tolist() == plain["t2d"].nonzero().flatten().tolist()


def test_whole_vocabulary_maps_each_token_to_itself(open_pair: Callable[[str], Pair]) -> None:
    names = [draft.name for draft in DRAFTS if draft.keys.get("draft_vocab", 96) != 96]
    assert names
    for name in names:
        assert not open_pair(name).drafter.d2t.any()


# Taps: a convention that does not fit is refused, an override is obeyed


@pytest.mark.parametrize("name", ["specforge-taps", "modelopt-taps", "speculators-taps"])
def test_base_with_other_taps_is_refused_at_build(
    workshop: Workshop, tmp_path: Path, name: str
) -> None:
    draft = BY_NAME[name]
    shutil.copytree(workshop.base_engine("llama", DEFAULT_AUX_LAYERS), tmp_path / "engine")
    export(
        str(workshop.checkpoint(draft)),
        tmp_path,
        ExportOptions(base_model_dir=str(workshop.base("llama"))),
    )
    with pytest.raises(PairingError, match="the base emits hidden_states") as caught:
        build(tmp_path / "llm", tmp_path / "engine", LIMITS)
    assert f"`aux_layers` {','.join(map(str, draft.aux_layers))}" in caught.value.remedy


def test_taps_named_by_the_user_win_over_the_drafts_own(workshop: Workshop) -> None:
    """With --aux-layers on both sides the draft reads those layers, and its reference agrees on
    them."""
    draft, aux_layers = BY_NAME["modelopt-taps"], (2, 3, 6)
    pair = workshop.pair(draft, aux_layers)
    try:
        assert pair.engine.config.component.spec.aux_layer_ids == aux_layers
        truth = reference.gather_aux_hidden_states(pair.hidden_states, aux_layers)
        np.testing.assert_allclose(
            said_by_engine(pair).extend, said_by_reference(pair.ref, truth).extend, **CLOSE
        )
    finally:
        pair.engine.close()


def test_draft_without_taps_of_its_own_takes_the_default_of_its_bases_depth(
    workshop: Workshop, open_pair: Callable[[str], Pair]
) -> None:
    config = (workshop.checkpoint(BY_NAME["eagle"]) / "config.json").read_text()
    assert "layer_ids" not in config
    assert open_pair("eagle").engine.config.component.spec.aux_layer_ids == (
        2,
        LAYERS // 2,
        LAYERS - 3,
    )
