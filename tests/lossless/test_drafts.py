"""EAGLE-1 drafts, Medusa heads and a hybrid's own MTP head leave every token as it was: chains,
their own trees and static ones, greedy and sampled, alone, in batches and behind a prefix that was
kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

import edgespec
from edgespec.errors import LimitError, OptionError
from edgespec.export.components import ExportOptions
from edgespec.prompts import SamplingParams
from edgespec.runtime.drafters.medusa import CartesianPlan
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.trees.static_tree import NAMED, StaticPlan
from edgespec.runtime.trees.tree import DraftPlan
from tests import made, shared, toys
from tests.lossless.answers import VOCAB, assert_as_alone, assert_same, plainly, prompt_of, served
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.engineless import assert_same_beside_a_draft
from tests.lossless.engines import LANES, Engines, opened, write_engines
from tests.lossless.pairs import make_base, make_mtp_pair

STATIC = StaticPlan.of([[0], [1], [2], [1, 0], [2, 1], [2, 1, 0], [1, 0, 2], [2, 1, 0, 1]])
ADDED = {"presence_penalty": 0.6, "frequency_penalty": 0.4}
SAMPLINGS = [
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.7, top_k=20, top_p=1.0, seed=1),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.8, seed=2, repetition_penalty=1.2, **ADDED),
]


@dataclass(frozen=True)
class Kind:
    """A draft for a base, the directory of its component, and plans: a chain, a tree by its sizes,
    and two static ones. Draft and base are near each other, so drafts are accepted now and then."""

    draft: Callable[[Path, Path], Path]
    component: str
    plans: tuple[DraftPlan, ...]


KINDS = {
    "eagle1": Kind(
        toys.make_eagle1,
        "llm",
        (DraftPlan(1, 3, 4), DraftPlan(4, 3, 16), STATIC, StaticPlan.of(NAMED["mc_sim_7b_25"])),
    ),
    "medusa": Kind(
        partial(toys.make_medusa, heads=4),
        "medusa_draft",
        (
            CartesianPlan(1, 4, 5),
            CartesianPlan(3, 4, 12),
            STATIC,
            StaticPlan.of(NAMED["mc_sim_7b_63"]).within(4, 40),
        ),
    ),
}


# Of a head that drafts chains alone, and is often right
MTP = (DraftPlan(1, 1, 2), DraftPlan(1, 3, 4), DraftPlan(1, 7, 8))


def make_engines(path: Path, name: str) -> None:
    """Engines of a random base and its draft, for one sequence and for four."""
    if name == "mtp":
        make_mtp_pair(path, 1, LANES)
        (path / "engines-1").rename(path / "one")
        (path / f"engines-{LANES}").rename(path / "four")
        return
    kind, base = KINDS[name], make_base(path / "base", "llama", eos=[0])
    draft = kind.draft(path / "draft", base)
    write_engines(
        path,
        made.exported(base, ExportOptions(base_for=name)) / "llm",
        made.exported(draft, ExportOptions(base_model_dir=str(base))) / kind.component,
    )


def engines_of(name: str) -> Path:
    return shared.made_once(("drafts", name), lambda path: make_engines(path, name))


@dataclass(frozen=True)
class Drafted:
    """The engines of a kind, whose answers do not end by themselves, and its plans."""

    engines: Engines
    plans: tuple[DraftPlan, ...]


@pytest.fixture(scope="module", params=[*KINDS, "mtp"])
def opened_once(request: pytest.FixtureRequest) -> Iterator[Drafted]:
    name = request.param
    with opened(engines_of(name)) as engines:
        for engine in (engines.one, engines.four):
            engine.stop_ids = frozenset()
        yield Drafted(engines, MTP if name == "mtp" else KINDS[name].plans)


@pytest.fixture
def drafted(opened_once: Drafted) -> Iterator[Drafted]:
    yield opened_once
    one = opened_once.engines.one
    one.session.drafter = one.drafter
    one.forget_prefixes()


of_mtp = pytest.mark.parametrize("opened_once", ["mtp"], indirect=True)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}")
def test_drafts_leave_every_token_as_it_was(drafted: Drafted, sampling: SamplingParams) -> None:
    one, asked = drafted.engines.one, replace(sampling, max_generate_length=24)
    for plan in drafted.plans:
        most = 0
        for length in (1, 9, 40):
            plain = plainly(one, prompt_of(length), asked)
            found = one.generate(prompt_of(length), asked, plan)
            assert_same(one, plain, found, asked)
            most = max(most, *found.metrics.per_step_drafted)
        assert most == plan.verify_size - 1


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=lambda s: f"t{s.temperature}")
def test_drafts_are_accepted_now_and_then(drafted: Drafted, sampling: SamplingParams) -> None:
    """So that the claim above is one about trees that are walked, and about states that go back by
    every number of rows."""
    counts: set[int] = set()
    greedy_head = drafted.plans is MTP and sampling.temperature == 0
    plan = MTP[1] if drafted.plans is MTP else drafted.plans[-1]
    for seed in range(8):
        asked = replace(sampling, max_generate_length=24, seed=seed)
        found = drafted.engines.one.generate(prompt_of(12, seed), asked, plan)
        counts |= set(found.metrics.per_step_accepted)
    assert counts == {0, 1, 2, 3} if greedy_head else {0, 1} <= counts


def test_a_batch_gives_each_what_it_gets_alone(drafted: Drafted) -> None:
    engines, plans = drafted.engines, (*drafted.plans, None)
    shapes = [(1, 9), (30, 22), (12, 24), (5, 1), (22, 5), (3, 16), (17, 27), (9, 12), (40, 20)]
    jobs = [
        GenerationRequest(
            prompt_of(length),
            replace(SAMPLINGS[i % 3], max_generate_length=new),
            plans[i % len(plans)],
        )
        for i, (length, new) in enumerate([*shapes, (2, 24)])
    ]
    assert_as_alone(engines.one, jobs, served(engines.four, jobs))


@pytest.mark.parametrize("opened_once", KINDS, indirect=True)
def test_behind_a_prefix_that_was_kept_the_drafts_are_the_same(drafted: Drafted) -> None:
    one, plan = drafted.engines.one, drafted.plans[1]
    asked, start = replace(SAMPLINGS[0], max_generate_length=12), prompt_of(20, 7)
    for prompt in (start[:15] + prompt_of(9, 8), start + prompt_of(3, 9)):
        one.forget_prefixes()
        whole = one.generate(prompt, asked, plan)
        one.generate(start, asked, plan, keep=True)
        again = one.generate(prompt, asked, plan)
        assert again.metrics.reused_tokens > 0
        assert again.token_ids == whole.token_ids
        assert again.metrics.per_step_accepted == whole.metrics.per_step_accepted


@of_mtp
@pytest.mark.parametrize("right", [0, 0.6, 1])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}")
def test_drafts_right_or_wrong_leave_every_token_as_it_was(
    drafted: Drafted, right: float, sampling: SamplingParams
) -> None:
    one, asked, prompt = (
        drafted.engines.one,
        replace(sampling, max_generate_length=30),
        prompt_of(12),
    )
    plain = plainly(one, prompt, asked)
    one.session.drafter = ScriptedDrafter([(prompt, plain.token_ids)], VOCAB, right)
    found = one.generate(prompt, asked, MTP[2])
    assert_same(one, plain, found, asked)
    assert (sum(found.metrics.per_step_accepted) > 0) == (right > 0)


@of_mtp
def test_an_mtp_head_drafts_no_trees(drafted: Drafted) -> None:
    one = drafted.engines.one
    with pytest.raises(LimitError, match="top_k 4: an MTP head drafts a chain"):
        one.plan(4, 3, 8)
    with pytest.raises(LimitError, match="top_k 2"):
        one.generate([5, 6], SAMPLINGS[0], DraftPlan(2, 2, 4))
    assert one.plan() == DraftPlan(1, 3, 4)
    assert one.plan(steps=5) == one.plan(verify_size=6) == DraftPlan(1, 5, 6)


@of_mtp
def test_drafts_of_the_text_stand_beside_the_head_s(drafted: Drafted) -> None:
    assert_same_beside_a_draft(drafted.engines.one, drafted.engines.four)


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
    path = engines_of("eagle1") / "one"
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
