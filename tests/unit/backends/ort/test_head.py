"""Logits of an engine whose lm_head searches them: whatever is asked, and in whatever order, is
what numpy says of logits that are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgespec.backends.call import Attention, Call, LaneAttention, Logits
from edgespec.backends.host import HostLogits
from edgespec.backends.ort.head import WRITING, Head, HeadLogits
from edgespec.backends.ort.options import WeightFormat
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits, Role
from edgespec.export.components import ExportOptions
from tests import made, toys
from tests.unit.backends.ort.native.sessions import compiled

pytestmark = compiled

LANES = 2
VOCAB = 700
LIMITS = Limits(max_input_len=16, max_kv_cache_capacity=32, max_batch_size=LANES)
FORMATS = {
    "int4": WeightFormat("int4", 32, kernels="native"),
    "int8 by channel": WeightFormat("int8", 0, kernels="native"),
}


@pytest.fixture(scope="module", params=FORMATS)
def engine_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("head")
    base = toys.make_base(work / "base", layers=1, vocab=VOCAB)
    exported = made.exported(base, ExportOptions(golden=False))
    return made.built(LIMITS, *sorted(exported.iterdir()), options=FORMATS[request.param])


@pytest.fixture
def runner(engine_dir: Path) -> OrtRunner:
    return open_runner(engine_dir, Role.LLM)[0]


def call(rows: int, seed: int = 0) -> Call:
    """Rows at the begin of all lanes; of the second lane one row fewer goes through the head."""
    random = np.random.default_rng(seed)
    embeds = random.standard_normal((LANES, rows, 64), np.float32)
    angles = random.standard_normal((LANES, rows, 8), np.float32)
    seen = LaneAttention(0, np.tri(rows, dtype=bool), np.arange(rows))
    gather = [np.arange(rows), np.arange(1, rows)]
    cos, sin = np.cos(angles), np.sin(angles)
    return Call(embeds, cos, sin, Attention([seen] * LANES), np.zeros(LANES, np.int64), gather)


def head_of(runner: OrtRunner) -> Head:
    assert runner.head is not None
    return runner.head


def written(runner: OrtRunner, asked: Call) -> list[HostLogits]:
    """The logits of each lane, all of them written by the engine."""
    head = head_of(runner)
    kept, head.writing = head.writing, dict.fromkeys(range(LANES), WRITING)
    arrays = [own.array for own in found(runner, asked)]
    head.writing = kept
    assert all(array is not None for array in arrays)
    return [HostLogits(np.array(array)) for array in arrays]


def found(runner: OrtRunner, asked: Call) -> list[HeadLogits]:
    logits = [result.logits for result in runner.run(asked)]
    assert all(isinstance(own, HeadLogits) for own in logits)
    return [own for own in logits if isinstance(own, HeadLogits)]


def unwritten(runner: OrtRunner, asked: Call) -> list[HeadLogits]:
    """The logits of each lane, none of them written."""
    head_of(runner).writing = dict.fromkeys(range(LANES), 0)
    logits = found(runner, asked)
    assert [own.array for own in logits] == [None] * LANES
    return logits


def check_same(one: Logits, other: Logits, counts: tuple[int, ...] = (1, 3, 8, 64, 99)) -> None:
    """All that may be asked of both is the same, to the bit; sums are nearly so."""
    assert (len(one), one.vocab_size) == (len(other), other.vocab_size)
    assert one.finite() == other.finite()
    assert [one.best(row) for row in range(len(one))] == [
        other.best(row) for row in range(len(one))
    ]
    for count in counts:
        top, wanted = one.top(count), other.top(count)
        assert top.ids.tobytes() == wanted.ids.tobytes()
        assert top.values.tobytes() == wanted.values.tobytes()
        np.testing.assert_allclose(top.logsumexp, wanted.logsumexp, rtol=1e-6)
    for row in range(len(one)):
        assert one.row(row).tobytes() == other.row(row).tobytes()
    assert one.rows().tobytes() == np.ascontiguousarray(other.rows()).tobytes()


def test_what_is_asked_is_the_same_whether_logits_are_written(runner: OrtRunner) -> None:
    for rows in (1, 5, 2):
        asked = call(rows + 1, seed=rows)
        wanted = written(runner, asked)
        for lane, own in enumerate(unwritten(runner, asked)):
            check_same(own, wanted[lane])
        for lane, own in enumerate(found(runner, asked)):  # more is found now
            assert own.largest.count == 64
            check_same(own, wanted[lane])


def test_parts_of_logits_are_the_same_parts(runner: OrtRunner) -> None:
    asked = call(6)
    wanted = written(runner, asked)[0]
    rows = np.array([4, 0, 4])
    for logits in (unwritten(runner, asked)[0], found(runner, asked)[0]):
        check_same(logits.first_rows(2), wanted.first_rows(2))
        check_same(logits.take(rows), wanted.take(rows))
        few, same = logits.first_ids(17), wanted.first_ids(17)
        assert few.best(1) == same.best(1)
        check_same(few.take(rows), same.take(rows), counts=(1, 5, 17))


def test_rows_that_were_taken_outlive_the_next_call(runner: OrtRunner) -> None:
    wanted = written(runner, call(5))[0].take(np.array([4]))
    kept = unwritten(runner, call(5))[0].take(np.array([4]))
    found(runner, call(5, seed=9))
    check_same(kept, wanted)


def test_logits_are_written_while_somebody_asks_for_rows(runner: OrtRunner) -> None:
    first, second = found(runner, call(2))
    assert first.array is not None  # nobody knows yet what will be asked
    first.best(0)
    second.row(0)
    for _ in range(WRITING):
        first, second = found(runner, call(2))
        assert first.array is None
        assert second.array is not None
        assert first.best(0) == HostLogits(first.whole()).best(0)
    assert found(runner, call(2))[1].array is None
    runner.free(0)  # another sequence
    assert [own.array is None for own in found(runner, call(2))] == [False, True]


def test_logits_that_are_not_written_take_no_memory(runner: OrtRunner) -> None:
    unwritten(runner, call(2))
    logits = runner.bindings.buffers["logits"]
    logits[:] = np.float32(7)
    for own in unwritten(runner, call(2, seed=1)):
        own.best(0)
    assert (logits == 7).all()


def test_what_is_not_a_number_is_found(runner: OrtRunner) -> None:
    asked = call(4)
    asked.inputs_embeds[0, 2] = np.nan
    wanted = written(runner, asked)
    first, second = unwritten(runner, asked)
    assert not first.finite()
    assert first.first_rows(2).finite()
    assert second.finite()
    for row in range(4):
        (best, value), (same, largest) = first.best(row), wanted[0].best(row)
        np.testing.assert_equal((best, value), (same, largest))


def test_only_what_was_asked_for_is_found(runner: OrtRunner) -> None:
    head = head_of(runner)
    first, _ = unwritten(runner, call(2))
    first.best(0)
    assert head.search == (1, VOCAB, 0)
    first.first_ids(600).top(4)
    assert head.search == (4, 600, 1)
    first, _ = unwritten(runner, call(2))
    top = first.first_ids(600).top(4)
    assert first.array is None
    assert top.ids.shape == (2, 4)
