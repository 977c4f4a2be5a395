"""Adaptive drafting on real engines: whatever a step drafts, the tokens are plain decoding's.

The costs are made by hand: of drafts that cost nothing, which are made in each step, and of drafts
that cost much, which end soon and are tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import edgespec
from edgespec.backends.build import build
from edgespec.backends.host import HostStates
from edgespec.backends.manifest import EngineManifest
from edgespec.errors import LimitError
from edgespec.export.components import ExportOptions, export
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.tree_drafter import TreeDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests import shared, toys
from tests.costs import with_costs
from tests.lossless import draft_models
from tests.lossless.answers import (
    VOCAB,
    assert_as_alone,
    assert_same,
    plainly,
    prompt_of,
    served,
)
from tests.lossless.engines import LANES, api_engines
from tests.lossless.pairs import LIMITS
from tests.lossless.test_drafts import engines_of

GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLED = SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=3)
PRICES = {"free": (0.0, 1e-9), "dear": (0.1, 0.2)}
STATIC = StaticPlan.of([[0], [1], [2], [1, 0], [2, 1], [2, 1, 0]])
SIZES = {"chain": (1, 4, None), "tree": (3, 3, 12)}


def dflash_engines(path: Path) -> None:
    base = toys.make_base(path / "base", "qwen3", layers=8, vocab=VOCAB)
    draft = toys.make_dflash(path / "draft", base, block_size=8)
    export(str(base), path, ExportOptions(base_for="dflash", draft_dir=str(draft)))
    export(str(draft), path, ExportOptions(base_model_dir=str(base)))
    for name, lanes in (("one", 1), ("four", LANES)):
        for part in ("llm", "dflash_draft"):
            build(path / part, path / name, replace(LIMITS, max_batch_size=lanes))


def model_engines(name: str) -> Path:
    models = draft_models.models("llama")
    lanes = {"one": 1, "four": LANES}[name]
    limits = replace(draft_models.LIMITS, max_batch_size=lanes)
    return draft_models.engines(models / "base", models / "draft", limits)


PAIRS: dict[str, Callable[[str], Path]] = {
    "eagle3": lambda name: api_engines() / name,
    "eagle1": lambda name: engines_of("eagle1") / name,
    "mtp": lambda name: engines_of("mtp") / name,
    "dflash": lambda name: shared.made_once("adaptive dflash", dflash_engines) / name,
    "draft_model": model_engines,
    "medusa": lambda name: engines_of("medusa") / name,
}
SHAPES = {
    "eagle3": ("chain", "tree"),
    "eagle1": ("chain", "tree", "static"),
    "medusa": ("chain", "tree"),
    "mtp": ("chain",),
    "dflash": ("chain", "tree"),
    "draft_model": ("chain", "tree"),
}
SHAPES_OF_BLOCKS = {"chain": (1, None, 8), "tree": (3, None, 20)}
# Chains and trees: eagle3, dflash and mtp have both prices, and eagle1 a static tree at one
DEEP = [(name, "dear") for name in ("eagle1", "draft_model", "medusa")]
DEEP += [(name, "free") for name in ("draft_model", "medusa")]


def cases(*without: str) -> list[Any]:
    """Each pair at each price, but those of the names."""
    return [
        pytest.param((name, price), marks=pytest.mark.deep if (name, price) in DEEP else ())
        for name in PAIRS
        for price in PRICES
        if name not in without
    ]


@dataclass(frozen=True)
class Pair:
    name: str
    price: str
    one: Engine
    four: Engine

    def plans(self) -> dict[str, DraftPlan]:
        sizes = SHAPES_OF_BLOCKS if self.name == "dflash" else SIZES
        own = [shape for shape in SHAPES[self.name] if shape in sizes]
        found = {shape: self.one.plan(*sizes[shape]) for shape in own}
        if "static" in SHAPES[self.name]:
            found["static"] = replace(STATIC, adaptive=True)
        return found


@pytest.fixture(scope="module", params=cases(), ids=lambda case: "-".join(case))
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    name, price = request.param
    path = tmp_path_factory.mktemp("adaptive")
    with ExitStack() as stack:
        engines = []
        for lanes in ("one", "four"):
            source = PAIRS[name](lanes)
            target = with_costs(source, path / lanes, method_of(source), *PRICES[price])
            engine = edgespec.load(target, spec_policy="adaptive")
            engines.append(stack.enter_context(engine))
            engine.stop_ids = frozenset()
        yield Pair(name, price, *engines)


def method_of(engine_dir: Path) -> str:
    with edgespec.load(engine_dir) as engine:
        assert engine.method is not None
        return engine.method


@pytest.fixture
def pair(opened: Pair) -> Iterator[Pair]:
    for engine in (opened.one, opened.four):
        engine.forget_prefixes()
    yield opened
    for engine in (opened.one, opened.four):
        engine.session.drafter = engine.drafter


def test_adaptive_drafts_leave_every_token_as_it_was(pair: Pair) -> None:
    drafted, paused = 0, 0
    for shape, plan in pair.plans().items():
        assert plan.adaptive, shape
        for sampling, length in ((GREEDY, 1), (SAMPLED, 30)):
            asked = replace(sampling, max_generate_length=30)
            plain = plainly(pair.one, prompt_of(length), asked)
            found = pair.one.generate(prompt_of(length), asked, plan)
            assert_same(pair.one, plain, found, asked)
            assert found.metrics.spec_policy == "adaptive"
            drafted += sum(map(bool, found.metrics.per_step_drafted))
            paused += found.metrics.steps_paused
    assert drafted > 0
    assert (paused > 0) == (pair.price == "dear")


def test_batches_of_three_with_early_ends_leave_every_token_as_it_was(pair: Pair) -> None:
    plans = [*pair.plans().values(), None]
    shapes = [(1, 9), (30, 30), (12, 24), (5, 1), (22, 5), (3, 28), (17, 27)]
    jobs = [
        GenerationRequest(
            prompt_of(n),
            replace((GREEDY, SAMPLED)[i % 2], max_generate_length=new),
            plans[i % len(plans)],
        )
        for i, (n, new) in enumerate(shapes)
    ]
    assert_as_alone(pair.one, jobs, served(pair.four, jobs, 3))


def test_behind_a_conversation_that_was_kept_whole_nothing_changes(pair: Pair) -> None:
    plan, asked = pair.plans()["chain"], replace(GREEDY, max_generate_length=14)
    first = pair.one.generate(prompt_of(9), asked, plan, keep=True)
    prompt = [*prompt_of(9), *first.token_ids, 5, 6, 7]
    found = pair.one.generate(prompt, asked, plan)
    assert found.metrics.reused_tokens > 9
    assert_same(pair.one, plainly(pair.one, prompt, asked), found, asked)


def test_the_same_request_again_gives_the_same_figures(pair: Pair) -> None:
    plan, asked = pair.plans()["chain"], replace(SAMPLED, max_generate_length=30)
    first, again = (pair.one.generate(prompt_of(9), asked, plan) for _ in range(2))
    assert again.token_ids == first.token_ids
    for figure in ("per_step_drafted", "per_step_accepted", "steps_paused"):
        assert getattr(again.metrics, figure) == getattr(first.metrics, figure)


@pytest.mark.parametrize("opened", cases("medusa"), indirect=True, ids="-".join)
def test_rejection_never_leaves_out_what_it_drew(pair: Pair) -> None:
    """A drawn draft that were left out for its own token would be drawn otherwise than its
    distribution says: all that is drawn is verified, however improbable it is. Medusa heads draft
    a tree of their own."""
    assert pair.one.drafter is not None
    plan = pair.plans()["chain"]
    asked = replace(SAMPLED, temperature=1.0, max_generate_length=30)
    seen: list[tuple[DraftRequest, DraftTree]] = []
    real = type(pair.one.drafter).propose

    def propose(drafter: object, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = real(drafter, requests)  # type: ignore[arg-type]
        seen.extend(zip(requests, trees, strict=True))
        return trees

    with mock.patch.object(type(pair.one.drafter), "propose", propose):
        pair.one.generate(prompt_of(9), asked, plan, acceptance="rejection")
    assert any(request.budget is not None for request, _ in seen)
    for request, tree in seen:
        assert request.sampler is not None
        assert len(tree) - 1 == tree.drafted_levels >= 1


# What waits for a drafter, on an engine


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    target = tmp_path_factory.mktemp("waiting") / "one"
    with_costs(PAIRS["eagle3"]("one"), target, "eagle3", 1.0, 1.0)
    with edgespec.load(target) as engine:
        engine.stop_ids = frozenset()
        yield engine


def test_measured_costs_make_plans_without_sizes_adaptive(waiting: Engine) -> None:
    assert waiting.plan() == DraftPlan(1, 8, 9, adaptive=True)
    assert waiting.plan(steps=3) == DraftPlan(1, 3, 4)


def test_nan_in_what_waits_ends_the_drafts_and_changes_no_token(waiting: Engine) -> None:
    drafter, asked = waiting.drafter, replace(GREEDY, max_generate_length=40)
    assert isinstance(drafter, TreeDrafter)
    plain, real = waiting.plainly(prompt_of(9), asked), drafter.observe
    spoilt, full = list[int](), list[bool]()

    def observe(observations: Sequence[Observation]) -> None:
        for item in observations:
            assert item.hidden_states is not None
            if not spoilt and 4 < len(item.tokens) < 9:
                states = item.hidden_states.numpy().copy()
                states[2] = np.nan
                spoilt.append(len(item.tokens))
                item = replace(item, hidden_states=HostStates(states))
            real([item])
            full.append(drafter.lanes[item.lane].full)

    with mock.patch.object(drafter, "observe", observe):
        found = waiting.generate(prompt_of(9), asked)
        assert (len(spoilt), full[0], full[-1]) == (1, False, True)
        again = waiting.generate(prompt_of(9), asked)
    assert (len(spoilt), full[-1]) == (1, False)
    assert found.token_ids == again.token_ids == plain.token_ids


def test_a_draft_whose_cache_is_smaller_stops_drafting_there(tmp_path: Path) -> None:
    models = draft_models.models("llama")
    small = replace(draft_models.LIMITS, max_kv_cache_capacity=24, max_input_len=16)
    source = draft_models.engines(models / "base", models / "draft", draft_limits=small)
    with_costs(source, tmp_path / "engines", method_of(source), 0.0, 0.0)
    asked = replace(GREEDY, max_generate_length=36)
    with edgespec.load(tmp_path / "engines") as engine:
        engine.stop_ids = frozenset()
        plain = engine.plainly(prompt_of(9), asked)
        found = engine.generate(prompt_of(9), asked)
    assert found.metrics.spec_policy == "adaptive"
    assert found.token_ids == plain.token_ids
    assert any(found.metrics.per_step_drafted)
    assert not any(found.metrics.per_step_drafted[-10:])


def test_adaptive_is_refused_without_costs_and_fixed_is_not() -> None:
    path = PAIRS["eagle3"]("one")
    with pytest.raises(LimitError, match="what a step costs here was not measured"):
        edgespec.load(path, spec_policy="adaptive")
    with edgespec.load(path, spec_policy="fixed") as engine:
        assert not engine.plan().adaptive
    with edgespec.load(path, spec_policy="adaptive", spec_decode=False) as engine:
        assert engine.method is None


def test_fixed_is_fixed_where_costs_are_known(tmp_path: Path) -> None:
    with_costs(PAIRS["eagle3"]("one"), tmp_path / "one", "eagle3", 0.0, 0.0)
    assert EngineManifest.read(tmp_path / "one").engines
    with edgespec.load(tmp_path / "one", spec_policy="fixed") as engine:
        found = engine.generate(prompt_of(9), replace(GREEDY, max_generate_length=8))
        assert engine.plan() == DraftPlan(1, 3, 4)
    assert (found.metrics.spec_policy, found.metrics.steps_paused) == ("fixed", 0)
