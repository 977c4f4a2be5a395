"""Rejection sampling gives the distribution of plain sampling, with drafts that are drawn and with
drafts that are not; rules that nearly do are caught."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgespec.backends.host import HostLogits
from edgespec.runtime.acceptance import rejection
from edgespec.runtime.acceptance.rejection import RejectionAcceptance, residual
from edgespec.runtime.acceptance.verify import AcceptResult, walk
from edgespec.runtime.sampling.draft_sampler import Distribution, DraftSampler
from edgespec.runtime.sampling.sampler import Sampler, gumbel, log_softmax, stream, uniform
from edgespec.runtime.trees.tree import DraftTree
from tests.unit.runtime.acceptance.rules import (
    BEFORE,
    DRAFT_FIRST,
    DRAFT_SECOND,
    FIRST,
    PENDING,
    SUSPICIOUS,
    Rule,
    Setting,
    V,
    drawn_chain,
    joint,
    law,
    logits_of,
    p_value,
    reduced_chain,
    tree,
    two_tokens,
)

DRAWS = 1500  # 1,000 do not show a rejection that is redrawn with the noise that decided it
SETTINGS: list[Setting] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 3},
    {"temperature": 1.4, "top_k": 4, "top_p": 0.8},
    {
        "temperature": 1.3,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {0: 0.7, 3: -0.4},
    },
]
BEST = int(np.argmax(DRAFT_FIRST))
one_in_depth = pytest.mark.parametrize(
    "setting", [pytest.param(SETTINGS[0], marks=pytest.mark.deep), SETTINGS[-1]], ids=str
)


def rule(
    drafted: DraftTree, logits: HostLogits, sampler: Sampler, before: Sequence[int]
) -> AcceptResult:
    return rejection.accept(drafted, logits, sampler, before, RejectionAcceptance())


def sampler_of(setting: Setting, seed: int) -> Sampler:
    return Sampler(seed=seed, **setting)  # type: ignore[arg-type]


def greedy_chain(sampler: Sampler) -> DraftTree:
    """The best tokens of the draft, whatever the seed."""
    return tree([PENDING, BEST, int(np.argmax(DRAFT_SECOND[BEST]))], [-1, 0, 1])


def greedy_tree(sampler: Sampler) -> DraftTree:
    first, second, *_ = np.argsort(-DRAFT_FIRST).tolist()
    return tree([PENDING, first, second, 0, 1, 2], [-1, 0, 0, 1, 1, 2])


def nothing(sampler: Sampler) -> DraftTree:
    return DraftTree.root_only(PENDING)


DRAFTS = {
    "drawn": drawn_chain,
    "reduced": reduced_chain,
    "greedy": greedy_chain,
    "tree": greedy_tree,
    "none": nothing,
}


def pairs(accept: Rule, name: str, setting: Setting, draws: int = DRAWS) -> list[tuple[int, int]]:
    samplers = [sampler_of(setting, seed) for seed in range(draws)]
    return [two_tokens(accept, sampler, DRAFTS[name](sampler)) for sampler in samplers]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *(("drawn", setting) for setting in SETTINGS[::3]),
        *(pytest.param("drawn", setting, marks=pytest.mark.deep) for setting in SETTINGS[1:3]),
        *((name, SETTINGS[-1]) for name in DRAFTS if name != "drawn"),
    ],
    ids=str,
)
def test_two_tokens_have_the_joint_distribution_of_plain_sampling(
    name: str, setting: Setting
) -> None:
    assert p_value(pairs(rule, name, setting), joint(setting)) > SUSPICIOUS


# Rules that are wrong, each in one way that is easily made


def believing_softmax(
    drafted: DraftTree, logits: HostLogits, sampler: Sampler, before: Sequence[int]
) -> AcceptResult:
    """A greedy draft is taken for one that was drawn from the draft's softmax."""
    logits_of_draft = [DRAFT_FIRST, *(DRAFT_SECOND[token] for token in drafted.tokens[1:])]
    told = [None]
    for parent in drafted.parents[1:]:
        ids, log_probs = sampler.warped(logits_of_draft[parent])
        told.append(Distribution(ids, np.exp(log_probs)))
    lied = DraftTree(drafted.tokens, drafted.parents, drawn_from=told)
    return rule(lied, logits, sampler, before)


def without_residual(patch: pytest.MonkeyPatch) -> Rule:
    """After a rejection the token is drawn from all of p."""
    patch.setattr(rejection, "residual", lambda p, q: p)
    return rule


def with_one_stream(patch: pytest.MonkeyPatch) -> Rule:
    """What draws a draft decides on it too."""

    def of_the_draft(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
        return uniform(seed, position, drafted_last[0].tokens[1:2])

    drafted_last: list[DraftTree] = []

    def with_its_noise(
        drafted: DraftTree, logits: HostLogits, sampler: Sampler, before: Sequence[int]
    ) -> AcceptResult:
        drafted_last[:] = [drafted]
        return rule(drafted, logits, sampler, before)

    patch.setattr(rejection, "uniform", of_the_draft)
    patch.setattr(rejection, "stream", lambda seed, *keys: stream(seed, 1, len(BEFORE)))
    return with_its_noise


WRONG = {
    "greedy drafts by their softmax": (lambda patch: believing_softmax, "greedy"),
    "no residual": (without_residual, "drawn"),
    "the noise of the draft decides": (with_one_stream, "drawn"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rule_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, drafts = WRONG[name]
    found = pairs(make(monkeypatch), drafts, SETTINGS[0])
    assert p_value(found, joint(SETTINGS[0])) < SUSPICIOUS


# Its parts, from their definitions


@one_in_depth
def test_share_of_first_drafts_that_are_accepted_is_the_sum_of_the_smaller_probabilities(
    setting: Setting,
) -> None:
    """1 - TV(p, q) (arXiv 2211.17192, corollary 3.6); sample and walk accepts sum p q."""
    p, q = law(FIRST, setting), law(DRAFT_FIRST, setting)
    found: dict[str, int] = {"rejection": 0, "walk": 0}
    for seed in range(DRAWS):
        sampler = sampler_of(setting, seed)
        drafted = drawn_chain(sampler)
        for name, accept in (("rejection", rule), ("walk", walk)):
            found[name] += len(accept(drafted, logits_of(drafted), sampler, BEFORE).path) > 1
    for name, share in (("rejection", np.minimum(p, q).sum()), ("walk", (p * q).sum())):
        deviation = np.sqrt(share * (1 - share) / DRAWS)
        assert abs(found[name] / DRAWS - share) < 4 * deviation
    assert found["rejection"] > found["walk"]


@one_in_depth
def test_drafts_are_drawn_from_the_warped_distribution_that_they_name(setting: Setting) -> None:
    drawn = []
    for seed in range(DRAWS):
        draws = DraftSampler(sampler_of(setting, seed), BEFORE, V)
        first, q = draws.draw(DRAFT_FIRST)
        np.testing.assert_allclose(q.of(np.arange(V)), law(DRAFT_FIRST, setting), atol=1e-9)
        second, q = draws.draw(DRAFT_SECOND[first], [first])
        wanted = law(DRAFT_SECOND[first], setting, [*BEFORE, first])
        np.testing.assert_allclose(q.of(np.arange(V)), wanted, atol=1e-9)
        drawn.append((first, second))
    rows = np.stack([law(row, setting, [*BEFORE, t]) for t, row in enumerate(DRAFT_SECOND)])
    assert p_value(drawn, law(DRAFT_FIRST, setting)[:, None] * rows) > SUSPICIOUS


def test_draft_of_a_smaller_vocabulary_is_drawn_in_the_base_s_ids() -> None:
    own, ids = np.array([0.3, 1.1, -0.4], np.float32), np.array([4, 0, 2])  # not ascending
    token, q = DraftSampler(Sampler(1.0, seed=3), BEFORE, V).draw(own, ids=ids)
    wanted = np.zeros(V)
    wanted[ids] = np.exp(log_softmax(own.astype(np.float64)))
    np.testing.assert_allclose(q.of(np.arange(V)), wanted, atol=1e-9)
    assert token in ids


def test_bias_and_penalty_of_the_request_are_the_draft_s_too() -> None:
    sampler = Sampler(1.0, repetition_penalty=2.0, logit_bias={0: 5.0}, seed=1)
    _, q = DraftSampler(sampler, BEFORE, V).draw(DRAFT_FIRST, [2])
    adjusted = DRAFT_FIRST.astype(np.float64)
    adjusted[0] += 5
    for token in (1, 2, 3, PENDING):
        adjusted[token] = adjusted[token] / 2 if adjusted[token] > 0 else adjusted[token] * 2
    np.testing.assert_allclose(q.of(np.arange(V)), np.exp(log_softmax(adjusted)), atol=1e-9)


def test_position_that_is_drafted_again_is_drafted_with_new_noise() -> None:
    flat = np.zeros(50, np.float32)
    sampler = Sampler(1.0, seed=1)
    one = DraftSampler(sampler, [1, 2, 3], 50)
    again = DraftSampler(sampler, [1, 2, 3, 4], 50)
    first = [one.draw(flat, [4] * n)[0] for n in range(1, 12)]
    second = [again.draw(flat, [4] * n)[0] for n in range(11)]
    assert first != second
    assert first == [one.draw(flat, [4] * n)[0] for n in range(1, 12)]


def test_noise_of_drafts_is_not_that_of_the_base() -> None:
    ids = np.arange(1000)
    seeds = [5, stream(5, 1, 3), stream(5, 2), stream(5, 3), stream(6, 2)]
    rows = [gumbel(seed, 3, ids) for seed in seeds]
    for i, one in enumerate(rows):
        for other in rows[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.15


def test_residual_is_what_p_has_more_than_q() -> None:
    p = Distribution(np.array([0, 2, 3]), np.array([0.5, 0.3, 0.2]))
    q = Distribution(np.array([1, 2, 3]), np.array([0.4, 0.5, 0.1]))
    np.testing.assert_allclose(residual(p, q).probs, [0.5 / 0.6, 0, 0.1 / 0.6])
    np.testing.assert_allclose(residual(p, p).probs, p.probs)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", DRAFTS)
def test_at_temperature_0_it_is_sample_and_walk(name: str, seed: int) -> None:
    greedy = Sampler(seed=seed)
    drafted = DRAFTS[name](Sampler(1.0, seed=seed))
    logits = logits_of(drafted)
    assert rule(drafted, logits, greedy, BEFORE) == walk(drafted, logits, greedy, BEFORE)


def test_without_drafts_it_draws_the_very_token_of_plain_sampling() -> None:
    for seed in range(100):
        sampler, root = Sampler(1.0, seed=seed), DraftTree.root_only(PENDING)
        found = rule(root, HostLogits(FIRST[None]), sampler, BEFORE)
        assert found == walk(root, HostLogits(FIRST[None]), sampler, BEFORE)
