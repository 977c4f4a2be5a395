"""Typical acceptance against its definition (arXiv 2401.10774, section 2.3.1), in both of its
forms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgespec.backends.host import HostLogits
from edgespec.errors import OptionError
from edgespec.runtime.acceptance import typical
from edgespec.runtime.acceptance.typical import TypicalAcceptance
from edgespec.runtime.acceptance.verify import AcceptResult, walk
from edgespec.runtime.sampling.sampler import Sampler, log_softmax
from edgespec.runtime.trees.tree import DraftTree
from tests.unit.runtime.acceptance.rules import (
    BEFORE,
    FIRST,
    PENDING,
    SECOND,
    SUSPICIOUS,
    V,
    logits_of,
    p_value,
    tree,
    two_tokens,
)

EPSILON = 0.09
FAST, DRAWN = TypicalAcceptance(EPSILON), TypicalAcceptance(EPSILON, posterior_fast=False)


def typical_by_torch(
    logits: np.ndarray, temperature: float, epsilon: float, alpha: float
) -> np.ndarray:
    """Which tokens [V] are typical, by torch and from the definition."""
    p = torch.from_numpy(logits.astype(np.float64) / temperature).softmax(0)
    entropy = torch.distributions.Categorical(probs=p).entropy()
    return (p > torch.minimum(torch.tensor(epsilon), alpha * torch.exp(-entropy))).numpy()


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> DraftTree:
    parents, tokens = [-1], [0]
    for node in range(1, nodes):
        parent = int(rng.integers(0, node))
        taken = {tokens[n] for n in range(1, node) if parents[n] == parent}
        parents.append(parent)
        tokens.append(int(rng.choice([t for t in range(vocab) if t not in taken])))
    return tree(tokens, parents)


def paths_of(drafted: DraftTree) -> list[list[int]]:
    """Every path from the root to a leaf, as Medusa lists its candidates."""
    leaves = set(range(len(drafted))) - set(drafted.parents.tolist())
    out = []
    for leaf in sorted(leaves):
        path = [leaf]
        while path[-1]:
            path.append(int(drafted.parents[path[-1]]))
        out.append(path[::-1])
    return out


def by_definition(
    drafted: DraftTree, logits: np.ndarray, temperature: float, epsilon: float, alpha: float
) -> tuple[list[int], int]:
    """The accepted path and the token behind it: of each candidate the leading run of typical
    drafts, the longest of them, of several the one of the largest likelihood."""
    best: tuple[int, float, list[int]] = (0, 0.0, [0])
    log_p = torch.from_numpy(logits.astype(np.float64) / temperature).log_softmax(1).numpy()
    for path in paths_of(drafted):
        run, likelihood = [0], 0.0
        for above, node in pairwise(path):
            token = drafted.tokens[node]
            if not typical_by_torch(logits[above], temperature, epsilon, alpha)[token]:
                break
            run.append(node)
            likelihood += log_p[above, token]
        if (len(run), likelihood) > (best[0], best[1]):
            best = (len(run), likelihood, run)
    return best[2], int(np.argmax(logits[best[2][-1]]))


@given(
    st.integers(0, 2**32),
    st.integers(1, 14),
    st.sampled_from([0.4, 1.0, 2.0]),
    st.sampled_from([(0.09, None), (0.3, 0.2), (1.0, 1.0), (0.01, 0.5)]),
)
def test_longest_typical_candidate_is_accepted(
    seed: int, nodes: int, temperature: float, thresholds: tuple[float, float | None]
) -> None:
    rng = np.random.default_rng(seed)
    drafted, vocab = random_tree(rng, nodes, 16), 16
    logits = rng.normal(0, 2, (nodes, vocab)).astype(np.float32)
    for node in range(1, nodes):  # so that several drafts are typical
        logits[drafted.parents[node], drafted.tokens[node]] += 3
    epsilon, alpha = thresholds
    options = TypicalAcceptance(epsilon, alpha)
    sampler = Sampler(temperature, seed=seed)
    found = typical.accept(drafted, HostLogits(logits), sampler, BEFORE, options)
    path, bonus = by_definition(drafted, logits, temperature, epsilon, alpha or math.sqrt(epsilon))
    # the most probable token is accepted even where the definition, at equality, leaves it out
    if len(found.path) == len(path):
        assert found.path == path
        assert found.emitted == [*drafted.tokens[path[1:]].tolist(), bonus]
    else:
        assert is_top_one_extension(found, logits, drafted, temperature, epsilon, alpha)


def is_top_one_extension(
    found: AcceptResult,
    logits: np.ndarray,
    drafted: DraftTree,
    temperature: float,
    epsilon: float,
    alpha: float | None,
) -> bool:
    """Whether all that is accepted beyond the definition is a node's most probable token."""
    return all(
        typical_by_torch(logits[above], temperature, epsilon, alpha or math.sqrt(epsilon))[
            drafted.tokens[node]
        ]
        or drafted.tokens[node] == np.argmax(logits[above])
        for above, node in pairwise(found.path)
    )


def test_draft_that_greedy_decoding_rejects_is_accepted_where_it_is_typical() -> None:
    second = int(np.argsort(-FIRST)[1])
    drafted = tree([PENDING, second], [-1, 0])
    logits = logits_of(drafted)
    assert typical_by_torch(FIRST, 1.0, EPSILON, 0.3)[second]
    found = typical.accept(drafted, logits, Sampler(1.0, seed=1), BEFORE, FAST)
    assert found == AcceptResult([0, 1], [second, int(np.argmax(SECOND[second]))])
    assert walk(drafted, logits, Sampler(), BEFORE).path == [0]


def test_draft_that_top_k_removes_is_never_accepted() -> None:
    second = int(np.argsort(-FIRST)[1])
    drafted = tree([PENDING, second], [-1, 0])
    for options in (FAST, DRAWN):
        sampler = Sampler(1.0, top_k=1, seed=1)
        found = typical.accept(drafted, logits_of(drafted), sampler, BEFORE, options)
        assert found == AcceptResult([0], [int(np.argmax(FIRST))])


@pytest.mark.parametrize("options", [FAST, DRAWN, TypicalAcceptance()], ids=str)
def test_at_temperature_0_and_without_a_threshold_it_is_greedy(options: TypicalAcceptance) -> None:
    drafted = tree([PENDING, *np.argsort(-FIRST)[:3], 0, 1], [-1, 0, 0, 0, 1, 2])
    logits = logits_of(drafted)
    greedy = walk(drafted, logits, Sampler(), BEFORE)
    for temperature in (0.0, 1.0) if options.posterior_threshold is None else (0.0,):
        sampler = Sampler(temperature, seed=3)
        assert typical.accept(drafted, logits, sampler, BEFORE, options) == greedy


# The form that draws: sampling from what is typical, whatever is drafted

TEMPERATURE = 1.3
OPTIONS = TypicalAcceptance(0.2, 0.35, posterior_fast=False)


def truncated(logits: np.ndarray) -> np.ndarray:
    """[V]: the probabilities of the typical tokens alone, renormalised."""
    p = torch.from_numpy(logits.astype(np.float64) / TEMPERATURE).softmax(0).numpy()
    kept = typical_by_torch(logits, TEMPERATURE, 0.2, 0.35)
    return np.where(kept, p, 0) / p[kept].sum()


def rule(
    drafted: DraftTree, logits: HostLogits, sampler: Sampler, before: Sequence[int]
) -> AcceptResult:
    return typical.accept(drafted, logits, sampler, before, OPTIONS)


def accepting_any(
    drafted: DraftTree, logits: HostLogits, sampler: Sampler, before: Sequence[int]
) -> AcceptResult:
    """A wrong rule: one time in eight it takes the fast form."""
    fast = TypicalAcceptance(0.2, 0.35)
    return typical.accept(
        drafted, logits, sampler, before, fast if sampler.seed % 8 == 0 else OPTIONS
    )


BEST = np.argsort(-FIRST).tolist()
DRAFTS = {
    "none": DraftTree.root_only(PENDING),
    "chain": tree([PENDING, BEST[1], 0], [-1, 0, 1]),
    "tree": tree([PENDING, BEST[0], BEST[1], 0, 1], [-1, 0, 0, 1, 2]),
}


def pairs(accept: object, name: str) -> list[tuple[int, int]]:
    samplers = [Sampler(TEMPERATURE, seed=seed) for seed in range(1500)]
    return [two_tokens(accept, sampler, DRAFTS[name]) for sampler in samplers]  # type: ignore[arg-type]


WANTED = truncated(FIRST)[:, None] * np.stack([truncated(row) for row in SECOND])


@pytest.mark.parametrize("name", DRAFTS)
def test_tokens_are_sampled_from_the_typical_ones_whatever_is_drafted(name: str) -> None:
    assert (WANTED == 0).any()
    assert p_value(pairs(rule, name), WANTED) > SUSPICIOUS


def test_rule_that_is_wrong_one_time_in_eight_is_caught() -> None:
    assert p_value(pairs(accepting_any, "chain"), WANTED) < SUSPICIOUS


# Options


@pytest.mark.parametrize(
    "values",
    [
        {"posterior_threshold": 0},
        {"posterior_threshold": 1.1},
        {"posterior_threshold": True},
        {"posterior_threshold": float("nan")},
        {"posterior_threshold": 10**20},
        {"posterior_threshold": 10**5000},
        {"posterior_threshold": "0.09"},
        {"posterior_alpha": 0.3},
        {"posterior_threshold": 0.09, "posterior_alpha": -1},
        {"posterior_threshold": 0.09, "posterior_fast": 1},
    ],
)
def test_option_that_cannot_be_is_refused_by_its_name(values: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=f"{[*values][-1]} of typical acceptance is"):
        TypicalAcceptance(**values)  # type: ignore[arg-type]


def test_alpha_is_the_root_of_the_threshold() -> None:
    assert TypicalAcceptance(0.09).alpha == pytest.approx(0.3)
    assert len(FIRST) == V


def test_a_token_at_the_threshold_is_drawn_and_no_draft_at_it_is_accepted() -> None:
    logits = np.array([3.0, 2.0, 0.0], np.float32)
    probs = np.exp(log_softmax(logits.astype(np.float64)))
    options = TypicalAcceptance(float(probs[1]), 1.0)
    for strictly, allowed in ((False, [0, 1]), (True, [0])):
        ids, _ = typical.typical(logits, Sampler(1.0), [], options, strictly=strictly)
        assert ids.tolist() == allowed


def test_tokens_of_a_path_are_repetitions_behind_it() -> None:
    """Behind 1, which the path has, 1 again is no longer typical under the penalty."""
    logits = HostLogits(np.array([[0, 3, 0, 0], [0, 3, 2.5, 0], [0, 0, 3, 0]], np.float32))
    drafted, options = tree([0, 1, 1], [-1, 0, 1]), TypicalAcceptance(0.3, 1.0)
    for penalty, path in ((1.0, [0, 1, 2]), (3.0, [0, 1])):
        sampler = Sampler(1.0, repetition_penalty=penalty)
        assert typical.accept(drafted, logits, sampler, [0], options).path == path
