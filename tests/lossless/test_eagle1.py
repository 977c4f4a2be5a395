"""The law on EAGLE-1 drafts: static trees, dynamic trees and chains leave every token as it was,
greedy and sampled, alone and in batches."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.errors import OptionError
from edgespec.export.components import ExportOptions
from edgespec.prompts import SamplingParams
from edgespec.runtime.generation import GenerationRequest, Response
from edgespec.runtime.lossless_check import first_difference
from edgespec.runtime.static_tree import NAMED, StaticPlan
from edgespec.runtime.tree import DraftPlan
from tests import made, shared, toys
from tests.lossless.engines import LANES, Engines
from tests.lossless.pairs import LIMITS, make_base

VOCAB = 256
STATIC = StaticPlan.of([[0], [1], [2], [1, 0], [2, 1], [2, 1, 0], [1, 0, 2], [2, 1, 0, 1]])
PLANS = [DraftPlan(1, 3, 4), DraftPlan(4, 3, 16), STATIC, StaticPlan.of(NAMED["mc_sim_7b_25"])]
SAMPLINGS = [
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.7, top_k=20, top_p=1.0, seed=1),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.8, seed=2, repetition_penalty=1.2),
]


def make_engines(path: Path) -> Path:
    """Engines of a random pair for one sequence and for four. The draft's lm_head and embedding are
    the base's: so are its tokens now and then."""
    base = make_base(path / "base", "llama", eos=[0])
    draft = toys.make_eagle1(path / "draft", base)
    components = [
        made.exported(base, ExportOptions(base_for="eagle1")) / "llm",
        made.exported(draft, ExportOptions(base_model_dir=str(base))) / "llm",
    ]
    for name, lanes in (("one", 1), ("four", LANES)):
        engines = made.built(replace(LIMITS, max_batch_size=lanes), *components)
        shutil.copytree(engines, path / name)
    return path


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    path = shared.made_once("eagle1 engines", make_engines)
    with edgespec.load(path / "one") as one, edgespec.load(path / "four") as four:
        for engine in (one, four):
            engine.stop_ids = frozenset()
        yield Engines(one, four)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, length]).integers(3, VOCAB, length).tolist()


def assert_same(
    engines: Engines, plain: Response, drafted: Response, sampling: SamplingParams
) -> None:
    difference = first_difference(engines.one, plain, drafted, sampling)
    assert difference is None, difference.words
    assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: str(plan.verify_size))
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}")
def test_drafts_leave_every_token_as_it_was(
    engines: Engines, plan: DraftPlan, sampling: SamplingParams
) -> None:
    drafted_nodes = 0
    for length in (1, 9, 40):
        asked = replace(sampling, max_generate_length=24)
        plain = engines.one.plainly(prompt_of(length), asked)
        drafted = engines.one.generate(prompt_of(length), asked, plan)
        assert_same(engines, plain, drafted, asked)
        drafted_nodes = max(drafted_nodes, *drafted.metrics.per_step_drafted)
    assert drafted_nodes == plan.verify_size - 1


def test_static_drafts_are_accepted_now_and_then(engines: Engines) -> None:
    """So that the claim above is one about trees that are walked."""
    counts: set[int] = set()
    for seed in range(8):
        asked = replace(SAMPLINGS[1], max_generate_length=24, seed=seed)
        found = engines.one.generate(prompt_of(12, seed), asked, PLANS[3])
        counts |= set(found.metrics.per_step_accepted)
    assert {0, 1} <= counts


def test_a_batch_of_static_and_dynamic_trees_gives_each_what_it_gets_alone(
    engines: Engines,
) -> None:
    shapes = [(1, 9), (30, 22), (12, 24), (5, 1), (22, 5), (3, 16), (17, 27), (9, 12), (40, 20)]
    plans = [STATIC, None, PLANS[1], PLANS[3], PLANS[0]]
    jobs = [
        GenerationRequest(
            prompt_of(length), replace(SAMPLINGS[i % 3], max_generate_length=new), plans[i % 5]
        )
        for i, (length, new) in enumerate(shapes)
    ]
    found = {
        id(request): event
        for request, event in engines.four.serve(deque(jobs), batch_size=LANES)
        if isinstance(event, Response)
    }
    for job in jobs:
        plain = engines.one.plainly(job.prompt_ids, job.sampling)
        assert_same(engines, plain, found[id(job)], job.sampling)


@pytest.mark.parametrize(
    ("block", "plan"),
    [
        ({"decoding_type": "Eagle1", "eagle_choices": [*STATIC.choices]}, STATIC),
        (
            {"decoding_type": "Eagle1", "eagle_choices": "mc_sim_7b_25", "num_eagle_layers": 5},
            StaticPlan.of(NAMED["mc_sim_7b_25"]),
        ),
        (
            {"decoding_type": "Eagle2", "dynamic_tree_max_topK": 3, "max_draft_len": 3},
            DraftPlan(3, 3, 10),
        ),
        ({"decoding_type": "Eagle1", "max_draft_len": 2}, DraftPlan(1, 2, 3)),
    ],
)
def test_a_speculative_config_asks_for_each_tree(block: dict[str, object], plan: DraftPlan) -> None:
    path = shared.made_once("eagle1 engines", make_engines) / "one"
    asked = replace(SAMPLINGS[1], max_generate_length=8)
    with edgespec.load(path, speculative_config=block) as engine:
        assert engine.plan() == plan
        drafted = engine.generate(prompt_of(9), asked)
        assert drafted.token_ids == engine.plainly(prompt_of(9), asked).token_ids


def test_a_config_names_no_file(tmp_path: Path) -> None:
    """What a request may send must not open what it names."""
    (tmp_path / "tree.json").write_text("[[0]]")
    block = {"decoding_type": "Eagle1", "eagle_choices": str(tmp_path / "tree.json")}
    with pytest.raises(OptionError, match="neither a list nor the name of a tree"):
        edgespec.load(tmp_path, speculative_config=block)
