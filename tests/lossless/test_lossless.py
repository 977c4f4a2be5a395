"""The law of the house on real engines: with drafts or without, greedy or sampled, the same tokens
come out.

A difference is allowed only where two candidates tie within 1e-5, as the engine itself counts it;
on these toys none may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import edgespec
from edgespec.backends.ort.native.library import why_missing
from edgespec.backends.ort.recurrent import RecurrentCache
from edgespec.errors import LimitError
from edgespec.prompts import CAPACITY, END_OF_SEQUENCE, MAX_LENGTH
from edgespec.rope import RopeTable
from edgespec.runtime.acceptance.verify import ACCEPT_RULES
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.requests.lossless_check import Replay, first_difference, spelt
from edgespec.runtime.sampling.sampler import NEAR_TIE
from edgespec.runtime.trees.static_tree import NAMED, StaticPlan
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.lossless import answers
from tests.lossless.answers import VOCAB, asked, assert_same, prompt_of
from tests.lossless.drafters import ScriptedDrafter, accept_one_more, rule_row

PLANS = [DraftPlan(1, 3, 4), DraftPlan(4, 3, 16), DraftPlan(10, 4, 40)]
SAMPLINGS = [
    edgespec.SamplingParams(temperature=0.0),
    edgespec.SamplingParams(temperature=0.3, top_k=0, top_p=1.0, seed=1),
    edgespec.SamplingParams(temperature=1.0, top_k=5, top_p=1.0, seed=2),
    edgespec.SamplingParams(temperature=1.0, top_k=50, top_p=0.8, seed=3),
    edgespec.SamplingParams(temperature=2.0, top_k=0, top_p=0.9, seed=4),
]
GREEDY = SAMPLINGS[0]


def name_of(value: object) -> str:
    if isinstance(value, DraftPlan):
        return f"{value.top_k}/{value.steps}/{value.verify_size}"
    return f"t{value.temperature}" if isinstance(value, edgespec.SamplingParams) else str(value)


# Of attention alone, and with recurrent layers; then bases that differ in masks and tables alone:
# how a token is picked hangs on none of that. Fixtures are shared by their place in the list.
KINDS = ["llama", "qwen3_5"]
BASES = [*KINDS, "mistral-window-5", "gemma3-window-5", "phi4-mini"]
of_each_kind = pytest.mark.parametrize("engine", KINDS, indirect=True)


def rows(of_all: list[Any], more: list[Any]) -> list[tuple[Any, ...]]:
    """Those of each base, and more of the first."""
    return [(base, *row) for base in BASES for row in of_all + more * (base == BASES[0])]


@pytest.fixture(scope="module", params=BASES)
def engine(request: pytest.FixtureRequest, pairs: dict[str, Path]) -> Iterator[Engine]:
    with edgespec.load(pairs[request.param]) as opened:
        opened.stop_ids = frozenset()
        yield opened


@pytest.fixture(autouse=True)
def as_it_was(engine: Engine) -> Iterator[None]:
    drafter = engine.session.drafter
    yield
    engine.session.drafter, engine.stop_ids = drafter, frozenset()


def plainly(
    engine: Engine, prompt: list[int], sampling: edgespec.SamplingParams, max_new: int
) -> Response:
    return answers.plainly(engine, prompt, asked(sampling, max_new))


def drafting(
    engine: Engine,
    prompt: list[int],
    sampling: edgespec.SamplingParams,
    max_new: int,
    plan: DraftPlan,
) -> Response:
    return engine.generate(prompt, asked(sampling, max_new), plan)


def script(
    engine: Engine,
    prompt: list[int],
    sampling: edgespec.SamplingParams,
    right: float,
    max_new: int = 48,
) -> None:
    """Plug in a drafter that knows what plain decoding says."""
    truth = plainly(engine, prompt, sampling, max_new).token_ids
    engine.session.drafter = ScriptedDrafter([(prompt, truth)], VOCAB, right)


OF_ALL = [
    (PLANS[0], GREEDY),
    (PLANS[1], SAMPLINGS[3]),
    (PLANS[2], GREEDY),
    (StaticPlan.of(NAMED["mc_sim_7b_25"]), SAMPLINGS[2]),
]
MORE = [(PLANS[1], sampling) for sampling in (*SAMPLINGS[:3], SAMPLINGS[4])]
MORE += [(PLANS[0], SAMPLINGS[3]), (PLANS[2], SAMPLINGS[3])]


@pytest.mark.parametrize(
    ("engine", "plan", "sampling"),
    rows(OF_ALL, MORE),
    indirect=["engine"],
    ids=name_of,
)
def test_eagle_drafts_leave_every_token_as_it_was(
    engine: Engine, plan: DraftPlan, sampling: edgespec.SamplingParams
) -> None:
    for length in (1, 30):
        prompt = prompt_of(length)
        plain = plainly(engine, prompt, sampling, 20)
        drafted = drafting(engine, prompt, sampling, 20, plan)
        assert_same(engine, plain, drafted, sampling)
        assert sum(drafted.metrics.per_step_drafted) > 0


@pytest.mark.parametrize(
    ("engine", "right", "sampling"),
    rows(
        [(0, GREEDY), (0.6, SAMPLINGS[3]), (1, GREEDY)],
        [(0.6, sampling) for sampling in (*SAMPLINGS[:3], SAMPLINGS[4])]
        + [(0, SAMPLINGS[3]), (1, SAMPLINGS[3])],
    ),
    indirect=["engine"],
    ids=name_of,
)
def test_drafter_right_or_wrong_leaves_every_token_as_it_was(
    engine: Engine, right: float, sampling: edgespec.SamplingParams
) -> None:
    plan = DraftPlan(4, 7, 30)  # deeper than the window of five
    for length in (1, 12):
        prompt = prompt_of(length)
        plain = plainly(engine, prompt, sampling, 30)
        script(engine, prompt, sampling, right)
        drafted = drafting(engine, prompt, sampling, 30, plan)
        assert_same(engine, plain, drafted, sampling)
        accepted = drafted.metrics.per_step_accepted
        assert (sum(accepted) > 0) == (right > 0)
        # 29 tokens after prefill's, a bonus each; the last is cut short
        assert right < 1 or accepted == [7, 7, 7, 4]


def test_speculative_run_without_drafts_is_the_plain_one(engine: Engine) -> None:
    prompt = prompt_of(9)
    drafted = drafting(engine, prompt, SAMPLINGS[3], 24, DraftPlan(1, 1, 1))
    assert_same(engine, plainly(engine, prompt, SAMPLINGS[3], 24), drafted, SAMPLINGS[3])
    assert sum(drafted.metrics.per_step_drafted) == 0


@of_each_kind
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLINGS[3]], ids=name_of)
@pytest.mark.parametrize("right", [None, 0.8, 1])
def test_stop_token_ends_both_runs_wherever_it_stands(
    engine: Engine, right: float | None, sampling: edgespec.SamplingParams
) -> None:
    """Each token of the plain run in turn is the end: first of a step, inside an accepted run, as
    the bonus."""
    prompt = prompt_of(7)
    truth = plainly(engine, prompt, sampling, 14).token_ids
    if right is not None:
        script(engine, prompt, sampling, right)
    for stop in dict.fromkeys(truth):
        engine.stop_ids = frozenset({stop})
        plain = plainly(engine, prompt, sampling, 14)
        drafted = drafting(engine, prompt, sampling, 14, PLANS[1])
        assert plain.token_ids == truth[: truth.index(stop) + 1]
        assert plain.finish_reason == END_OF_SEQUENCE
        assert_same(engine, plain, drafted, sampling)


@pytest.mark.parametrize("right", [None, 0.8, 1])
@pytest.mark.parametrize("length", [40, 48])
def test_full_cache_ends_both_runs_at_the_same_token(
    engine: Engine, right: float | None, length: int
) -> None:
    """Capacity 64, so that 25 and 17 tokens are possible; the draft's cache fills up too."""
    prompt = prompt_of(length)
    if right is not None:
        script(engine, prompt, GREEDY, right, max_new=99)
    plain = plainly(engine, prompt, GREEDY, 99)
    drafted = drafting(engine, prompt, GREEDY, 99, PLANS[2])
    assert len(plain.token_ids) == 64 - length + 1
    assert plain.finish_reason == CAPACITY
    assert_same(engine, plain, drafted, GREEDY)


@pytest.mark.parametrize("max_new", [1, 2, 3, 5])
@pytest.mark.parametrize("right", [0.8, 1])
def test_length_limit_is_met_exactly(engine: Engine, max_new: int, right: float) -> None:
    prompt = prompt_of(5)
    script(engine, prompt, GREEDY, right)
    drafted = drafting(engine, prompt, GREEDY, max_new, PLANS[1])
    assert_same(engine, plainly(engine, prompt, GREEDY, max_new), drafted, GREEDY)
    assert (len(drafted.token_ids), drafted.finish_reason) == (max_new, MAX_LENGTH)


@pytest.mark.parametrize("chunk", [1, 7])
def test_prompt_read_in_chunks_leaves_every_token_as_it_was(
    engine: Engine, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts too: were the last feature of a chunk paired with the wrong token, they would be
    others."""
    prompt = prompt_of(23)
    whole = drafting(engine, prompt, GREEDY, 24, PLANS[2])
    monkeypatch.setattr(CachedDecoder, "prefill_chunk", chunk)
    parts = drafting(engine, prompt, GREEDY, 24, PLANS[2])
    assert_same(engine, plainly(engine, prompt, GREEDY, 24), parts, GREEDY)
    assert parts.metrics.per_step_accepted == whole.metrics.per_step_accepted


def test_requests_one_after_the_other_do_not_touch_each_other(engine: Engine) -> None:
    prompts = [prompt_of(20, seed) for seed in range(3)]
    first = [drafting(engine, prompt, GREEDY, 12, PLANS[1]).token_ids for prompt in prompts]
    again = [
        drafting(engine, prompt, GREEDY, 12, PLANS[1]).token_ids for prompt in reversed(prompts)
    ]
    assert again == first[::-1]
    assert len({tuple(tokens) for tokens in first}) == 3


def test_seed_decides_a_sampled_answer_and_is_told_where_it_was_drawn(engine: Engine) -> None:
    prompt, free = (
        prompt_of(9),
        edgespec.SamplingParams(temperature=1.5, top_k=0, top_p=1.0, max_generate_length=20),
    )
    one, other = engine.generate(prompt, free), engine.generate(prompt, free)
    assert one.token_ids != other.token_ids
    repeated = edgespec.SamplingParams(1.5, 1.0, 0, one.seed, 20)
    assert engine.plainly(prompt, repeated).token_ids == one.token_ids
    assert engine.generate(prompt, asked(GREEDY, 4)).seed is None


def test_recurrent_layers_are_exact_on_our_own_kernels_alone(
    pairs: dict[str, Path], engine: Engine
) -> None:
    native = why_missing() is None
    assert (engine.rounding > NEAR_TIE) == (engine.base.recurrent and not native)
    if native:
        with edgespec.load(pairs["qwen3_5"], exact=True) as exact:
            assert exact.rounding == 0
    else:
        with pytest.raises(LimitError, match="recurrent layers"):
            edgespec.load(pairs["qwen3_5"], exact=True)


# The comparison can see


@pytest.mark.parametrize("reused", [0, 7])
@pytest.mark.parametrize("index", [0, 1, 17])
def test_computing_the_tokens_again_gives_the_logits_of_the_prompt(
    engine: Engine, index: int, reused: int
) -> None:
    """In calls of one row, of the steps' sizes and of others: all agree to the last digits, so that
    in float32 nothing but a near-tie is ever explained."""
    prompt = prompt_of(12)
    script(engine, prompt, GREEDY, 0.7)
    drafted = drafting(engine, prompt, GREEDY, 24, DraftPlan(4, 4, 20))
    drafted.metrics.reused_tokens = reused
    wanted = engine.next_logits([*prompt, *drafted.token_ids[:index]])
    replay = Replay.of(engine, drafted, index, 1)
    rows = [call.rows for call in replay.as_verified()]
    assert sum(call.kept for call in replay.as_verified()) == index
    assert not index or max(rows) > 1
    found = list(replay.logits())
    assert len(found) == 6
    for logits in found:
        np.testing.assert_allclose(logits, wanted, atol=2e-5 * np.abs(wanted).max())
    assert [lane.length for lane in engine.base.lanes] == [0] * len(engine.base.lanes)


def one_too_far(table: RopeTable, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A planted bug of many rows alone: those behind the first of a call stand one further."""
    return RIGHT_ROWS(table, positions + (np.arange(positions.shape[-1]) > 0))


RIGHT_ROWS = RopeTable.rows


def test_tokens_are_spelt_in_one_line(engine: Engine) -> None:
    by_bytes = {engine.tokenizer.token_bytes(token): token for token in range(VOCAB)}
    assert spelt(engine.tokenizer, by_bytes[b"\n"]) == '"\\n"'
    assert spelt(engine.tokenizer, by_bytes[b"a"]) == '"a"'
    assert all(len(spelt(engine.tokenizer, token).splitlines()) == 1 for token in range(VOCAB))


def test_rounding_that_is_none_explains_nothing(engine: Engine) -> None:
    """Were whatever one row and many rows differ by taken for rounding, this would be explained."""
    prompt = prompt_of(9)
    plain = plainly(engine, prompt, GREEDY, 40)
    script(engine, prompt, GREEDY, 0.8)
    drafted = drafting(engine, prompt, GREEDY, 40, DraftPlan(4, 4, 20))
    other = drafted.token_ids[20] ^ 1
    ids = [*drafted.token_ids[:20], other, *drafted.token_ids[21:]]
    with mock.patch.object(RopeTable, "rows", one_too_far):
        difference = first_difference(engine, plain, replace(drafted, token_ids=ids), GREEDY)
    assert difference is not None
    assert difference.index == 20
    assert not difference.explained
    assert difference.rounding > difference.bound
    assert "beyond the" in difference.words


def commit_without_moving(decoder: CachedDecoder, lane: int, path: np.ndarray) -> None:
    decoder.lanes[lane].length += len(path)
    decoder.drop_scratch(lane)


PLANTED = {
    "verify accepts one token too many": mock.patch.dict(
        ACCEPT_RULES, exact=rule_row(accept_one_more)
    ),
    "commit moves no rows": mock.patch.object(CachedDecoder, "commit", commit_without_moving),
    "nodes see their siblings": mock.patch.object(
        DraftTree, "mask", property(lambda t: np.tri(len(t), dtype=bool))
    ),
    "nodes stand one behind the other": mock.patch.object(
        DraftTree, "depths", property(lambda t: np.arange(len(t)))
    ),
}


def keep_rejected_rows(cache: RecurrentCache, lane: int, path: np.ndarray) -> None:
    """The state takes in as many rows as were accepted, whichever these were."""
    RIGHTLY_KEPT(cache, lane, np.arange(len(path)))


RIGHTLY_KEPT = RecurrentCache.keep
PLANTED_IN_HYBRIDS = {
    "nodes see their siblings": PLANTED["nodes see their siblings"],
    "verify accepts one token too many": PLANTED["verify accepts one token too many"],
    "the state takes in rejected rows": mock.patch.object(
        RecurrentCache, "keep", keep_rejected_rows
    ),
}


PLANTED_IN = {base: PLANTED_IN_HYBRIDS if base == "qwen3_5" else PLANTED for base in BASES}


@pytest.mark.parametrize(
    ("engine", "bug"),
    [(base, bug) for base, planted in PLANTED_IN.items() for bug in planted],
    indirect=["engine"],
)
def test_planted_bug_is_found_and_rounding_does_not_explain_it(engine: Engine, bug: str) -> None:
    prompt = prompt_of(9)
    plain = plainly(engine, prompt, GREEDY, 40)
    script(engine, prompt, GREEDY, 0.8)
    with (PLANTED | PLANTED_IN_HYBRIDS)[bug]:
        drafted = drafting(engine, prompt, GREEDY, 40, DraftPlan(4, 4, 20))
        # With the bug still there: it must not explain itself
        difference = first_difference(engine, plain, drafted, GREEDY)
    assert difference is not None
    assert not difference.explained
    assert plain.token_ids[: difference.index] == drafted.token_ids[: difference.index]
    assert (difference.plain, difference.speculative) == (
        plain.token_ids[difference.index],
        drafted.token_ids[difference.index],
    )
