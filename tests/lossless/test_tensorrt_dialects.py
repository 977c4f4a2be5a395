"""The whole product over graphs that are lowered for TensorRT, with ONNX Runtime in its place:
`build` proves them on the golden outputs, alone and in a batch, and with drafts or without the same
tokens come out, which are those of ONNX Runtime's own engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.backends.build import build
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.registry import BACKENDS, DEFAULT_BACKEND
from edgespec.backends.tensorrt.target import Dialect
from edgespec.runtime.engine import Engine
from tests import made, shared
from tests.lossless.answers import assert_same, plainly
from tests.lossless.pairs import LIMITS
from tests.lossless.tensorrt_pairs import GREEDY, PAIRS, SAMPLED, Parts
from tests.tensorrt_on_ort import LoweredBackend

LANES = 2


def built(parts: Parts, backend: str) -> Path:
    """The directory of the engines of a pair, for LANES sequences."""
    limits = replace(LIMITS, max_batch_size=LANES)

    def make(out: Path) -> None:
        for onnx_dir in (parts.base, parts.draft):
            build(onnx_dir, out, limits, backend=backend)

    digests = [made.digest(path) for path in (parts.base, parts.draft)]
    return shared.made_once(("tensorrt engines", backend, digests, limits), make)


# Graphs of all pairs are compared in both by tests/parity; test_tensorrt_runner has the other pairs
IN_BOTH, NATIVE = ("eagle3",), ("eagle3-gemma3", "jetspec", "dspark", "draft-model")
ROWS = [
    pytest.param(
        (name, dialect),
        id=f"{name}-{dialect.value}",
        marks=() if name in IN_BOTH + NATIVE * (dialect is Dialect.NATIVE) else pytest.mark.deep,
    )
    for dialect in (Dialect.PORTABLE, Dialect.NATIVE)
    for name in PAIRS
]


@pytest.fixture(scope="module", params=ROWS)
def row(request: pytest.FixtureRequest) -> tuple[str, Dialect]:
    return request.param


@pytest.fixture(scope="module")
def backend(row: tuple[str, Dialect]) -> Iterator[str]:
    made_here = LoweredBackend(row[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, made_here.name, made_here)
        yield made_here.name


@pytest.fixture(scope="module")
def parts(row: tuple[str, Dialect]) -> Parts:
    return PAIRS[row[0]]()


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
    for length in (1, 30):
        prompt = np.random.default_rng(length).integers(3, 256, length).tolist()
        plain, drafted = plainly(engine, prompt, sampling), engine.generate(prompt, sampling)
        assert_same(engine, plain, drafted, sampling)
        assert len(plain.token_ids) == 24
        accepted += sum(drafted.metrics.per_step_accepted)
    assert accepted > 0 or not parts.often_right


def test_they_are_the_tokens_of_onnx_runtimes_own_engines(engine: Engine, parts: Parts) -> None:
    prompt = np.random.default_rng(0).integers(3, 256, 12).tolist()
    with edgespec.load(built(parts, DEFAULT_BACKEND)) as other:
        other.stop_ids = frozenset()
        assert other.generate(prompt, GREEDY).token_ids == engine.generate(prompt, GREEDY).token_ids
