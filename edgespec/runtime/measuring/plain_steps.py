"""Plain steps timed by the way: what a step without drafts takes at the end of answers that had
some.

Knows sequences and an idle engine. What it draws is thrown away: no answer, no kept row and no
metric changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from edgespec.runtime.engine import Engine
from edgespec.runtime.faults import FAULTS
from edgespec.runtime.lanes import stages
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.sequence import SequenceState
from edgespec.runtime.measuring.speedup import StepCost
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.text.prompt_value import PromptValue

PASSES = 6  # of which the first is not counted
Ended = tuple[Sequence[int], Sampler]  # the tokens of an answered request, and what drew them


def time_plain_steps(
    engine: Engine, answered: Sequence[Ended], stopping: Callable[[], bool] = lambda: False
) -> StepCost | None:
    """The median of a few plain steps of an idle engine, one sequence for each of `answered`, as
    long as they became.

    The rows that they attend to are those that stand in their lanes, whosever these were: how long
    a pass takes is not a matter of their values. A recurrent base reads a few tokens anew. None
    where an engine is busy, has no room, or fails, and once `stopping` says so.
    """
    with engine.driver.paused():
        session, base = engine.session, engine.base
        if session.num_free_lanes < len(base.lanes):
            return None
        room = base.capacity - PASSES - 1
        lanes = range(min(len(answered), engine.max_batch_size))
        if room < 1 or not lanes or any(len(tokens) < 2 for tokens, _ in answered):
            return None
        try:
            for lane in lanes:
                tokens, sampler = answered[lane]
                sequence = SequenceState(PromptValue.of(tokens[-room:]), sampler, PASSES + 1)
                sequence.lane = lane
                session.running.append(sequence)
                hold(base, lane, sequence.tokens[:-1])
            return timed(engine, stopping)
        except FAULTS:
            return None
        finally:
            session.restart()
            for lane in lanes:
                base.reset(lane)


def hold(base: CachedDecoder, lane: int, tokens: Sequence[int]) -> None:
    """Let a lane be as long as these tokens; a recurrent state, whose length matters little, that
    of the last few."""
    if not base.recurrent:
        base.hold(lane, len(tokens))
        return
    base.reset(lane)
    base.read(lane, np.array(tokens[-base.prefill_chunk :], np.int64))


def timed(engine: Engine, stopping: Callable[[], bool]) -> StepCost | None:
    """The median of PASSES steps of the sequences that run, without the first."""
    session, whole = engine.session, list[float]()
    with engine.measured() as passes:
        for _ in range(PASSES):
            if stopping():
                return None
            began = time.perf_counter()
            steps = session.step()
            whole.append(time.perf_counter() - began)
            if any(output.error is not None for _, output in steps):
                return None
    verify, commit = (median(passes[stage][1:]) for stage in (stages.GENERATION, stages.COMMIT))
    return StepCost(0.0, verify, commit, max(0.0, median(whole[1:]) - verify - commit))
