"""The runner of ONNX Runtime engines: its cache, its buffers, and engines that it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.base import Call
from edgespec.backends.build import build
from edgespec.backends.engine_config import EngineLimits
from edgespec.backends.ort.cache import padding_of
from edgespec.backends.ort.lowering import lowered_contract
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.registry import open_runner
from edgespec.contract import GraphContract, Limits, Role, canonical_contract
from edgespec.errors import BundleError, EnvironmentProblem
from edgespec.export.components import ExportOptions, export
from tests import toys

CAPACITY = 12


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("engine")
    exported = export(
        str(toys.make_base(work / "base", layers=2)), work / "onnx", ExportOptions(golden=False)
    )
    build(
        exported.directory,
        work / "engine",
        Limits(max_input_len=CAPACITY, max_kv_cache_capacity=CAPACITY),
    )
    return work / "engine"


@pytest.fixture
def runner(engine_dir: Path) -> OrtRunner:
    return open_runner(engine_dir, Role.LLM)[0]


def call(rows: int, slots: int, gathered: int) -> Call:
    """`rows` rows in the last of `slots` slots, the last `gathered` of them through the head."""
    rng = np.random.default_rng(rows)
    mask = np.tri(rows, slots, slots - rows, dtype=bool)[None, None]
    angles = rng.standard_normal((1, rows, 8), np.float32)
    rows_of_head = np.arange(rows - gathered, rows)[None]
    embeds, start = rng.standard_normal((1, rows, 64), np.float32), np.array([slots - rows])
    return Call(embeds, np.cos(angles), np.sin(angles), mask, start, rows_of_head)


@pytest.mark.parametrize("slots", [[2, 4, 5], [3, 5, 8], [2, 3, 4]])
def test_moved_rows_stand_in_a_row_and_all_others_stay(runner: OrtRunner, slots: list[int]) -> None:
    runner.slab[:] = np.random.default_rng(0).standard_normal(runner.slab.shape, np.float32)
    before = runner.slab.copy()
    runner.keep_rows(0, np.array(slots), 2)
    np.testing.assert_array_equal(runner.slab[:, :, :, 2:5], before[:, :, :, slots])
    np.testing.assert_array_equal(runner.slab[:, :, :, :2], before[:, :, :, :2])
    np.testing.assert_array_equal(runner.slab[:, :, :, 5:], before[:, :, :, 5:])


def test_results_have_the_rows_of_their_own_call(runner: OrtRunner, engine_dir: Path) -> None:
    """Large, small, middling: the buffers behind results are kept from call to call and cut to
    size."""
    for rows, gathered in ((9, 9), (2, 1), (9, 4)):
        asked = call(rows, rows, gathered)
        found = runner.run(asked).logits
        assert found.shape == (1, gathered, 256)
        np.testing.assert_array_equal(found, open_runner(engine_dir, Role.LLM)[0].run(asked).logits)


def test_a_call_may_fill_the_cache_and_one_slot_for_a_row_that_fills_up(runner: OrtRunner) -> None:
    assert np.isfinite(runner.run(call(CAPACITY, CAPACITY, 1)).logits).all()
    with pytest.raises(AssertionError):
        runner.run(call(2, CAPACITY + 2, 1))


def test_an_engine_without_the_outputs_of_its_contract_is_refused_by_their_name(
    engine_dir: Path,
) -> None:
    with pytest.raises(BundleError, match="outputs that differ from the contract: hidden_states"):
        OrtRunner(engine_dir / "llm.onnx", base_contract(engine_dir), CAPACITY)


def base_contract(engine_dir: Path) -> GraphContract:
    plain = open_runner(engine_dir, Role.LLM)[0].contract.shape
    return lowered_contract(canonical_contract(replace(plain, role=Role.BASE, features=3 * 64)))


def test_a_file_that_is_no_engine_is_refused_with_its_name(
    engine_dir: Path, tmp_path: Path
) -> None:
    contract = open_runner(engine_dir, Role.LLM)[0].contract
    (tmp_path / "llm.onnx").write_bytes(b"not a graph")
    with pytest.raises(BundleError, match=r"llm\.onnx"):
        OrtRunner(tmp_path / "llm.onnx", contract, CAPACITY)


OPENED = [
    (1, CAPACITY + 1),
    (3, CAPACITY + 61),
]  # a plain engine verifies trees too: a tree of 60 and its root beside a full lane


@pytest.mark.parametrize(("lanes", "slots"), OPENED)
def test_lanes_and_padding_come_from_what_the_engine_was_built_for(
    tmp_path: Path, lanes: int, slots: int
) -> None:
    exported = export(
        str(toys.make_base(tmp_path / "base", layers=1)), tmp_path, ExportOptions(golden=False)
    )
    build(exported.directory, tmp_path / "engine", Limits(lanes, CAPACITY, CAPACITY))
    runner = open_runner(tmp_path / "engine", Role.LLM)[0]
    assert isinstance(runner, OrtRunner)
    assert (runner.lanes, runner.capacity, runner.cache.slots) == (lanes, CAPACITY, slots)


def engine_limits(**sizes: int) -> EngineLimits:
    return EngineLimits(max_input_len=CAPACITY, max_kv_cache_capacity=CAPACITY, **sizes)


PADDING = [
    ({"max_batch_size": 1, "max_verify_tree_size": 60}, 1),
    ({"max_batch_size": 2, "max_verify_tree_size": 60}, 61),
    ({"max_batch_size": 2, "max_draft_tree_size": 9}, 10),
    ({"max_batch_size": 2}, 1),
]


@pytest.mark.parametrize(("limits", "padding"), PADDING)
def test_padding_has_room_for_the_largest_tree_beside_a_full_lane(
    limits: dict[str, int], padding: int
) -> None:
    assert padding_of(engine_limits(**limits)) == padding


def test_padding_of_block_drafts_has_room_for_a_neighbours_context_too() -> None:
    two, one = (engine_limits(max_batch_size=n, max_draft_tree_size=9) for n in (2, 1))
    assert padding_of(two, block=True) == 19
    assert padding_of(one, block=True) == 1


@pytest.mark.parametrize(
    ("lanes", "said", "remedy"),
    [
        (1, r"KV cache of 0.0 GB \(12 tokens\)", "a smaller --max-kv-cache-capacity"),
        (
            5,
            r"KV cache of 0.0 GB \(5 sequences of 12 tokens\)",
            "a smaller --max-batch-size or --max-kv-cache-capacity",
        ),
    ],
)
def test_a_cache_that_does_not_fit_is_told_with_its_lanes(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, said: str, remedy: str
) -> None:
    def no_memory(*args: object, **kwargs: object) -> None:
        raise MemoryError

    contract = open_runner(engine_dir, Role.LLM)[0].contract
    monkeypatch.setattr(np, "zeros", no_memory)
    with pytest.raises(EnvironmentProblem, match=said) as told:
        OrtRunner(engine_dir / "llm.onnx", contract, CAPACITY, lanes)
    assert remedy in told.value.remedy


def test_the_cache_is_bound_again_only_when_other_lanes_are_called(
    runner: OrtRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    binding = runner.binding

    class Watched:
        def bind_output(self, name: str, *args: object) -> None:
            bound.append(name)
            binding.bind_output(name, *args)

        def __getattr__(self, name: str) -> object:
            return getattr(binding, name)

    runner.binding = Watched()
    monkeypatch.setattr(runner.session, "run_with_iobinding", lambda watched: None)
    for rows in (3, 2, 3):
        runner.run(call(rows, rows, 1))
    assert bound.count("present_key_0") == 1
    assert bound.count("logits") == 3
