"""Accept rules in the loop: tokens of a whole run have their distribution, requests of one batch
have rules of their own, and metrics say which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from edgespec.backends.host import HostStates
from edgespec.runtime.acceptance import rejection
from edgespec.runtime.acceptance.base import AcceptOptions
from edgespec.runtime.acceptance.verify import (
    ACCEPT_RULES,
    EXACT_ACCEPTANCE,
    RejectionAcceptance,
    RelaxedAcceptance,
    TypicalAcceptance,
)
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.block_drafter import BlockTreeDrafter
from edgespec.runtime.drafters.tree_drafter import TreeDrafter
from edgespec.runtime.grammar.guide import Guide
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.sampling.draft_sampler import DraftSampler
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan, DraftTree
from tests.lossless.drafters import ScriptedDrafter
from tests.unit.runtime.acceptance.rules import SUSPICIOUS, V, p_value
from tests.unit.runtime.hash_drafts import VOCAB as DRAFT_VOCAB
from tests.unit.runtime.hash_drafts import WIDTH, blocks_of, levels_of
from tests.unit.runtime.hash_model import GREEDY, VOCAB, begin, decoder_of, logits_after, plainly

PROMPT = [6, 1, 8, 0, 3]
CHAIN = DraftPlan(1, 3, 4)
TEMPERATURE, TOP_K = 0.9, 5
OFFSETS = np.array([0, 0, 0, 1, 1, 1, 2])  # seven of nine tokens can be drafted
RUNS = 450


def run(session: Session, seq: SequenceState) -> list[StepOutput]:
    outputs = [begin(session, seq)]
    while outputs[-1].finish_reason is None:
        ((_, output),) = session.step()
        outputs.append(output)
    return outputs


def tokens_of(outputs: list[StepOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


class EveryOther(Guide):
    """A grammar that allows every other token, others behind each path."""

    def __init__(self) -> None: ...

    def allowed(self, before: Sequence[int]) -> np.ndarray:
        return (np.arange(VOCAB) + sum(before)) % 2 == 0

    def takes(self, before: Sequence[int], token: int) -> bool:
        return bool(self.allowed(before)[token])

    def forced(self, before: Sequence[int], most: int) -> list[int]:
        return []


@cache
def law(path: tuple[int, ...], *, guided: bool = False) -> np.ndarray:
    """[VOCAB]: the probabilities of the token after `path`, from the definition."""
    logits = logits_after(list(enumerate(path))).astype(np.float64) / TEMPERATURE
    if guided:
        logits = np.where(EveryOther().allowed(path), logits, -np.inf)
    p = np.where(logits >= np.sort(logits)[-TOP_K], np.exp(logits), 0)
    return p / p.sum()


def second_and_third(*, guided: bool = False) -> np.ndarray:
    """[VOCAB, VOCAB]: the probabilities of the second and third tokens together."""
    out, prompt = np.zeros((VOCAB, VOCAB)), tuple(PROMPT)
    after = partial(law, guided=guided)
    for first, p in enumerate(after(prompt)):
        for second, q in enumerate(after((*prompt, first)) if p else ()):
            out[second] += p * q * after((*prompt, first, second)) if q else 0
    return out


def pairs(
    acceptance: AcceptOptions, runs: int = RUNS, guide: Guide | None = None
) -> tuple[list[tuple[int, int]], float]:
    """The second and third tokens of many runs, and how many drafts each of them accepted."""
    session = Session(decoder_of(16), TreeDrafter(levels_of(16), OFFSETS))
    found, accepted = [], 0
    for seed in range(runs):
        sampler = Sampler(TEMPERATURE, TOP_K, seed=seed, mask=guide)
        seq = SequenceState(PROMPT, sampler, 3, plan=CHAIN, acceptance=acceptance, guide=guide)
        outputs = run(session, seq)
        _, second, third = tokens_of(outputs)
        found.append((second, third))
        accepted += sum(output.accepted for output in outputs)
    return found, accepted / runs


def chi_square(found: list[tuple[int, int]], *, guided: bool = False) -> float:
    wanted = second_and_third(guided=guided)
    cells = [(a, b) for a in range(VOCAB) for b in range(VOCAB)]
    # `p_value` counts pairs of V tokens: rows and columns that are likely, and one for the rest
    likely = np.argsort(-wanted.sum(1))[: V - 1].tolist()
    place = {token: likely.index(token) if token in likely else V - 1 for token in range(VOCAB)}
    small = np.zeros((V, V))
    for a, b in cells:
        small[place[a], place[b]] += wanted[a, b]
    return p_value([(place[a], place[b]) for a, b in found], small)


def test_runs_with_rejection_have_the_distribution_of_plain_sampling() -> None:
    found, accepted = pairs(RejectionAcceptance())
    assert chi_square(found) > SUSPICIOUS
    _, by_walk = pairs(EXACT_ACCEPTANCE, 200)
    assert accepted > by_walk > 0


def test_wrong_rule_is_seen_in_the_loop_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    found, _ = pairs(RejectionAcceptance())
    assert chi_square(found) < SUSPICIOUS


def test_rejection_under_a_grammar_has_the_distribution_of_plain_sampling() -> None:
    found, accepted = pairs(RejectionAcceptance(), guide=EveryOther())
    assert chi_square(found, guided=True) > SUSPICIOUS
    assert accepted > 0


def test_drawn_drafts_that_are_cut_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the exact rule: drawn from the whole q, and cut where the grammar forbids them."""
    monkeypatch.setattr(DraftSampler, "adjusted", lambda self, row, before: row)
    monkeypatch.setattr(
        Session, "guided", lambda self, seq, tree, forced: seq.guide.cut(tree, seq.tokens)
    )
    found, _ = pairs(RejectionAcceptance(), 3 * RUNS, EveryOther())
    assert chi_square(found, guided=True) < SUSPICIOUS


def test_chain_of_a_block_is_drawn_slot_by_slot_from_what_it_names() -> None:
    states = Observation(0, HostStates(np.ones((4, WIDTH), np.float32)), np.array([1, 2, 3, 4]))
    drawn = Counter[int]()
    for seed in range(400):
        drafter = BlockTreeDrafter(blocks_of(40), 7, 4, OFFSETS)
        drafter.observe([states])
        draws = DraftSampler(Sampler(1.0, seed=seed), [1, 2, 3, 4, 5], VOCAB)
        (tree,) = drafter.propose([DraftRequest(0, 5, BlockPlan(1, 3, 4), draws)])
        assert tree.parents.tolist() == [-1, 0, 1, 2]
        assert tree.drawn_from is not None
        assert tree.drawn_from[0] is None
        for node in range(1, 4):
            q = tree.distribution(node)
            assert q.probs.sum() == pytest.approx(1)
            assert q.ids.tolist() == (np.arange(DRAFT_VOCAB) + OFFSETS).tolist()
        drawn[int(tree.tokens[1])] += 1
    q = tree.distribution(1)
    expected = {int(token): 400 * p for token, p in zip(q.ids, q.probs, strict=True)}
    for token, count in expected.items():
        assert abs(drawn[token] - count) < 5 * np.sqrt(count + 1)


def test_without_a_rule_that_asks_for_it_nothing_is_drawn() -> None:
    seen: list[DraftRequest] = []

    class Watching(ScriptedDrafter):
        def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:  # type: ignore[override]
            seen.extend(requests)
            return super().propose(requests)

    for acceptance, sampler, draws in (
        (EXACT_ACCEPTANCE, Sampler(1.0, seed=1), False),
        (TypicalAcceptance(0.09), Sampler(1.0, seed=1), False),
        (RejectionAcceptance(), GREEDY, False),
        (RejectionAcceptance(), Sampler(1.0, seed=1), True),
    ):
        seen.clear()
        session = Session(decoder_of(64), Watching([(PROMPT, [])], VOCAB, 0))
        run(session, SequenceState(PROMPT, sampler, 6, plan=CHAIN, acceptance=acceptance))
        assert {request.sampler is not None for request in seen} == {draws}


# A batch of requests with a rule each

SAMPLER = Sampler(1.0, seed=8)
BEGIN, END = 1, 2
TASKS = {
    "exact": SequenceState(PROMPT, SAMPLER, 20, plan=CHAIN),
    "plain": SequenceState(PROMPT, SAMPLER, 20, acceptance=TypicalAcceptance(0.5)),
    "greedy": SequenceState(PROMPT, GREEDY, 20, plan=CHAIN, acceptance=RejectionAcceptance()),
    "rejection": SequenceState(PROMPT, SAMPLER, 20, plan=CHAIN, acceptance=RejectionAcceptance()),
    "typical": SequenceState(PROMPT, SAMPLER, 20, plan=CHAIN, acceptance=TypicalAcceptance(0.5)),
    "relaxed": SequenceState(
        PROMPT, GREEDY, 20, plan=CHAIN, acceptance=RelaxedAcceptance(4, 2.0, BEGIN, END)
    ),
}


def alone(task: SequenceState) -> list[int]:
    session = Session(decoder_of(64), TreeDrafter(levels_of(64), OFFSETS))
    return tokens_of(run(session, replace(task)))


def test_each_request_of_a_batch_has_its_own_rule() -> None:
    lanes = len(TASKS)
    session = Session(decoder_of(64, lanes=lanes), TreeDrafter(levels_of(64, lanes), OFFSETS))
    tokens: dict[SequenceState, list[int]] = {}
    for task in TASKS.values():
        seq = replace(task)
        tokens[seq] = begin(session, seq).tokens.copy()
    while session.running:
        for seq, output in session.step():
            tokens[seq] += output.tokens
    found = dict(zip(TASKS, tokens.values(), strict=True))
    assert found == {name: alone(task) for name, task in TASKS.items()}
    assert found["exact"] == found["plain"] == plainly(PROMPT, SAMPLER, 20)[0]
    assert found["greedy"] == plainly(PROMPT, GREEDY, 20)[0]
    assert len({tuple(ids) for ids in found.values()}) == 5


def test_first_token_is_the_rule_s_too() -> None:
    seq = SequenceState(
        PROMPT, Sampler(5.0, seed=2), 2, plan=CHAIN, acceptance=TypicalAcceptance(0.09)
    )
    session = Session(decoder_of(64), ScriptedDrafter([(PROMPT, [])], VOCAB, 0))
    best = int(np.argmax(logits_after(list(enumerate(PROMPT)))))
    assert begin(session, seq).tokens == [best]
    assert plainly(PROMPT, Sampler(5.0, seed=2), 1)[0] != [best]


def test_metrics_say_the_rule_and_what_it_guarantees() -> None:
    metrics = RequestMetrics(
        5, 3, acceptance="typical", acceptance_options={"posterior_threshold": 0.1}, lossless="no"
    )
    assert metrics.to_dict(speculative=True)["acceptance"] == {
        "rule": "typical",
        "lossless": "no",
        "options": {"posterior_threshold": 0.1},
    }
    assert "LOSSY" in metrics.in_words()
    plain = RequestMetrics(5)
    assert plain.to_dict(speculative=True)["acceptance"] == {"rule": "exact", "lossless": "tokens"}
    assert "acceptance" not in plain.to_dict(speculative=False)
    assert set(ACCEPT_RULES) == {"exact", "rejection", "typical", "relaxed"}
