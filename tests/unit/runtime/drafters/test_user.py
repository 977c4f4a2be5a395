"""A drafter of the user's own: what it is told, what becomes of its proposals, and that nothing it
does changes an answer or ends a request.

The model is `hash_model`'s, and what is right is told by its plain decoding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.backends.host import HostStates
from edgespec.errors import OptionError
from edgespec.runtime.drafters.base import Drafter as Drafting
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.guard import (
    INVALID,
    MAX_PAUSE,
    PAUSED,
    RAISED,
    SLOW,
    DraftFailed,
    Guard,
)
from edgespec.runtime.drafters.guarded import GuardedDrafter
from edgespec.runtime.drafters.loading import guarded, load_drafter
from edgespec.runtime.drafters.trtllm import (
    BaseResourceManager,
    Drafter,
    LlmRequest,
    ResourceManager,
    ResourceManagerType,
    ScheduledRequests,
    TrtLlmDrafter,
)
from edgespec.runtime.drafters.user import DraftContext, Proposal, ProposingDrafter, TokenView
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.loop.sequence import SequenceState, StepOutput
from edgespec.runtime.loop.session import Session
from edgespec.runtime.sampling.draft_sampler import Distribution
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftPlan, DraftTree
from tests.lossless.drafters import ScriptedDrafter, Stateless
from tests.unit.runtime.hash_model import GREEDY, VOCAB, begin, decoder_of, plainly

PROMPT = [6, 1, 8, 0, 3]
MAX_NEW = 24
CHAIN, TREE = DraftPlan(1, 3, 4), DraftPlan(3, 3, 9)
TRUTH = plainly(PROMPT, GREEDY, 60)[0]
WHOLE = [*PROMPT, *TRUTH]


def guard(budget_s: float | None = None) -> Guard:
    return Guard("test", budget_s)


def proposing(drafter: object, budget_s: float | None = None) -> ProposingDrafter:
    return ProposingDrafter(drafter, guard(budget_s), VOCAB, open_no_tokenizer)  # type: ignore[arg-type]


def open_no_tokenizer() -> Any:
    raise AssertionError("nobody asks for it here")


def run(
    drafter: Any,
    plan: DraftPlan = CHAIN,
    *,
    sampler: Sampler = GREEDY,
    prompt: Sequence[int] = PROMPT,
    max_new: int = MAX_NEW,
) -> tuple[list[int], RequestMetrics]:
    """Tokens and metrics of a run with a drafter as the loop has it."""
    session, metrics = Session(decoder_of(64), drafter), RequestMetrics(len(prompt))
    seq = SequenceState(prompt, sampler, max_new, plan=plan)
    tokens = []
    for step in steps_of(session, seq):
        metrics.add(step, 0.0)
        tokens += step.tokens
    return tokens, metrics


def steps_of(session: Session, seq: SequenceState) -> Iterator[StepOutput]:
    output = begin(session, seq)
    yield output
    while output.finish_reason is None:
        ((_, output),) = session.step()
        yield output


# What it is told, and what becomes of what it returns


class Telling:
    """Proposes what plain decoding says, and keeps what it was told."""

    def __init__(self, *, needs_hidden_states: bool = False) -> None:
        self.needs_hidden_states = needs_hidden_states
        self.told: list[DraftContext] = []
        self.finished: list[int] = []
        self.closed = False

    def propose(self, context: DraftContext) -> list[int]:
        self.told.append(context)
        context.state["calls"] = context.state.get("calls", 0) + 1
        assert list(context.tokens) == WHOLE[: len(context.tokens)]
        return WHOLE[len(context.tokens) :][: context.max_draft_len]

    def finish(self, request_id: int) -> None:
        self.finished.append(request_id)

    def close(self) -> None:
        self.closed = True


def test_context_has_tokens_position_plan_and_what_was_accepted() -> None:
    own = Telling()
    drafter = proposing(own)
    tokens, metrics = run(drafter)
    assert tokens == TRUTH[:MAX_NEW]
    assert metrics.acceptance_rate == 1
    assert [context.position for context in own.told[:3]] == [5, 9, 13]
    assert [context.num_accepted for context in own.told[:3]] == [None, 3, 3]
    assert {context.num_prompt_tokens for context in own.told} == {5}
    assert own.told[0].plan == CHAIN
    assert own.told[0].max_draft_len == 3
    assert [context.hidden_states for context in own.told] == [None] * len(own.told)
    assert own.told[-1].state == {"calls": len(own.told)}
    assert own.finished == [own.told[0].request_id]  # as soon as it has ended, though none follows
    drafter.close()
    assert (own.finished, own.closed) == ([own.told[0].request_id], True)


@pytest.mark.parametrize("cancelled", [True, False])
def test_sequence_that_is_cancelled_or_under_way_at_the_end_is_finished(cancelled: bool) -> None:
    own = Telling()
    drafter = proposing(own)
    session, seq = Session(decoder_of(64), drafter), SequenceState(PROMPT, GREEDY, 24, plan=CHAIN)
    begin(session, seq)
    session.step()
    assert own.finished == []
    if cancelled:
        session.end(seq)
        assert own.finished == [own.told[0].request_id]
    drafter.close()
    assert own.finished == [own.told[0].request_id]


def test_prompt_that_fails_while_it_is_read_is_finished() -> None:
    own = Telling()
    drafter = proposing(own)
    session, seq = Session(decoder_of(64), drafter), SequenceState(PROMPT, GREEDY, 24, plan=CHAIN)
    session.admit(seq)
    (number,) = (found.request_id for found in drafter.sequences.lanes.values())
    session.fail(seq)
    assert own.finished == [number]


def test_hidden_states_come_for_each_committed_position_once_where_they_are_asked_for() -> None:
    own = Telling(needs_hidden_states=True)
    tokens, _ = run(proposing(own))
    assert tokens == TRUTH[:MAX_NEW]
    rows = np.concatenate([context.hidden_states for context in own.told])
    # hash_model's hidden states begin with the position and the token
    assert rows[:, 0].tolist() == [*range(own.told[-1].position)]
    assert rows[:, 1].tolist() == WHOLE[: own.told[-1].position]


def test_tokens_cannot_be_changed_and_do_not_grow() -> None:
    behind = [4, 5, 6]
    tokens = TokenView(behind)
    behind.append(7)
    assert (len(tokens), list(tokens), tokens[-1], tokens[1:]) == (3, [4, 5, 6], 6, [5, 6])
    assert tokens[::-1] == [6, 5, 4]
    assert tokens == [4, 5, 6]
    with pytest.raises(IndexError):
        tokens[3]
    with pytest.raises(TypeError):
        tokens[0] = 1  # type: ignore[index]


class Returning:
    """Returns the same at each step, or what a function makes of the context."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def propose(self, context: DraftContext) -> Any:
        return self.what(context) if callable(self.what) else self.what


def tree_for(found: Any, plan: DraftPlan = TREE) -> DraftTree:
    drafter = proposing(Returning(found))
    drafter.begin(0, PROMPT, 0)
    (tree,) = drafter.propose([DraftRequest(0, 3, plan)])
    return tree


@pytest.mark.parametrize(
    ("found", "tokens", "parents"),
    [
        (None, [3], [-1]),
        ([], [3], [-1]),
        ([4, 5], [3, 4, 5], [-1, 0, 1]),
        (np.array([4, 5]), [3, 4, 5], [-1, 0, 1]),
        ((4, np.int64(5)), [3, 4, 5], [-1, 0, 1]),
        (Proposal([4, 5, 6], [-1, -1, 0]), [3, 4, 5, 6], [-1, 0, 0, 1]),
        ([1, 2, 3, 4, 5, 6], [3, 1, 2, 3], [-1, 0, 1, 2]),  # deeper than the plan
        (
            Proposal([1, 2, 3, 4, 5], [-1, -1, -1, -1, 3]),  # wider: 4 and what follows it go
            [3, 1, 2, 3],
            [-1, 0, 0, 0],
        ),
    ],
)
def test_proposal_becomes_a_tree_within_the_plan(
    found: Any, tokens: list[int], parents: list[int]
) -> None:
    tree = tree_for(found)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.lost) == (tokens, parents, None)


def test_probabilities_are_shown_with_the_tree() -> None:
    probs = tree_for(Proposal([4, 5], probs=[0.5, 1])).probs
    assert probs is not None
    assert probs.tolist() == [1.0, 0.5, 1.0]


# A drafter that misbehaves


class Endless(Sequence[int]):
    """A list that never ends, once it is looked at."""

    def __init__(self, entered: threading.Event, leave: threading.Event) -> None:
        self.entered, self.leave = entered, leave

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        self.entered.set()
        self.leave.wait(20)
        return 1


def raising(context: DraftContext) -> list[int]:
    raise ValueError("on purpose")


def leaving(context: DraftContext) -> list[int]:
    raise SystemExit(3)


def interrupting(context: DraftContext) -> list[int]:
    raise KeyboardInterrupt


class Wordless(Exception):
    """Its text fails too."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def wordless(context: DraftContext) -> list[int]:
    raise Wordless


def talkative(context: DraftContext) -> list[int]:
    raise ValueError("x" * 10**6)


def raising_ours(context: DraftContext) -> list[int]:
    raise DraftFailed(["rubbish"])  # type: ignore[arg-type]


def changing(context: DraftContext) -> list[int]:
    context.tokens.append(3)  # type: ignore[attr-defined]
    return []


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def out_of_memory(context: DraftContext) -> list[int]:
    raise MemoryError


def recursing(context: DraftContext) -> list[int]:
    return recursing(context)


def generating(context: DraftContext) -> Iterator[int]:
    yield from range(10**9)


class Broken(Sequence[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError("no items")


class Lying(Broken):
    """It says that it has one token, and has one after the other."""

    def __getitem__(self, index: Any) -> Any:
        return 1


MISBEHAVIOUR: dict[str, tuple[Any, str]] = {
    "it raises": (raising, RAISED),
    "it ends the program": (leaving, RAISED),
    "it interrupts": (interrupting, RAISED),
    "it has no memory": (out_of_memory, RAISED),
    "what it raises has no text": (wordless, RAISED),
    "what it raises has a long text": (talkative, RAISED),
    "it raises an error of ours": (raising_ours, RAISED),
    "it changes what it was told": (changing, RAISED),
    "what it returns cannot be shown": ([Unshowable()], INVALID),
    "it never returns from itself": (recursing, RAISED),
    "its list raises": (Broken(), RAISED),
    "a list that never ends": (Lying(), INVALID),
    "a text": ("12", INVALID),
    "a number": (7, INVALID),
    "a generator": (generating, INVALID),
    "numbers that are no integers": ([1.0, 2.0], INVALID),
    "an array of floats": (np.array([1.0]), INVALID),
    "an array of two dimensions": (np.ones((2, 2), int), INVALID),
    "truth values": ([True], INVALID),
    "a set": ({1, 2}, INVALID),
    "bytes": (b"12", INVALID),
    "nested lists": ([[1], [2]], INVALID),
    "None in a list": ([None], INVALID),
    "an id of sixteen bytes": (np.array([2**63], np.uint64), INVALID),
    "an array of objects": (np.array([1, None]), INVALID),
    "an id below the vocabulary": ([-1], INVALID),
    "an id beyond the vocabulary": ([VOCAB], INVALID),
    "an id that no array holds": ([2**80], INVALID),
    "far too many": ([1] * 100_000, INVALID),
    "a parent that comes later": (Proposal([1, 2], [1, -1]), INVALID),
    "a cycle": (Proposal([1, 2], [1, 0]), INVALID),
    "its own parent": (Proposal([1], [0]), INVALID),
    "fewer parents than tokens": (Proposal([1, 2], [-1]), INVALID),
    "siblings that are the same": (Proposal([1, 1], [-1, -1]), INVALID),
    "probabilities that are NaN": (Proposal([1], probs=[float("nan")]), INVALID),
    "probabilities above 1": (Proposal([1], probs=[2.0]), INVALID),
    "probabilities of others": (Proposal([1, 2], probs=[0.5]), INVALID),
}


@pytest.mark.parametrize("sampler", [GREEDY, Sampler(1.0, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaviour_costs_drafts_and_leaves_the_answer_as_it_is(
    name: str, sampler: Sampler
) -> None:
    what, why = MISBEHAVIOUR[name]
    drafter = proposing(Returning(what), budget_s=20)
    tokens, metrics = run(drafter, TREE, sampler=sampler)
    assert tokens == plainly(PROMPT, sampler, MAX_NEW)[0]
    assert metrics.lost_drafts[why] >= 2
    assert metrics.lost_drafts[PAUSED] > metrics.lost_drafts[why]
    assert sum(metrics.per_step_drafted) == 0
    (note,) = drafter.guard.notes
    assert f"({why})" in note
    assert len(note) < 700
    drafter.close()


def test_note_says_what_was_wrong() -> None:
    notes = {}
    for name in ("it raises", "an id beyond the vocabulary", "a cycle"):
        drafter = proposing(Returning(MISBEHAVIOUR[name][0]))
        run(drafter)
        notes[name] = drafter.guard.notes[0]
    assert "ValueError: on purpose" in notes["it raises"]
    assert f"token id {VOCAB}" in notes["an id beyond the vocabulary"]
    assert "the parent of token 0 is 1" in notes["a cycle"]


def test_call_that_hangs_is_left_alone_and_its_late_result_thrown_away() -> None:
    entered, leave = threading.Event(), threading.Event()
    calls: list[int] = []

    def hanging(context: DraftContext) -> Any:
        calls.append(context.position)
        return Endless(entered, leave) if len(calls) == 1 else WHOLE[len(context.tokens) :][:3]

    drafter = proposing(Returning(hanging), budget_s=0.05)
    tokens, metrics = run(drafter)
    assert tokens == TRUTH[:MAX_NEW]
    assert entered.wait(10)
    assert len(calls) == 1, "it is not called while its first call runs"
    assert metrics.lost_drafts[SLOW] == 1
    assert metrics.lost_drafts[PAUSED] == metrics.steps - 1
    leave.set()
    assert drafter.guard.thread.last is not None
    assert drafter.guard.thread.last.done.wait(10)
    drafter.guard.budget_s = 20
    tokens, metrics = run(drafter)
    assert tokens == TRUTH[:MAX_NEW]
    assert sum(metrics.per_step_accepted) > 0, "it drafts again once the call has returned"
    drafter.close()


def test_failures_in_a_row_pause_for_twice_as_long_each() -> None:
    called: list[int] = []

    def counting(context: DraftContext) -> list[int]:
        called.append(context.position)
        raise ValueError

    drafter = proposing(Returning(counting))
    run(drafter, max_new=48)
    assert np.diff(called).tolist() == [2, 3, 5, 9, 17]


def test_pause_is_bounded_and_forgotten_after_a_success() -> None:
    own = guard()
    for _ in range(20):
        own.failed(DraftFailed(RAISED))
    assert own.pause == MAX_PAUSE
    own.succeeded()
    own.failed(DraftFailed(RAISED))
    assert own.pause == 1


def test_finish_and_close_that_raise_harm_nobody() -> None:
    own = SimpleNamespace(propose=lambda context: [], finish=raising, close=lambda: 1 / 0)
    drafter = proposing(own)
    assert run(drafter)[0] == TRUTH[:MAX_NEW]
    drafter.close()
    assert drafter.guard.counts[RAISED] == 2


# What it says of itself is read once, when it is opened


def opened(drafter: object) -> Drafting:
    """A drafter as an engine opens it."""
    component = SimpleNamespace(vocab_size=VOCAB, eos_token_ids=[0])
    base: Any = SimpleNamespace(component=component)
    return guarded(drafter, base, Path(), None).drafter


def saying(name: str, value: object) -> object:
    """A drafter with an attribute of that name: a value, or an error that reading it raises."""

    def get(self: object) -> object:
        if isinstance(value, BaseException):
            raise value
        return value

    body = {"propose": lambda self, context: [], name: property(get)}
    return type("Own", (), body)()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("finish", RuntimeError("f"), "finish of the drafter Own raised RuntimeError: f"),
        ("close", SystemExit(3), "close of the drafter Own raised SystemExit: 3"),
        ("propose", Wordless(), "propose of the drafter Own raised an error that has no text"),
        ("prepare_draft_tokens", ValueError("p"), "prepare_draft_tokens of the drafter Own raised"),
        ("begin", ZeroDivisionError(), "begin of the drafter Own raised ZeroDivisionError"),
        ("needs_hidden_states", np.array([1, 2]), r"needs_hidden_states .* is array\(\[1, 2\]\)"),
        ("needs_hidden_states", Unshowable(), "needs_hidden_states .* is of type Unshowable"),
        ("max_draft_len", "four", "max_draft_len of the drafter Own is 'four'"),
        ("max_draft_len", OSError("m"), "max_draft_len of the drafter Own raised OSError: m"),
    ],
)
def test_attribute_that_cannot_be_read_is_refused_by_its_name(
    name: str, value: object, said: str
) -> None:
    own = saying(name, value)
    with pytest.raises(OptionError, match=said):
        opened(own)


MODULES = {
    "import sys\nsys.exit('gone')": "could not be imported: SystemExit: gone",
    "class Own:\n    def __init__(self):\n        raise SystemExit(7)": "SystemExit: 7",
    "class E(Exception):\n    def __str__(self):\n        raise OSError\nraise E": "has no text",
    "def __getattr__(name):\n    raise OSError(name)": "could not be imported: OSError: Own",
    "Own = 3": "",
}


@pytest.mark.parametrize("place", range(len(MODULES)))
def test_module_that_ends_the_program_is_refused(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = [*MODULES.items()][place]
    name = f"own_drafter_module_{place}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    if not said:
        assert load_drafter(f"{name}:Own") == 3
        return
    with pytest.raises(OptionError, match=said):
        load_drafter(f"{name}:Own")


CLASSES = {
    "class Own:\n    def __init__(self):\n        raise RuntimeError('no grammar')": (
        "arguments: mend the class; python -c 'import {0}; {0}.Own\\(\\)' shows where"
    ),
    "class Own:\n    def __init__(self, length, *rest):\n        pass": (
        "It is made without arguments: mend the class"
    ),
    "from edgespec.runtime.drafters.trtllm import ResourceManager\nclass Pool(ResourceManager): ..."
    "\nclass Own:\n    def __init__(self):\n        self.resource_manager = Pool()": (
        "TypeError: .*resource_managers'\nIt is made without arguments: mend the class"
    ),
}


@pytest.mark.parametrize("place", range(len(CLASSES)))
def test_class_that_cannot_be_made_says_whether_it_is_its_arguments(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = [*CLASSES.items()][place]
    name = f"own_drafter_class_{place}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(OptionError, match=said.format(name)):
        load_drafter(f"{name}:Own")


# A whole Drafter behind the guard


class Failing(Stateless):
    """Raises in one of its methods, from a call on."""

    def __init__(self, method: str, first: int = 0) -> None:
        super().__init__([(PROMPT, TRUTH)], VOCAB, 1)
        self.left = first
        setattr(self, method, self.fail(getattr(self, method)))

    def fail(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                raise ValueError("on purpose")
            return method(*args)

        return failing


@pytest.mark.parametrize("method", ["begin", "propose", "observe", "reset", "snapshot", "close"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_method_that_raises_costs_drafts_alone(method: str, first: int) -> None:
    drafter = GuardedDrafter(Failing(method, first), guard(), VOCAB)
    for _ in range(2):
        tokens, metrics = run(drafter)
        assert tokens == TRUTH[:MAX_NEW]
    drafter.snapshot(0, 3)
    drafter.close()
    assert drafter.guard.counts[RAISED] > 0 or first
    assert metrics.steps > 0


def test_lane_whose_observation_failed_is_not_drafted_for_until_the_next_sequence() -> None:
    own = Failing("observe", 2)
    drafter = GuardedDrafter(own, guard(), VOCAB)
    tokens, metrics = run(drafter)
    assert tokens == TRUTH[:MAX_NEW]
    assert metrics.per_step_drafted[0] == 3
    assert sum(metrics.per_step_drafted[2:]) == 0
    own.left = 10**6
    tokens, metrics = run(drafter)
    assert tokens == TRUTH[:MAX_NEW]
    assert metrics.acceptance_rate == 1


def test_a_lane_that_was_lost_is_drafted_for_once_another_sequence_moves_into_it() -> None:
    own: Any = SimpleNamespace(
        move=lambda source, target: None,
        propose=lambda requests: [DraftTree.chain(r.pending, [1]) for r in requests],
    )
    drafter = GuardedDrafter(own, guard(), VOCAB)
    drafter.lost_lanes.add(0)
    drafter.move(1, 0)
    (drafted,) = drafter.propose([DraftRequest(0, 3, CHAIN, None, None)])
    assert len(drafted) == 2


ROOT = DraftTree.root_only(3)
TREES: dict[str, Any] = {
    "no tree": "tree",
    "no root": DraftTree(np.array([4, 5]), np.array([-1, 0])),
    "floats": DraftTree(np.array([3.0, 4.0]), np.array([-1, 0])),  # type: ignore[arg-type]
    "a list": DraftTree([3, 4], [-1, 0]),  # type: ignore[arg-type]
    "a forward parent": DraftTree(np.array([3, 4, 5]), np.array([-1, 2, 0])),
    "two roots": DraftTree(np.array([3, 4]), np.array([-1, -1])),
    "an id beyond": DraftTree(np.array([3, VOCAB]), np.array([-1, 0])),
    "same siblings": DraftTree(np.array([3, 4, 4]), np.array([-1, 0, 0])),
    "too deep": DraftTree(np.array([3, 1, 2, 3, 4]), np.array([-1, 0, 1, 2, 3])),
    "too many": DraftTree(np.arange(3, 3 + 10) % 9, np.array([-1, *[0] * 9])),
    "NaN": DraftTree(np.array([3, 4]), np.array([-1, 0]), np.array([1, np.nan], np.float32)),
    "fewer probs": DraftTree(np.array([3, 4]), np.array([-1, 0]), np.ones(1, np.float32)),
    "drawn from elsewhere": DraftTree(
        np.array([3, 4]), np.array([-1, 0]), drawn_from=[None, Distribution.point(5)]
    ),
    "drawn from nothing": DraftTree(
        np.array([3, 4]),
        np.array([-1, 0]),
        drawn_from=[None, Distribution(np.array([4]), np.array([np.nan]))],
    ),
}


@pytest.mark.parametrize("name", TREES)
def test_tree_that_is_none_is_never_verified(name: str) -> None:
    own = Stateless([(PROMPT, TRUTH)], VOCAB, 1)
    drafter = GuardedDrafter(own, guard(), VOCAB)
    own.propose = lambda requests: [TREES[name]]  # type: ignore[method-assign]
    drafter.reset(0)
    drafter.begin(0, PROMPT, 0)
    (tree,) = drafter.propose([DraftRequest(0, 3, TREE)])
    assert (len(tree), tree.lost) == (1, INVALID)


@pytest.mark.parametrize("found", [None, [], [ROOT, ROOT], iter([ROOT]), {0: ROOT}])
def test_proposals_that_are_not_one_for_each_request_are_none(found: Any) -> None:
    own = Stateless([(PROMPT, TRUTH)], VOCAB, 1)
    own.propose = lambda requests: found  # type: ignore[method-assign]
    drafter = GuardedDrafter(own, guard(), VOCAB)
    drafter.reset(0)
    (tree,) = drafter.propose([DraftRequest(0, 3, TREE)])
    assert tree.lost == INVALID


def test_good_drafter_behind_a_guard_is_as_good_as_without() -> None:
    for right in (0.7, 1):
        bare = run(ScriptedDrafter([(PROMPT, TRUTH)], VOCAB, right), TREE)
        own = ScriptedDrafter([(PROMPT, TRUTH)], VOCAB, right)
        guarded = run(GuardedDrafter(own, guard(20), VOCAB), TREE)
        assert guarded[0] == bare[0] == TRUTH[:MAX_NEW]
        assert guarded[1].per_step_accepted == bare[1].per_step_accepted
        assert guarded[1].lost_drafts == {}


def test_prefix_s_snapshot_is_cut_and_restored_by_the_drafter() -> None:
    own = ScriptedDrafter([(PROMPT, TRUTH)], VOCAB, 1)
    drafter = GuardedDrafter(own, guard(), VOCAB)
    drafter.reset(0)
    hidden = np.zeros((4, 3), np.float32)
    drafter.observe([Observation(0, HostStates(hidden), np.array(PROMPT[1:]))])
    snapshot = drafter.snapshot(0, 4)
    assert snapshot is not None
    drafter.restore(1, snapshot.prefix(2))
    assert own.lanes[1].tokens == PROMPT[1:3]


# TensorRT-LLM's form


class Lookup(Drafter):
    """The continuation of the latest occurrence of the last token, as there."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(max_draft_len=3, **settings)
        self.resource_manager = Pool()
        self.seen: list[list[int]] = []
        self.managers: list[object] = []

    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        assert resource_manager is not None
        kind = ResourceManagerType.SPEC_RESOURCE_MANAGER
        self.managers.append(resource_manager.get_resource_manager(kind))
        for request in scheduled_requests.generation_requests:
            tokens = request.get_tokens(0)
            assert request.get_tokens() == [tokens]
            assert request.get_last_tokens(0) == tokens[-1]
            self.seen.append(tokens)
            request.py_draft_tokens = WHOLE[len(tokens) :][:3]


class Pool(BaseResourceManager):
    def __init__(self) -> None:
        self.prepared, self.updated, self.closed = 0, list[int](), False
        self.freed: list[LlmRequest] = []

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        self.prepared += 1

    def update_resources(self, scheduled_batch: ScheduledRequests) -> None:
        (request,) = scheduled_batch.all_requests()
        self.updated.append(request.py_num_accepted_draft_tokens)

    def free_resources(self, request: LlmRequest) -> None:
        self.freed.append(request)

    def shutdown(self) -> None:
        self.closed = True


def preparing(drafter: Any) -> TrtLlmDrafter:
    return TrtLlmDrafter(drafter, guard(), VOCAB, end_id=0)


def test_drafter_of_tensorrt_llm_drafts_as_it_does_there() -> None:
    own = Lookup()
    drafter = preparing(own)
    tokens, metrics = run(drafter)
    assert tokens == TRUTH[:MAX_NEW]
    assert metrics.acceptance_rate == 1
    assert own.seen[0] == WHOLE[:6]
    assert own.managers[0] is own.resource_manager
    pool = own.resource_manager
    assert pool.prepared == len(own.seen)
    assert pool.updated == metrics.per_step_accepted  # of the last step too
    assert [request.py_prompt_len for request in pool.freed] == [5]
    assert [*pool.freed[0].tokens] == WHOLE[: 5 + MAX_NEW]
    drafter.close()
    assert len(pool.freed) == 1
    assert pool.closed


def test_the_resource_manager_of_tensorrt_llm_is_updated_before_a_request_is_freed() -> None:
    """Also where the sequence ends between a proposal and what became of it."""
    own = Lookup()
    drafter, order = preparing(own), list[str]()
    pool: Any = own.resource_manager
    pool.update_resources = lambda batch: order.append("update")
    pool.free_resources = lambda request: order.append("free")
    session = Session(decoder_of(64), drafter)
    steps = steps_of(session, SequenceState(PROMPT, GREEDY, MAX_NEW, plan=CHAIN))
    next(steps)
    drafter.propose([DraftRequest(0, TRUTH[0], CHAIN, None, None)])
    drafter.reset(0)
    assert order == ["update", "free"]


def test_max_concurrency_and_the_schedule_of_lengths_are_heeded() -> None:
    own = Lookup(max_concurrency=1)
    drafter = preparing(own)
    for lane in (0, 1):
        drafter.begin(lane, WHOLE[:6], 0)
    requests = [DraftRequest(lane, WHOLE[5], CHAIN) for lane in (0, 1)]
    assert [len(tree) for tree in drafter.propose(requests)] == [1, 1]
    assert own.seen == []
    assert [len(tree) for tree in drafter.propose(requests[:1])] == [4]
    own.max_concurrency, own.draft_len_schedule = None, {1: 3, 4: 1}
    assert [len(tree) for tree in drafter.propose(requests)] == [2, 2]
    own.draft_len_schedule = {1: 3}  # more than its last key: nothing
    seen = len(own.seen)
    assert [len(tree) for tree in drafter.propose(requests)] == [1, 1]
    assert len(own.seen) == seen


class Empty(Pool):
    """A pool that is false, as one with nothing in it is."""

    def __len__(self) -> int:
        return 0


def test_manager_of_nothing_is_a_manager() -> None:
    own = Lookup()
    own.resource_manager = Empty()
    assert run(preparing(own))[0] == TRUTH[:MAX_NEW]
    assert own.managers[0] is own.resource_manager


def spoiling(request: LlmRequest) -> None:
    request.tokens.clear()  # type: ignore[attr-defined]


def forgetting(request: LlmRequest) -> None:
    request.tokens = None  # type: ignore[assignment]
    request.request_id, request.py_prompt_len = "one", "two"  # type: ignore[assignment]


def miscounting(request: LlmRequest) -> None:
    request.py_decoding_iter = None  # type: ignore[assignment]


class Unreadable:
    """A manager whose methods cannot even be looked up."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_concurrency": "4"},
        {"draft_len_schedule": {"a": 1}},
        {"draft_len_schedule": {1: "x"}},
        {"draft_len_schedule": 3},
        {"resource_manager": Unreadable()},
        {"then": spoiling},
        {"then": miscounting},
    ],
)
def test_rubbish_around_drafts_costs_drafts_alone(settings: dict[str, Any]) -> None:
    class Bad(Lookup):
        def prepare_draft_tokens(
            self, scheduled_requests: ScheduledRequests, resource_manager: Any = None
        ) -> None:
            super().prepare_draft_tokens(scheduled_requests, resource_manager)
            for request in scheduled_requests.generation_requests:
                settings.get("then", lambda _: None)(request)

    own = Bad()
    for name, value in settings.items():
        setattr(own, name, value)
    drafter = preparing(own)
    assert run(drafter)[0] == TRUTH[:MAX_NEW]
    drafter.reset(0)
    drafter.close()
    assert drafter.guard.counts[RAISED] > 0


def test_what_a_drafter_does_to_a_request_is_undone_before_the_next_step() -> None:
    class Forgetting(Lookup):
        def prepare_draft_tokens(
            self, scheduled_requests: ScheduledRequests, resource_manager: Any = None
        ) -> None:
            super().prepare_draft_tokens(scheduled_requests, resource_manager)
            forgetting(scheduled_requests.generation_requests.pop())

    own = Forgetting()
    own.resource_manager = None  # type: ignore[assignment]
    tokens, metrics = run(preparing(own))
    assert tokens == TRUTH[:MAX_NEW]
    assert metrics.acceptance_rate == 1


@pytest.mark.parametrize(
    "drafts", [None, [VOCAB], ["a"], 3, [1] * 5000, [float("nan")]], ids=lambda x: repr(x)[:12]
)
def test_drafts_of_tensorrt_llm_s_form_that_are_none_are_lost(drafts: Any) -> None:
    class Bad(Lookup):
        def prepare_draft_tokens(
            self, scheduled_requests: Any, resource_manager: Any = None
        ) -> Any:
            for request in scheduled_requests.generation_requests:
                request.py_draft_tokens = drafts

    tokens, metrics = run(preparing(Bad()))
    assert tokens == TRUTH[:MAX_NEW]
    assert (metrics.lost_drafts.get(INVALID, 0) > 0) == (drafts is not None)
