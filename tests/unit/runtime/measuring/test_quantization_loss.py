"""What quantized weights change, measured on a toy, against transformers and torch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

from edgespec.artifacts import file_names
from edgespec.backends.divergence import Divergence
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.ort.backend import BACKEND
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits, Role
from edgespec.prompts.shipped_text import PATH, calibration_text, held_out_text
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.lanes.embedding import EmbeddingTable
from edgespec.runtime.measuring.quantization_loss import MAX_TOKENS, after_build, measure_loss
from tests import made, toys

ROOM = 100  # tokens that the engine holds: several windows, and chunks of one
LIMITS = Limits(max_input_len=64, max_kv_cache_capacity=ROOM)
INT4 = BACKEND.parse_options({"weights": "int4", "weight_block": "32"})


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("base") / "base", "llama", layers=2)


@pytest.fixture
def onnx(base: Path) -> Path:
    return made.exported(base) / "llm"


@pytest.fixture
def engines(onnx: Path, tmp_path: Path) -> Path:
    there = made.built(LIMITS, onnx, options=INT4)
    return Path(shutil.copytree(there, tmp_path / "engines"))


def own_logits(engines: Path, windows: torch.Tensor) -> torch.Tensor:
    """[windows, S, V], each window in one call."""
    runner, config = open_runner(engines, Role.LLM)
    table = runner.table or EmbeddingTable(engines / file_names.EMBEDDING, config.component)
    decoder, found = CachedDecoder.of(runner, table, config.component), []
    for tokens in windows.numpy():
        decoder.reset(0)
        (result,) = decoder.extend([decoder.causal(0, tokens, np.arange(len(tokens)))])
        found.append(torch.from_numpy(result.logits.rows().copy()))
    runner.close()
    return torch.stack(found)


def test_figures_are_those_that_torch_makes_of_transformers_logits(
    base: Path, onnx: Path, engines: Path
) -> None:
    found = measure_loss(onnx, engines, Role.LLM)
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    ids = tokenizer.encode(held_out_text(), add_special_tokens=False).ids[:MAX_TOKENS]
    windows = torch.tensor(ids[: len(ids) // ROOM * ROOM]).reshape(-1, ROOM)
    with torch.no_grad():
        exported = toys.load_base(base)(windows).logits[:, :-1].flatten(0, 1)
    own, targets = own_logits(engines, windows)[:, :-1].flatten(0, 1), windows[:, 1:].flatten()
    assert found.tokens == len(targets) > 900
    assert found.exported_perplexity == pytest.approx(
        F.cross_entropy(exported, targets).exp().item(), rel=1e-5
    )
    assert found.perplexity == pytest.approx(F.cross_entropy(own, targets).exp().item(), rel=1e-5)
    kl = F.kl_div(own.log_softmax(-1), exported.log_softmax(-1), reduction="none", log_target=True)
    each = kl.sum(-1).double()
    assert found.kl == pytest.approx(each.mean().item(), rel=1e-3)
    assert found.kl > 1e-4
    assert found.kl_error == pytest.approx(each.std().item() / len(each) ** 0.5, rel=1e-2)
    same = (own.argmax(-1) == exported.argmax(-1)).float().mean().item()
    assert found.top1 == pytest.approx(same, abs=2e-3)
    assert EngineManifest.read(engines).engines[Role.LLM].divergence == found


def test_float32_a_draft_and_what_cannot_run_here_are_not_measured(
    onnx: Path, engines: Path, tmp_path: Path
) -> None:
    plain = made.built(LIMITS, onnx)
    assert after_build(onnx, plain, Role.LLM, measure=True) is None
    assert after_build(onnx, engines, Role.LLM, measure=False) is None
    assert after_build(onnx, engines, Role.DRAFT, measure=True) is None
    assert after_build(onnx, engines, Role.LLM, measure=True, unproven="no device") is None


def test_what_fails_is_said_and_the_engine_stays(onnx: Path, engines: Path) -> None:
    report = after_build(onnx.parent, engines, Role.LLM, measure=True)
    assert report is not None
    assert report.line.startswith("what quantized weights change was not measured: ")
    assert EngineManifest.read(engines).engines[Role.LLM].divergence is None


MEASURED = Divergence(
    tokens=1022,
    perplexity=8.46,
    exported_perplexity=8.19,
    kl=0.0387,
    kl_error=0.0009,
    top1=0.908,
)


def test_the_line_is_in_words_of_a_user() -> None:
    assert MEASURED.text("int4") == (
        "int4 changes 1 word in 11 (top-1 0.908), perplexity 8.46 instead of 8.19 (+3.3 %), KL"
        " 0.039 +- 0.0009 nats a token"
    )
    assert "changes no word of 1022 (" in replace(MEASURED, top1=1.0).text("int8")


@pytest.mark.parametrize(
    ("perplexity", "kl", "warning"),
    [
        (8.19 * 1.049, 0.099, None),
        (8.19 * 1.051, 0.2, "raises the perplexity by 5 %"),
        (float("nan"), 0.0, "raises the perplexity by nan %"),
        (8.19, 0.1, "moves the model's predictions by 0.1 nats a token, which the perplexity of"),
    ],
)
def test_who_loses_much_is_warned(perplexity: float, kl: float, warning: str | None) -> None:
    found = replace(MEASURED, perplexity=perplexity, kl=kl)
    better = ": `weights` int4 without `weight_block` is closer to the model"
    said = "".join(found.warnings("int4", BACKEND.better_weights(INT4.weights)))
    assert said.startswith(f"int4 {warning}") and said.endswith(better) if warning else not said


def test_who_is_warned_reads_of_the_next_better_format() -> None:
    weights = BACKEND.parse_options({"weights": "int4"}).weights
    ladder = {None: "`size` 5", 4.99: "`size` 6", 5.98: "`weights` int8"}
    for bits, better in ladder.items():
        assert BACKEND.better_weights(replace(weights, bits=bits)) == better


def test_the_text_is_cut_in_two() -> None:
    held, rest = (text.split("\n\n") for text in (held_out_text(), calibration_text()))
    assert sorted(held + rest) == sorted(PATH.read_text().strip().split("\n\n"))
    assert 3.5 < len("".join(rest)) / len("".join(held)) < 4.5


def test_a_manifest_keeps_figures_that_are_numbers() -> None:
    assert MEASURED.is_finite
    for odd in (float("nan"), float("inf"), 1e30):
        assert not replace(MEASURED, perplexity=odd).is_finite
