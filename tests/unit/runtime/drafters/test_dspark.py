"""DSpark's drafter: blocks whose first slot drafts, cut before the first slot that is not confident
enough; plans are chains.

The draft engine is `hash_drafts`'s.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from edgespec.backends.host import HostStates
from edgespec.backends.ort.backend import BACKEND
from edgespec.errors import LimitError
from edgespec.methods.base import HeadSizes
from edgespec.methods.dspark import Heads
from edgespec.methods.dspark_heads import DSparkHeads
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.block_drafter import BlockLimits
from edgespec.runtime.drafters.dspark import DSparkDrafter, LengthRule, while_it_pays
from edgespec.runtime.lanes.block import MaskSpec
from edgespec.runtime.sampling.draft_sampler import DraftSampler
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import BlockPlan, DraftTree
from tests.unit.runtime.hash_drafts import VOCAB, WIDTH, block_rows_said, blocks_of

MASK_TOKEN, BLOCK, PENDING = 6, 5, 3
IDS = np.array([0, 4, 5, 8, 13, 14, 26])  # the base's of the draft's own
PLAN = BlockPlan(1, BLOCK, BLOCK + 1, 0)
HEADS = Heads(
    markov_rank=2,
    markov_kind="gated",
    confidence=True,
    confidence_reads_markov=True,
    first_slot=0,
)


def heads() -> DSparkHeads:
    rng = np.random.default_rng(4)
    shapes = HEADS.shapes(HeadSizes(30, VOCAB, WIDTH))
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return DSparkHeads(HEADS, arrays, IDS)


def drafter_of(capacity: int = 40, lanes: int = 1, threshold: float = 0.0) -> DSparkDrafter:
    decoder = blocks_of(capacity, lanes, first_slot=0)
    return DSparkDrafter(decoder, MASK_TOKEN, BLOCK, heads(), threshold)


def some_states(seed: int, lane: int, count: int) -> Observation:
    rng = np.random.default_rng(seed)
    states = rng.integers(0, 99, (count, WIDTH)).astype(np.float32)
    return Observation(lane, HostStates(states), rng.integers(0, 20, count))


def said(seen: list[Observation], size: int = BLOCK) -> tuple[list[int], np.ndarray]:
    """Tokens and confidences of a block behind all that was observed."""
    context = np.concatenate([item.hidden_states.numpy() for item in seen])
    rows = block_rows_said(context, [PENDING, *[MASK_TOKEN] * (size - 1)], [MaskSpec()])
    logits, states = (np.array([getattr(row, n) for row in rows]) for n in ("logits", "hidden"))
    walk = heads().walk(PENDING, logits, states)
    assert walk.confidences is not None
    return IDS[walk.ids].tolist(), walk.confidences


def length(rule: LengthRule, confidences: list[float]) -> int:
    """The slots before the first that the rule turns down."""
    return len(list(itertools.takewhile(rule, confidences)))


def proposed(drafter: DSparkDrafter, plan: BlockPlan = PLAN) -> DraftTree:
    (tree,) = drafter.propose([DraftRequest(0, PENDING, plan)])
    assert tree.parents.tolist() == list(range(-1, len(tree) - 1))
    return tree


@pytest.mark.parametrize("size", [1, 3, BLOCK])
def test_all_slots_of_a_block_draft_the_anchor_s_too(size: int) -> None:
    drafter, seen = drafter_of(), [some_states(0, 0, 4)]
    drafter.observe(seen)
    tree = proposed(drafter, BlockPlan(1, size, size + 1, 0))
    assert tree.tokens.tolist() == [PENDING, *said(seen, size)[0]]
    assert drafter.decoder.runner.calls[-1].inputs_embeds.shape[1] == size


def test_the_confidences_set_the_length() -> None:
    lengths = set()
    for seed in range(24):
        seen = [some_states(seed, 0, 4)]
        tokens, confidences = said(seen)
        for threshold in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            drafter = drafter_of(threshold=threshold)
            drafter.observe(seen)
            below = [i for i, c in enumerate(confidences) if c < threshold]
            kept = tokens[: below[0]] if below else tokens
            assert proposed(drafter).tokens.tolist() == [PENDING, *kept]
            lengths.add(len(kept))
    assert lengths >= {0, 1, BLOCK}


@pytest.mark.parametrize(
    ("confidences", "threshold", "count"),
    [
        ([0.5, 0.25, 0.75], 0.25, 3),
        ([0.5, 0.25, 0.75], 0.5, 1),
        ([0.125, 0.875], 0.5, 0),
        ([], 0.5, 0),
    ],
)
def test_a_confidence_that_equals_the_threshold_is_enough(
    confidences: list[float], threshold: float, count: int
) -> None:
    assert length(drafter_of(threshold=threshold).length_rule(), confidences) == count


@pytest.mark.parametrize("row_cost", [0.01, 0.05, 0.18, 0.5, 1.0])
def test_by_default_a_block_has_the_length_that_brings_most_for_its_cost(row_cost: float) -> None:
    """By looking at all lengths; the confidences of a block fall, as those of drafts do."""
    lengths = set()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        confidences = np.sort(rng.random(BLOCK).astype(np.float32))[::-1] ** (seed % 3)
        survivals = [float(s) for s in np.cumprod(confidences, dtype=np.float64)]
        rates = [(1 + sum(survivals[:n])) / (1 + n * row_cost) for n in range(BLOCK + 1)]
        found = length(while_it_pays(row_cost), confidences.tolist())
        assert rates[found] == pytest.approx(max(rates), rel=1e-6)
        lengths.add(found)
    assert len(lengths) > 1


def test_a_drafter_without_a_threshold_asks_what_a_row_costs() -> None:
    unlike = 0  # blocks whose length is not that by a threshold
    for seed in range(12):
        seen = [some_states(seed, 0, 4)]
        tokens, confidences = said(seen)
        for row_cost in (0.0, 0.18, 0.5, 3.0):
            drafter = drafter_of()
            drafter.threshold, drafter.row_cost = None, row_cost
            drafter.observe(seen)
            count = length(while_it_pays(row_cost), confidences.tolist())
            assert count == {0.0: BLOCK, 3.0: 0}.get(row_cost, count)
            assert proposed(drafter).tokens.tolist() == [PENDING, *tokens[:count]]
            unlike += count != length(lambda c, least=row_cost: c >= least, confidences.tolist())
    assert unlike > 0


def test_drawn_drafts_follow_from_those_before_them() -> None:
    """Every slot again by hand: its logits, the Markov head's for the token drawn before it."""
    unlike, lengths, own = 0, set(), heads()
    for seed in range(24):
        seen, threshold = [some_states(seed, 0, 4)], (0.0, 0.15)[seed % 2]
        block = [PENDING, *[MASK_TOKEN] * (BLOCK - 1)]
        rows = block_rows_said(seen[0].hidden_states.numpy(), block, [MaskSpec()])
        drafter = drafter_of(threshold=threshold)
        drafter.observe(seen)
        draws = DraftSampler(Sampler(2.0, seed=seed), [1, 2, PENDING], 30)
        (tree,) = drafter.propose([DraftRequest(0, PENDING, PLAN, draws)])
        tokens = tree.tokens.tolist()
        lengths.add(len(tokens) - 1)
        for slot, row in enumerate(rows):
            logits, state = np.array(row.logits, np.float32), np.array(row.hidden, np.float32)
            walk = own.walk(tokens[slot], logits[None], state[None])
            assert walk.confidences is not None
            if walk.confidences[0] < threshold:
                assert len(tokens) == slot + 1
                break
            token, wanted = draws.draw(walk.logits[0], tokens[1 : slot + 1], IDS)
            q = tree.distribution(slot + 1)
            assert tokens[slot + 1] == token
            assert q.ids.tolist() == wanted.ids.tolist() == IDS.tolist()
            np.testing.assert_allclose(q.probs, wanted.probs, rtol=1e-6)
            unlike += token != int(IDS[walk.ids[0]])
    assert unlike > BLOCK
    assert lengths > {0, BLOCK}


@pytest.mark.parametrize(("capacity", "count"), [(4, 0), (5, 1), (7, 3), (9, 5), (30, 5)])
def test_a_block_is_no_longer_than_there_is_room_behind_its_context(
    capacity: int, count: int
) -> None:
    drafter, seen = drafter_of(capacity), [some_states(1, 0, 4)]
    drafter.observe(seen)
    wanted = said(seen, count)[0] if count else []
    assert proposed(drafter).tokens.tolist() == [PENDING, *wanted]


def test_lanes_draft_side_by_side_as_alone() -> None:
    drafter = drafter_of(lanes=3)
    seen = [some_states(lane, lane, 2 + lane) for lane in range(3)]
    drafter.observe(seen)
    trees = drafter.propose([DraftRequest(lane, PENDING, PLAN) for lane in range(3)])
    for item, tree in zip(seen, trees, strict=True):
        assert tree.tokens.tolist() == [PENDING, *said([item])[0]]


# Plans


LIMITS = BlockLimits(60, 7, 1000, "a DSpark draft", first_slot=0, max_top_k=1)
HINTS = BACKEND.plan_hints


@pytest.mark.parametrize(
    ("given_sizes", "plan"),
    [
        ((None, None, None), BlockPlan(1, 7, 8, 0)),
        ((1, 1, 8), BlockPlan(1, 7, 8, 0)),
        ((None, None, 4), BlockPlan(1, 3, 4, 0)),
    ],
)
def test_open_sizes_follow_from_those_given(
    given_sizes: tuple[int | None, ...], plan: BlockPlan
) -> None:
    assert LIMITS.plan(*given_sizes, HINTS) == plan
    assert plan.within(2, 100) == BlockPlan(1, 2, 3, 0)
    assert LIMITS.plan(1, 1, 8, HINTS).depth_words == "blocks of 7"


@pytest.mark.parametrize(
    ("sizes", "what", "remedy"),
    [
        ((2, None, None), "a DSpark draft makes chains", "Set it to 1"),
        (
            (1, None, 9),
            "blocks of 7 make 8 nodes at most",
            r"Set `spec_verify_size` to 8 or less\.$",
        ),
        ((1, 2, None), "makes its block in one step", "`spec_verify_size`"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    sizes: tuple[int | None, ...], what: str, remedy: str
) -> None:
    with pytest.raises(LimitError, match=what) as caught:
        LIMITS.plan(*sizes, HINTS)
    assert re.search(remedy, caught.value.remedy)
