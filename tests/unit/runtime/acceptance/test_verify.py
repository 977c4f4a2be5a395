"""The walk accepts what the base draws itself and nothing else, so that its tokens keep the base's
law."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from edgespec.backends.host import HostLogits
from edgespec.runtime.acceptance.verify import walk
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftTree

VOCAB = 8


def saying(*tokens: int) -> HostLogits:
    """Logits [N, V] whose largest is tokens[n] at node n."""
    return HostLogits(np.eye(VOCAB, dtype=np.float32)[list(tokens)])


def tree(tokens: list[int], parents: list[int]) -> DraftTree:
    return DraftTree(np.array(tokens), np.array(parents))


BRANCHING = tree([7, 3, 5, 5, 2, 3], [-1, 0, 0, 1, 2, 2])


def test_root_alone_emits_the_base_s_token() -> None:
    result = walk(DraftTree.root_only(7), saying(4), Sampler(), range(10 + 1))
    assert (result.path, result.emitted) == ([0], [4])


def test_wrong_first_draft_leaves_the_bonus_alone() -> None:
    result = walk(BRANCHING, saying(6, 0, 0, 0, 0, 0), Sampler(), range(10 + 1))
    assert (result.path, result.emitted) == ([0], [6])


def test_full_path_is_accepted_and_its_leaf_gives_the_bonus() -> None:
    result = walk(tree([7, 1, 2, 3], [-1, 0, 1, 2]), saying(1, 2, 3, 4), Sampler(), range(10 + 1))
    assert (result.path, result.emitted) == ([0, 1, 2, 3], [1, 2, 3, 4])


def test_walk_goes_to_the_sibling_that_the_base_drew_and_on_from_there() -> None:
    result = walk(BRANCHING, saying(5, 5, 3, 0, 0, 6), Sampler(), range(10 + 1))
    assert (result.path, result.emitted) == ([0, 2, 5], [5, 3, 6])


def test_child_of_another_branch_is_not_taken_for_a_child() -> None:
    """Node 3 carries 5 under node 1; after node 2 the base's 5 is a bonus."""
    result = walk(BRANCHING, saying(5, 0, 5, 0, 0, 0), Sampler(), range(10 + 1))
    assert (result.path, result.emitted) == ([0, 2], [5, 5])


def test_token_of_a_grandchild_does_not_skip_a_level() -> None:
    result = walk(tree([7, 1, 2], [-1, 0, 1]), saying(2, 2, 2), Sampler(), range(10 + 1))
    assert (result.path, result.emitted) == ([0], [2])


def test_each_level_is_drawn_at_its_own_absolute_position() -> None:
    """With flat logits the noise decides alone: the walk must draw what plain sampling draws,
    position by position."""
    sampler, flat = Sampler(1.0, 0, 1.0, 3), np.zeros(VOCAB, np.float32)
    wanted = [sampler.pick(flat, range(position)) for position in (21, 22, 23)]
    chain = tree([7, *wanted[:2]], [-1, 0, 1])
    assert (
        walk(chain, HostLogits(np.zeros((3, VOCAB), np.float32)), sampler, range(21)).emitted
        == wanted
    )
    assert len(set(wanted)) > 1


def test_repetition_penalty_at_a_node_is_over_the_path_to_it() -> None:
    """Of the prompt and the tokens drawn on the way, and of no other node's."""
    sampler = Sampler(repetition_penalty=2.0)
    chain = tree([7, 1, 2, 4], [-1, 0, 1, 0])
    first, second = saying(1, 2).rows()
    last = np.zeros(VOCAB, np.float32)
    # each is halved where it is on the path: 0 of the prompt, 7 the root, 1 and 2 of the walk
    last[[0, 7, 1, 2]], last[4] = 1.9, 1.0
    logits = HostLogits(np.stack([first, second, last, last]))
    assert walk(chain, logits, sampler, [0, 0, 7]).emitted == [1, 2, 4]
    assert walk(chain, logits, sampler, [0, 0, 4, 7]).emitted == [1, 2, 0]


@given(st.integers(0, 2**32), st.integers(1, 12), st.sampled_from([0.0, 1.0]))
def test_path_descends_from_the_root_and_emits_one_token_more_than_it_accepts(
    seed: int, nodes: int, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(0, n)) for n in range(1, nodes))]
    tokens = [0] * nodes
    for n in range(1, nodes):  # siblings differ
        taken = {tokens[m] for m in range(1, n) if parents[m] == parents[n]}
        tokens[n] = next(t for t in rng.permutation(nodes + VOCAB) if t not in taken)
    logits = rng.normal(0, 2, (nodes, nodes + VOCAB)).astype(np.float32)
    for n in range(1, nodes):  # so that drafts stand now and then
        logits[parents[n], tokens[n]] += 3
    result = walk(
        tree(tokens, parents), HostLogits(logits), Sampler(temperature, seed=seed), range(5 + 1)
    )
    assert len(result.emitted) == len(result.path)
    assert result.path[0] == 0
    for above, node, token in zip(result.path, result.path[1:], result.emitted, strict=False):
        assert parents[node] == above
        assert tokens[node] == token
    last = result.path[-1]
    assert result.emitted[-1] not in {tokens[n] for n in range(1, nodes) if parents[n] == last}


# Two tokens, drafted or not, keep the joint law of plain sampling

FIRST = np.array([1.0, 0.3, -0.4, 0.6], np.float32)
SECOND = (
    np.random.default_rng(1).normal(0, 1, (4, 4)).astype(np.float32)
)  # row t: logits after token t
SETTING = (0.8, 3, 0.95)
SEEDS = 3000


def law(logits: np.ndarray) -> np.ndarray:
    """SETTING's warped law, written plainly."""
    p = torch.from_numpy(logits.astype(np.float64) / SETTING[0]).softmax(0).numpy()
    order = np.argsort(-p)[: SETTING[1]]
    p = p[order] / p[order].sum()
    kept = np.concatenate([[True], np.cumsum(p)[:-1] < SETTING[2]])
    out = np.zeros(len(logits))
    out[order[kept]] = p[kept] / p[kept].sum()
    return out


def two_tokens(seed: int, drafted: DraftTree, greedy_when_drafted: bool = False) -> tuple[int, int]:
    """The first two tokens that verifying `drafted`, and then a bare root where one is still
    wanting, emits."""
    sampler = Sampler(*SETTING, seed)
    after = [FIRST, *(SECOND[t] for t in drafted.tokens[1:])]
    emitted = walk(drafted, HostLogits(np.stack(after)), sampler, range(41)).emitted
    if (
        greedy_when_drafted
        and drafted.child(0, int(np.argmax(FIRST))) is not None
        and seed % 8 == 0
    ):
        emitted = [int(np.argmax(FIRST))]
    if len(emitted) == 1:
        emitted += walk(
            DraftTree.root_only(emitted[0]),
            HostLogits(SECOND[emitted[0]][None]),
            sampler,
            range(42),
        ).emitted
    return emitted[0], emitted[1]


def joint_p_value(drafted: DraftTree, **planted: bool) -> float:
    wanted = law(FIRST)[:, None] * np.stack([law(row) for row in SECOND])
    counts = Counter(two_tokens(seed, drafted, **planted) for seed in range(SEEDS))
    found = np.array([[counts[a, b] for b in range(4)] for a in range(4)])
    if found[wanted == 0].any():
        return 0.0
    return float(stats.chisquare(found[wanted > 0], wanted[wanted > 0] * SEEDS).pvalue)


DRAFTS = {
    "none": DraftTree.root_only(9),
    "chain": tree([9, 0], [-1, 0]),
    "tree": tree([9, 0, 3, 0, 1, 2], [-1, 0, 0, 1, 1, 2]),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_two_tokens_of_a_walked_tree_follow_the_joint_law_of_plain_sampling(name: str) -> None:
    assert joint_p_value(DRAFTS[name]) > 1e-4


def test_walk_that_favours_a_draft_one_time_in_eight_is_caught() -> None:
    assert joint_p_value(DRAFTS["tree"], greedy_when_drafted=True) < 1e-4


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_walked_trees_draw_the_very_tokens_of_plain_sampling(name: str) -> None:
    for seed in range(500):
        assert two_tokens(seed, DRAFTS[name]) == two_tokens(seed, DRAFTS["none"])
