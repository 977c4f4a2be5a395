"""Low-bit engines on kernels of our own whose bases are hybrids, or verify blocks: speculation
gives the bits of plain decoding, as it does on the bases of `test_bitwise`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
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
from edgespec.export.components import ExportOptions, export
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.trees.tree import DraftPlan
from tests import toys
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.pairs import agree, shared_pair
from tests.unit.backends.ort.native.sessions import compiled

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "demo"
VOCAB = 256
LIMITS = Limits(
    max_input_len=96, max_kv_cache_capacity=128, max_batch_size=4, max_verify_tree_size=40
)
GREEDY = edgespec.SamplingParams(temperature=0.0, max_generate_length=32)
DRAWN = edgespec.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=1, max_generate_length=32)
CHAINS = [DraftPlan(1, 1, 2), DraftPlan(1, 3, 4), DraftPlan(1, 7, 8)]
TREE = DraftPlan(4, 4, 20)

pytestmark = compiled


def prompt_of(length: int) -> list[int]:
    found: list[int] = np.random.default_rng(length).integers(3, VOCAB, length).tolist()
    return found


# ---- hybrids


@pytest.fixture(scope="module")
def hybrid_onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("hybrid")
    base = toys.make_qwen3_5(work / "base", layers=4, vocab=VOCAB)
    agree(base / "model.safetensors")
    export(str(base), work / "onnx", ExportOptions(base_for="mtp"))
    return work / "onnx"


@pytest.fixture(scope="module", params=["int4", "int8"])
def hybrid_dir(
    request: pytest.FixtureRequest, hybrid_onnx: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path: Path = tmp_path_factory.mktemp("engines") / request.param
    form = WeightFormat(request.param, 32, kernels=NATIVE)
    for component in ("llm", "mtp_draft"):
        assert build(hybrid_onnx / component, path, LIMITS, options=form).weights.is_bitwise
    return path


@pytest.fixture(scope="module")
def hybrid(hybrid_dir: Path) -> Iterator[Engine]:
    with Engine(hybrid_dir) as opened:
        opened.stop_ids = frozenset()
        yield opened


def test_rows_of_a_hybrid_have_the_same_bits_in_every_call(hybrid: Engine) -> None:
    made: list[None] = []
    runner = hybrid.base.runner
    assert runner.contract.shape.recurrent is not None
    assert row_bits.first_difference(runner, lambda: made.append(None)) is None
    assert len(made) == row_bits.num_passes(runner.lanes, recurrent=True)
    assert hybrid.rounding == 0.0
    assert any("lossless: bitwise" in note for note in hybrid.notes)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_chains_and_batches_of_a_hybrid_leave_every_token_as_it_was(
    hybrid: Engine, sampling: edgespec.SamplingParams
) -> None:
    prompts = [prompt_of(length) for length in (1, 17, 60, 33)]
    plain = [hybrid.plainly(prompt, sampling).token_ids for prompt in prompts]
    counts: set[int] = set()
    for plan in CHAINS:
        for prompt, wanted in zip(prompts, plain, strict=True):
            drafted = hybrid.generate(prompt, sampling, plan)
            assert drafted.token_ids == wanted
            counts |= set(drafted.metrics.per_step_accepted)
    assert len(counts) > 2
    for plan in (edgespec.PLAIN, CHAINS[1]):
        together = hybrid.generate_batch(prompts * 2, sampling, plan)
        assert [answer.token_ids for answer in together] == plain * 2


def test_trees_over_a_hybrid_leave_every_token_as_it_was(tmp_path: Path) -> None:
    pair = shared_pair("qwen3_5", "modelopt")
    limits, form = replace(LIMITS, max_draft_tree_size=40), WeightFormat("int4", 32, kernels=NATIVE)
    for component in ("onnx_base", "onnx_draft"):
        build(pair / component / "llm", tmp_path, limits, options=form)
    with Engine(tmp_path) as engine:
        engine.stop_ids = frozenset()
        assert engine.config.weights.is_bitwise
        for sampling, right in itertools.product((GREEDY, DRAWN), (0.5, 0.8, 1.0)):
            prompt = prompt_of(21)
            plain = engine.plainly(prompt, sampling).token_ids
            engine.session.drafter = ScriptedDrafter([(prompt, plain)], VOCAB, right)
            drafted = engine.generate(prompt, sampling, TREE)
            assert drafted.token_ids == plain
            assert sum(drafted.metrics.per_step_accepted) > 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_prompt_in_chunks_gives_the_same_bits(
    hybrid: Engine, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = hybrid.next_logits(prompt_of(90))
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", chunk)
    assert hybrid.next_logits(prompt_of(90)).tobytes() == wanted.tobytes()


def test_a_kept_state_of_a_hybrid_goes_on_as_it_would_have(hybrid: Engine) -> None:
    """A chat: the second prompt is the first with its answer and more."""
    prompt = prompt_of(40)
    first = hybrid.generate(prompt, GREEDY, CHAINS[1], keep=True)
    longer = [*prompt, *first.token_ids, *prompt_of(9)]
    again = hybrid.generate(longer, GREEDY, CHAINS[1])
    assert again.metrics.reused_tokens > len(prompt)
    hybrid.forget_prefixes()
    assert hybrid.plainly(longer, GREEDY).token_ids == again.token_ids


def test_exact_is_accepted_for_a_hybrid_and_changes_nothing(
    hybrid: Engine, hybrid_dir: Path, tmp_path: Path
) -> None:
    wanted = hybrid.generate(prompt_of(20), GREEDY, CHAINS[1])
    with Engine(hybrid_dir, exact=True) as exact:
        exact.stop_ids = frozenset()
        found = exact.generate(prompt_of(20), GREEDY, CHAINS[1])
    assert (found.token_ids, found.metrics.steps) == (wanted.token_ids, wanted.metrics.steps)
    said = CliRunner().invoke(cli, ["inspect", str(hybrid_dir)]).output
    assert "lossless, bitwise" in said
    args = ["infer", "--engine-dir", str(hybrid_dir), "--input-file", str(DEMO / "input.json")]
    args += ["--output-file", str(tmp_path / "out.json"), "--spec-decode", "--exact"]
    found_by_cli = CliRunner().invoke(cli, [*args, "--max-generate-length", "4"])
    assert "lossless: bitwise" in " ".join(found_by_cli.output.split()), found_by_cli.output


def test_other_kernels_of_a_hybrid_are_as_before(hybrid_onnx: Path, tmp_path: Path) -> None:
    form = WeightFormat("int4", 32)
    built = build(hybrid_onnx / "llm", tmp_path, replace(LIMITS, max_batch_size=1), options=form)
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


@pytest.mark.parametrize("fault", [keep_the_first, keep_twice])
def test_the_proof_finds_states_that_took_in_other_rows(
    hybrid: Engine, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecurrentCache, "keep", fault)
    assert "has other bits" in str(row_bits.first_difference(hybrid.base.runner))


# ---- bases of block drafts


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The demo base with its DFlash draft."""
    work, draft = tmp_path_factory.mktemp("blocks"), str(DEMO / "dflash_draft")
    options = ExportOptions(base_for="dflash", draft_dir=draft)
    export(str(DEMO / "base"), work, options)
    export(draft, work, ExportOptions(base_model_dir=str(DEMO / "base")))
    form = WeightFormat("int4", 128, kernels=NATIVE)
    base = build(work / "llm", work / "engines", LIMITS, options=form)
    assert base.weights.is_bitwise
    # rows of a block see each other: there is none that could be alone
    assert not build(
        work / "dflash_draft", work / "engines", LIMITS, options=form
    ).weights.is_bitwise
    with Engine(work / "engines") as opened:
        opened.stop_ids = frozenset()
        yield opened


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_blocks_leave_every_token_as_it_was(
    blocks: Engine, sampling: edgespec.SamplingParams
) -> None:
    assert row_bits.first_difference(blocks.base.runner) is None
    assert any("lossless: bitwise" in note for note in blocks.notes)
    prompts = [prompt_of(length) for length in (1, 60)]
    plain = [blocks.plainly(prompt, sampling).token_ids for prompt in prompts]
    accepted = 0
    for plan in (blocks.plan(top_k=1), blocks.plan(top_k=3, verify_size=20)):
        for prompt, wanted in zip(prompts, plain, strict=True):
            drafted = blocks.generate(prompt, sampling, plan)
            assert drafted.token_ids == wanted
            accepted += sum(drafted.metrics.per_step_accepted)
        together = blocks.generate_batch(prompts * 2, sampling, plan)
        assert [answer.token_ids for answer in together] == plain * 2
    assert accepted > 0
