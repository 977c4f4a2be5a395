"""Measures what steps cost here: rounds over all points, so that a slow minute of the machine hits
all of them alike, and of each the median.

Knows which points, how often, and for how long. How one step is timed is known in `cost_steps`,
what is made of the figures in `cost_model`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from edgespec.backends import engine_dir as engines
from edgespec.backends.base import SILENT, Listeners
from edgespec.backends.machine import available_bytes, waited_s
from edgespec.backends.pair_check import target_of
from edgespec.backends.registry import backend_of
from edgespec.contract import Role
from edgespec.errors import BundleError, EnvironmentProblem, LimitError, command
from edgespec.runtime.costs.cost_profile import (
    FILE,
    ONCE_MORE,
    CostProfile,
    ObserveTime,
    PassTime,
    ProposeTime,
    current,
    device_of,
    drop_stale,
    hashes_of,
    roles_of,
    write_profile,
)
from edgespec.runtime.drafters.block_drafter import BlockLimits
from edgespec.runtime.drafters.engine_drafter import EngineDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.faults import as_error
from edgespec.runtime.measuring.cost_description import built_line
from edgespec.runtime.measuring.cost_steps import BaseSteps, DraftSteps, StepPlace, room_of
from edgespec.runtime.measuring.speedup import ms
from edgespec.runtime.opening.tuned_plan import drop_stale_plan
from edgespec.runtime.trees.tree import DraftPlan

logger = logging.getLogger(__name__)
NOT_MEASURED = "costs not measured"
MEASURE_THERE = command("bench", "ENGINES", measure_costs=True)
BUDGET_S = 10.0
ROWS = (1, 2, 4, 8, 16, 32, 60)
CONTEXTS = (128, 2048, 8192)
BATCHES = (1, 2, 4, 8)
LEVELS = (1, 2, 4, 8)
TOP_KS = (1, 4, 10)
BATCH_ROWS = 64  # of all sequences of a batch together; what is beyond follows from these
BATCH_CONTEXT = 2048  # up to which batches are measured
FAR_ROWS = 16  # behind more tokens than these
BATCH_LEVELS = (1, 4)  # of trees, in batches
MIN_ROUNDS, MAX_ROUNDS = 2, 9
MAIN_SHARE = 2  # of the time that there is, within which main places are begun
OFTEN = 8  # rows up to which a step is measured in all rounds; a longer one is less noisy
WARM_BELOW_S = 0.005  # a step this short is run twice: another size binds buffers anew
LONG_S = 0.2  # a plain step this long is timed once a round
REPEAT_S, MAX_REPEATS = 0.002, 4  # a shorter one is timed several times
FREE_SHARE = 0.5  # of the memory that is free, which caches may take
LATER_S = 60.0  # a machine that is busy still is so a moment later
LOOKS = 5  # plain steps by which kept costs are doubted
DIFFERS = 1.25  # times as long, or as short, as kept costs say: they are of another machine's state


@dataclass(frozen=True, slots=True)
class Levels:
    """A draft of so many levels of `top_k` nodes, by a plan."""

    count: int
    top_k: int
    plan: DraftPlan


@dataclass
class Points:
    """What is to be measured, by place in the order of their importance, and what was: of the base
    steps over so many rows of each sequence, of its drafter levels."""

    rows: dict[StepPlace, list[int]] = field(default_factory=dict)
    levels: dict[StepPlace, list[Levels]] = field(default_factory=dict)
    base: dict[tuple[StepPlace, int], list[float]] = field(default_factory=dict)
    propose: dict[tuple[StepPlace, Levels], list[float]] = field(default_factory=dict)
    observe: dict[tuple[StepPlace, Levels], list[float]] = field(default_factory=dict)

    @property
    def places(self) -> list[StepPlace]:
        """The places, the main ones first, and of each kind those with the fewest tokens."""
        return sorted(self.rows, key=lambda p: (not self.is_main(p), p.batch * p.context, p.batch))

    def is_main(self, place: StepPlace) -> bool:
        """Whether others follow from a place, more or less: of the shorter contexts that of one
        sequence, and of as many as there are."""
        if place.context > BATCH_CONTEXT:
            return False
        return place.batch in (1, max(place.batch for place in self.rows))

    def drop(self, place: StepPlace) -> None:
        """Leave a place out."""
        self.rows.pop(place, None)
        self.levels.pop(place, None)

    def __len__(self) -> int:
        return sum(map(len, self.rows.values())) + sum(map(len, self.levels.values()))


def measure_costs(
    engine_dir: Path,
    *,
    budget_s: float = BUDGET_S,
    progress: Listeners = SILENT,
    again: bool = False,
) -> CostProfile:
    """Open the engines of a directory, measure what their steps cost, for about `budget_s` at most,
    and keep it beside them; returns the profile of the pair, or where there is no draft that of the
    base. A plain engine beside a pair gets a profile of its own. `again`: kept costs were doubted;
    those of a busier machine do not take their place.

    Raises BundleError where there is no base, and what opening, measuring and writing raise.
    """
    there = engines.finished_engines(engine_dir).engines
    draft = engines.read_config(engine_dir, Role.DRAFT).component if Role.DRAFT in there else None
    pair = draft is not None and target_of(set(there), draft) is not None
    if not {Role.BASE, Role.LLM} & set(there):
        message = f"{engine_dir} has no base engine, and a draft alone has no steps"
        raise BundleError(message, "Build the base first.")
    with Engine(engine_dir, spec_decode=pair, prefix_cache_bytes=0, tuned=False) as engine:
        profile = measure_engine(engine, budget_s=budget_s, progress=progress)
    profile = kept_of(engine_dir, profile) if again else profile
    write_profile(engine_dir, profile)
    if pair and Role.LLM in there and profile.role is not Role.LLM:
        with Engine(engine_dir, spec_decode=False, prefix_cache_bytes=0, tuned=False) as engine:
            plain = measure_engine(engine, budget_s=budget_s, progress=progress)
        write_profile(engine_dir, kept_of(engine_dir, plain) if again else plain)
    return profile


def kept_of(engine_dir: Path, profile: CostProfile) -> CostProfile:
    """Of two measurements of the same the one whose machine was less busy, as not to be measured
    once more."""
    for old in current(engine_dir):
        same = (old.role, old.method, dict(old.device)) == (
            profile.role,
            profile.method,
            dict(profile.device),
        )
        if same and profile.busy and old.waited < profile.waited:
            profile = old
    return replace(profile, attempts=ONCE_MORE)


def to_measure_again(engine_dir: Path) -> str | None:
    """Why the costs of a directory are to be measured once more here; None where they are not, or
    were a moment ago. Raises BundleError."""
    path = engine_dir / FILE
    if not path.exists() or time.time() - path.stat().st_mtime < LATER_S:
        return None
    for profile in current(engine_dir):
        here = dict(profile.device) == device_of(engine_dir, profile.role)
        if here and profile.busy and profile.attempts < ONCE_MORE:
            return profile.busy
    return None


def doubt(engine: Engine) -> str | None:
    """Why the kept costs of an open and idle engine are to be measured: there are none, they were
    measured on a busy machine, or a plain step takes another time now. None where they are as
    good as any."""
    if engine.costs is None:
        return engine.why_no_costs
    profile = engine.costs.profile
    if profile.busy and profile.attempts < ONCE_MORE:
        return profile.busy
    plain = min(profile.base, key=lambda time: (time.rows, time.batch, time.context))
    steps = BaseSteps(engine)
    with engine.driver.paused():
        try:
            steps.begin(StepPlace(plain.context, plain.batch), fill=True)
            now = median(repeated(partial(steps.step, plain.rows)) for _ in range(LOOKS))
        finally:
            steps.end()
    if 1 / DIFFERS < now / plain.seconds < DIFFERS:
        return None
    return f"a plain step takes {ms(now)}, and took {ms(plain.seconds)} when costs were measured"


def measure_engine(
    engine: Engine,
    *,
    budget_s: float = BUDGET_S,
    progress: Listeners = SILENT,
    clock: Callable[[], float] = time.monotonic,
) -> CostProfile:
    """What the steps of an open engine cost, and its draft engine's, while it answers nobody.

    No answer and no metric changes. Of recurrent layers contexts are read, so that only the
    shortest is measured. Raises LimitError where requests are under way, and what a step raises.
    """
    with engine.driver.paused():
        if engine.session.num_free_lanes < len(engine.base.lanes):
            raise LimitError("the engine answers requests", "Measure once they have ended.")
        measuring = Measuring(engine, budget_s, progress, clock)
        try:
            measuring.run()
        finally:
            measuring.end()
    return measuring.profile()


def after_build(
    engine_dir: Path,
    *,
    measure: bool,
    unproven: str | None = None,
    opens: bool = False,
    progress: Listeners = SILENT,
) -> str | None:
    """Measure the engines of a directory one of which is new, and what is said of it; None where
    nothing is to be. Profiles of engines that are no more go. It raises nothing: what fails is
    said. `unproven`: why the engines cannot run here; `opens`: whether they open next."""
    try:
        drop_stale(engine_dir)
        drop_stale_plan(engine_dir)
        if not measure:
            return None
        if unproven is not None:
            return f"{NOT_MEASURED}: {unproven}. There: {MEASURE_THERE}"
        began = time.monotonic()
        profile = measure_costs(engine_dir, progress=progress)
        return built_line(profile, time.monotonic() - began, opens=opens)
    except Exception as raised:  # of whatever kind: the engines are as good as before
        error = as_error(raised)
        logger.warning("costs were not measured", exc_info=raised)
        return f"{NOT_MEASURED}: {error.what}"


class Measuring:
    """One measurement of an idle engine."""

    def __init__(
        self, engine: Engine, budget_s: float, progress: Listeners, clock: Callable[[], float]
    ) -> None:
        self.engine, self.budget_s, self.progress, self.clock = engine, budget_s, progress, clock
        self.base = BaseSteps(engine)
        self.draft: DraftSteps | None = None
        self.points = Points(rows=dict(self.base_points()))
        self.filled: set[StepPlace] = set()
        self.left = 0  # points, of all rounds
        self.waited = 0.0  # of the time, without a core

    # ---- which points

    def base_points(self) -> Iterator[tuple[StepPlace, list[int]]]:
        """The sizes of trees by place, as far as the engine verifies them and has room."""
        for context in self.contexts():
            for batch in BATCHES:
                if batch > self.engine.max_batch_size or not self.has_memory(context * batch):
                    continue
                if batch > 1 and context > BATCH_CONTEXT:
                    continue
                most = max(1, self.base.room(context))
                sizes = sorted({min(size, most) for size in ROWS})
                far = context > BATCH_CONTEXT
                most = FAR_ROWS if far else most if batch == 1 else BATCH_ROWS // batch
                yield StepPlace(context, batch), [size for size in sizes if size <= most]

    def contexts(self) -> list[int]:
        """CONTEXTS as far as there is room for them, or the middle of a smaller cache."""
        behind = min(self.base.most, max(ROWS)) + 2
        capacity = self.engine.base.capacity
        fitting = [context for context in CONTEXTS if context + behind <= capacity]
        fitting = fitting or [max(1, capacity // 2)]
        return fitting[:1] if self.engine.base.recurrent else fitting

    def has_memory(self, tokens: int) -> bool:
        """Whether caches of so many tokens take no more than is good for the machine."""
        free, engine = available_bytes(), self.engine
        if free is None or tokens <= CONTEXTS[0]:
            return True
        directory, configs = engine.drafting.engine_dir, engine.configs.values()
        size = sum(
            backend_of(directory, config.role).memory(config).kv_bytes_per_token
            for config in configs
        )
        return tokens * size <= FREE_SHARE * free

    def draft_points(self, place: StepPlace, at_first: bool) -> Iterator[Levels]:
        """The plans of the engine's drafter at a place: levels of chains, and of trees where it
        makes some."""
        drafter, capacity = self.engine.drafter, None
        if isinstance(drafter, EngineDrafter):
            capacity = drafter.capacity
        for top_k in TOP_KS:
            for levels in LEVELS if at_first or top_k == 1 else BATCH_LEVELS:
                plan = self.plan(top_k, levels)
                if plan is None or (top_k > 1 and levels > plan.steps):
                    continue
                if capacity is None or place.context + room_of(plan) <= capacity:
                    yield Levels(plan.steps, top_k, plan)

    def plan(self, top_k: int, levels: int) -> DraftPlan | None:
        """A plan of so many levels, or of as many as the draft makes; None where it makes none."""
        engine = self.engine
        limits = engine.planner.limits()
        most = engine.config.limits.verify_tree_size
        levels = min(levels, limits.max_levels or levels, most - 1)
        steps = None if isinstance(limits, BlockLimits) else levels
        size = levels + 1 if top_k == 1 else None
        try:
            plan = limits.plan(top_k, steps, size, engine.planner.hints)
        except LimitError:
            return None
        return plan.within(levels=levels, nodes=most)

    # ---- rounds

    def run(self) -> None:
        """Rounds over all points until the time is over; in the first one places are left out for
        which there would be none."""
        wall, waited = time.perf_counter(), waited_s()
        self.rounds()
        self.waited = (waited_s() - waited) / (time.perf_counter() - wall)

    def rounds(self) -> None:
        """All that is timed."""
        began, first = self.clock(), self.points.places[0]
        self.open_draft(first)
        self.left = MAX_ROUNDS * len(self.points)
        self.progress.start(self.left)
        for place in self.points.places:
            share = MAIN_SHARE if self.points.is_main(place) else 1 / MIN_ROUNDS
            if place != first and self.clock() - began > self.budget_s * share:
                self.points.drop(place)
                continue
            try:
                self.measure(place)
            except EnvironmentProblem:
                if place == first:
                    raise
                self.points.drop(place)  # there was no memory for it
        for done in range(1, MAX_ROUNDS):
            spent = self.clock() - began
            if done >= MIN_ROUNDS and spent * (done + 1) / done > self.budget_s:
                break
            for place in self.points.places:
                self.measure(place, max(ROWS) if done < MIN_ROUNDS else OFTEN)
        self.advance(self.left)

    def advance(self, points: int) -> None:
        """So many points are done, or left out."""
        self.left -= points
        self.progress.advance(points)

    def open_draft(self, first: StepPlace) -> None:
        """Find out what is to be measured of the draft engine; nothing where there is none."""
        engine = self.engine
        if engine.drafter is None or engine.draft_config is None:
            return
        states = None
        if engine.drafter.needs_hidden_states:
            self.base.begin(first)
            states = self.base.hidden_states()
        self.draft = DraftSteps(engine.drafter, states, self.base, engine.max_batch_size)
        for place in self.points.places:
            points = dict.fromkeys(self.draft_points(place, at_first=place == first))
            if points:
                self.points.levels[place] = [*points]

    def measure(self, place: StepPlace, most: int = max(ROWS)) -> None:
        """All points of a place, once more; of the base those of up to `most` rows, each behind a
        plain step, to which all others are compared."""
        fill = place not in self.filled
        self.filled.add(place)
        self.base.begin(place, fill=fill)
        for rows in self.points.rows[place]:
            plain = self.points.base.setdefault((place, 1), [])
            again = 1 < rows <= OFTEN and plain[-1] < LONG_S
            for size in (1, rows) if again else (rows,):
                if rows <= most:
                    known = self.points.base.setdefault((place, size), [])
                    known.append(repeated(partial(self.base.step, size)))
            self.advance(1)
        wanted = self.points.levels.get(place, [])
        if self.draft is None or not wanted:
            return
        self.draft.begin(place, max((levels.plan for levels in wanted), key=room_of), fill=fill)
        usual = self.draft.seconds(wanted[0].plan)
        for levels in wanted:
            proposed = self.points.propose.setdefault((place, levels), [])
            if levels.top_k > 1:
                proposed.append(repeated(partial(self.draft.seconds, levels.plan)))
            else:
                propose, observe = self.draft.time(levels.plan, wanted[0].plan, usual)
                proposed.append(propose)
                self.points.observe.setdefault((place, levels), []).append(observe)
            self.advance(1)

    def end(self) -> None:
        """Leave the engine as it was."""
        self.base.end()
        if self.draft is not None:
            self.draft.end()

    # ---- what was found

    def profile(self) -> CostProfile:
        """The medians, bound to the engines and the device."""
        engine = self.engine
        directory, role = engine.drafting.engine_dir, engine.config.role
        method = engine.method if self.draft is not None else None
        return CostProfile(
            role=role,
            base=tuple(
                PassTime(rows=rows, **at(place, seconds))
                for (place, rows), seconds in self.points.base.items()
            ),
            method=method,
            propose=tuple(
                ProposeTime(levels=levels.count, top_k=levels.top_k, **at(place, seconds))
                for (place, levels), seconds in self.points.propose.items()
            ),
            observe=tuple(
                ObserveTime(rows=levels.count, **at(place, seconds))
                for (place, levels), seconds in self.points.observe.items()
            ),
            engines=hashes_of(directory, roles_of(role, with_draft=method is not None)),
            device=device_of(directory, role),
            waited=round(max(0.0, self.waited), 3),
        )


def at(place: StepPlace, seconds: Sequence[float]) -> dict[str, Any]:
    """Where a point is, and the median of its seconds, as it is kept: in nanoseconds. What a draft
    observes may cost nothing."""
    kept = round(max(0.0, median(seconds)), 9)
    return {"context": place.context, "batch": place.batch, "seconds": kept}


def repeated(step: Callable[[], float]) -> float:
    """What a step takes: a long one as it is, a short one once what changes with its size is
    bound, the median of several."""
    first = step()
    if first >= WARM_BELOW_S:
        return first
    count = min(MAX_REPEATS, 1 + int(REPEAT_S / max(first, 1e-9)))
    return median(step() for _ in range(count))
