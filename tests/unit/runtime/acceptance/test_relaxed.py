"""Relaxed acceptance: within thoughts a draft near the best token is accepted, outside of them
nothing is that sample and walk would not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgespec.backends.host import HostLogits
from edgespec.errors import OptionError
from edgespec.runtime.acceptance import relaxed
from edgespec.runtime.acceptance.relaxed import RelaxedAcceptance
from edgespec.runtime.acceptance.verify import AcceptResult, walk
from edgespec.runtime.sampling.sampler import Sampler
from tests.unit.runtime.acceptance.rules import tree

BEGIN, END, VOCAB = 90, 91, 100
OPTIONS = RelaxedAcceptance(3, 0.5, BEGIN, END)
THINKING, DONE, NEVER = [1, BEGIN, 5], [1, BEGIN, 5, END, 6], [1, 5]


def preferring(*best: int, gap: float = 0.2) -> np.ndarray:
    """Logits [V] in which each of `best` is `gap` below the one before it, and the rest far
    below."""
    row = np.full(VOCAB, -9, np.float32)
    row[list(best)] = 5 - gap * np.arange(len(best))
    return row


def accepted(
    tokens: list[int],
    rows: list[np.ndarray],
    before: list[int],
    options: RelaxedAcceptance = OPTIONS,
    sampler: Sampler = Sampler(),  # noqa: B008 (frozen)
) -> AcceptResult:
    """What is accepted of a chain."""
    chain = tree([before[-1], *tokens], [*range(-1, len(tokens))])
    return relaxed.accept(chain, HostLogits(np.stack(rows)), sampler, before, options)


CHAIN = [8, 12]
ROWS = [preferring(7, 8), preferring(11, 12), preferring(20)]


def test_draft_near_the_best_token_is_accepted_within_thoughts_alone() -> None:
    assert accepted(CHAIN, ROWS, THINKING) == AcceptResult([0, 1, 2], [8, 12, 20])
    for before in (DONE, NEVER):
        assert accepted(CHAIN, ROWS, before) == AcceptResult([0], [7])


@pytest.mark.parametrize(
    ("rank", "gap", "stands"),
    [(1, 0.5, True), (1, 0.51, False), (2, 0.25, True), (2, 0.3, False), (3, 0.1, False)],
)
def test_both_the_rank_and_the_difference_of_log_probabilities_count(
    rank: int, gap: float, stands: bool
) -> None:
    best = [7, 8, 9, 10]
    row = preferring(*best, gap=gap)
    log_p = torch.from_numpy(row).log_softmax(0)
    assert float(log_p[7] - log_p[best[rank]]) == pytest.approx(rank * gap, abs=1e-5)
    found = accepted([best[rank]], [row, ROWS[2]], THINKING)
    assert found == (AcceptResult([0, 1], [best[rank], 20]) if stands else AcceptResult([0], [7]))


def test_thoughts_that_end_within_a_step_relax_nothing_behind_them() -> None:
    rows = [preferring(END), preferring(11, 12), preferring(20)]
    assert accepted([END, 12], rows, THINKING) == AcceptResult([0, 1], [END, 11])
    rows = [preferring(BEGIN), preferring(11, 12), preferring(20)]
    assert accepted([BEGIN, 12], rows, NEVER) == AcceptResult([0, 1, 2], [BEGIN, 12, 20])


def test_of_several_children_the_drawn_one_goes_first_then_the_nearest() -> None:
    before = THINKING
    rows = [preferring(7, 8, 9), preferring(11), preferring(12), preferring(13)]
    for tokens, wanted in (([9, 7, 8], 7), ([9, 8, 30], 8), ([9, 30, 31], 9)):
        drafted = tree([before[-1], *tokens], [-1, 0, 0, 0])
        found = relaxed.accept(drafted, HostLogits(np.stack(rows)), Sampler(), before, OPTIONS)
        assert found.emitted[0] == wanted


@given(st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_topk_1_and_outside_of_thoughts_it_is_sample_and_walk(
    seed: int, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    rows = HostLogits(rng.normal(0, 1, (4, VOCAB)).astype(np.float32))
    chain = tree([5, *rng.permutation(VOCAB)[:3].tolist()], [-1, 0, 1, 2])
    sampler = Sampler(temperature, seed=seed)
    plain = walk(chain, rows, sampler, THINKING)
    strict = replace(OPTIONS, relaxed_topk=1)
    if temperature == 0:
        assert relaxed.accept(chain, rows, sampler, THINKING, strict) == plain
    outside = walk(chain, rows, sampler, DONE)
    assert relaxed.accept(chain, rows, sampler, DONE, OPTIONS) == outside


def test_sampled_request_gets_no_token_that_its_top_k_removes() -> None:
    sampler = Sampler(1.0, top_k=1, seed=4)
    assert accepted([8], ROWS[:2], THINKING, sampler=sampler) == AcceptResult([0], [7])
    assert accepted([8], ROWS[:2], THINKING).path == [0, 1]


class Vocabulary:
    def __init__(self, **ids: int) -> None:
        self.ids = {name.replace("_", "/"): token for name, token in ids.items()}

    def token_id(self, token: str) -> int | None:
        return self.ids.get(token.strip("<>"))

    def token(self, token_id: int) -> str | None:
        return next((name for name, known in self.ids.items() if known == token_id), None)


def test_tokens_of_the_thoughts_are_the_model_s_own() -> None:
    found = RelaxedAcceptance().for_model(Vocabulary(think=3, _think=4))
    assert (found.begin_thinking_phase_token, found.end_thinking_phase_token) == (3, 4)
    assert OPTIONS.for_model(Vocabulary(think=3, _think=4, begin=BEGIN, end=END)) == OPTIONS
    with pytest.raises(OptionError, match="no tokens that begin and end them"):
        RelaxedAcceptance().for_model(Vocabulary(think=3))


def test_tokens_of_the_thoughts_may_be_named_as_the_tokenizer_writes_them() -> None:
    tokens = Vocabulary(reason=5, _reason=6)
    found = RelaxedAcceptance(10, 0.6, "<reason>", 6).for_model(tokens)
    assert (found.begin_thinking_phase_token, found.end_thinking_phase_token) == (5, 6)
    with pytest.raises(OptionError, match="no token '<other>'"):
        RelaxedAcceptance(10, 0.6, "<reason>", "<other>").for_model(tokens)
    with pytest.raises(OptionError, match="no token 7"):
        RelaxedAcceptance(10, 0.6, 5, 7).for_model(tokens)


@pytest.mark.parametrize(
    "values",
    [
        {"relaxed_topk": 0},
        {"relaxed_topk": 2.5},
        {"relaxed_topk": True},
        {"relaxed_delta": -0.1},
        {"relaxed_delta": float("inf")},
        {"relaxed_delta": 10**350},
        {"relaxed_topk": -(10**20)},
        {"begin_thinking_phase_token": 3},
        {"end_thinking_phase_token": "3"},
        {"begin_thinking_phase_token": -1, "end_thinking_phase_token": 3},
        {"begin_thinking_phase_token": 3, "end_thinking_phase_token": ""},
        {"begin_thinking_phase_token": True, "end_thinking_phase_token": 3},
    ],
)
def test_option_that_cannot_be_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="of relaxed acceptance is"):
        RelaxedAcceptance(**values)  # type: ignore[arg-type]
