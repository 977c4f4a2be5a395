"""A drafter of your own in one method: `propose` gets a DraftContext and returns the tokens that it
expects.

Knows what such a drafter is given and what it may return, and keeps the tokens of each sequence for
it. It needs no engine. What it raises, returns wrongly or takes too long for costs its drafts and
never the request: see `guard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from edgespec.runtime.drafters.attributes import flag, method
from edgespec.runtime.drafters.base import DraftRequest, Observation, TextDrafter
from edgespec.runtime.drafters.guard import INVALID, PAUSED, DraftFailed, Guard
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

Floats = NDArray[np.float32]
MAX_TOKENS = 1024  # of a proposal: more cannot be meant


class TokenView(Sequence[int]):
    """The first tokens of a list that only grows: nothing is copied, and nobody changes it."""

    __slots__ = ("_count", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        self._tokens, self._count = tokens, len(tokens)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            if step == 1:
                return self._tokens[start:stop]
            return [self._tokens[i] for i in range(start, stop, step)]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._tokens[index % self._count]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens[: self._count])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


@dataclass(frozen=True, kw_only=True)
class DraftContext:
    """What a drafter is given of one sequence, at one step.

    `tokens` are all tokens of prompt and answer; the last one is pending, and drafts follow it. Of
    them `num_prompt_tokens` are the prompt's. `plan` is what this step can verify; `max_draft_len`
    says it for a chain. `num_accepted` are the drafts of the step before that were accepted, None
    at the first step.

    `hidden_states` [m, k*H] are the base's aux hidden states at the positions that were committed
    since the call before: the last row belongs to the token before the pending one. They come where
    the drafter has `needs_hidden_states = True`, else None.

    `request_id` numbers the sequences. `state` is the drafter's own: it is empty at first, and kept
    from step to step until the sequence ends.
    """

    request_id: int
    tokens: TokenView
    num_prompt_tokens: int
    plan: DraftPlan
    num_accepted: int | None
    hidden_states: Floats | None
    state: dict[Any, Any]
    open_tokenizer: Callable[[], Tokenizer] = field(repr=False)

    @property
    def position(self) -> int:
        """The absolute position of the pending token; the first draft has the one after it."""
        return len(self.tokens) - 1

    @property
    def max_draft_len(self) -> int:
        """Tokens of a chain, at most."""
        return min(self.plan.steps, self.plan.verify_size - 1)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with `encode`, `decode`, `token_bytes` and `token_id`."""
        return self.open_tokenizer()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; broken UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, with no special tokens added."""
        return self.tokenizer.encode(text)


@dataclass(frozen=True)
class Proposal:
    """Drafts as a tree: `parents[i]` is the index of the token before `tokens[i]`, -1 for the
    pending one; a parent comes before its children, and siblings differ. Without `parents` it is a
    chain.

    `probs[i]` is how probable the drafter holds `tokens[i]` after its parent, 0 to 1; it is shown
    by /tree in a chat and decides nothing.
    """

    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    probs: Sequence[float] | None = None


class UserDrafter(Protocol):
    """A drafter of your own. Any object with `propose` is one; what else it may have:

    `needs_hidden_states = True` to get the base's aux hidden states; `max_draft_len`, the chain
    that is drafted where the user gave no sizes; `finish(request_id)`, called when a sequence has
    ended; `close()`, called with the engine's.
    """

    def propose(self, context: DraftContext) -> Sequence[int] | Proposal | None:
        """Token ids that may follow `context.tokens`, the most probable first; a tree as Proposal;
        nothing, or None, where there is nothing to say. What is more than the plan is cut."""


# ---- what was returned, as a tree


def tree_of(proposed: object, request: DraftRequest, vocab_size: int) -> DraftTree:
    """The tree of what a drafter returned, cut down to the plan. Raises DraftFailed."""
    if proposed is None:
        return DraftTree.root_only(request.pending)
    proposal = proposed if isinstance(proposed, Proposal) else Proposal(proposed)  # type: ignore[arg-type]
    tokens = integers("tokens", proposal.tokens)
    if wrong := [token for token in tokens if not 0 <= token < vocab_size]:
        raise DraftFailed(
            INVALID, f"token id {wrong[0]}, the model's vocabulary ends at {vocab_size - 1}"
        )
    parents = checked_parents(proposal.parents, len(tokens))
    check_siblings(tokens, parents)
    probs = None if proposal.probs is None else probabilities(proposal.probs, len(tokens))
    return within(request, tokens, parents, probs)


def integers(name: str, values: object) -> list[int]:
    """A list of integers. Raises DraftFailed for anything else."""
    array = bounded(name, values)
    if len(array) and not np.issubdtype(array.dtype, np.integer):
        raise DraftFailed(INVALID, f"{name} hold {array.dtype}, not integers alone")
    return [int(value) for value in array]


def bounded(name: str, values: object) -> NDArray[Any]:
    """The values of a list, whose length may not be what it says. Raises DraftFailed for what is
    none, and for too many."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise DraftFailed(
            INVALID, f"{name} is of type {type(values).__name__}, not a list of numbers"
        )
    items = list(islice(values, MAX_TOKENS + 1))
    if len(items) > MAX_TOKENS:
        raise DraftFailed(INVALID, f"more than {MAX_TOKENS} {name}")
    if any(isinstance(item, bool | np.bool_) or not np.isscalar(item) for item in items):
        raise DraftFailed(INVALID, f"{name} hold what is no number")
    return np.array(items)


def checked_parents(given: object, num_tokens: int) -> list[int]:
    """The parents of `num_tokens` tokens; those of a chain for None. Raises DraftFailed."""
    if given is None:
        return list(range(-1, num_tokens - 1))
    parents = integers("parents", given)
    if len(parents) != num_tokens:
        raise DraftFailed(INVALID, f"{len(parents)} parents for {num_tokens} tokens")
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            message = f"the parent of token {node} is {parent}"
            raise DraftFailed(
                INVALID, f"{message}; a parent is -1 or the index of an earlier token"
            )
    return parents


def check_siblings(tokens: Sequence[int], parents: Sequence[int]) -> None:
    """Raises DraftFailed where two children of one node carry the same token."""
    pairs = set(zip(parents, tokens, strict=True))
    if len(pairs) < len(tokens):
        raise DraftFailed(INVALID, "two tokens with one parent are the same")


def probabilities(given: object, num_tokens: int) -> list[float]:
    """Probabilities of `num_tokens` tokens. Raises DraftFailed."""
    values = bounded("probs", given)
    if len(values) != num_tokens:
        raise DraftFailed(INVALID, f"{len(values)} probs for {num_tokens} tokens")
    sound = not num_tokens or np.issubdtype(values.dtype, np.number)
    if not sound or not ((values >= 0) & (values <= 1)).all():  # NaN is neither
        raise DraftFailed(INVALID, "probs hold what is no probability from 0 to 1")
    return [float(value) for value in values]


def within(
    request: DraftRequest,
    tokens: Sequence[int],
    parents: Sequence[int],
    probs: Sequence[float] | None,
) -> DraftTree:
    """The tree of a proposal, without what is deeper, wider or more than the plan."""
    plan = request.plan
    place, depths, children = {-1: 0}, {-1: 0}, dict[int, int]()
    kept: list[int] = []
    for node, parent in enumerate(parents):
        if len(kept) == plan.verify_size - 1:
            break
        if parent not in place or depths[parent] == plan.steps:
            continue
        if children.get(parent, 0) == plan.top_k:
            continue
        children[parent] = children.get(parent, 0) + 1
        depths[node] = depths[parent] + 1
        kept.append(node)
        place[node] = len(kept)
    return DraftTree(
        np.array([request.pending, *(tokens[node] for node in kept)], np.int64),
        np.array([-1, *(place[parents[node]] for node in kept)], np.int64),
        None if probs is None else np.array([1.0, *(probs[n] for n in kept)], np.float32),
    )


# ---- the sequences


@dataclass
class UserSequence:
    """A sequence as its drafter knows it."""

    request_id: int
    tokens: list[int]
    num_prompt: int
    observed: int  # positions that observations covered
    hidden_states: list[Floats] = field(default_factory=list)
    num_accepted: int | None = None
    state: dict[Any, Any] = field(default_factory=dict)


class Sequences:
    """The sequences of all lanes, by what a Drafter is given."""

    def __init__(self, *, needs_hidden_states: bool) -> None:
        self.needs_hidden_states = needs_hidden_states
        self.lanes: dict[int, UserSequence] = {}
        self.numbers = count()

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> UserSequence:
        """A sequence begins in a lane, with its whole prompt."""
        sequence = UserSequence(next(self.numbers), [*tokens], len(tokens), num_reused)
        self.lanes[lane] = sequence
        return sequence

    def observe(self, item: Observation) -> None:
        """Take in what was committed in a lane, with the tokens behind it."""
        sequence, tokens = self.lanes.get(item.lane), item.tokens.tolist()
        if sequence is None:
            return
        if self.needs_hidden_states:
            assert item.hidden_states is not None
            sequence.hidden_states.append(item.hidden_states.numpy().copy())
            known = len(sequence.tokens) - sequence.observed - 1  # of the prompt, or said before
            tokens = tokens[max(0, known) :]
            sequence.observed += len(item.tokens)
        generated = len(sequence.tokens) > sequence.num_prompt
        sequence.tokens += tokens
        if generated:
            sequence.num_accepted = len(item.tokens) - 1

    def take_hidden_states(self, sequence: UserSequence) -> Floats | None:
        """[m, k*H], what was observed since they were last taken."""
        if not self.needs_hidden_states:
            return None
        states, sequence.hidden_states = sequence.hidden_states, []
        return np.concatenate(states) if states else None

    def pop(self, lane: int) -> UserSequence | None:
        """The sequence of a lane, which has ended; None where there is none."""
        return self.lanes.pop(lane, None)

    def pop_all(self) -> list[UserSequence]:
        """The sequences of all lanes, which end here."""
        sequences = [*self.lanes.values()]
        self.lanes.clear()
        return sequences

    def move(self, source: int, target: int) -> UserSequence | None:
        """A sequence goes on in another lane; returns the one that had it."""
        ended = self.lanes.pop(target, None)
        if source in self.lanes:
            self.lanes[target] = self.lanes.pop(source)
        return ended


class SequenceDrafter(TextDrafter, ABC):
    """A Drafter for code of the user's that knows sequences and no lanes."""

    def __init__(self, guard: Guard, vocab_size: int, *, needs_hidden_states: bool = False) -> None:
        self.guard, self.vocab_size = guard, vocab_size
        self.needs_hidden_states = needs_hidden_states
        self.sequences = Sequences(needs_hidden_states=needs_hidden_states)

    @abstractmethod
    def finish(self, ended: UserSequence) -> None:
        """A sequence has ended."""

    def reset(self, lane: int) -> None:
        """The sequence of a lane has ended, if it holds one."""
        if (ended := self.sequences.pop(lane)) is not None:
            self.finish(ended)

    def move(self, source: int, target: int) -> None:
        """A sequence goes on in another lane."""
        if (ended := self.sequences.move(source, target)) is not None:
            self.finish(ended)

    def notify(self, function: Callable[[], object], *, share: float = 1.0) -> None:
        """A call that proposes nothing, guarded."""
        try:
            self.guard.call(function, share=share)
        except DraftFailed as lost:
            self.guard.failed(lost)

    def close(self) -> None:
        """End all sequences, and the drafter's thread. What is under way has ended."""
        for ended in self.sequences.pop_all():
            self.finish(ended)
        self.shut_down()
        self.guard.close()

    def shut_down(self) -> None:
        """All sequences have ended."""


class ProposingDrafter(SequenceDrafter):
    """A UserDrafter as the loop has it: a Drafter."""

    def __init__(
        self,
        drafter: UserDrafter,
        guard: Guard,
        vocab_size: int,
        open_tokenizer: Callable[[], Tokenizer],
    ) -> None:
        needs_hidden_states = flag(drafter, "needs_hidden_states")
        super().__init__(guard, vocab_size, needs_hidden_states=needs_hidden_states)
        self.drafter, self.open_tokenizer = drafter, open_tokenizer
        self.on_finish, self.on_close = method(drafter, "finish"), method(drafter, "close")

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """A sequence begins in a lane, with its whole prompt."""
        self.sequences.begin(lane, tokens, num_reused)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Keep what was committed for the next context."""
        for item in observations:
            self.sequences.observe(item)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """What the drafter proposes for each request, one call each. Where a call fails that
        request has no drafts in this step, and neither have those after it."""
        why: str | None = None
        trees = []
        try:
            self.guard.check_ready()
        except DraftFailed as lost:
            why = lost.why
        for request in requests:
            tree = DraftTree.root_only(request.pending, why)
            if why is None and request.plan.verify_size > 1 and request.plan.steps:
                try:
                    tree = self.asked(request, len(requests))
                except DraftFailed as lost:
                    why = self.guard.failed(lost)
                    tree = DraftTree.root_only(request.pending, why)
                    why = PAUSED if len(requests) > 1 else why
            trees.append(tree)
        if why is None:
            self.guard.succeeded()
        return trees

    def asked(self, request: DraftRequest, num_requests: int) -> DraftTree:
        """The tree of one call. Raises DraftFailed."""
        sequence = self.sequences.lanes[request.lane]
        context = DraftContext(
            request_id=sequence.request_id,
            tokens=TokenView(sequence.tokens),
            num_prompt_tokens=sequence.num_prompt,
            plan=request.plan,
            num_accepted=sequence.num_accepted,
            hidden_states=self.sequences.take_hidden_states(sequence),
            state=sequence.state,
            open_tokenizer=self.open_tokenizer,
        )
        # What is returned is looked at in the drafter's thread too: it may be code as well
        return self.guard.call(
            lambda: tree_of(self.drafter.propose(context), request, self.vocab_size)
        )

    def finish(self, ended: UserSequence) -> None:
        """Tells the drafter that a sequence has ended, where it wants to know."""
        if (finish := self.on_finish) is not None:
            self.notify(lambda: finish(ended.request_id))

    def shut_down(self) -> None:
        """Close the drafter, where it can be."""
        if self.on_close is not None:
            self.notify(self.on_close)
