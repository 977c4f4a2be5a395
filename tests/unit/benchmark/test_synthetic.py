"""Dialled acceptance: drafts are right exactly where the draws say so, whatever the plan, the lane
and the tree; and answers stay the plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from edgespec.benchmark.synthetic import Dial, SyntheticDrafter, Truth, synthetic
from edgespec.errors import OptionError
from edgespec.runtime.costs.cost_model import StepCosts
from edgespec.runtime.drafters.base import DraftRequest, EndObserver, Observation
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.plans.draft_budget import Budgeted, DraftBudget
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from edgespec.vision.rows import ImageRows
from tests.unit.runtime.hash_model import VOCAB, begin, decoder_of, plainly

CHAIN = (-1, 0, 1, 2)
WIDE = (-1, 0, 0, 0, 1, 1, 2, 4, 4)  # the first children are 1, 4 and 7
SEED = 5


@dataclass
class ShapedDrafter:
    """Proposes trees of one shape, whose tokens are distinct among siblings and mean nothing."""

    parents: Sequence[int]
    needs_hidden_states: bool = False
    capacity: int | None = None
    num_lanes: int | None = None
    engine_s: float = 0.0
    proposed: int = 0
    observed: dict[int, list[int]] = field(default_factory=dict)

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        self.observed[lane] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        self.proposed += len(requests)
        return [self.tree(request) for request in requests]

    def tree(self, request: DraftRequest) -> DraftTree:
        size = min(request.plan.verify_size, len(self.parents))
        parents = np.array(self.parents[:size], np.int64)
        ranks = [int(np.sum(parents[:node] == parents[node])) for node in range(size)]
        tokens = np.array([(request.pending + rank) % VOCAB for rank in ranks], np.int64)
        tokens[0] = request.pending
        tree = DraftTree(tokens, parents)
        kept = tree.depths <= request.plan.steps
        return DraftTree(tokens[kept], parents[kept])

    def observe(self, observations: Sequence[Observation]) -> None:
        for item in observations:
            self.observed[item.lane] += item.tokens.tolist()

    def reset(self, lane: int) -> None:
        self.observed.pop(lane, None)

    def move(self, source: int, target: int) -> None:
        self.observed[target] = self.observed.pop(source)

    def snapshot(self, lane: int, count: int) -> None:
        return None

    def restore(self, lane: int, snapshot: object) -> None: ...

    def close(self) -> None: ...


class EndObserving(ShapedDrafter, EndObserver): ...


def truths_of(prompts: Sequence[Sequence[int]], length: int, sampler: Sampler) -> dict:
    return {
        tuple(prompt): Truth.of(plainly(prompt, sampler, length)[0], SEED, number)
        for number, prompt in enumerate(prompts)
    }


def test_what_is_right_for_an_image_is_not_for_another_with_the_same_tokens() -> None:
    prompts = [
        PromptValue.with_images([1, *[8] * 6, 2], [ImageSlots(1, rows)], 2)
        for rows in (ImageRows(np.zeros((6, 4)), {}, (1, 4, 6), key) for key in ("one", "other"))
    ]
    truths = {p.cache_key: Truth.of([n], SEED, n) for n, p in enumerate(prompts)}
    drafter = SyntheticDrafter(ShapedDrafter([-1]), Dial((1.0,)), truths, VOCAB)
    for number, prompt in enumerate(prompts):
        drafter.begin(number, prompt, 0)
        assert drafter.lanes[number].truth is truths[prompt.cache_key]
    drafter.begin(0, prompts[0].tokens, 0)  # nothing is right for these tokens as text
    assert drafter.lanes[0].truth is None


def expected_steps(truth: Truth, length: int, dial: Dial, depth: int) -> list[int]:
    """Accepted drafts of each step, from the definition: a step drafts the next `depth` positions,
    and the first whose draw is not below its probability ends it."""
    steps, emitted = [], 1
    while emitted < length:
        levels, accepted = min(depth, length - emitted - 1), 0
        while accepted < levels and truth.draws[emitted + accepted] < dial.at(accepted + 1):
            accepted += 1
        steps.append(accepted)
        emitted += accepted + 1
    return steps


def run(
    drafter: SyntheticDrafter,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    plan: DraftPlan,
    sampler: Sampler,
) -> dict[tuple[int, ...], tuple[list[int], list[int]]]:
    """Tokens and accepted drafts a step of each prompt, all of them in lanes side by side."""
    session = Session(decoder_of(256, lanes=len(prompts)), drafter)
    seqs = [
        SequenceState(list(prompt), sampler, length, plan=plan)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    found: dict[tuple[int, ...], tuple[list[int], list[int]]] = {}

    def note(seq: SequenceState, output: StepOutput) -> None:
        tokens, steps = found.setdefault(tuple(seq.prompt), ([], []))
        tokens += output.tokens
        steps += [output.accepted] if output.verified else []

    for seq in seqs:
        note(seq, begin(session, seq))
    while session.running:
        for seq, output in session.step():
            note(seq, output)
    return found


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize(("parents", "depth"), [(CHAIN, 3), (WIDE, 3)])
@pytest.mark.parametrize("dial", ["0", "1", "0.6", "0.9:0.4:0.7"])
@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, seed=3)])
def test_drafts_are_right_where_the_draws_say_so(
    hidden: bool, parents: tuple[int, ...], depth: int, dial: str, sampler: Sampler
) -> None:
    """Three sequences of different lengths: lanes move when the first ones end."""
    prompts, lengths = [[1, 2, 3], [4, 5], [6, 7, 8, 1]], [9, 21, 40]
    truths = truths_of(prompts, max(lengths), sampler)
    drafter = synthetic(ShapedDrafter(parents, hidden), Dial.read(dial), truths, VOCAB)
    plan = DraftPlan(3 if parents is WIDE else 1, depth, len(parents))
    found = run(drafter, prompts, lengths, plan, sampler)
    for prompt, length in zip(prompts, lengths, strict=True):
        tokens, steps = found[tuple(prompt)]
        truth = truths[tuple(prompt)]
        assert tokens == list(truth.tokens[:length])
        assert steps == expected_steps(truth, length, Dial.read(dial), depth)


def test_draws_are_those_of_seed_request_and_position() -> None:
    draws = Truth.of(range(4000), 1, 2).draws
    assert draws.tolist() == Truth.of(range(5000), 1, 2).draws[:4000].tolist()
    others = [Truth.of(range(4000), *key).draws for key in ((1, 3), (2, 2))]
    assert all((draws != other).mean() > 0.99 for other in others)
    # of 4000 uniform draws 2800 are below 0.7, with a standard deviation of 29
    assert int((draws < 0.7).sum()) == 2779
    assert (draws.min() >= 0, draws.max() < 1) == (True, True)


def test_real_drafter_is_asked_and_shown_everything() -> None:
    prompts = [[1, 2, 3], [4, 5]]
    real = ShapedDrafter(CHAIN, needs_hidden_states=True)
    truths = truths_of(prompts, 20, Sampler())
    plan = DraftPlan(1, 3, 4)
    asked = run(
        synthetic(real, Dial.read("0.5"), truths, VOCAB), prompts, [20, 20], plan, Sampler()
    )
    steps = sum(len(steps) for _, steps in asked.values())
    drafted = sum(
        len(expected_steps(truths[tuple(prompt)], 20, Dial((0.5,)), 3)) for prompt in prompts
    )
    assert steps == drafted
    # the last token of an answer needs no draft
    assert real.proposed == steps


def test_unknown_prompt_keeps_its_drafts() -> None:
    real = ShapedDrafter(CHAIN)
    plan = DraftPlan(1, 3, 4)
    drafter = synthetic(real, Dial((1.0,)), {}, VOCAB)
    drafter.begin(0, [1, 2], 0)
    request = DraftRequest(0, 4, plan)
    (tree,), (own,) = drafter.propose([request]), real.propose([request])
    assert tree.tokens.tolist() == own.tokens.tolist()


def test_wrong_siblings_stay_different_and_wrong() -> None:
    drafter = synthetic(ShapedDrafter(WIDE), Dial((0.0,)), {}, VOCAB)
    for right in range(VOCAB):
        tokens = np.array([0, 3, 4, 5], np.int64)
        drafter.make_wrong(tokens, [1, 2, 3], right)
        assert right not in tokens[1:]
        assert len({*tokens[1:].tolist()}) == 3


def test_last_step_is_observed_by_those_that_observe_it() -> None:
    truths = truths_of([[1, 2]], 10, Sampler())
    for kind, whole in ((ShapedDrafter, False), (EndObserving, True)):
        drafter = synthetic(kind(CHAIN), Dial((1.0,)), truths, VOCAB)
        assert isinstance(drafter, EndObserver) == whole


# ---- as far as it pays


class Budgeting(ShapedDrafter, Budgeted): ...


COSTS = StepCosts([0, 10, 11, 12, 13, 14, 15], [0, 2, 4, 6, 8], [0, 0, 0, 0, 0])


@pytest.mark.parametrize(("rate", "drafts"), [(0.0, 0), (0.2, 1), (0.6, 2), (0.95, 3)])
def test_chain_is_as_long_as_its_budget_lets_it_become(rate: float, drafts: int) -> None:
    """At 0.1 tokens a second a level, of 3 seconds, has to bring 0.3 tokens, of what was reached
    0.6 each by the estimate before any was judged; a row that is there already, 0.1."""
    drafter = synthetic(Budgeting(CHAIN), Dial((rate,)), {}, VOCAB)
    assert isinstance(drafter, Budgeted)
    drafter.begin(0, [1, 2], 0)
    budget = DraftBudget(AcceptanceEstimate(), COSTS, 0.1, 3)
    plan = DraftPlan(1, 3, 4)
    (tree,) = drafter.propose([DraftRequest(0, 4, plan, budget=budget)])
    assert len(tree) - 1 == drafts
    assert tree.probs is not None
    assert tree.probs.tolist() == pytest.approx([1.0, *[rate] * drafts])
    (whole,) = drafter.propose([DraftRequest(0, 4, plan)])
    assert (len(whole), whole.probs) == (4, None)


def test_trees_do_not_say_how_probable_their_drafts_are() -> None:
    drafter = synthetic(Budgeting(WIDE), Dial((0.5,)), {}, VOCAB, chains=False)
    assert not isinstance(drafter, Budgeted)


@pytest.mark.parametrize("text", ["", "1.1", "-0.1", "0.5:x", "0.5:", "nan"])
def test_what_is_no_probability_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not an acceptance"):
        Dial.read(text)


def test_dial_goes_on_with_its_last_value() -> None:
    dial = Dial.read("0.8:0.6:0.5")
    assert [dial.at(depth) for depth in (1, 2, 3, 4, 9)] == [0.8, 0.6, 0.5, 0.5, 0.5]
    assert str(dial) == "0.8:0.6:0.5"
