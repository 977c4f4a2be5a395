"""The canonical graph, run as it stands by ONNX Runtime, against the engine that lowering makes of
it.

Also what the canonical graph itself promises: its operators, its batches, and why caches are filled
with zeroes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.artifacts import file_names
from edgespec.backends.base import BuildOptions
from edgespec.backends.call import Attention, Call, LaneAttention, Result, Value
from edgespec.backends.feeds import reader_of
from edgespec.backends.golden import joined
from edgespec.backends.host import stacked_states
from edgespec.backends.masks import attention_mask
from edgespec.backends.ort.contract import lowered_contract
from edgespec.backends.ort.lowering import lower
from edgespec.backends.ort.options import FP32
from edgespec.backends.ort.runner import OrtRunner
from edgespec.contract import (
    GraphShape,
    Kind,
    Role,
    canonical_contract,
    graph_inputs,
    past_names,
    present_names,
)
from edgespec.errors import ContractError
from edgespec.rope import RopeTable
from tests import toys
from tests.calls import Outputs, attention_of, outputs_of, states_of
from tests.parity.conftest import CAPACITY, Component, MakeComponent
from tests.parity.other_forms import TAMPERED, read_attention_twice, set_attribute
from tests.unit.backends.ort.native.sessions import compiled

Array = NDArray[Any]

# two float32 kernels that sum in another order; logits have a standard deviation of about 2.5
TOLERANCE = 1e-4
TREE_PARENTS = (-1, 0, 0, 2, 1, 1, 3, 0, 6)  # paths with gaps in slot order


# Calls, and the canonical graph's way to take them


@dataclass
class Canonical:
    """The exported graph with a cache of its own: pasts go in whole, presents come out whole."""

    session: ort.InferenceSession
    shape: GraphShape
    cache: dict[str, Array]

    @classmethod
    def open(cls, component: Component, batch: int = 1) -> Canonical:
        shape = component.runner.contract.shape
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        path = str(component.onnx_dir / file_names.MODEL)
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        rows = np.zeros((batch, shape.num_kv_heads, CAPACITY, shape.head_dim), np.float32)
        return cls(
            session,
            shape,
            {name: rows.copy() for i in range(shape.num_layers) for name in past_names(i)},
        )

    def run(self, calls: list[Call]) -> dict[str, Array]:
        """One run over a batch of calls, each into its own sequence's next rows; keeps the
        presents."""
        out = dict(
            zip(
                (o.name for o in self.session.get_outputs()),
                self.session.run(None, self.feeds(calls)),
                strict=True,
            )
        )
        for i in range(self.shape.num_layers):
            for past, present in zip(past_names(i), present_names(i), strict=True):
                self.cache[past] = out[present]
        return out

    def feeds(self, calls: list[Call]) -> dict[str, Array]:
        call, feeds = functools.reduce(joined, calls), {}
        for row in graph_inputs(self.shape):
            if row.kind is Kind.MASK:
                masks = [attention_mask(c, c.attended(row.name)) for c in calls]
                spare = [(0, 0), (0, 0), (0, 0)]
                feeds[row.name] = np.concatenate(
                    [np.pad(m, (*spare, (0, CAPACITY - m.shape[3]))) for m in masks]
                )
            elif (array := reader_of(row)(call)) is not None:
                feeds[row.name] = array
            else:
                dims = row.spec(self.shape).dims(B=len(calls), S_base=0, S_draft=0)
                feeds[row.name] = np.zeros(dims, np.float32)
        return feeds | self.cache


@dataclass
class Calls:
    """Makes calls with random embeddings and features for one component."""

    shape: GraphShape
    rope: RopeTable
    rng: np.random.Generator
    local_rope: RopeTable | None = None

    @classmethod
    def of(cls, component: Component, seed: int = 0) -> Calls:
        local = component.config.component.local_rope
        return cls(
            component.runner.contract.shape,
            component.rope,
            np.random.default_rng(seed),
            RopeTable.of(local, component.runner.capacity) if local else None,
        )

    def rows(self, count: int, width: int) -> Array:
        return self.rng.standard_normal((1, count, width), np.float32)

    def make(self, positions: Array, mask: Array, *, own_state: bool = False) -> Call:
        count = len(positions)
        cos, sin = self.rope.rows(positions[None])
        embeds, start = self.rows(count, self.shape.hidden_size), np.array([mask.shape[1] - count])
        places = np.concatenate([np.arange(start[0]), positions])
        lanes = [LaneAttention(0, mask, places)]
        extras: dict[str, Value] = {"sliding_attention_mask": Attention(lanes, WINDOW)}
        if self.local_rope is not None:
            turned = self.local_rope.rows(positions[None])
            extras |= dict(zip(("local_rope_cos", "local_rope_sin"), turned, strict=True))
        if self.shape.role is Role.DRAFT and own_state:
            extras["draft_hidden"] = states_of(self.rows(count, self.shape.features))
        elif self.shape.role is Role.DRAFT:
            extras["base_hidden"] = states_of(self.rows(count, self.shape.base_features))
        return Call(embeds, cos, sin, Attention(lanes), start, [np.arange(count)], extras)

    def causal(self, start: int, count: int) -> Call:
        return self.make(
            np.arange(start, start + count), np.tri(count, start + count, start, dtype=bool)
        )

    def tree(self, start: int, *, own_state: bool = False) -> Call:
        """A tree behind `start` committed rows."""
        seen = np.eye(len(TREE_PARENTS), dtype=bool)
        for node, parent in enumerate(TREE_PARENTS[1:], start=1):
            seen[node] |= seen[parent]
        mask = np.concatenate([np.ones((len(seen), start), bool), seen], axis=1)
        return self.make(start + seen.sum(1) - 1, mask, own_state=own_state)


def assert_same(out: dict[str, Array], results: list[Result], tolerance: float = TOLERANCE) -> None:
    result = outputs_of(results)
    assert np.abs(result.logits - out["logits"]).max() <= tolerance
    assert (result.hidden_states is None) == ("hidden_states" not in out)
    if result.hidden_states is not None:
        assert np.abs(result.hidden_states - out["hidden_states"]).max() <= tolerance


def cache_rows(component: Component, end: int) -> Array:
    """The runner's KV rows before `end`: [2 * layers, 1, heads, end, dim]."""
    return component.runner.slab[:, :, :, :end]


def present_rows(out: dict[str, Array], shape: GraphShape, end: int) -> Array:
    return np.stack(
        [out[name][:, :, :end] for i in range(shape.num_layers) for name in present_names(i)]
    )


# Components


WINDOW = 4  # of the layers that have one, where others have none
BASES: dict[str, dict[str, Any]] = {
    "llama-bfloat16": {
        "family": "llama",
        "dtype": "bfloat16",
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen3": {"family": "qwen3", "head_dim": 32, "tied": True},
    "gemma3": {"sliding_window": WINDOW},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle": {"layout": "eagle"},
    "specforge-fc-norm": {"layout": "specforge", "fc_norm": True, "dtype": "float16"},
    "modelopt-two-layers": {"layout": "modelopt", "layers": 2, "dtype": "bfloat16"},
    "speculators-norms": {
        "layout": "speculators",
        "norm_before_fc": True,
        "norm_before_residual": True,
        "qk_norm": True,
    },
    "speculators-norm-output": {"layout": "speculators", "norm_output": True, "draft_vocab": None},
}


# Engines on the kernels that are the default here, and others on ONNX Runtime's
FALL_BACK = "/onnxruntime"
ON_FALL_BACK = [f"{name}{FALL_BACK}" for name in ("qwen3", "gemma3", "eagle")]


def kernels_of(name: str) -> BuildOptions | None:
    """The options of the build of an engine by its name; None: the default ones."""
    return FP32 if name.endswith(FALL_BACK) else None


@pytest.fixture(scope="module", params=[*BASES, *ON_FALL_BACK[:2]])
def base(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_component: MakeComponent,
) -> Component:
    name = request.param.removesuffix(FALL_BACK)
    make = toys.make_gemma3 if name == "gemma3" else toys.make_base
    path = make(tmp_path_factory.mktemp("base") / "base", layers=7, **BASES[name])
    return make_component(path, Role.BASE, build=kernels_of(request.param))


@pytest.fixture(scope="module", params=[*DRAFTS, *ON_FALL_BACK[2:]])
def draft(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    make_component: MakeComponent,
) -> Component:
    base = toys.make_base(tmp_path_factory.mktemp("base") / "base", layers=7)
    name = request.param.removesuffix(FALL_BACK)
    path = toys.make_draft(base.parent / "draft", base, **DRAFTS[name])
    build = kernels_of(request.param)
    return make_component(path, Role.DRAFT, build=build, base_model_dir=str(base))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, make_component: MakeComponent) -> Component:
    path = toys.make_base(tmp_path_factory.mktemp("llama") / "base", layers=7)
    return make_component(path, Role.BASE)


# Lowered equals canonical


def test_a_lowered_base_equals_its_canonical_graph(base: Component) -> None:
    calls, canonical = Calls.of(base), Canonical.open(base)
    for call in (calls.causal(0, 11), calls.causal(11, 1), calls.causal(12, 3), calls.tree(15)):
        assert_same(canonical.run([call]), base.runner.run(call))


def test_a_lowered_base_writes_the_same_cache_rows(base: Component) -> None:
    calls, canonical = Calls.of(base), Canonical.open(base)
    for call in (calls.causal(0, 11), calls.tree(11)):
        out = canonical.run([call])
        base.runner.run(call)
        end = call.width
        difference = cache_rows(base, end) - present_rows(out, canonical.shape, end)
        assert np.abs(difference).max() <= TOLERANCE


def test_a_lowered_draft_equals_its_canonical_graph_on_base_and_on_own_hidden_states(
    draft: Component,
) -> None:
    calls, canonical = Calls.of(draft), Canonical.open(draft)
    prompt, more = calls.causal(0, 9), calls.causal(9, 2)
    tree = calls.tree(11, own_state=True)
    assert "base_hidden" in prompt.extras
    assert "draft_hidden" in tree.extras
    for call in (prompt, more, tree):
        assert_same(canonical.run([call]), draft.runner.run(call))


def test_a_draft_reads_the_hidden_states_that_its_flag_names(draft: Component) -> None:
    """Given both, with rows for both, the flag alone decides."""
    calls, canonical = Calls.of(draft), Canonical.open(draft)
    own, true = calls.tree(0, own_state=True), calls.tree(0)
    base = stacked_states(true.states("base_hidden") or [], 0)
    both = canonical.feeds([own]) | {"base_hidden": base}
    names = [output.name for output in canonical.session.get_outputs()]
    for from_base, alone in (
        (True, replace(own, extras=true.extras)),
        (False, own),
    ):
        feeds = both | {"use_base_hidden": np.array(from_base)}
        out = dict(zip(names, canonical.session.run(None, feeds), strict=True))
        assert_same(out, draft.runner.run(alone))


# gather_idx


@pytest.mark.parametrize("gathered", [[8], [6, 1], [0, 0, 3]])
def test_gather_idx_picks_rows_of_the_logits_and_leaves_the_taps_whole(
    llama: Component, gathered: list[int]
) -> None:
    call = Calls.of(llama).causal(0, 9)
    some = replace(call, gather=[np.array(gathered)])
    for run in (
        lambda c: outputs_of(llama.runner.run(c)),
        lambda c: result_of(Canonical.open(llama).run([c])),
    ):
        whole = run(call)
        logits, aux_layers = whole.logits.copy(), whole.hidden_states.copy()
        picked = run(some)
        assert picked.logits.shape == (1, len(gathered), 256)
        assert np.abs(picked.logits - logits[:, gathered]).max() <= TOLERANCE
        assert np.abs(picked.hidden_states - aux_layers).max() <= TOLERANCE


def result_of(out: dict[str, Array]) -> Outputs:
    return Outputs(out["logits"], out.get("hidden_states"))


# Rows that nobody wrote


@pytest.mark.parametrize("half", [0, 1], ids=["key", "value"])
def test_a_nan_in_an_unwritten_row_poisons_the_canonical_graph(llama: Component, half: int) -> None:
    """Why every cache is zero-filled: standard Attention multiplies before it masks."""
    canonical, call = Canonical.open(llama), Calls.of(llama).causal(0, 5)
    assert np.isfinite(canonical.run([call])["logits"]).all()
    canonical.cache[past_names(3)[half]][:, :, CAPACITY - 1] = np.nan
    assert np.isnan(canonical.run([call])["logits"]).all()


def test_an_engine_opens_with_a_cache_of_zeroes(
    llama: Component, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(np, "empty", lambda shape, dtype=float: np.full(shape, np.nan, dtype))
    contract = llama.runner.contract
    runner = OrtRunner(llama.engine_dir / "spec_base.onnx", contract, CAPACITY)
    assert runner.slab.shape == (2 * 7, 1, 2, CAPACITY, 16)
    assert not runner.slab.any()  # a NaN would be true
    runner.close()


def test_garbage_behind_the_written_rows_changes_nothing_in_the_lowered_engine(
    llama: Component,
) -> None:
    calls = Calls.of(llama)
    prompt, tree = calls.causal(0, 11), calls.tree(11)
    runner, end = llama.runner, 11 + len(TREE_PARENTS)

    def run(garbage: float) -> list[Array]:
        runner.slab[:] = garbage
        first = outputs_of(runner.run(prompt)).logits.copy()
        runner.slab[:, :, :, 11:] = garbage
        second = outputs_of(runner.run(tree))
        return [
            first,
            second.logits.copy(),
            second.hidden_states.copy(),
            cache_rows(llama, end).copy(),
        ]

    for clean, dirty in zip(run(0.0), run(np.nan), strict=True):
        np.testing.assert_array_equal(clean, dirty)


def test_a_call_writes_its_own_rows_and_no_others(llama: Component) -> None:
    calls, slab = Calls.of(llama), llama.runner.slab
    llama.runner.run(calls.causal(0, 11))
    slab[:, :, :, 11:] = 7.0
    before = slab.copy()
    llama.runner.run(calls.tree(11))
    end = 11 + len(TREE_PARENTS)
    np.testing.assert_array_equal(slab[:, :, :, :11], before[:, :, :, :11])
    np.testing.assert_array_equal(slab[:, :, :, end:], before[:, :, :, end:])
    assert (slab[:, :, :, 11:end] != 7.0).all()


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory, make_component: MakeComponent) -> Component:
    """The same on ONNX Runtime's kernels."""
    path = toys.make_base(tmp_path_factory.mktemp("llama") / "base", layers=7)
    return make_component(path, Role.BASE, build=FP32)


@compiled
def test_our_own_kernel_shows_a_row_what_the_call_says(llama: Component) -> None:
    """Later slots too."""
    call = Calls.of(llama).causal(0, 5)
    all_seen = replace(call, attention=attention_of(np.ones((1, 1, 5, 5), bool)))
    assert_same(Canonical.open(llama).run([all_seen]), llama.runner.run(all_seen))


def test_group_query_attention_never_shows_a_row_a_later_slot(grouped: Component) -> None:
    """It is causal in slot order whatever the mask says: why parents stand before their
    children."""
    llama, call = grouped, Calls.of(grouped).causal(0, 5)
    all_seen = replace(call, attention=attention_of(np.ones((1, 1, 5, 5), bool)))
    causal = outputs_of(llama.runner.run(call)).logits.copy()
    np.testing.assert_array_equal(outputs_of(llama.runner.run(all_seen)).logits, causal)
    canonical = Canonical.open(llama).run([all_seen])["logits"]
    assert np.abs(canonical - causal)[:, :-1].max() > 0.1


# Batches


def test_a_batch_of_two_equals_two_batches_of_one(base: Component) -> None:
    """Two sequences of different lengths: each has its own slots, positions, mask and gathered
    rows."""
    assert_batch_is_its_members(base, own_state=False)


def test_a_batch_of_two_drafts_equals_two_batches_of_one(draft: Component) -> None:
    assert_batch_is_its_members(draft, own_state=True)


def assert_batch_is_its_members(component: Component, *, own_state: bool) -> None:
    calls = Calls.of(component)
    lengths, two = (4, 13), Canonical.open(component, batch=2)
    singles = []
    for member, length in enumerate(lengths):
        single = Canonical.open(component)
        single.run([calls.causal(0, length)])
        for name, rows in single.cache.items():
            two.cache[name][member] = rows[0]
        singles.append(single)
    gathered = (np.array([1, 8]), np.array([6, 2]))
    trees = [
        replace(calls.tree(n, own_state=own_state), gather=[g])
        for n, g in zip(lengths, gathered, strict=True)
    ]
    together = two.run(trees)
    for member, (single, tree) in enumerate(zip(singles, trees, strict=True)):
        alone = single.run([tree])
        for name, value in alone.items():
            assert np.abs(together[name][member] - value[0]).max() <= TOLERANCE, name


# The file


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_nodes(attribute.g)


def test_a_canonical_base_is_valid_onnx_of_the_standard_domain_alone(base: Component) -> None:
    assert_standard(base.onnx_dir / file_names.MODEL)


def test_a_canonical_draft_is_valid_onnx_of_the_standard_domain_alone(draft: Component) -> None:
    assert_standard(draft.onnx_dir / file_names.MODEL)


def assert_standard(path: Path) -> None:
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.load(path, load_external_data=False)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", 24)]
    assert {node.domain for node in all_nodes(model.graph)} == {""}
    assert not model.functions


def test_inputs_and_outputs_have_the_types_and_shapes_of_the_contract(draft: Component) -> None:
    model = ir.load(draft.onnx_dir / file_names.MODEL)
    shape = draft.runner.contract.shape
    found = {
        v.name: (str(v.dtype), [str(d) for d in v.shape or ()])
        for v in (*model.graph.inputs, *model.graph.outputs)
    }
    kv = ("FLOAT", ["B", str(shape.num_kv_heads), "C", str(shape.head_dim)])
    assert found.pop("attention_mask") == ("BOOL", ["B", "1", "S", "C"])
    assert found.pop("write_indices") == ("INT64", ["B"])
    assert found.pop("gather_idx") == ("INT64", ["B", "G"])
    assert found.pop("use_base_hidden") == ("BOOL", [])
    assert found.pop("base_hidden") == ("FLOAT", ["B", "S_base", str(3 * 64)])
    assert found.pop("draft_hidden") == ("FLOAT", ["B", "S_draft", "64"])
    assert found.pop("inputs_embeds") == found.pop("hidden_states") == ("FLOAT", ["B", "S", "64"])
    assert (
        found.pop("rope_cos")
        == found.pop("rope_sin")
        == ("FLOAT", ["B", "S", str(shape.head_dim // 2)])
    )
    assert found.pop("logits") == ("FLOAT", ["B", "G", str(shape.vocab_size)])
    assert len(found) == 4 * shape.num_layers
    assert all(value == kv for value in found.values())


def test_a_lowered_base_has_no_transposed_or_cast_weights_left(base: Component) -> None:
    assert_weights_in_place(base.engine_dir / "spec_base.onnx", attention_kind(base))


def test_a_lowered_draft_has_no_transposed_or_cast_weights_left(draft: Component) -> None:
    assert_weights_in_place(draft.engine_dir / "spec_draft.onnx", attention_kind(draft))


def attention_kind(component: Component) -> str:
    """The operator that attends in an engine."""
    own = component.config.settings.get("kernels") == "native"
    return "TreeAttention" if own else "GroupQueryAttention"


def assert_weights_in_place(path: Path, attends: str) -> None:
    model = onnx.load(path, load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    nodes = list(all_nodes(model.graph))
    assert not [
        n.name for n in nodes if n.op_type in ("Cast", "Transpose") and n.input[0] in weights
    ]
    external = [tensor for tensor in model.graph.initializer if tensor.external_data]
    assert {tensor.data_type for tensor in external} == {onnx.TensorProto.FLOAT}
    assert {tensor.name for tensor in external} <= {name for node in nodes for name in node.input}
    kinds = {node.op_type for node in nodes}
    assert attends in kinds
    assert not kinds & {"Attention", "TensorScatter"}


# Graphs of another form


OF_ORT = {
    "is-causal": set_attribute("Attention", "is_causal", 1),
    "second-reader": read_attention_twice,
}
ALSO_IN_BATCHES = (
    *("scale", "softcap", "is-causal", "no-cache", "cache-at-slot-zero", "circular-cache"),
    "other-mask",
)
IN_ATTENTION = (
    *ALSO_IN_BATCHES,
    *("no-scaling-of-q", "no-rope", "interleaved-rope", "second-reader"),
)


@pytest.mark.parametrize(
    ("tamper", "batched"),
    [*((name, False) for name in IN_ATTENTION), *((name, True) for name in ALSO_IN_BATCHES)],
)
def test_lowering_refuses_a_graph_of_another_form(
    llama: Component, tamper: str, batched: bool
) -> None:
    model = ir.load(llama.onnx_dir / file_names.MODEL)
    (OF_ORT.get(tamper) or TAMPERED[tamper][0])(model)
    with pytest.raises(ContractError, match=r"layers\.0/attn"):
        lower(model, "data", batched=batched)


@pytest.mark.parametrize("batched", [False, True])
def test_lowering_takes_the_graph_that_was_not_tampered_with(
    llama: Component, batched: bool
) -> None:
    model = ir.load(llama.onnx_dir / file_names.MODEL)
    names = {value.name for value in lower(model, "data", batched).model.graph.inputs}
    assert names == {
        spec.name
        for spec in lowered_contract(
            canonical_contract(llama.config.component.graph), batched
        ).inputs
    }


def test_lowering_for_batches_keeps_the_canonical_attention(llama: Component) -> None:
    before = kinds(ir.load(llama.onnx_dir / file_names.MODEL))
    after = kinds(lower(ir.load(llama.onnx_dir / file_names.MODEL), "data", batched=True).model)
    assert {kind: after[kind] for kind in ("Attention", "TensorScatter", "RotaryEmbedding")} == {
        "Attention": 7,
        "TensorScatter": 14,
        "RotaryEmbedding": 14,
    }
    joined = after["SkipSimplifiedLayerNormalization"]
    transposed = before["Transpose"] - after["Transpose"]  # those of weights alone
    assert before - after == Counter(Transpose=transposed, Add=joined, RMSNormalization=joined)


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)
