"""Experts of low-bit weights: speculation gives the bits of plain decoding in chains, trees and
batches, though each row reads other experts.

The base is a toy of Qwen3-MoE, the draft a smaller model that is often right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import edgespec
from edgespec.backends import row_bits
from edgespec.backends.build import build
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from edgespec.runtime.engine import Engine
from edgespec.runtime.trees.tree import DraftPlan
from tests import shared, toys
from tests.lossless.draft_models import engines, follow, make_model
from tests.lossless.pairs import agree
from tests.unit.backends.ort.native.sessions import compiled

LAYERS, EXPERTS, CHOSEN = 3, 8, 3
LIMITS = Limits(max_input_len=64, max_kv_cache_capacity=128, max_batch_size=3)
FORMATS = {
    "int4-32": WeightFormat("int4", 32, kernels=NATIVE),
    "int8-0": WeightFormat("int8", 0, kernels=NATIVE),
}
PLANS = [DraftPlan(1, 3, 4), DraftPlan(4, 3, 16)]
SAMPLINGS = [
    edgespec.SamplingParams(temperature=0.0, max_generate_length=40),
    edgespec.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=1, max_generate_length=40),
]

pytestmark = compiled


def make_models(path: Path) -> None:
    sizes = {"experts": EXPERTS, "per_token": CHOSEN, "layers": LAYERS}
    base = toys.make_qwen3_moe(path / "base", **sizes)
    follow(base / "model.safetensors")
    make_model(path / "draft", "llama", layers=2, seed=1)


@pytest.fixture(scope="module", params=FORMATS)
def directory(request: pytest.FixtureRequest) -> Path:
    models = shared.made_once(("experts", EXPERTS, CHOSEN, LAYERS), make_models)
    options = FORMATS[request.param]
    return engines(models / "base", models / "draft", LIMITS, options=options, golden=True)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with Engine(directory) as opened:
        opened.stop_ids = frozenset()
        yield opened


def prompt_of(length: int) -> list[int]:
    found: list[int] = np.random.default_rng(length).integers(3, 250, length).tolist()
    return found


def test_each_mixture_is_one_node_and_the_router_keeps_float32(directory: Path) -> None:
    graph = ir.load(directory / "llm.onnx").graph
    counts = Counter(node.op_type for node in graph)
    assert counts["Experts"] == counts["TopK"] == counts["Softmax"] == LAYERS
    assert counts["MatMul"] == LAYERS  # of the routers
    assert counts["Sum"] == counts["Equal"] == 0


def test_build_proves_that_rows_have_the_same_bits_in_every_call(engine: Engine) -> None:
    assert row_bits.first_difference(engine.base.runner) is None
    assert engine.rounding == 0.0
    assert any("lossless: bitwise" in note for note in engine.notes)


def test_chains_trees_and_batches_leave_every_token_as_it_was(engine: Engine) -> None:
    jobs = [(prompt_of(length), SAMPLINGS[i % 2]) for i, length in enumerate((1, 17, 40, 33))]
    plain = [engine.plainly(prompt, sampling).token_ids for prompt, sampling in jobs]
    assert all(len(tokens) == 40 for tokens in plain)
    accepted = 0
    for plan in PLANS:
        for (prompt, sampling), wanted in zip(jobs, plain, strict=True):
            drafted = engine.generate(prompt, sampling, plan)
            assert drafted.token_ids == wanted
            accepted += sum(drafted.metrics.per_step_accepted)
        for i, sampling in enumerate(SAMPLINGS):
            prompts = [prompt for prompt, own in jobs if own is sampling]
            together = engine.generate_batch(prompts, sampling, plan)
            assert [answer.token_ids for answer in together] == plain[i::2]
    assert accepted > 20


def test_a_hybrid_with_experts_and_its_head_says_the_same_with_drafts(tmp_path: Path) -> None:
    """Also an expert that all rows take, and a draft with experts of its own."""
    base = toys.make_qwen3_5(tmp_path / "base", layers=4, experts=EXPERTS)
    agree(base / "model.safetensors")
    export(str(base), tmp_path / "onnx", ExportOptions(base_for="mtp"))
    for part in ("llm", "mtp_draft"):
        onnx = tmp_path / "onnx" / part
        built = build(onnx, tmp_path / "engines", LIMITS, options=FORMATS["int4-32"])
        assert built.weights.is_bitwise
    for name, count in (("spec_base.onnx", 4), ("spec_draft.onnx", 1)):
        graph = ir.load(tmp_path / "engines" / name).graph
        assert Counter(node.op_type for node in graph)["Experts"] == count
    accepted = 0
    with Engine(tmp_path / "engines") as engine:
        engine.stop_ids = frozenset()
        for length in (1, 17, 33):
            plain = engine.plainly(prompt_of(length), SAMPLINGS[0])
            drafted = engine.generate(prompt_of(length), SAMPLINGS[0], PLANS[0])
            assert drafted.token_ids == plain.token_ids
            accepted += sum(drafted.metrics.per_step_accepted)
    assert accepted > 0
