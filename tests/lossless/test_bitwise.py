"""Engines on kernels of our own: low-bit speculation gives the bits of plain decoding in chains,
trees, batches, and behind a kept prefix; of bases with attention alone, of hybrids, of those that
verify blocks, and of experts, though each row reads other ones."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.backends import row_bits
from edgespec.backends.build import build
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.backends.ort.recurrent import RecurrentCache
from edgespec.cli.main import cli
from edgespec.contract import Limits
from edgespec.errors import LimitError
from edgespec.export.components import ExportOptions
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan
from tests import made, shared, toys
from tests.e2e.workshop import asked, infer
from tests.lossless import demo, tensorrt_pairs
from tests.lossless.draft_models import follow, make_model
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.pairs import agree, shared_pair
from tests.unit.backends.ort.native.sessions import compiled

VOCAB = 250
LIMITS = Limits(
    max_input_len=96, max_kv_cache_capacity=160, max_batch_size=4, max_verify_tree_size=40
)
ONE_LANE = replace(LIMITS, max_batch_size=1)
INT4 = WeightFormat("int4", 32, kernels=NATIVE)
INT4_128 = WeightFormat("int4", 128, kernels=NATIVE)
NEW = 20
GREEDY = edgespec.SamplingParams(temperature=0.0, max_generate_length=NEW)
DRAWN = replace(GREEDY, temperature=1.0, top_k=0, top_p=1.0, seed=1)
SAMPLINGS = (GREEDY, DRAWN)
CHAIN, TREE = DraftPlan(1, 3, 4), DraftPlan(4, 4, 20)
EXPERT_LAYERS, EXPERTS = 3, 8

pytestmark = compiled


def blocks() -> tuple[Path, Path]:
    """The demo base with its DFlash draft."""
    base, draft = demo.RECIPE / "base", demo.RECIPE / "dflash_draft"
    of_base = ExportOptions(base_for="dflash", draft_dir=str(draft))
    of_draft = ExportOptions(base_model_dir=str(base))
    return made.exported(base, of_base) / "llm", made.exported(draft, of_draft) / "dflash_draft"


def hybrid() -> tuple[Path, Path]:
    parts = tensorrt_pairs.mtp()
    return parts.base, parts.draft


def experts() -> tuple[Path, Path]:
    """A toy of Qwen3-MoE, and a smaller model that is often right."""

    def make(path: Path) -> None:
        sizes = {"experts": EXPERTS, "per_token": 3, "layers": EXPERT_LAYERS}
        base = toys.make_qwen3_moe(path / "base", **sizes)
        follow(base / "model.safetensors")
        make_model(path / "draft", "llama", layers=2, seed=1)

    path = shared.made_once(("experts", EXPERTS, EXPERT_LAYERS), make)
    of_draft = ExportOptions(as_draft="draft_model", base_model_dir=str(path / "base"))
    draft = made.exported(path / "draft", of_draft) / "draft_model"
    return made.exported(path / "base") / "llm", draft


@dataclass(frozen=True)
class Kind:
    """The components of a pair, its plans and how its weights are packed."""

    parts: Callable[[], tuple[Path, Path]]
    plans: tuple[DraftPlan, ...]
    formats: dict[str, WeightFormat]


KINDS = {
    "demo": Kind(
        demo.exports,
        (CHAIN, DraftPlan(8, 4, 40)),
        {
            "int4-128": INT4_128,
            "int8-0": WeightFormat("int8", 0, kernels=NATIVE),
            "int4-32-int8-cache": replace(INT4, kv_cache_dtype="int8"),
        },
    ),
    "hybrid": Kind(
        hybrid,
        (DraftPlan(1, 1, 2), CHAIN, DraftPlan(1, 7, 8)),
        {"int4": INT4, "int8": WeightFormat("int8", 32, kernels=NATIVE)},
    ),
    "experts": Kind(
        experts, (CHAIN, TREE), {"int4": INT4, "int8-0": WeightFormat("int8", 0, kernels=NATIVE)}
    ),
    "blocks": Kind(blocks, (BlockPlan(1, 7, 8), BlockPlan(3, 7, 20)), {"int4-128": INT4_128}),
}
ROWS = {f"{name}-{form}": (name, form) for name, kind in KINDS.items() for form in kind.formats}


@dataclass(frozen=True)
class Opened:
    name: str
    kind: Kind
    directory: Path
    engine: Engine


# Formats that another kind has too, whose kernels know nothing of the kind
DEEP = ("hybrid-int8", "experts-int8-0")


def rows(*names: str) -> list[Any]:
    """Those of the names, in their order."""
    return [pytest.param(name, marks=pytest.mark.deep) if name in DEEP else name for name in names]


@pytest.fixture(scope="module", params=rows(*ROWS))
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    name, form = ROWS[request.param]
    kind = KINDS[name]
    directory = made.built(LIMITS, *kind.parts(), options=kind.formats[form])
    with Engine(directory) as engine:
        engine.stop_ids = frozenset()
        yield Opened(name, kind, directory, engine)


@pytest.fixture
def engine(opened: Opened) -> Engine:
    opened.engine.forget_prefixes()
    return opened.engine


of_hybrids = pytest.mark.parametrize("opened", rows("hybrid-int4", "hybrid-int8"), indirect=True)
of_a_hybrid = pytest.mark.parametrize("opened", ["hybrid-int4"], indirect=True)


def prompt_of(length: int) -> list[int]:
    found: list[int] = np.random.default_rng(length).integers(3, VOCAB, length).tolist()
    return found


def test_rows_have_the_same_bits_in_every_call_and_the_calls_are_counted(opened: Opened) -> None:
    engine, calls = opened.engine, list[None]()
    runner = engine.base.runner
    recurrent = runner.contract.shape.recurrent is not None
    assert recurrent == (opened.name == "hybrid")
    assert row_bits.first_difference(runner, lambda: calls.append(None)) is None
    assert len(calls) == row_bits.num_passes(runner.lanes, recurrent=recurrent)
    assert engine.rounding == 0.0
    assert any("lossless: bitwise" in note for note in engine.notes)
    assert not any("rounding" in note for note in engine.notes)
    assert engine.config.weights.is_bitwise
    assert engine.draft_config is not None
    # Rows of a block see each other: there is none that could be alone
    assert engine.draft_config.weights.is_bitwise == (opened.name != "blocks")


def test_chains_trees_and_batches_leave_every_token_as_it_was(
    opened: Opened, engine: Engine
) -> None:
    jobs = [(prompt_of(length), SAMPLINGS[i % 2]) for i, length in enumerate((1, 17, 60, 33))]
    plain = [engine.plainly(prompt, sampling).token_ids for prompt, sampling in jobs]
    assert {len(tokens) for tokens in plain} == {NEW}
    counts: set[int] = set()
    for plan in opened.kind.plans:
        for (prompt, sampling), wanted in zip(jobs, plain, strict=True):
            drafted = engine.generate(prompt, sampling, plan)
            assert drafted.token_ids == wanted
            counts |= set(drafted.metrics.per_step_accepted)
    assert len(counts) > (1 if opened.name == "blocks" else 2)  # that draft is seldom right
    for plan, (i, sampling) in itertools.product(
        (edgespec.PLAIN, opened.kind.plans[-1]), enumerate(SAMPLINGS)
    ):
        prompts = [prompt for prompt, own in jobs if own is sampling]
        together = engine.generate_batch(prompts * 2, sampling, plan)
        assert [answer.token_ids for answer in together] == plain[i::2] * 2


def test_what_was_kept_goes_on_as_it_would_have(opened: Opened, engine: Engine) -> None:
    """A chat: the second prompt is the first with its answer and more."""
    prompt, plan = prompt_of(40), opened.kind.plans[-1]
    asked = replace(GREEDY, max_generate_length=30)
    first = engine.generate(prompt, asked, plan, keep=True)
    longer = [*prompt, *first.token_ids, *prompt_of(9)]
    again = engine.generate(longer, asked, plan)
    assert again.metrics.reused_tokens > len(prompt)
    engine.forget_prefixes()
    assert engine.plainly(longer, asked).token_ids == again.token_ids


def test_exact_is_accepted_and_changes_nothing(
    opened: Opened, engine: Engine, tmp_path: Path
) -> None:
    plan = opened.kind.plans[-1]
    wanted = engine.generate(prompt_of(20), GREEDY, plan)
    with Engine(opened.directory, exact=True) as exact:
        exact.stop_ids = frozenset()
        found = exact.generate(prompt_of(20), GREEDY, plan)
        with pytest.raises(LimitError, match="not what plain decoding gives"):
            exact.generate(prompt_of(5), GREEDY, plan, acceptance="typical")
    assert (found.token_ids, found.metrics.steps) == (wanted.token_ids, wanted.metrics.steps)
    said = CliRunner().invoke(cli, ["inspect", str(opened.directory)]).output
    assert "lossless, bitwise" in said
    args = infer(opened.directory, tmp_path, asked("one two"))
    args += ["--spec-decode", "--exact", "--check-lossless"]
    done = CliRunner().invoke(cli, [str(arg) for arg in args])
    assert done.exit_code == 0, done.output
    assert "lossless: bitwise" in " ".join(done.output.split())


def test_rows_that_differ_are_found_and_leave_the_engine_its_margin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On kernels that give one row alone other bits, and where a proof fails."""
    onnx, _ = demo.exports()
    build(onnx, tmp_path / "other", ONE_LANE, options=WeightFormat("int4", 128))
    with Engine(tmp_path / "other", spec_decode=False) as engine:
        assert "has other bits" in str(row_bits.first_difference(engine.base.runner))
        assert engine.rounding > 0.1
    monkeypatch.setattr(row_bits, "first_difference", lambda runner, done: "row 3 has other bits")
    built = build(onnx, tmp_path / "own", ONE_LANE, options=INT4_128)
    assert not built.weights.is_bitwise
    assert any("lossless up to kernel rounding" in note for note in built.notes)


# ---- hybrids


def test_trees_over_a_hybrid_leave_every_token_as_it_was(tmp_path: Path) -> None:
    pair = shared_pair("qwen3_5", "modelopt")
    for component in ("onnx_base", "onnx_draft"):
        build(pair / component / "llm", tmp_path, LIMITS, options=INT4)
    with Engine(tmp_path) as engine:
        engine.stop_ids = frozenset()
        assert engine.config.weights.is_bitwise
        for sampling, right in itertools.product(SAMPLINGS, (0.5, 0.8, 1.0)):
            prompt = prompt_of(21)
            plain = engine.plainly(prompt, sampling).token_ids
            engine.session.drafter = ScriptedDrafter([(prompt, plain)], 256, right)
            drafted = engine.generate(prompt, sampling, TREE)
            assert drafted.token_ids == plain
            assert sum(drafted.metrics.per_step_accepted) > 0


@of_hybrids
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_in_chunks_gives_the_same_bits(
    engine: Engine, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = engine.next_logits(prompt_of(90))
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", chunk)
    assert engine.next_logits(prompt_of(90)).tobytes() == wanted.tobytes()


def test_other_kernels_of_a_hybrid_are_as_before(tmp_path: Path) -> None:
    built = build(hybrid()[0], tmp_path, ONE_LANE, options=WeightFormat("int4", 32))
    assert not built.weights.is_bitwise
    assert any("lossless up to kernel rounding" in note for note in built.notes)
    with pytest.raises(LimitError, match="recurrent layers"):
        Engine(tmp_path, spec_decode=False, exact=True)
    with Engine(tmp_path, spec_decode=False) as engine:
        assert "has other bits" in str(row_bits.first_difference(engine.base.runner))


def keep_the_first(cache: RecurrentCache, lane: int, path: np.ndarray) -> None:
    """As many rows as were accepted, whichever these were."""
    RIGHTLY_KEPT(cache, lane, np.arange(len(path)))


def keep_twice(cache: RecurrentCache, lane: int, path: np.ndarray) -> None:
    """The last accepted row is taken in twice."""
    RIGHTLY_KEPT(cache, lane, path)
    cache.pending[lane] = cache.pending[lane][:, [*range(len(path)), -1]]


RIGHTLY_KEPT = RecurrentCache.keep


@of_a_hybrid
@pytest.mark.parametrize("fault", [keep_the_first, keep_twice])
def test_the_proof_finds_states_that_took_in_other_rows(
    engine: Engine, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecurrentCache, "keep", fault)
    assert "has other bits" in str(row_bits.first_difference(engine.base.runner))


# ---- experts


@pytest.mark.parametrize("opened", rows("experts-int4", "experts-int8-0"), indirect=True)
def test_each_mixture_is_one_node_and_the_router_keeps_float32(opened: Opened) -> None:
    graph = ir.load(opened.directory / "llm.onnx").graph
    counts = Counter(node.op_type for node in graph)
    assert counts["Experts"] == counts["TopK"] == counts["Softmax"] == EXPERT_LAYERS
    assert counts["MatMul"] == EXPERT_LAYERS  # of the routers
    assert counts["Sum"] == counts["Equal"] == 0


def test_a_hybrid_with_experts_and_its_head_says_the_same_with_drafts(tmp_path: Path) -> None:
    """Also an expert that all rows take, and a draft with experts of its own."""
    base = toys.make_qwen3_5(tmp_path / "base", layers=4, experts=EXPERTS)
    agree(base / "model.safetensors")
    onnx = made.exported(base, ExportOptions(base_for="mtp"))
    for part in ("llm", "mtp_draft"):
        assert build(onnx / part, tmp_path / "engines", LIMITS, options=INT4).weights.is_bitwise
    for name, count in (("spec_base.onnx", 4), ("spec_draft.onnx", 1)):
        graph = ir.load(tmp_path / "engines" / name).graph
        assert Counter(node.op_type for node in graph)["Experts"] == count
    accepted = 0
    with Engine(tmp_path / "engines") as engine:
        engine.stop_ids = frozenset()
        for length in (1, 17, 33):
            plain = engine.plainly(prompt_of(length), GREEDY)
            drafted = engine.generate(prompt_of(length), GREEDY, CHAIN)
            assert drafted.token_ids == plain.token_ids
            accepted += sum(drafted.metrics.per_step_accepted)
    assert accepted > 0
