"""Times of stages: each pass by itself, and their sum by coarse stage."""

from __future__ import annotations

import pytest

from edgespec.runtime.lanes import stages
from edgespec.runtime.lanes.stages import StageLog, StageTimes


class Engine:
    """Its seconds go on when it is asked to."""

    seconds = 0.0

    def engine_s(self) -> float:
        return self.seconds

    def fail(self) -> None:
        self.seconds += 1.0
        raise ZeroDivisionError


def test_a_pass_is_logged_and_added_to_what_was_spent_with_its_engines_share() -> None:
    engine, spent = Engine(), StageTimes()
    log = StageLog(engine.engine_s)
    for _ in range(2):
        with log.timed(stages.VERIFICATION, spent):
            engine.seconds += 3.0
    with log.timed(stages.COMMIT, spent):
        pass
    assert {stage: len(passes) for stage, passes in log.passes.items()} == {
        stages.VERIFICATION: 2,
        stages.COMMIT: 1,
    }
    assert spent.verify == pytest.approx(sum(log.passes[stages.VERIFICATION]))
    assert spent.commit == log.passes[stages.COMMIT][0]
    assert spent.engine == 6.0
    assert (spent.prefill, spent.draft) == (0.0, 0.0)


def test_a_pass_that_raises_is_not_counted() -> None:
    engine, spent = Engine(), StageTimes()
    log = StageLog(engine.engine_s)
    with pytest.raises(ZeroDivisionError), log.timed(stages.COMMIT, spent):
        engine.fail()
    assert not log.passes
    assert spent == StageTimes()


def test_without_recording_only_the_sums_are_kept() -> None:
    log, spent = StageLog(Engine().engine_s, recording=False), StageTimes()
    with log.timed(stages.GENERATION, spent):
        pass
    assert not log.passes
    assert spent.verify > 0


def test_times_add_up_stage_by_stage() -> None:
    times = StageTimes(1.0, 2.0, 3.0, 4.0, 5.0)
    times += StageTimes(10.0, 20.0, 30.0, 40.0, 50.0)
    assert times == StageTimes(11.0, 22.0, 33.0, 44.0, 55.0)


def test_a_pass_before_a_request_is_listed_alone() -> None:
    log = StageLog(Engine().engine_s)
    log.note(stages.VISION_ENCODER, 2.0)
    assert log.passes == {stages.VISION_ENCODER: [2.0]}
    with log.recorded() as passes:
        log.note(stages.VISION_ENCODER, 3.0)
    log.note(stages.VISION_ENCODER, 2.0)
    assert passes == {stages.VISION_ENCODER: [3.0]}
