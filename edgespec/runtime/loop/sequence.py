"""One sequence of tokens: what is asked of it, how far it has come, and where it ends.

Knows token ids and lanes. Knows nothing of text and engines, nor of how drafts come about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edgespec.backends.call import HiddenStates, Logits
from edgespec.errors import EdgeSpecError
from edgespec.prompts import CAPACITY, END_OF_SEQUENCE, MAX_LENGTH
from edgespec.runtime.acceptance.verify import EXACT_ACCEPTANCE, AcceptOptions
from edgespec.runtime.drafters.base import Drafter, Observation
from edgespec.runtime.grammar.guide import Guide
from edgespec.runtime.lanes.stages import StageTimes
from edgespec.runtime.plans.draft_budget import Budgeted
from edgespec.runtime.plans.policy import AdaptiveState
from edgespec.runtime.plans.schedules import Gates
from edgespec.runtime.sampling.sampler import Sampler, top_log_probs
from edgespec.runtime.text.prompt_value import PromptValue
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

SCORED_ROWS = 16  # of a prompt at a time: what is made of their logits takes memory
Candidates = list[tuple[int, float]]  # ids with their log-probabilities, descending


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step gave a sequence. `drafted` counts nodes beside the root; prefill is the step
    with `verified` False.

    `logprobs` are the most probable tokens where each one was drawn, by the model's own logits at
    temperature 1. `tree` is what was verified, None for prefill, and `path` its accepted nodes, the
    root first. `held_back`: nothing was drafted because too many sequences ran for it. `paused`:
    nothing was drafted because the policy decided so.
    """

    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    verified: bool = True
    finish_reason: str | None = None
    logprobs: list[Candidates] = field(default_factory=list)
    error: EdgeSpecError | None = None
    tree: DraftTree | None = None
    path: list[int] = field(default_factory=list)
    held_back: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class StepSize:
    """What one step of a sequence was: the nodes that were verified with the root, the levels that
    were drafted, and the tokens that were committed."""

    nodes: int = 1
    levels: int = 0
    committed: int = 1


@dataclass(eq=False)
class SequenceState:
    """A prompt to be continued until an id of `stop_ids`, or until `max_new_tokens`, and its state
    on the way.

    A running sequence is n committed tokens and exactly one pending token, the last of `tokens`.
    The KV rows of the prompt's first `keep` tokens are kept for later prompts; with `keep_all`
    those of all tokens at the end. `plan` None decodes without drafts, and `acceptance` means
    nothing then. `drafter` None is the session's own; once the sequence has a lane, None drafts
    nothing. `prompt_logprobs` None asks for no `prompt_candidates`.
    """

    prompt: PromptValue
    sampler: Sampler
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    plan: DraftPlan | None = None
    num_logprobs: int = 0
    keep: int = 0
    keep_all: bool = False
    acceptance: AcceptOptions = EXACT_ACCEPTANCE
    drafter: Drafter | None = None
    gates: Gates | None = None  # what limits its drafts
    adaptive: AdaptiveState | None = None  # of a plan that the session's policy adapts
    prompt_logprobs: int | None = None
    guide: Guide | None = None  # of its grammar, whose mask its sampler has
    takes_forced: bool = True  # drafts that the grammar leaves no choice
    priority: int = 0  # lower ones are read first
    cache_salt: str = ""  # its prefixes are kept for sequences with the same one

    tokens: list[int] = field(init=False)  # the prompt's and all emitted ones
    num_prompt: int = field(init=False)  # tokens of the prompt
    lane: int = field(init=False, default=0)
    slot: int = field(init=False, default=0)  # the lane that it began in
    num_reused: int = field(init=False, default=0)  # of the prompt, taken from the prefix cache
    num_read: int = field(init=False, default=0)  # of the prompt, committed so far
    # of each token of the prompt that was read, None for the first
    prompt_candidates: list[Candidates | None] = field(init=False, default_factory=list)
    # of one row, the aux hidden state of the last committed position, for a drafter that needs it
    hidden_state: HiddenStates | None = field(init=False, default=None)
    # Committed, and not yet shown to its drafter: it drafts nothing meanwhile
    unobserved: list[Observation] = field(init=False, default_factory=list)
    num_unobserved: int = field(init=False, default=0)  # tokens of them
    last_step: StepSize = field(init=False, default=StepSize())
    # One that is read and begins alike: what is kept of it will be there sooner
    follows: SequenceState | None = field(init=False, default=None)
    times: StageTimes = field(init=False)  # of the passes that it took part in

    def __post_init__(self) -> None:
        self.prompt = PromptValue.of(self.prompt)  # of plain ids too
        self.tokens, self.times = [*self.prompt.tokens], StageTimes()
        self.num_prompt = len(self.prompt)

    @property
    def num_emitted(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def cache_key(self) -> list[int]:
        """What tells its KV rows from those of other sequences, for each of `tokens`."""
        return [*self.prompt.cache_key, *self.tokens[len(self.prompt) :]]

    @property
    def accept_options(self) -> AcceptOptions:
        """The accept rule of its steps: the exact one where nothing drafts for it."""
        return EXACT_ACCEPTANCE if self.plan is None else self.acceptance

    @property
    def waits(self) -> bool:
        """Whether its drafter, an engine, is shown what was committed only when it is to draft."""
        if self.adaptive is None or self.drafter is None:
            return False
        return self.drafter.needs_hidden_states or isinstance(self.drafter, Budgeted)

    @property
    def pending(self) -> int:
        """The token that the base has drawn and not yet read."""
        return self.tokens[-1]

    def prompt_observation(
        self, start: int, end: int, hidden_states: HiddenStates, first: Sequence[int] = ()
    ) -> Observation:
        """The prompt's slots `start` to `end` as its drafter observes them, each with the token
        behind it: behind the last slot of all `first`."""
        prompt = self.prompt
        following = np.array([*prompt[start + 1 : end + 1], *first], np.int64)
        rope_positions, images = (
            prompt.positions_of(start, end),
            prompt.images_of(start + 1, end + 1),
        )
        return Observation(self.lane, hidden_states, following, rope_positions, images)

    def score_prompt(self, logits: Logits, start: int, end: int) -> None:
        """Take in the logits of the prompt's slots `start` to `end`: each is of the token behind
        it."""
        assert self.prompt_logprobs is not None
        if start == 0:
            self.prompt_candidates = [None]
        tokens = self.prompt[start + 1 : end + 1]
        for first in range(0, len(tokens), SCORED_ROWS):
            chosen = tokens[first : first + SCORED_ROWS]
            rows = logits.take(np.arange(first, first + len(chosen)))
            self.prompt_candidates += top_log_probs(rows, self.prompt_logprobs, chosen)

    def watch(self, token: int) -> str | None:
        """Called once per emitted token, in order; a finish reason ends the sequence there."""
        return None

    def take(self, output: StepOutput, room: int) -> StepOutput:
        """Append a step's tokens up to where the sequence ends, and say why if it does.

        The pending token needs a row of its own in the next pass, so the cache is full where `room`
        is 0.
        """
        for count, token in enumerate(output.tokens, start=1):
            self.tokens.append(token)
            reason = self.watch(token)
            if token in self.stop_ids:
                reason = END_OF_SEQUENCE
            if reason is not None:
                return cut(output, count, reason)
        num_emitted = self.num_emitted
        assert num_emitted <= self.max_new_tokens
        if num_emitted == self.max_new_tokens:
            return replace(output, finish_reason=MAX_LENGTH)
        return replace(output, finish_reason=CAPACITY) if room == 0 else output


def cut(output: StepOutput, count: int, reason: str) -> StepOutput:
    """A step that ends the sequence with its first `count` tokens."""
    return replace(
        output,
        tokens=output.tokens[:count],
        accepted=min(output.accepted, count),
        finish_reason=reason,
        logprobs=output.logprobs[:count],
        path=output.path[: count + 1],
    )


def rest(seq: SequenceState) -> int:
    """Tokens of a prompt that are still to be read."""
    return len(seq.prompt) - seq.num_read
