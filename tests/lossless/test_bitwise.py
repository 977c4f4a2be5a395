"""Engines on kernels of our own: low-bit speculation gives the bits of plain decoding in
chains, trees, batches, and behind a kept prefix.

On the demo pair, whose logits are those of a trained model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import edgespec
from edgespec.backends import row_bits
from edgespec.backends.build import build
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.cli.main import cli
from edgespec.contract import Limits
from edgespec.errors import LimitError
from edgespec.runtime.engine import Engine
from edgespec.runtime.trees.tree import DraftPlan
from tests.lossless import demo
from tests.unit.backends.ort.native.sessions import compiled

LIMITS = Limits(max_input_len=256, max_kv_cache_capacity=256, max_batch_size=4)
FORMATS = {
    "int4-128": WeightFormat("int4", 128, kernels=NATIVE),
    "int8-0": WeightFormat("int8", 0, kernels=NATIVE),
    "int4-32-int8-cache": WeightFormat("int4", 32, kernels=NATIVE, kv_cache_dtype="int8"),
}
SAMPLINGS = [
    edgespec.SamplingParams(temperature=0.0, max_generate_length=40),
    edgespec.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=1, max_generate_length=40),
]
PLANS = [DraftPlan(1, 3, 4), DraftPlan(8, 4, 40)]

pytestmark = compiled


@pytest.fixture(scope="module")
def exported() -> dict[str, Path]:
    """The components of the demo pair, which other files read as well."""
    return dict(zip(("base", "draft"), demo.exports(), strict=True))


@pytest.fixture(scope="module", params=FORMATS)
def engine_dir(
    request: pytest.FixtureRequest,
    exported: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    engines = tmp_path_factory.mktemp("bitwise")
    for onnx in exported.values():
        built = build(onnx, engines, LIMITS, options=FORMATS[request.param])
        assert built.weights.is_bitwise
    return engines


@pytest.fixture(scope="module")
def engine(engine_dir: Path) -> Iterator[Engine]:
    with Engine(engine_dir) as opened:
        opened.stop_ids = frozenset()
        yield opened


def prompt_of(length: int) -> list[int]:
    found: list[int] = np.random.default_rng(length).integers(3, 900, length).tolist()
    return found


def test_rows_have_the_same_bits_in_every_call_and_the_calls_are_counted(engine: Engine) -> None:
    calls: list[None] = []
    assert row_bits.first_difference(engine.base.runner, lambda: calls.append(None)) is None
    assert len(calls) == row_bits.num_passes(engine.base.runner.lanes)
    assert engine.rounding == 0.0
    assert any("lossless: bitwise" in note for note in engine.notes)
    assert not any("rounding" in note for note in engine.notes)


def test_chains_trees_batches_and_kept_prefixes_leave_every_token_as_it_was(
    engine: Engine,
) -> None:
    jobs = [(prompt_of(length), SAMPLINGS[i % 2]) for i, length in enumerate((1, 17, 60, 33))]
    plain = [engine.plainly(prompt, sampling).token_ids for prompt, sampling in jobs]
    assert len({len(tokens) for tokens in plain}) == 1
    for plan in PLANS:
        for (prompt, sampling), wanted in zip(jobs, plain, strict=True):
            drafted = engine.generate(prompt, sampling, plan)
            assert drafted.token_ids == wanted
            assert sum(drafted.metrics.per_step_accepted) > 0
    for plan in (None, PLANS[1]):
        for sampling in SAMPLINGS:
            prompts = [prompt for prompt, own in jobs if own is sampling]
            together = engine.generate_batch(prompts * 2, sampling, plan or edgespec.PLAIN)
            wanted = [
                tokens for (_, own), tokens in zip(jobs, plain, strict=True) if own is sampling
            ]
            assert [answer.token_ids for answer in together] == wanted * 2
    prompt, sampling = jobs[2]
    longer = prompt + plain[2][:10]
    again = engine.generate(longer, replace(sampling, max_generate_length=30), PLANS[1])
    assert sampling.temperature == 0
    assert again.token_ids == plain[2][10:40]


def test_exact_is_accepted_and_changes_nothing(engine: Engine, engine_dir: Path) -> None:
    wanted = engine.generate(prompt_of(20), SAMPLINGS[0], PLANS[1])
    with Engine(engine_dir, exact=True) as exact:
        exact.stop_ids = frozenset()
        found = exact.generate(prompt_of(20), SAMPLINGS[0], PLANS[1])
        with pytest.raises(LimitError, match="not what plain decoding gives"):
            exact.generate(prompt_of(5), SAMPLINGS[0], PLANS[0], acceptance="typical")
    assert found.token_ids == wanted.token_ids
    assert found.metrics.steps == wanted.metrics.steps


def test_inspect_and_infer_say_that_it_is_bitwise(engine_dir: Path, tmp_path: Path) -> None:
    said = CliRunner().invoke(cli, ["inspect", str(engine_dir)]).output
    assert "lossless, bitwise" in said
    args = ["infer", "--engine-dir", str(engine_dir), "--input-file", str(demo.INPUT)]
    args += ["--output-file", str(tmp_path / "out.json"), "--spec-decode", "--check-lossless"]
    found = CliRunner().invoke(cli, [*args, "--max-generate-length", "24"])
    assert found.exit_code == 0, found.output
    assert "lossless: bitwise" in " ".join(found.output.split())


def test_rows_that_differ_are_found_and_leave_the_engine_its_margin(
    exported: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On kernels that give one row alone other bits, and where a proof fails."""
    limits, onnx = replace(LIMITS, max_batch_size=1), exported["base"]
    build(onnx, tmp_path / "other", limits, options=WeightFormat("int4", 128))
    with Engine(tmp_path / "other", spec_decode=False) as engine:
        assert "has other bits" in str(row_bits.first_difference(engine.base.runner))
        assert engine.rounding > 0.1
    monkeypatch.setattr(row_bits, "first_difference", lambda runner, done: "row 3 has other bits")
    built = build(onnx, tmp_path / "own", limits, options=FORMATS["int4-128"])
    assert not built.weights.is_bitwise
    assert any("lossless up to kernel rounding" in note for note in built.notes)
