"""One lm_head in memory for the engines of a pair: a draft that has its base's reads it from the
base's file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.artifacts import file_names
from edgespec.backends.build import build
from edgespec.backends.engine_config import EngineConfig, EngineFields, EngineWeights
from edgespec.backends.engine_dir import STEMS
from edgespec.backends.engine_dir import open_engine as engine_of
from edgespec.backends.golden import golden_calls, only_logits
from edgespec.backends.golden_file import read_golden
from edgespec.backends.ort.options import WeightFormat
from edgespec.backends.ort.pair_weights import PairWeights, file_of
from edgespec.backends.ort.runner import OrtRunner, open_engine
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
    path = exported / "mtp_draft" / file_names.GOLDEN
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
    with file_of(path, config.weights.largest).open("r+b") as file:  # not in the other directory
        file.seek(config.weights.largest.offset)
        file.write(bytes(int(np.prod(config.weights.largest.shape))))
    pair = PairWeights()
    pair.shared(engine_dir / "spec_base.onnx", base.weights.largest)
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
    other = replace(largest, sha256="0" * 64)
    pair = PairWeights()
    (first,) = pair.shared(engine_dir / "spec_base.onnx", other).values()
    (second,) = pair.shared(engine_dir / "spec_draft.onnx", largest).values()
    assert first.data_ptr() != second.data_ptr()


def test_a_file_that_is_too_short_is_refused(engine_dir: Path, tmp_path: Path) -> None:
    config, _ = engine_of(engine_dir, Role.DRAFT)
    largest = config.weights.largest
    assert largest is not None
    assert largest.file is not None
    (tmp_path / largest.file).write_bytes(b"\0" * 8192)
    with pytest.raises(BundleError, match=f"{largest.file} cannot be mapped"):
        PairWeights().shared(tmp_path / "spec_draft.onnx", largest)


# ---- on the disk


def heads_in(directory: Path) -> list[str]:
    """The files of lm_heads in an engine directory."""
    return [path.name for path in directory.glob("lm_head.*")]


@pytest.mark.parametrize("first", ["llm", "mtp_draft"])
def test_a_pair_has_one_lm_head_on_the_disk(exported: Path, tmp_path: Path, first: str) -> None:
    order = sorted(exported.iterdir(), key=lambda path: path.name != first)
    build(order[0], tmp_path, LIMITS, options=INT4)
    (name,) = heads_in(tmp_path)
    written = (tmp_path / name).stat()
    build(order[1], tmp_path, LIMITS, options=INT4)
    assert heads_in(tmp_path) == [name]
    assert (tmp_path / name).stat().st_mtime_ns == written.st_mtime_ns
    for role in (Role.BASE, Role.DRAFT):
        config, entry = engine_of(tmp_path, role)
        assert name in entry.files
        assert config.weights.largest is not None
        data = (tmp_path / f"{STEMS[role]}.onnx.data").stat().st_size
        assert data < sum(item.size_bytes for item in entry.files.values()) - written.st_size
        open_runner(tmp_path, role)


def test_an_lm_head_stays_while_an_engine_has_it(exported: Path, tmp_path: Path) -> None:
    for component in ("llm", "mtp_draft"):
        build(exported / component, tmp_path, LIMITS, options=INT4)
    (name,) = heads_in(tmp_path)
    eight = WeightFormat("int8", 32, kernels="native")
    build(exported / "mtp_draft", tmp_path, LIMITS, options=eight)
    assert len(heads_in(tmp_path)) == 2
    open_runner(tmp_path, Role.BASE)
    build(exported / "llm", tmp_path, LIMITS, options=eight)
    (other,) = heads_in(tmp_path)
    assert other != name
    for role in (Role.BASE, Role.DRAFT):
        open_runner(tmp_path, role)


def test_an_engine_without_its_lm_head_is_refused(engine_dir: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(engine_dir, tmp_path / "engines"))
    (name,) = heads_in(path)
    (path / name).unlink()
    for role in (Role.BASE, Role.DRAFT):
        with pytest.raises(BundleError, match=f"{name} is missing"):
            open_runner(path, role)


def test_an_lm_head_has_the_name_of_its_hash(engine_dir: Path) -> None:
    config, _ = engine_of(engine_dir, Role.BASE)
    raw = config.weights.to_dict()
    raw["largest"]["file"] = "../lm_head.data"
    with pytest.raises(BundleError, match=r"'file' is '\.\./lm_head\.data', not"):
        EngineWeights.read(EngineFields(raw, "config.json"))


# ---- what each method's pair has in common

MakeDraft = Callable[[Path, Path], Path]
# Whether the draft has its base's lm_head
PAIRS: dict[str, tuple[str, MakeDraft, bool]] = {
    "EAGLE-3, an lm_head of its own": (
        "eagle3",
        lambda path, base: toys.make_draft(path, base, "eagle"),
        False,
    ),
    "EAGLE-3 without one": (
        "eagle3",
        lambda path, base: toys.make_draft(
            path, base, "eagle", draft_vocab=None, own_head=False, d2t=None
        ),
        True,
    ),
    "EAGLE-1": ("eagle1", toys.make_eagle1, True),
    "DFlash": ("dflash", toys.make_dflash, True),
    "DSpark, an lm_head of its own": ("dspark", toys.make_dspark, False),
    "Medusa": ("medusa", toys.make_medusa, False),
    "a draft model": (
        "draft_model",
        lambda path, base: toys.make_base(path, layers=1, vocab=VOCAB, tied=True, seed=9),
        False,
    ),
}


def make_pair(path: Path, name: str, *, tied: bool = False, **sizes: int) -> Path:
    """The engines of a pair, the base as its method asks for it."""
    method, make_draft, _ = PAIRS[name]
    base = toys.make_base(path / "base", "qwen3", layers=8, tied=tied, **{"vocab": VOCAB, **sizes})
    draft = make_draft(path / "draft", base)
    whole = method if method == "draft_model" else None
    of_base = ExportOptions(
        golden=False,
        base_for=None if whole else method,
        draft_dir=str(draft) if "dflash" in method or "dspark" in method else None,
    )
    of_draft = ExportOptions(golden=False, base_model_dir=str(base), as_draft=whole)
    onnx = [*made.exported(base, of_base).iterdir(), *made.exported(draft, of_draft).iterdir()]
    return made.built(LIMITS, *onnx, options=INT4)


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_maps_an_lm_head_once_where_it_is_the_same(name: str, tmp_path: Path) -> None:
    check_sharing(make_pair(tmp_path, name), expected=PAIRS[name][2])


def test_a_draft_has_the_lm_head_of_a_tied_base(tmp_path: Path) -> None:
    """Which is the embedding of both."""
    check_sharing(make_pair(tmp_path, "EAGLE-1", tied=True), expected=True)


def test_an_lm_head_is_shared_where_other_weights_are_larger(tmp_path: Path) -> None:
    check_sharing(make_pair(tmp_path, "EAGLE-1", vocab=128, intermediate=192), expected=True)


def check_sharing(engine_dir: Path, *, expected: bool) -> None:
    """Whether the engines of a pair read their lm_head, and the draft its embedding, from the
    base's memory."""
    pair = PairWeights()
    opened: dict[Role, OrtRunner] = {}
    for role in (Role.BASE, Role.LLM, Role.DRAFT):
        if (engine_dir / f"{STEMS[role]}.onnx").is_file():
            config, _ = engine_of(engine_dir, role)
            opened[role] = open_engine(engine_dir / f"{STEMS[role]}.onnx", config, pair)
    *_, base, draft = opened.values()
    (own,), (value,) = base.shared.values(), draft.shared.values()
    assert base.head is not None
    assert own.data_ptr() == base.head.weight.ctypes.data
    assert (value.data_ptr() == own.data_ptr()) is expected
