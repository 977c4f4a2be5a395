"""What steps cost, measured on toys: plausible figures, and an engine that goes on as if nothing
had happened."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import pytest

import edgespec
from edgespec.backends.base import Listeners
from edgespec.contract import Limits, Role
from edgespec.errors import BundleError, EnvironmentProblem, LimitError
from edgespec.export.components import ExportOptions
from edgespec.prompts import SamplingParams
from edgespec.runtime.costs import cost_profile
from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.costs.cost_profile import FILE, CostProfile, find_profile, read_profiles
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.sequence import SequenceState
from edgespec.runtime.measuring import cost_measure
from edgespec.runtime.measuring.cost_description import explained
from edgespec.runtime.measuring.cost_measure import (
    MIN_ROUNDS,
    after_build,
    doubt,
    kept_of,
    measure_costs,
    measure_engine,
    to_measure_again,
)
from edgespec.runtime.measuring.cost_steps import BaseSteps
from edgespec.runtime.sampling.sampler import Sampler
from tests import made, toys
from tests.lossless.pairs import LIMITS, make_mtp_pair, shared_pair

SAMPLING = SamplingParams(temperature=0.8, seed=3, max_generate_length=12)
PROMPTS = [[5, 6, 7], [8, 9], [3] * 20]


@pytest.fixture(autouse=True)
def two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of as many as there is time for."""
    monkeypatch.setattr(cost_measure, "MAX_ROUNDS", MIN_ROUNDS)


def eagle_pair(path: Path) -> Path:
    return Path(shutil.copytree(shared_pair("llama", "eagle") / "engines", path / "engines"))


def plain_engine(path: Path) -> Path:
    base = toys.make_base(path / "base", "llama", layers=2)
    onnx = made.exported(base, ExportOptions())
    return Path(shutil.copytree(made.built(LIMITS, onnx / "llm"), path / "engines"))


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_pair(tmp_path_factory.mktemp("hybrids"), 3)


def check_plausible(profile: CostProfile) -> None:
    """Times are positive, and more rows never cost less once they are looked up."""
    times = [*profile.base, *profile.propose, *profile.observe]
    assert all(time.seconds > 0 for time in (*profile.base, *profile.propose))
    assert all(0 <= time.seconds < 10 for time in times)
    costs = CostModel(profile).at(40, batch=2)
    for curve in (costs.passes, costs.propose, costs.observe):
        assert all(a <= b for a, b in pairwise(curve))


def answers(engine: Engine) -> list[list[int]]:
    return [r.token_ids for r in engine.generate_batch(PROMPTS, SAMPLING)]


def test_a_pair_is_measured_and_answers_as_before(tmp_path: Path) -> None:
    with edgespec.load(eagle_pair(tmp_path), spec_decode=True) as engine:
        before = answers(engine)
        kept = engine.generate([5, 6, 7], SAMPLING, keep=True)
        profile = measure_engine(engine)
        assert engine.session.num_free_lanes == len(engine.base.lanes)
        assert not engine.session.log.recording
        assert answers(engine) == before
        more = [5, 6, 7, *kept.token_ids, 9]
        assert engine.generate(more, SAMPLING).token_ids == engine.plainly(more, SAMPLING).token_ids
    check_plausible(profile)
    assert (profile.role, profile.method) == (Role.BASE, "eagle3")
    assert set(profile.engines) == {"base", "draft"}
    # The middle of a cache of 64 tokens, and as many rows as are left behind it
    assert {(t.context, t.batch) for t in profile.base} == {(32, 1)}
    assert [t.rows for t in profile.base] == [1, 2, 4, 8, 16, 30]
    chains = [t.levels for t in profile.propose if t.top_k == 1]
    assert chains == [t.rows for t in profile.observe] == [1, 2, 4, 8]
    assert {t.top_k for t in profile.propose} == {1, 4, 10}


def test_sequences_of_a_batch_and_recurrent_states_are_left_as_they_were(hybrids: Path) -> None:
    with edgespec.load(hybrids / "engines-3", spec_decode=True) as engine:
        before = answers(engine)
        profile = measure_engine(engine)
        assert answers(engine) == before
    check_plausible(profile)
    assert profile.method == "mtp"
    assert {t.batch for t in profile.base} == {t.batch for t in profile.propose} == {1, 2}
    assert {t.top_k for t in profile.propose} == {1}  # a head makes no trees


def test_a_plain_engine_has_costs_of_passes_alone(tmp_path: Path) -> None:
    engines = plain_engine(tmp_path)
    profile = measure_costs(engines)
    check_plausible(profile)
    assert (profile.role, profile.method, profile.propose, profile.observe) == (
        Role.LLM,
        None,
        (),
        (),
    )
    # A method without an engine has no costs of its own
    assert find_profile(engines, Role.LLM, "suffix", has_engine=False).profile == profile
    with edgespec.load(engines, spec_decode=True) as engine:
        assert engine.method == "suffix"
        assert measure_engine(engine).method is None


def test_more_contexts_are_measured_where_there_is_room(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", "llama", layers=2)
    onnx = made.exported(base, ExportOptions())
    limits = replace(LIMITS, max_kv_cache_capacity=2300, max_batch_size=2)
    engines = shutil.copytree(made.built(limits, onnx / "llm"), tmp_path / "engines")
    profile = measure_costs(engines)
    assert {(t.context, t.batch) for t in profile.base} == {
        (128, 1),
        (128, 2),
        (2048, 1),
        (2048, 2),
    }


def test_a_pair_is_kept_and_a_new_measurement_takes_its_place(tmp_path: Path) -> None:
    engines, passes = eagle_pair(tmp_path), list[int]()
    progress = Listeners(start=passes.append, advance=passes.append)
    measure_costs(engines, progress=progress)
    again = measure_costs(engines)
    assert list(read_profiles(engines)) == [again]
    assert find_profile(engines, Role.BASE, "eagle3", has_engine=True).profile == again
    assert passes[0] == sum(passes[1:]) > 0


def test_a_slow_engine_is_measured_in_few_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the time that there is only what was begun goes on, and each point is measured
    twice."""
    ticks = count()
    counted: dict[int, int] = {}
    step = BaseSteps.step

    def counting(self: BaseSteps, rows: int) -> float:
        counted[rows] = counted.get(rows, 0) + 1
        return step(self, rows) + 1.0  # long, so that it is not repeated within a round

    monkeypatch.setattr(BaseSteps, "step", counting)
    monkeypatch.setattr(cost_measure, "MAX_ROUNDS", 4)
    with edgespec.load(eagle_pair(tmp_path), spec_decode=False) as engine:
        measure_engine(engine, budget_s=0.5, clock=lambda: float(next(ticks)))
        assert counted[2] == MIN_ROUNDS
        counted.clear()
        measure_engine(engine, budget_s=1e6, clock=lambda: float(next(ticks)))
        assert (counted[2], counted[30]) == (4, MIN_ROUNDS)


def test_an_engine_that_answers_is_not_measured(tmp_path: Path) -> None:
    with edgespec.load(eagle_pair(tmp_path), spec_decode=True) as engine:
        engine.session.running.append(SequenceState([5, 6, 7], Sampler(), 3))
        with pytest.raises(LimitError, match="answers requests"):
            measure_engine(engine)
        assert len(engine.session.running) == 1
        engine.session.restart()


def test_a_step_that_breaks_leaves_the_lanes_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with edgespec.load(eagle_pair(tmp_path), spec_decode=True) as engine:
        before = answers(engine)
        run, calls = engine.base.runner.run, count()

        def breaking(call: object) -> object:
            if next(calls) == 5:
                raise EnvironmentProblem("no memory", "Close other programs.")
            return run(call)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(engine.base.runner, "run", breaking)
            with pytest.raises(EnvironmentProblem, match="no memory"):
                measure_engine(engine)
        assert answers(engine) == before


# ---- after a build


def test_what_was_measured_is_said(tmp_path: Path) -> None:
    engines = eagle_pair(tmp_path)
    line = after_build(engines, measure=True)
    assert line is not None
    assert line.startswith("costs, behind 32 tokens: a plain step ")
    assert "8 drafts" in line
    assert after_build(engines, measure=False) is None
    assert (engines / FILE).is_file()  # the engines are the same


def test_a_failure_is_said_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("by chance")

    monkeypatch.setattr(cost_measure, "measure_costs", fail)
    line = after_build(tmp_path, measure=True)
    assert line == "costs not measured: ZeroDivisionError: by chance"


def test_engines_of_another_device_are_measured_there(tmp_path: Path) -> None:
    line = after_build(tmp_path, measure=True, unproven="it is for sm_110")
    assert line is not None
    assert "it is for sm_110" in line
    assert "edgespec bench ENGINES --measure-costs" in line


# ---- on a busy machine


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads wait two seconds for a core in each measurement."""
    waited = count(0.0, 2.0)
    monkeypatch.setattr(cost_measure, "waited_s", lambda: next(waited))


def made_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measure, "waited_s", lambda: 0.0)
    monkeypatch.setattr(cost_profile, "FALLS", 0.0)


@pytest.mark.usefixtures("busy")
def test_costs_of_a_busy_machine_are_kept_as_such_and_said(tmp_path: Path) -> None:
    engines = eagle_pair(tmp_path)
    said = after_build(engines, measure=True)
    (profile,) = read_profiles(engines)
    assert profile.busy is not None
    assert f"; {profile.busy}. The next infer, chat or run with drafts measures" in str(said)
    assert next(explained(profile)).startswith("Costs were measured on a busy machine: threads ")
    with edgespec.load(engines, spec_decode=True) as engine:
        assert [note for note in engine.notes if profile.busy in note]
        assert doubt(engine) == profile.busy
    assert "busy" not in str(after_build(engines, measure=True, opens=True))  # opening says it


@pytest.mark.usefixtures("busy")
def test_they_are_measured_once_more_and_a_quiet_machine_s_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = eagle_pair(tmp_path)
    first = measure_costs(engines)
    assert to_measure_again(engines) is None  # it was but a moment ago
    monkeypatch.setattr(cost_measure, "LATER_S", 0.0)
    assert to_measure_again(engines) == first.busy
    worse = replace(first, waited=first.waited + 1e6)
    assert kept_of(engines, worse) == replace(first, attempts=2)
    made_idle(monkeypatch)
    quiet = measure_costs(engines, again=True)
    assert (quiet.busy, quiet.attempts) == (None, 2)
    assert list(read_profiles(engines)) == [quiet]
    assert to_measure_again(engines) is None


def test_costs_are_doubted_where_a_plain_step_takes_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_idle(monkeypatch)
    engines = eagle_pair(tmp_path)
    profile = measure_costs(engines)
    with edgespec.load(engines, spec_decode=True) as engine:
        before = answers(engine)
        for factor in (0.1, 10.0):
            base = tuple(replace(t, seconds=factor * t.seconds) for t in profile.base)
            engine.costs = CostModel(replace(profile, base=base))
            assert "a plain step takes " in str(doubt(engine))
        monkeypatch.setattr(cost_measure, "DIFFERS", 100.0)
        assert doubt(engine) is None
        engine.costs, engine.why_no_costs = None, "there are none"
        assert doubt(engine) == "there are none"
        assert answers(engine) == before


def test_a_draft_alone_has_no_steps(tmp_path: Path) -> None:
    pair = shared_pair("llama", "eagle")
    engines = shutil.copytree(made.built(LIMITS, pair / "onnx_draft" / "llm"), tmp_path / "engines")
    with pytest.raises(BundleError, match="has no base engine"):
        measure_costs(engines)


def test_profiles_of_engines_that_were_replaced_go(tmp_path: Path) -> None:
    engines, pair = eagle_pair(tmp_path), shared_pair("llama", "eagle")
    measure_costs(engines)
    other = replace(LIMITS, max_draft_tree_size=30)
    rebuilt(pair / "onnx_draft" / "llm", engines, other)
    found = find_profile(engines, Role.BASE, "eagle3", has_engine=True)
    assert (found.profile, found.why) == (
        None,
        "the engines were built again after their costs were measured",
    )
    assert after_build(engines, measure=False) is None
    assert not (engines / FILE).exists()


def rebuilt(onnx: Path, engines: Path, limits: Limits) -> None:
    from edgespec.backends.build import build

    build(onnx, engines, limits)
