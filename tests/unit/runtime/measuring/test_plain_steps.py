"""Plain steps timed at the end of a run: they are few, and nobody else notices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgespec
from edgespec.prompts import NoJournal, RequestFile, SamplingParams, parse_requests
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes import stages
from edgespec.runtime.loop.generation import Chunk
from edgespec.runtime.measuring.cost_steps import StepPlace
from edgespec.runtime.measuring.plain_steps import PASSES, time_plain_steps
from edgespec.runtime.requests.file_runner import FileRun
from edgespec.runtime.requests.profile import summary
from edgespec.runtime.sampling.sampler import Sampler
from tests.lossless.pairs import make_mtp_pair, shared_pair

NO_EOS = {"0": -100, "2": -100}  # a logit_bias: toys end by chance otherwise
GREEDY = Sampler.of(SamplingParams(temperature=0))


@pytest.fixture
def engine() -> Iterator[Engine]:
    with edgespec.load(Path(shared_pair("llama", "eagle")) / "engines", spec_decode=True) as opened:
        yield opened


class Quiet:
    def add(self, chunk: Chunk) -> None: ...

    def finish(self, count: int) -> None: ...


def requests(length: int, **request: object) -> RequestFile:
    asked = [{"messages": [{"role": "user", "content": "a"}]} | r for r in ({}, request)]
    document = {"temperature": 0, "max_generate_length": length, "logit_bias": NO_EOS}
    return parse_requests(document | {"requests": asked}, "input.json")


def run(engine: Engine, asked: RequestFile) -> FileRun:
    done = FileRun(engine, asked, engine.plan(), NoJournal(), stopping=lambda: False, warn=print)
    done.run(Quiet(), warmup=0, check_lossless=False)
    assert done.fault is None
    return done


def test_run_with_drafts_alone_has_plain_steps_beside_them(engine: Engine) -> None:
    done = run(engine, requests(60))
    said = summary(done.stats())["speedup"]
    assert said["plain_steps_of"] == "end"
    assert 0 < said["plain_step_s"] < math.inf
    assert stages.GENERATION not in done.stats().passes  # they are no part of the run's times
    assert len(engine.session.log.passes[stages.GENERATION]) == PASSES


@pytest.mark.parametrize(
    ("length", "request_"), [(5, {}), (60, {"disable_spec_decode": True})], ids=["short", "plain"]
)
def test_run_that_needs_no_plain_steps_has_none(
    engine: Engine, length: int, request_: dict[str, object]
) -> None:
    assert run(engine, requests(length, **request_)).plain_step is None


@pytest.mark.parametrize("num_tokens", [3, 40, 10_000], ids=["short", "long", "beyond the cache"])
def test_next_answer_is_as_if_nothing_had_been_timed(engine: Engine, num_tokens: int) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3, max_generate_length=12)
    before = engine.generate([5, 6, 7], sampling, keep=True)
    assert time_plain_steps(engine, StepPlace(num_tokens, 1), GREEDY) is not None
    assert engine.session.num_free_lanes == len(engine.base.lanes)
    assert engine.generate([5, 6, 7], sampling).token_ids == before.token_ids
    more = [5, 6, 7, *before.token_ids, 9]
    assert engine.generate(more, sampling).token_ids == engine.plainly(more, sampling).token_ids


def test_a_run_that_is_to_stop_times_nothing(engine: Engine) -> None:
    assert time_plain_steps(engine, StepPlace(3, 1), GREEDY, stopping=lambda: True) is None
    assert engine.session.num_free_lanes == len(engine.base.lanes)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_pair(tmp_path_factory.mktemp("hybrids"), 3)


def test_recurrent_states_and_lanes_of_a_batch_are_left_as_they_were(hybrids: Path) -> None:
    """What is thrown away of a recurrent layer is a state, and not rows that nobody sees."""
    sampling = SamplingParams(temperature=0, max_generate_length=12)
    prompts = [[5, 6, 7], [8, 9], [3] * 20]
    with edgespec.load(hybrids / "engines-3", spec_decode=True) as engine:
        before = [r.token_ids for r in engine.generate_batch(prompts, sampling)]
        assert time_plain_steps(engine, StepPlace(20, 3), GREEDY) is not None
        assert engine.session.num_free_lanes == 3
        assert [r.token_ids for r in engine.generate_batch(prompts, sampling)] == before
