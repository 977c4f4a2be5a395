"""One lm_head in memory for the engines of a pair: a draft that has its base's reads it from the
base's file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edgespec import bundle
from edgespec.backends.engine_config import EngineConfig, LargestWeight
from edgespec.backends.engine_dir import open_engine as engine_of
from edgespec.backends.golden import golden_calls, only_logits
from edgespec.backends.golden_file import read_golden
from edgespec.backends.ort.options import WeightFormat
from edgespec.backends.ort.pair_weights import PairWeights
from edgespec.backends.ort.runner import OrtRunner, data_of, open_engine
from edgespec.backends.registry import Devices, open_runner
from edgespec.contract import Limits, Role
from edgespec.errors import BundleError
from edgespec.export.components import ExportOptions
from tests import made, toys
from tests.unit.backends.ort.native.sessions import compiled

pytestmark = compiled

VOCAB = 640  # lm_head is the largest weight
LIMITS = Limits(max_input_len=32, max_kv_cache_capacity=64)
INT4 = WeightFormat("int4", 32, kernels="native")


@pytest.fixture(scope="module", params=["tied", "untied"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and the MTP head in its checkpoint."""
    path = tmp_path_factory.mktemp("base") / "base"
    base = toys.make_qwen3_5(path, vocab=VOCAB, tied=request.param == "tied")
    return made.exported(base, ExportOptions(base_for="mtp"))


@pytest.fixture(scope="module")
def engine_dir(exported: Path) -> Path:
    return made.built(LIMITS, *sorted(exported.iterdir()), options=INT4)


def prompt_logits(runner: OrtRunner, exported: Path, config: EngineConfig) -> np.ndarray:
    """What the MTP head says of its golden prompt."""
    component = config.component
    path = exported / "mtp_draft" / bundle.GOLDEN
    golden = read_golden(path, component.graph, component.vocab_size)
    prompt, _ = golden_calls(golden, [component.rope])
    return only_logits(runner, prompt).copy()


def test_a_pair_needs_one_lm_head(engine_dir: Path) -> None:
    devices = Devices()
    base, _ = open_runner(engine_dir, Role.BASE, devices)
    draft, config = open_runner(engine_dir, Role.DRAFT, devices)
    alone, _ = open_runner(engine_dir, Role.DRAFT)
    largest = config.weights.largest
    assert largest is not None
    assert largest.name.startswith("lm_head")
    assert isinstance(draft, OrtRunner)
    assert isinstance(base, OrtRunner)
    assert isinstance(alone, OrtRunner)
    (value,), (same,), (own,) = (runner.shared.values() for runner in (draft, base, alone))
    assert list(draft.shared) == [largest.name]
    assert value.data_ptr() == same.data_ptr() != own.data_ptr()


def test_a_draft_reads_the_lm_head_of_its_base(
    engine_dir: Path, exported: Path, tmp_path: Path
) -> None:
    config, _ = engine_of(engine_dir, Role.DRAFT)
    base, _ = engine_of(engine_dir, Role.BASE)
    assert config.weights.largest is not None
    shutil.copytree(engine_dir, tmp_path / "changed")
    path = tmp_path / "changed" / "spec_draft.onnx"
    with data_of(path).open("r+b") as file:  # so that only the base's file has it
        file.seek(config.weights.largest.offset)
        file.write(bytes(int(np.prod(config.weights.largest.shape))))
    pair = PairWeights()
    pair.shared(data_of(engine_dir / "spec_base.onnx"), base.weights.largest)
    wanted = prompt_logits(
        open_engine(engine_dir / "spec_draft.onnx", config, PairWeights()), exported, config
    )
    found = prompt_logits(open_engine(path, config, pair), exported, config)
    without = prompt_logits(open_engine(path, config, PairWeights()), exported, config)
    np.testing.assert_array_equal(found, wanted)
    assert np.abs(without - wanted).max() > 0.01


def test_another_lm_head_is_not_shared(engine_dir: Path) -> None:
    config, _ = engine_of(engine_dir, Role.DRAFT)
    largest = config.weights.largest
    assert largest is not None
    other = LargestWeight(
        name=largest.name, offset=largest.offset, shape=largest.shape, sha256="0" * 64
    )
    pair = PairWeights()
    (first,) = pair.shared(data_of(engine_dir / "spec_base.onnx"), other).values()
    (second,) = pair.shared(data_of(engine_dir / "spec_draft.onnx"), largest).values()
    assert first.data_ptr() != second.data_ptr()


def test_a_file_that_is_too_short_is_refused(engine_dir: Path, tmp_path: Path) -> None:
    config, _ = engine_of(engine_dir, Role.DRAFT)
    (tmp_path / "short").write_bytes(b"\0" * 8192)
    with pytest.raises(BundleError, match="short cannot be mapped"):
        PairWeights().shared(tmp_path / "short", config.weights.largest)
