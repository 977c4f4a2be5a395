"""The runner of ONNX Runtime engines: its cache, its buffers, and engines that it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.base import Interrupted
from edgespec.backends.build import build
from edgespec.backends.call import Attention, Call, LaneAttention
from edgespec.backends.engine_config import EngineLimits
from edgespec.backends.ort import cache
from edgespec.backends.ort import runner as runner_module
from edgespec.backends.ort.cache import padding_of
from edgespec.backends.ort.contract import lowered_contract
from edgespec.backends.ort.options import FP32
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.registry import open_runner
from edgespec.contract import (
    GraphContract,
    GraphShape,
    Limits,
    RecurrentShape,
    Role,
    canonical_contract,
    past_names,
    present_names,
)
from edgespec.errors import BundleError, EnvironmentProblem
from edgespec.export.components import ExportOptions, export
from tests import toys
from tests.calls import attention_of, outputs_of
from tests.unit.backends.ort.bindings import Session

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
        options=FP32,  # on ONNX Runtime's kernels
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
    rows_of_head = [np.arange(rows - gathered, rows)]
    embeds, start = rng.standard_normal((1, rows, 64), np.float32), np.array([slots - rows])
    return Call(embeds, np.cos(angles), np.sin(angles), attention_of(mask), start, rows_of_head)


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
        found = outputs_of(runner.run(asked)).logits
        assert found.shape == (1, gathered, 256)
        again = outputs_of(open_runner(engine_dir, Role.LLM)[0].run(asked)).logits
        np.testing.assert_array_equal(found, again)


def test_a_call_may_fill_the_cache_and_one_slot_for_a_row_that_fills_up(runner: OrtRunner) -> None:
    assert runner.run(call(CAPACITY, CAPACITY, 1))[0].logits.finite()
    with pytest.raises(AssertionError):
        runner.run(call(2, CAPACITY + 2, 1))


def test_calls_of_recurrent_layers_are_shorter(runner: OrtRunner, hybrid: OrtRunner) -> None:
    """Their work grows with the square of their rows."""
    assert hybrid.prefill_chunk < runner.prefill_chunk


def test_failed_call_is_an_error_and_no_log_on_the_terminal(
    runner: OrtRunner, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime would print it in colors, with the names of nodes as they are in the file."""
    beyond = replace(call(2, 2, 1), gather=[np.array([99])])
    with pytest.raises(EnvironmentProblem, match="ONNX Runtime failed in a call of 1 x 2 rows"):
        runner.run(beyond)
    assert capfd.readouterr() == ("", "")


def test_call_can_be_ended_and_made_again(
    runner: OrtRunner, hybrid: OrtRunner, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = outputs_of(runner.run(call(9, 9, 4))).logits.copy()
    with runner.interruptible() as interrupt:
        interrupt()
        with pytest.raises(Interrupted):
            runner.run(call(9, 9, 4))
    with runner.interruptible():
        interrupt()  # of calls that are over
        np.testing.assert_array_equal(outputs_of(runner.run(call(9, 9, 4))).logits, expected)
    assert capfd.readouterr() == ("", "")
    with hybrid.interruptible() as interrupt:
        interrupt()  # a recurrent state would be half written
        assert hybrid.run_options is None


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
    (3, CAPACITY + 65),
]  # a plain engine verifies trees too: a tree of 64 nodes beside a full lane


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
        (1, r"KV cache of 0.0 GB \(12 tokens\)", "a smaller `max_kv_cache_capacity`"),
        (
            5,
            r"KV cache of 0.0 GB \(5 sequences of 12 tokens\)",
            "a smaller `max_batch_size` or `max_kv_cache_capacity`",
        ),
    ],
)
def test_a_cache_that_does_not_fit_is_told_with_its_lanes(
    engine_dir: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, said: str, remedy: str
) -> None:
    def no_memory(*args: object, **kwargs: object) -> None:
        raise MemoryError

    contract = open_runner(engine_dir, Role.LLM)[0].contract
    monkeypatch.setattr(cache, "zeroes", no_memory)
    with pytest.raises(EnvironmentProblem, match=said) as told:
        OrtRunner(engine_dir / "llm.onnx", contract, CAPACITY, lanes)
    assert remedy in told.value.remedy


def test_memory_is_bound_again_only_where_it_is_another(
    runner: OrtRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[str] = []
    binding = runner.bindings.binding

    class Watched:
        def bind_output(self, name: str, *args: object) -> None:
            bound.append(name)
            binding.bind_output(name, *args)

        def bind_ortvalue_output(self, name: str, value: object) -> None:
            bound.append(name)
            binding.bind_ortvalue_output(name, value)

        def __getattr__(self, name: str) -> object:
            return getattr(binding, name)

    runner.bindings.binding = Watched()
    monkeypatch.setattr(runner.session, "run_with_iobinding", lambda *watched: None)
    for rows in (3, 2, 3):
        runner.run(call(rows, rows, 1))
    assert bound.count("present_key_0") == 1
    assert bound.count("logits") == 1  # it is the same memory each time


# Lanes, without an engine: `bindings` has what is bound, and recurrent layers that add up

HYBRID = GraphShape(
    Role.BASE,
    hidden_size=2,
    num_layers=3,
    num_kv_heads=2,
    head_dim=2,
    rotary_dim=2,
    vocab_size=5,
    features=4,
    recurrent=RecurrentShape((1,), 1, 1, 1, 1, conv_kernel=3),
)


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> OrtRunner:
    """Of three lanes, each of up to 90 rows."""
    contract = lowered_contract(canonical_contract(HYBRID), batched=True)
    monkeypatch.setattr(runner_module, "open_session", lambda path, shared: Session(contract))
    return OrtRunner(Path("engine"), contract, 90, lanes=3, padding=9)


def lanes_call(runner: OrtRunner, first: int, values: list[list[float]]) -> None:
    """Rows whose embeddings are `values` [B, S], behind what each lane has committed."""
    assert runner.recurrent is not None
    batch, rows = np.shape(values)
    starts = np.array([runner.recurrent.lengths[first + b] for b in range(batch)], np.int64)
    embeds = np.repeat(np.array(values, np.float32)[..., None], HYBRID.hidden_size, 2)
    angles, own = np.zeros((batch, rows, 1), np.float32), np.ones((rows, rows), bool)
    seen = [LaneAttention(start, own, start + np.arange(rows)) for start in starts.tolist()]
    gather = [np.zeros(1, np.int64)] * batch
    asked = Call(embeds, angles, angles, Attention(seen), starts, gather, first_lane=first)
    runner.run(asked)


def taken_in(runner: OrtRunner, lane: int) -> float:
    """The sum of what the recurrent layer has committed."""
    assert runner.recurrent is not None
    held = runner.recurrent.read(lane)
    return float(held.state.sum() + held.pending[..., 0].sum())


@pytest.mark.parametrize("way", ["free", "zero"])
def test_a_lane_that_is_given_up_leaves_no_rows_and_no_state(hybrid: OrtRunner, way: str) -> None:
    """Its neighbour keeps both."""
    hybrid.slab[:] = 1.0
    lanes_call(hybrid, 0, [[1, 2, 4], [8, 16, 32]])
    for lane in (0, 1):
        hybrid.keep_rows(lane, np.array([0, 2]), 0)
    getattr(hybrid, way)(0)
    assert hybrid.recurrent is not None
    assert (hybrid.recurrent.lengths[:2], hybrid.cache.extents[:2]) == ([0, 2], [0, 3])
    assert (taken_in(hybrid, 0), taken_in(hybrid, 1)) == (0, 8 + 32)
    held = hybrid.recurrent.read(0)
    assert held.pending.shape[1] == 0
    assert not held.conv.any()
    assert hybrid.slab[:, 1].all()
    assert hybrid.slab[:, 0].any() == (way == "free")


def test_a_commit_moves_rows_and_keeps_the_same_ones_for_the_state(hybrid: OrtRunner) -> None:
    lanes_call(hybrid, 1, [[1, 2]])
    hybrid.keep_rows(1, np.array([0, 1]), 0)
    lanes_call(hybrid, 1, [[4, 8, 16, 32]])
    hybrid.slab[:, 1] = np.arange(hybrid.cache.stride, dtype=np.float32)[:, None]
    hybrid.keep_rows(1, np.array([3, 5]), 2)
    assert hybrid.slab[0, 1, 0, :4, 0].tolist() == [0, 1, 3, 5]
    assert taken_in(hybrid, 1) == 1 + 2 + 8 + 32


def test_a_lane_goes_on_where_it_was_copied_to_with_its_state(hybrid: OrtRunner) -> None:
    lanes_call(hybrid, 0, [[1, 2, 4]])
    hybrid.keep_rows(0, np.array([0, 1, 2]), 0)
    hybrid.slab[:, 0, :, :3] = 7.0
    hybrid.copy_lane(0, 2, 3)
    kept = hybrid.read_rows(0, 3)
    hybrid.free(0)
    hybrid.write_rows(1, kept)
    assert hybrid.recurrent is not None
    assert hybrid.recurrent.lengths == [0, 3, 3]
    for lane in (1, 2):
        assert (hybrid.slab[:, lane, :, :3] == 7.0).all()
        lanes_call(hybrid, lane, [[8]])
        hybrid.keep_rows(lane, np.array([3]), 3)
        assert taken_in(hybrid, lane) == 15


def test_only_the_whole_of_a_state_is_copied(hybrid: OrtRunner) -> None:
    lanes_call(hybrid, 0, [[1, 2, 4]])
    hybrid.keep_rows(0, np.array([0, 1, 2]), 0)
    with pytest.raises(AssertionError):
        hybrid.read_rows(0, 2)
    with pytest.raises(AssertionError):
        hybrid.copy_lane(0, 1, 2)


def test_keys_and_values_are_bound_where_the_lanes_of_a_call_stand(hybrid: OrtRunner) -> None:
    """After other lanes, and after the cache has taken another stride."""
    session = hybrid.session
    for first, values in ((0, [[1]]), (1, [[1], [1]]), (1, [[1] * 60, [1] * 60]), (2, [[1]])):
        lanes_call(hybrid, first, values)
        slab = hybrid.slab
        for index, layer in enumerate((0, 2)):
            for part, pair in enumerate(zip(past_names(layer), present_names(layer), strict=True)):
                here = slab[2 * index + part, first:]
                for bound in (session.binding.inputs[pair[0]], session.binding.outputs[pair[1]]):
                    assert bound.address == here.ctypes.data
                    assert bound.dims == (len(values), *slab.shape[2:])
    assert hybrid.cache.stride > 60


def test_each_call_reads_its_own_rows_whatever_lanes_and_rows_came_before(
    hybrid: OrtRunner,
) -> None:
    for first, values in (
        (0, [[1.0]]),
        (1, [[2.0, 3.0], [4.0, 5.0]]),
        (0, [[6.0]]),
        (0, [[7.0] * 60, [8.0] * 60, [9.0] * 60]),  # the cache takes another stride
        (2, [[10.0]]),
        (1, [[11.0, 12.0], [13.0, 14.0]]),
    ):
        lanes_call(hybrid, first, values)
        feeds, lanes = hybrid.session.feeds, len(values)
        assert feeds["inputs_embeds"][..., 0].tolist() == values
        assert feeds["write_indices"].tolist() == [0] * lanes
        assert feeds["attention_mask"].shape == (lanes, 1, len(values[0]), hybrid.cache.stride)
        assert (feeds["attention_mask"].sum(3) == len(values[0])).all()


def test_a_mask_is_as_wide_as_the_cache_and_hides_what_is_behind_the_calls_slots(
    hybrid: OrtRunner,
) -> None:
    for rows in (20, 3):  # the buffer had other rows before
        hybrid.free(0)
        lanes_call(hybrid, 0, [[1.0] * rows])
        mask = hybrid.session.feeds["attention_mask"]
        assert mask.shape == (1, 1, rows, hybrid.cache.stride)
        assert mask[..., :rows].all()
        assert not mask[..., rows:].any()


def test_damaged_engine_is_refused_without_a_word_on_stdout(
    engine_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "llm.onnx"
    path.write_bytes((engine_dir / "llm.onnx").read_bytes()[:200])
    with pytest.raises(BundleError, match="ONNX Runtime cannot load"):
        runner_module.open_session(path)
    assert capfd.readouterr() == ("", "")
