"""Batches on real engines: each sequence gets what it gets alone, and plain, on an engine for one.

The two engines share no attention kernel. The mixtures are of plain sequences, chains and trees,
greedy and sampled, with more of them than lanes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from edgespec.backends.base import Table
from edgespec.backends.call import Attention, Call, Logits, Result
from edgespec.backends.masks import attention_mask
from edgespec.backends.ort import runner as runner_module
from edgespec.backends.ort.cache import KvCache
from edgespec.backends.ort.native.library import why_missing
from edgespec.backends.ort.options import FP32, WeightFormat
from edgespec.backends.ort.visibility import Visibility, visibility
from edgespec.errors import EdgeSpecError, EnvironmentProblem
from edgespec.prompts import CANCELLED, END_OF_SEQUENCE, SamplingParams
from edgespec.prompts import CAPACITY as FULL
from edgespec.rope import RopeTable
from edgespec.runtime.drafters.base import DraftRequest
from edgespec.runtime.drafters.tree_drafter import TreeDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.loop.generation import GenerationRequest, Response
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.requests.lossless_check import first_difference
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.lossless.answers import (
    VOCAB,
    assert_as_alone,
    outcomes,
    plainly,
    prompt_of,
    served,
)
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.engineless import assert_same_beside_a_draft
from tests.lossless.engines import LANES, Engines, make_engines, opened
from tests.lossless.pairs import Family

CAPACITY = 64
PLANS = [None, DraftPlan(1, 3, 4), DraftPlan(4, 3, 16), DraftPlan(10, 4, 40)]
GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=0.9, seed=5)
SAMPLINGS = [GREEDY, SAMPLED, SamplingParams(0.7, 1.0, 20, 6, repetition_penalty=1.3), GREEDY]
ON_FALL_BACK = "llama-onnxruntime"
OPTIONS = {
    ON_FALL_BACK: FP32,
    "llama-fp16-cache": WeightFormat(kernels="native", kv_cache_dtype="fp16"),
    "mistral-window-5-int8": WeightFormat("int4", 32, kernels="native", kv_cache_dtype="int8"),
}
KIND: dict[str, tuple[Family, int | None]] = {
    "llama": ("llama", None),
    "qwen3_5": ("qwen3_5", None),
    ON_FALL_BACK: ("llama", None),
    "llama-fp16-cache": ("llama", None),
    "mistral-window-5-int8": ("mistral", 5),
    "mistral-window-5": ("mistral", 5),
    "gemma3-window-5": ("gemma3", 5),
}
# For who comes and who goes, which hangs on no mask and no kernel: of attention alone, and with
# recurrent layers. These stand first: fixtures are shared by their place in the list.
of_each_kind = pytest.mark.parametrize("engines", ["llama", "qwen3_5"], indirect=True)


# Caches and windows that others have too
LIKE_OTHERS = ("llama-fp16-cache", "mistral-window-5")


def kinds(*deep: str) -> list[Any]:
    """Those that this installation has kernels for."""
    own = [kind for kind, options in OPTIONS.items() if options.kernels == "native"]
    return [
        pytest.param(kind, marks=pytest.mark.deep) if kind in deep else kind
        for kind in KIND
        if why_missing() is None or kind not in own
    ]


@pytest.fixture(scope="module", params=kinds(*LIKE_OTHERS))
def engines(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    family, window = KIND[request.param]
    options = OPTIONS.get(request.param)
    path = tmp_path_factory.mktemp("batches")
    with opened(make_engines(path, family, sliding_window=window, options=options)) as pair:
        yield pair


@pytest.fixture(autouse=True)
def as_they_were(engines: Engines) -> Iterator[None]:
    stop_ids = engines.four.stop_ids
    for engine in (engines.one, engines.four):
        engine.stop_ids = frozenset()
        engine.forget_prefixes()
    yield
    for engine in (engines.one, engines.four):
        engine.stop_ids, engine.session.drafter = stop_ids, engine.drafter


def job(
    length: int, max_new: int, plan: DraftPlan | None = None, sampling: SamplingParams = GREEDY
) -> GenerationRequest:
    return GenerationRequest(
        prompt_of(length), replace(sampling, max_generate_length=max_new), plan
    )


def mixture() -> list[GenerationRequest]:
    """Twelve: each plan with each kind of sampling, of lengths that let them end at different
    times."""
    lengths = [
        (1, 9),
        (30, 22),
        (12, 30),
        (5, 1),
        (22, 5),
        (3, 16),
        (17, 27),
        (9, 12),
        (40, 20),
        (2, 30),
        (33, 3),
        (6, 8),
    ]
    return [
        job(n, new, PLANS[i % 4], SAMPLINGS[(i + i // 4) % 4]) for i, (n, new) in enumerate(lengths)
    ]


def again(jobs: Sequence[GenerationRequest]) -> list[GenerationRequest]:
    return [replace(one) for one in jobs]


def alone(engines: Engines, one: GenerationRequest) -> Response:
    return plainly(engines.one, one.prompt_ids, one.sampling)


def script(engines: Engines, jobs: Sequence[GenerationRequest], right: float | None) -> None:
    """Plug in a drafter that knows what each of them says alone; None leaves the engine's own. One
    that is there already learns it: what it kept of a prefix serves it alone."""
    if right is None:
        return
    session = engines.four.session
    drafter = ScriptedDrafter(
        [(one.prompt_ids, alone(engines, one).token_ids) for one in jobs], VOCAB, right
    )
    if isinstance(session.drafter, ScriptedDrafter):
        session.drafter.scripts, session.drafter.right = drafter.scripts, right
    else:
        session.drafter = drafter


@pytest.mark.parametrize("right", [None, pytest.param(0, marks=pytest.mark.deep), 0.8])
def test_mixture_gives_each_what_it_gets_alone(engines: Engines, right: float | None) -> None:
    jobs = mixture()
    script(engines, jobs, right)
    with mock.patch.object(
        CachedDecoder, "run", autospec=True, side_effect=CachedDecoder.run
    ) as run:
        found = served(engines.four, jobs)
    assert_as_alone(engines.one, jobs, found)
    accepted = sum(sum(one.metrics.per_step_accepted) for one in found)
    assert right is None or (accepted > 0) == (right > 0)
    assert max(len(call.args[1]) for call in run.mock_calls) == LANES


@of_each_kind
@pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.deep), 3])
def test_smaller_batches_of_the_same_engine_give_the_same(engines: Engines, lanes: int) -> None:
    jobs = mixture()[:7]
    assert_as_alone(engines.one, jobs, served(engines.four, jobs, lanes))


@of_each_kind
@pytest.mark.parametrize("right", [None, 0.8])
def test_stop_token_of_one_ends_one(engines: Engines, right: float | None) -> None:
    jobs = [
        job(n, 24, plan, s)
        for n, plan, s in zip((4, 8, 15, 21, 9), [*PLANS, None], [*SAMPLINGS, SAMPLED], strict=True)
    ]
    script(engines, jobs, right)
    third = alone(engines, jobs[2]).token_ids
    for engine in (engines.one, engines.four):
        engine.stop_ids = frozenset({third[5]})
    found = served(engines.four, jobs)
    assert_as_alone(engines.one, jobs, found)
    assert found[2].finish_reason == END_OF_SEQUENCE
    assert found[2].token_ids == third[: third.index(third[5]) + 1]


@of_each_kind
@pytest.mark.parametrize(("plan", "right"), [(PLANS[1], 0.8), (PLANS[3], None)])
def test_full_cache_ends_one_and_its_mates_go_on(
    engines: Engines, plan: DraftPlan, right: float | None
) -> None:
    """Its mates' trees are wide to the last: the rows by which it is padded lie behind its
    capacity."""
    full = job(45, 99, plan)
    jobs = [job(3, 40, PLANS[3], SAMPLED), full, job(11, 40, PLANS[2]), job(7, 40, None, SAMPLED)]
    script(engines, jobs, right)
    found = served(engines.four, jobs)
    assert_as_alone(engines.one, jobs, found)
    assert (len(found[1].token_ids), found[1].finish_reason) == (CAPACITY - 45 + 1, FULL)


def test_all_caches_full_at_once(engines: Engines) -> None:
    jobs = [job(n, 99, plan) for n, plan in zip((48, 47, 46, 45), PLANS, strict=True)]
    script(engines, jobs, 0.9)
    found = served(engines.four, jobs)
    assert_as_alone(engines.one, jobs, found)
    assert [len(one.token_ids) for one in found] == [17, 18, 19, 20]


# ---- who runs where


def test_last_one_takes_the_place_of_who_ends_and_who_waits_the_place_behind(
    engines: Engines,
) -> None:
    jobs = [job(2, 3), job(3, 9), job(4, 6), job(5, 9), job(6, 4)]
    seen: list[list[int]] = []
    real = Session.step

    def step(self: Session) -> list[tuple[SequenceState, StepOutput]]:
        assert [seq.lane for seq in self.running] == list(range(len(self.running)))
        seen.append([len(seq.prompt) for seq in self.running])
        return real(self)

    with mock.patch.object(Session, "step", step):
        found = served(engines.four, jobs)
    assert seen == [[2, 3, 4, 5]] * 2 + [[5, 3, 4, 6]] * 3 + [[5, 3]] * 3
    assert [one.slot for one in found] == [0, 1, 2, 3, 3]
    assert_as_alone(engines.one, jobs, found)


@pytest.mark.parametrize("plan", [None, PLANS[2]])
def test_rows_kept_of_one_lane_serve_another(engines: Engines, plan: DraftPlan | None) -> None:
    head = prompt_of(20)
    jobs = [
        GenerationRequest([*head, tail, 9], replace(SAMPLED, max_generate_length=12), plan, keep=20)
        for tail in (3, 4, 5, 6, 7)
    ]
    found = served(engines.four, jobs)
    assert_as_alone(engines.one, jobs, found)
    reused = [one.metrics.reused_tokens for one in found]
    # A draft's row pairs a position with the token after it, so it has one fewer; a state is taken
    # whole or not at all
    assert reused == [0] + [20 if plan is None or engines.four.base.recurrent else 19] * 4


@pytest.mark.parametrize("plan", [None, DraftPlan(1, 4, 5)])
def test_next_turn_reads_only_what_is_new(engines: Engines, plan: DraftPlan | None) -> None:
    first = job(11, 12, plan)
    script(engines, [first], right=1)
    (found,) = served(engines.four, [replace(first, keep_all=True)])
    assert plan is None or max(found.metrics.per_step_accepted) > 0
    follow_up = GenerationRequest(
        [*first.prompt_ids, *found.token_ids, 7, 8], replace(GREEDY, max_generate_length=9), plan
    )
    script(engines, [follow_up], right=1)
    (answer,) = served(engines.four, [follow_up])
    assert_as_alone(engines.one, [follow_up], [answer])
    assert answer.metrics.reused_tokens >= 11 + 12 - 1 - (0 if engines.four.base.recurrent else 5)


@pytest.mark.parametrize("plan", [None, DraftPlan(1, 4, 5)])
@pytest.mark.parametrize("index", [2, 4])
def test_conversation_goes_on_after_a_stop_within_what_was_accepted(
    engines: Engines, index: int, plan: DraftPlan | None
) -> None:
    """Rows behind the stop were accepted and are not part of the text; all before them is kept."""
    first = job(11, 12, DraftPlan(1, 4, 5))
    script(engines, [first], right=1)
    truth = alone(engines, first).token_ids
    for engine in (engines.one, engines.four):
        engine.stop_ids = frozenset({truth[index]})
    (found,) = served(engines.four, [replace(first, keep_all=True)])
    end = truth.index(truth[index]) + 1
    assert found.token_ids == truth[:end]
    for engine in (engines.one, engines.four):
        engine.stop_ids = frozenset()
    follow_up = GenerationRequest(
        [*first.prompt_ids, *truth[:end], 7, 8], replace(GREEDY, max_generate_length=9), plan
    )
    script(engines, [follow_up], right=1)
    (answer,) = served(engines.four, [follow_up])
    assert_as_alone(engines.one, [follow_up], [answer])
    assert answer.metrics.reused_tokens == 11 + end - 1 - (
        plan is not None and not engines.four.base.recurrent
    )


class Spoilt:
    """An embedding with a row that is no number."""

    def __init__(self, table: Table, token: int) -> None:
        self.table, self.token = table, token

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        rows = self.table.rows(tokens).copy()
        rows[tokens == self.token] = np.nan
        return rows


@pytest.mark.parametrize("place", ["prompt", "answer"])
def test_what_is_no_number_harms_no_later_request(engines: Engines, place: str) -> None:
    """Four lanes, each of which had one; kernels that multiply before they mask would spread it."""
    first = job(9, 12, PLANS[2])
    truth = alone(engines, first).token_ids
    spoilt = first.prompt_ids[4] if place == "prompt" else truth[5]
    bad = [replace(first, prompt_ids=[*first.prompt_ids]) for _ in range(LANES)]
    good = [job(n, 12, PLANS[n % 4]) for n in (4, 5, 6, 7, 8, 10)]
    for decoder in (engines.four.base, engines.four.drafter.decoder):
        decoder.embedding = Spoilt(decoder.embedding, spoilt)
    try:
        failed = outcomes(engines.four, bad)
    finally:
        for decoder in (engines.four.base, engines.four.drafter.decoder):
            decoder.embedding = decoder.embedding.table
    assert all(isinstance(one, EdgeSpecError) for one in failed)
    found = served(engines.four, good)
    assert_as_alone(engines.one, good, found)
    assert [one.metrics.per_step_accepted for one in found] == [
        one.metrics.per_step_accepted for one in served(engines.four, again(good))
    ]


def test_logits_behind_a_long_text_are_computed_as_a_prompt(engines: Engines) -> None:
    text = prompt_of(48)
    sizes = []
    real = CachedDecoder.run

    def run(self: CachedDecoder, parts: Sequence[DecoderRows]) -> list[Result]:
        sizes.append(len(parts[0].tokens))
        return real(self, parts)

    with (
        mock.patch.object(CachedDecoder, "prefill_chunk", 16),
        mock.patch.object(CachedDecoder, "run", run),
    ):
        logits = engines.one.next_logits(text).copy()
    assert max(sizes) == 16
    assert (
        int(logits.argmax())
        == engines.one.plainly(text, replace(GREEDY, max_generate_length=1)).token_ids[0]
    )


@of_each_kind
def test_one_that_is_cancelled_leaves_its_mates_as_they_were(engines: Engines) -> None:
    jobs = [job(n, 20, PLANS[n % 4], SAMPLED) for n in (4, 5, 6, 7, 8)]
    found: dict[GenerationRequest, Response] = {}
    scheduler = engines.four.scheduler
    handles = [scheduler.add(one) for one in jobs]
    while scheduler.has_work:
        for handle, event in scheduler.step():
            if handle is handles[1]:
                handle.cancel()
            if isinstance(event, Response):
                found[handle.request] = event
    assert found[jobs[1]].finish_reason == CANCELLED
    assert (
        found[jobs[1]].token_ids
        == alone(engines, jobs[1]).token_ids[: len(found[jobs[1]].token_ids)]
    )
    others = [one for one in jobs if one is not jobs[1]]
    assert_as_alone(engines.one, others, [found[one] for one in others])


@of_each_kind
def test_one_that_fails_leaves_its_mates_as_they_were(engines: Engines) -> None:
    jobs = [job(n, 20, PLANS[n % 4]) for n in (4, 5, 6, 7, 8)]
    real = Sampler.pick_from

    def pick(self: Sampler, logits: Logits, row: int, before: Sequence[int]) -> int:
        if list(before[:5]) == list(jobs[1].prompt_ids) and len(before) > 8:
            raise EnvironmentProblem("the engine computed nan as a logit")
        return real(self, logits, row, before)

    with mock.patch.object(Sampler, "pick_from", pick):
        found = outcomes(engines.four, jobs)
    assert isinstance(found.pop(1), EnvironmentProblem)
    assert_as_alone(engines.one, [*jobs[:1], *jobs[2:]], found)


def test_engine_that_fails_once_fails_the_batch_and_not_what_waits(engines: Engines) -> None:
    jobs = [job(n, 12, PLANS[n % 4]) for n in range(2, 9)]
    real, calls = CachedDecoder.run, 0

    def run(self: CachedDecoder, parts: Sequence[DecoderRows]) -> list[Result]:
        nonlocal calls
        calls += self is engines.four.base
        if calls == LANES + 3:  # after the prompts
            calls += 1
            raise MemoryError
        return real(self, parts)

    with mock.patch.object(CachedDecoder, "run", run):
        found = outcomes(engines.four, jobs)
    assert [isinstance(one, EnvironmentProblem) for one in found] == [True] * LANES + [False] * 3
    assert_as_alone(engines.one, jobs[LANES:], found[LANES:])


# ---- drafts: what equal outputs do not show


def drafted(
    engine: Engine, jobs: Sequence[GenerationRequest], lanes: int
) -> dict[tuple[int, ...], list[list[int]]]:
    """Each prompt's trees in turn, as tokens and parents."""
    found: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    real = TreeDrafter.propose

    def propose(self: TreeDrafter, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        trees = real(self, requests)
        for request, tree in zip(requests, trees, strict=True):
            seqs = {seq.lane: seq for seq in engine.session.running}
            prompt = tuple(seqs[request.lane].prompt)
            found[prompt].append([*tree.tokens.tolist(), *tree.parents.tolist()])
        return trees

    with mock.patch.object(TreeDrafter, "propose", propose):
        served(engine, jobs, lanes)
    return dict(found)


def test_trees_in_a_batch_are_those_that_are_grown_alone(engines: Engines) -> None:
    jobs = mixture()
    assert drafted(engines.four, jobs, LANES) == drafted(engines.one, again(jobs), 1)


def stay(drafter: TreeDrafter, source: int, target: int) -> None:
    drafter.decoder.move(source, target)
    drafter.lanes[target] = copy(drafter.lanes[1])


def test_draft_that_does_not_move_with_its_sequence_is_found(engines: Engines) -> None:
    jobs = [job(n, new, PLANS[2]) for n, new in ((3, 3), (4, 12), (5, 12), (6, 12))]
    with mock.patch.object(TreeDrafter, "move", stay):
        in_a_batch = drafted(engines.four, jobs, LANES)
    assert in_a_batch != drafted(engines.one, again(jobs), 1)


# ---- the comparison can see

run, rows_of, moved_rows = CachedDecoder.run, RopeTable.rows, KvCache.move_rows


def padding_seen(call: Call, attention: Attention, out: np.ndarray) -> np.ndarray:
    attention_mask(call, attention, out)
    for lane_mask, lane, start in zip(out[:, 0], attention.lanes, call.write_indices, strict=True):
        count = len(lane.visible)
        lane_mask[:count, start + count : start + call.rows] = True
    return out


def mask_of_the_next(call: Call, attention: Attention, out: np.ndarray) -> np.ndarray:
    out[:] = np.roll(attention_mask(call, attention, out), 1, axis=0)
    return out


def filling_seen(call: Call, attention: Attention) -> Visibility:
    seen = visibility(call, attention)
    wide = np.pad(seen.visible, ((0, 0), (0, 0), (0, call.rows)))
    for own, lane, start in zip(wide, attention.lanes, call.write_indices, strict=True):
        count, behind = len(lane.visible), start - lane.length
        own[:count, behind + count : behind + call.rows] = True
    return replace(seen, visible=wide)


def seen_by_the_next(call: Call, attention: Attention) -> Visibility:
    seen = visibility(call, attention)
    return Visibility(*(np.roll(of, 1, axis=0) for of in (seen.lengths, seen.visible, seen.first)))


def positions_of_the_next(self: RopeTable, positions: np.ndarray) -> Any:
    return rows_of(self, np.roll(positions, 1, axis=0) if positions.ndim > 1 else positions)


def results_of_the_next(self: CachedDecoder, parts: Sequence[DecoderRows]) -> list[Result]:
    found = run(self, parts)
    widths = {len(one.logits) for one in found}
    return [*found[1:], found[0]] if len(widths) == 1 else found


def nothing_copied(self: KvCache, source: int, target: int, count: int) -> None:
    self.reserve(target, [0], count, count)


def copied_the_wrong_way(self: KvCache, source: int, target: int, count: int) -> None:
    self.reserve(target, [0], count, count)
    self.slab[:, source, :, :count] = self.slab[:, target, :, :count]


def nothing_restrided(self: KvCache, stride: int) -> None:
    self.stride = stride


def rows_beside(self: KvCache, lane: int, slots: np.ndarray, start: int) -> None:
    moved_rows(self, lane, np.maximum(slots - 1, start), start)


PLANTED: dict[str, Callable[[], Any]] = {
    "rows that only fill up are seen": lambda: mock.patch.multiple(
        runner_module, attention_mask=padding_seen, visibility=filling_seen
    ),
    "masks are the next lane's": lambda: mock.patch.multiple(
        runner_module, attention_mask=mask_of_the_next, visibility=seen_by_the_next
    ),
    "rows are kept of other nodes": lambda: mock.patch.object(KvCache, "move_rows", rows_beside),
    "positions are the next lane's": lambda: mock.patch.object(
        RopeTable, "rows", positions_of_the_next
    ),
    "results are the next lane's": lambda: mock.patch.object(
        CachedDecoder, "run", results_of_the_next
    ),
    "eviction moves no rows": lambda: mock.patch.object(KvCache, "copy_lane", nothing_copied),
    "eviction moves them the other way": lambda: mock.patch.object(
        KvCache, "copy_lane", copied_the_wrong_way
    ),
}


# Each kernel finds them once; in the order of all, as fixtures are shared by place
OTHERS = tuple(kind for kind in KIND if kind not in ("llama", ON_FALL_BACK))


@pytest.mark.parametrize("engines", kinds(*OTHERS), indirect=True)
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found_and_rounding_does_not_explain_it(engines: Engines, bug: str) -> None:
    assert unexplained(engines, PLANTED[bug]())


@pytest.mark.parametrize("engines", [ON_FALL_BACK], indirect=True)
def test_rows_that_a_wider_cache_leaves_behind_are_found(engines: Engines) -> None:
    cache = engines.four.base.runner.cache
    for lane in range(LANES):
        cache.free(lane)
    cache.restride(32)  # narrow again, so that it has to grow
    assert unexplained(engines, mock.patch.object(KvCache, "restride", nothing_restrided))


def unexplained(engines: Engines, bug: AbstractContextManager[Any]) -> bool:
    """Whether a batch with a bug differs from sequences alone by more than rounding."""
    jobs = [
        job(n, new, plan)
        for n, new, plan in ((3, 5, PLANS[2]), (8, 16, None), (20, 16, PLANS[1]), (30, 16, None))
    ]
    with bug:
        found = outcomes(engines.four, jobs)
    differences = [
        first_difference(engines.one, alone(engines, one), response, one.sampling)
        for one, response in zip(jobs, found, strict=True)
        if isinstance(response, Response)
    ]
    return any(difference is not None and not difference.explained for difference in differences)


@of_each_kind
def test_drafts_of_the_text_stand_beside_the_draft_s(engines: Engines) -> None:
    assert_same_beside_a_draft(engines.one, engines.four)
