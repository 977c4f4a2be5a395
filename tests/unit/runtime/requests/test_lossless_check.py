"""A difference of two runs is explained only by what calls of other sizes do at its very position.

The model is `hash_model`'s, whose logits do not depend on the size of a call; `Rounding` makes them
do so by a known amount.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.backends.call import Call, Result
from edgespec.errors import LimitError
from edgespec.prompts import MAX_LENGTH, SamplingParams
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.requests.lossless_check import OTHER_SIZES, Replay, first_difference
from tests.unit.runtime.hash_model import (
    GREEDY,
    HashRunner,
    PositionRows,
    TokenRows,
    logits_after,
    plainly,
)

PROMPT = [6, 1, 8, 0, 3]
ANSWER = plainly(PROMPT, GREEDY, 12)[0]
INDEX = 9  # of the token that differs
# Of the verify steps: with their bonuses 9 tokens
PATHS, DRAFTED = [[0, 1, 4], [0], [0, 2, 3, 5]], [4, 4, 5]
LOGITS = logits_after(list(enumerate([*PROMPT, *ANSWER[:INDEX]])))
FIRST, SECOND, LAST = np.argsort(-LOGITS)[[0, 1, -1]].tolist()
APART = float(LOGITS[FIRST] - LOGITS[SECOND])


@dataclass
class Rounding(HashRunner):
    """Calls of many rows add `by` to the second best candidate's logit, and the same to all."""

    by: float = 0.0
    shift: float = 0.0

    def run(self, call: Call) -> list[Result]:
        results = super().run(call)
        if call.rows > 1:
            for result in results:
                logits = result.logits.rows()
                logits += self.shift
                logits[:, SECOND] += self.by
        return results


def engine_of(runner: HashRunner, rounding: float = 0.0, *, exact: bool = False) -> Any:
    base = CachedDecoder(runner, TokenRows(), PositionRows())
    return SimpleNamespace(
        base=base,
        session=SimpleNamespace(num_free_lanes=len(base.lanes)),
        driver=SimpleNamespace(paused=nullcontext),
        exact=exact,
        config=SimpleNamespace(weights=SimpleNamespace(is_bitwise=False)),
        rounding=rounding,
        tolerance=1e-4,
        stop_ids=frozenset(),
        tokenizer=SimpleNamespace(token_bytes=lambda token: str(token).encode()),
    )


def response(ids: Sequence[int], **metrics: object) -> Response:
    steps = RequestMetrics(len(PROMPT), per_step_path=PATHS, per_step_drafted=DRAFTED, **metrics)
    return Response("", [*ids], MAX_LENGTH, steps, None, [*PROMPT])


def differing(token: int) -> tuple[Response, Response]:
    """A plain run, and one that has another token at INDEX."""
    drafted = [*ANSWER]
    drafted[INDEX] = token
    return response(ANSWER), response(drafted)


def difference_of(engine: Any, token: int) -> Any:
    return first_difference(engine, *differing(token), SamplingParams(temperature=0.0))


def test_equal_runs_have_no_difference() -> None:
    engine = engine_of(HashRunner(64))
    assert first_difference(engine, response(ANSWER), response(ANSWER), SamplingParams()) is None
    assert engine.base.runner.rows == []


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("reused", [0, 3])
@pytest.mark.parametrize("index", [0, 2, 6, INDEX])
def test_calls_of_any_size_compute_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, lanes: int, reused: int, index: int
) -> None:
    """Wherever the position is: the first token, in the middle of a verification, behind one."""
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", 4)
    engine = engine_of(HashRunner(64, lanes))
    drafted = response([*ANSWER[:index], LAST, LAST, LAST], reused_tokens=reused)
    computed = list(Replay.of(engine, drafted, index, batch_size=lanes).logits())
    assert len(computed) == 2 * len({1, lanes}) + len(OTHER_SIZES)
    wanted = logits_after(list(enumerate([*PROMPT, *ANSWER[:index]])))
    for logits in computed:
        np.testing.assert_array_equal(logits, wanted)
    assert all(lane.length == 0 for lane in engine.base.lanes)


def test_calls_are_of_one_row_then_as_verified_then_of_other_sizes() -> None:
    engine = engine_of(HashRunner(64))
    replay = Replay.of(engine, differing(LAST)[1], INDEX, batch_size=1)
    rows = engine.base.runner.rows
    found = []
    for _ in replay.logits():
        found.append([*rows])
        rows.clear()
    assert found[:2] == [[5] + [1] * 9, [5, 5, 5, 6, 1]]
    for size, calls in zip(OTHER_SIZES, found[2:], strict=True):
        assert set(calls[:-1]) == {size}


def test_a_prompt_that_was_kept_is_read_again_in_calls_as_large_as_a_verification() -> None:
    engine = engine_of(HashRunner(64))
    drafted = differing(LAST)[1]
    kept = replace(drafted, metrics=replace(drafted.metrics, reused_tokens=4))
    many = Replay.of(engine, kept, INDEX, batch_size=1).logits()
    next(many)
    engine.base.runner.rows.clear()
    next(many)
    assert engine.base.runner.rows[:2] == [4, 1]


def test_lanes_run_side_by_side_as_they_did() -> None:
    engine = engine_of(HashRunner(64, 2))
    for _ in Replay.of(engine, differing(LAST)[1], INDEX, batch_size=5).logits():
        pass
    assert set(engine.base.runner.batches) == {1, 2}


@pytest.mark.parametrize(
    ("by", "engine_rounding", "explained"),
    [
        (0.0, 1.0, False),  # nothing moves them
        (0.5 * APART, 1.0, False),  # not far enough
        (1.5 * APART, 1.0, True),
        (1.5 * APART, 0.1 * APART, False),  # more than such kernels may do
    ],
)
def test_rounding_explains_what_it_moves_within_the_bound(
    by: float, engine_rounding: float, explained: bool
) -> None:
    engine = engine_of(Rounding(64, by=by, shift=3.0), engine_rounding)
    found = difference_of(engine, SECOND)
    assert (found.index, found.plain, found.speculative) == (INDEX, FIRST, SECOND)
    assert found.apart == pytest.approx(APART)
    assert found.rounding == pytest.approx(by, abs=1e-5)
    assert found.reproduced == (by > APART)
    assert found.explained == explained
    assert found.to_dict()["explained"] == explained


def test_a_candidate_that_is_far_is_explained_by_no_rounding_of_others() -> None:
    engine = engine_of(Rounding(64, by=1.5 * APART), 10.0)
    found = difference_of(engine, LAST)
    assert found.apart == pytest.approx(float(LOGITS[FIRST] - LOGITS[LAST]))
    assert not found.explained


def test_an_exact_engine_may_round_nothing() -> None:
    found = difference_of(engine_of(Rounding(64, by=1.5 * APART), 1.0, exact=True), SECOND)
    assert found.bound == 0
    assert not found.explained


def test_a_float32_engine_may_be_as_far_off_as_build_allows() -> None:
    found = difference_of(engine_of(HashRunner(64)), SECOND)
    assert found.bound == pytest.approx(1e-4 * float(np.abs(LOGITS).max()))


@pytest.mark.parametrize("shorter", ["plain", "speculative"])
def test_a_run_that_ended_before_the_other_is_explained_by_nothing(shorter: str) -> None:
    short, whole = response(ANSWER[:7]), response(ANSWER)
    runs = (short, whole) if shorter == "plain" else (whole, short)
    found = first_difference(engine_of(HashRunner(64), 10.0), *runs, SamplingParams())
    assert found is not None
    assert (found.index, found.explained) == (7, False)
    assert (found.plain is None) == (shorter == "plain")
    assert "NOT explained" in found.words
    assert found.to_dict()["candidates_apart_nats"] is None


def test_a_stream_that_is_open_is_not_disturbed() -> None:
    engine = engine_of(HashRunner(64, 2))
    engine.session.num_free_lanes = 1
    with pytest.raises(LimitError, match="a lane of the engine is taken"):
        difference_of(engine, SECOND)
