"""The whole product over graphs that are lowered for TensorRT, with ONNX Runtime in its place:
`build` proves them on the golden outputs, alone and in a batch, and with drafts or without the same
tokens come out, which are those of ONNX Runtime's own engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.backends.build import build
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.registry import BACKENDS, DEFAULT_BACKEND
from edgespec.backends.tensorrt.target import Dialect
from edgespec.export.components import ExportOptions
from edgespec.runtime.engine import Engine
from edgespec.runtime.lossless_check import first_difference
from tests import made, shared, toys
from tests.lossless import draft_models
from tests.lossless.pairs import LIMITS, agree, make_base
from tests.tensorrt_on_ort import LoweredBackend

LANES = 2
GREEDY = edgespec.SamplingParams(temperature=0.0, max_generate_length=24)
SAMPLED = edgespec.SamplingParams(
    temperature=1.0, top_k=20, top_p=0.9, seed=5, max_generate_length=24
)


@dataclass(frozen=True)
class Parts:
    """The exported components of a pair; `often_right`: its drafts are, and some are accepted."""

    base: Path
    draft: Path
    often_right: bool = False


def eagle3(family: Any, layout: Any) -> Parts:
    def make(path: Path) -> None:
        base = make_base(path / "base", family)
        toys.make_draft(path / "draft", base, layout)

    path = shared.made_once(("tensorrt eagle3", family, layout), make)
    options = ExportOptions(base_model_dir=str(path / "base"))
    return Parts(
        made.exported(path / "base", ExportOptions(base_for="eagle3")) / "llm",
        made.exported(path / "draft", options) / "llm",
    )


def mtp() -> Parts:
    def make(path: Path) -> None:
        base = toys.make_qwen3_5(path / "base", layers=4)
        agree(base / "model.safetensors")

    path = shared.made_once("tensorrt mtp", make)
    onnx = made.exported(path / "base", ExportOptions(base_for="mtp"))
    return Parts(onnx / "llm", onnx / "mtp_draft", often_right=True)


def block_draft(method: str, make_draft: Callable[..., Path], **keys: Any) -> Parts:
    def make(path: Path) -> None:
        base = toys.make_base(path / "base", "qwen3", layers=8)
        make_draft(path / "draft", base, **keys)

    path = shared.made_once(("tensorrt", method), make)
    base, draft = path / "base", path / "draft"
    of_base = ExportOptions(base_for=method, draft_dir=str(draft))
    of_draft = ExportOptions(base_model_dir=str(base))
    return Parts(
        made.exported(base, of_base) / "llm",
        made.exported(draft, of_draft) / f"{method}_draft",
    )


def draft_model() -> Parts:
    path = draft_models.models("llama")
    base, draft = path / "base", path / "draft"
    as_draft = ExportOptions(as_draft="draft_model", base_model_dir=str(base))
    return Parts(
        made.exported(base, ExportOptions()) / "llm",
        made.exported(draft, as_draft) / "draft_model",
        often_right=True,
    )


def medusa() -> Parts:
    def make(path: Path) -> None:
        base = toys.make_base(path / "base", "llama", layers=4)
        toys.make_medusa(path / "draft", base)

    path = shared.made_once("tensorrt medusa", make)
    base, draft = path / "base", path / "draft"
    of_base = ExportOptions(base_for="medusa", draft_dir=str(draft))
    return Parts(
        made.exported(base, of_base) / "llm",
        made.exported(draft, ExportOptions(base_model_dir=str(base))) / "medusa_draft",
    )


PAIRS: dict[str, Callable[[], Parts]] = {
    "eagle3": lambda: eagle3("llama", "eagle"),
    "eagle3-gemma3": lambda: eagle3("gemma3", "specforge"),
    "mtp": mtp,
    "dflash": lambda: block_draft("dflash", toys.make_dflash),
    "jetspec": lambda: block_draft("jetspec", toys.make_jetspec, block_size=6),
    "dspark": lambda: block_draft("dspark", toys.make_dspark, block_size=5),
    "draft-model": draft_model,
    "medusa": medusa,
}


def built(parts: Parts, backend: str) -> Path:
    """The directory of the engines of a pair, for LANES sequences."""
    limits = replace(LIMITS, max_batch_size=LANES)

    def make(out: Path) -> None:
        for onnx_dir in (parts.base, parts.draft):
            build(onnx_dir, out, limits, backend=backend)

    digests = [made.digest(path) for path in (parts.base, parts.draft)]
    return shared.made_once(("tensorrt engines", backend, digests, limits), make)


@pytest.fixture(scope="module", params=[Dialect.PORTABLE, Dialect.NATIVE])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    made_here = LoweredBackend(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, made_here.name, made_here)
        yield made_here.name


@pytest.fixture(scope="module", params=PAIRS)
def parts(request: pytest.FixtureRequest) -> Parts:
    return PAIRS[request.param]()


@pytest.fixture(scope="module")
def engine_dir(parts: Parts, backend: str) -> Path:
    return built(parts, backend)


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Iterator[Engine]:
    with edgespec.load(engine_dir) as opened:
        opened.stop_ids = frozenset()
        yield opened


def test_the_engines_were_proven_on_the_golden_outputs(engine_dir: Path) -> None:
    """Prompt and tree, of one sequence and of two side by side; relative to the largest value."""
    entries = EngineManifest.read(engine_dir).engines.values()
    differences = [entry.golden_difference for entry in entries]
    assert len(differences) == 2
    assert all(found is not None and found < 1e-5 for found in differences)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_tokens_come_out_with_drafts_and_without(
    engine: Engine, parts: Parts, sampling: edgespec.SamplingParams
) -> None:
    accepted = 0
    for length in (1, 9, 30):
        prompt = np.random.default_rng(length).integers(3, 256, length).tolist()
        plain, drafted = engine.plainly(prompt, sampling), engine.generate(prompt, sampling)
        assert first_difference(engine, plain, drafted, sampling) is None
        assert drafted.token_ids == plain.token_ids
        assert len(plain.token_ids) == 24
        accepted += sum(drafted.metrics.per_step_accepted)
    assert accepted > 0 or not parts.often_right


def test_they_are_the_tokens_of_onnx_runtimes_own_engines(engine: Engine, parts: Parts) -> None:
    prompt = np.random.default_rng(0).integers(3, 256, 12).tolist()
    with edgespec.load(built(parts, DEFAULT_BACKEND)) as other:
        other.stop_ids = frozenset()
        assert other.generate(prompt, GREEDY).token_ids == engine.generate(prompt, GREEDY).token_ids
