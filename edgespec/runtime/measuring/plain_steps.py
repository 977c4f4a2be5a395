"""Plain steps timed by the way: what a step without drafts takes at the end of answers that had
some.

Knows how long sequences became. What it draws is thrown away: no answer, no kept row and no metric
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from edgespec.runtime.engine import Engine
from edgespec.runtime.faults import FAULTS
from edgespec.runtime.lanes import stages
from edgespec.runtime.measuring.cost_steps import BaseSteps, StepPlace
from edgespec.runtime.measuring.speedup import StepCost
from edgespec.runtime.sampling.sampler import Sampler

PASSES = 5


def time_plain_steps(
    engine: Engine,
    place: StepPlace,
    sampler: Sampler,
    stopping: Callable[[], bool] = lambda: False,
) -> StepCost | None:
    """The median of a few plain steps of an idle engine at a place, or as near to it as there is
    room; of a recurrent base behind the few tokens that it reads anew. None where the engine is
    busy, has no room, or fails, and once `stopping` says so."""
    with engine.driver.paused():
        session, base = engine.session, engine.base
        most = base.prefill_chunk if base.recurrent else base.capacity - 2
        place = StepPlace(min(place.context, most), min(place.batch, engine.max_batch_size))
        if session.num_free_lanes < len(base.lanes) or min(place.context, place.batch) < 1:
            return None
        steps, whole = BaseSteps(engine, sampler), list[float]()
        try:
            steps.begin(place)
            with engine.measured() as passes:
                while len(whole) < PASSES:
                    if stopping():
                        return None
                    whole.append(steps.step(1))
        except FAULTS:
            return None
        finally:
            steps.end()
    verify, commit = (median(passes[stage]) for stage in (stages.GENERATION, stages.COMMIT))
    return StepCost(0.0, verify, commit, max(0.0, median(whole) - verify - commit))
