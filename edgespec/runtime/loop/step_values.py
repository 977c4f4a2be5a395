"""The values of one step of the loop, from a draft to what was committed.

Knows one sequence's tree, the base's result on it and the accept rule. Knows no lanes and no
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.backends.call import HiddenStates, Ids, Result
from edgespec.errors import EdgeSpecError
from edgespec.runtime.acceptance.verify import ACCEPT_RULES, AcceptResult
from edgespec.runtime.drafters.base import Observation
from edgespec.runtime.faults import as_error
from edgespec.runtime.loop.sequence import Candidates, SequenceState, StepOutput
from edgespec.runtime.plans.policy import Decision
from edgespec.runtime.sampling.sampler import top_log_probs
from edgespec.runtime.trees.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class Draft:
    """A sequence's tree of a step; the root alone where nothing is drafted. `held_back`: its
    schedule lets it draft nothing while so many run. `decision` is the policy's, where one
    adapts its plan."""

    seq: SequenceState
    tree: DraftTree
    held_back: bool = False
    decision: Decision | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """A draft after the base's pass. `accepted` is an error where this sequence alone failed."""

    draft: Draft
    result: Result
    accepted: AcceptResult | EdgeSpecError


@dataclass(frozen=True, slots=True)
class Committed:
    """What a step came to; `observation` is what its drafter is still to observe of it."""

    seq: SequenceState
    output: StepOutput
    observation: Observation | None = None


def accept(draft: Draft, result: Result) -> AcceptResult | EdgeSpecError:
    """What the sequence's rule accepts; an error is its own, and the rest of the batch goes on."""
    seq, options = draft.seq, draft.seq.accept_options
    try:
        rule = ACCEPT_RULES[options.rule].accept
        return rule(draft.tree, result.logits, seq.sampler, seq.tokens, options)
    except Exception as error:  # of whatever kind, it is this sequence's own
        return as_error(error)


def last_of(states: HiddenStates) -> HiddenStates:
    """A copy of the last row."""
    return states.take(np.array([len(states) - 1]))


def committed_path(seq: SequenceState, accepted: AcceptResult) -> Ids:
    """The accepted nodes up to a stop token: what comes after it is no part of the text."""
    if len(accepted.path) == 1:
        return ROOT
    stops = (i for i, token in enumerate(accepted.emitted) if token in seq.stop_ids)
    stop = next(stops, len(accepted.path))
    return np.array(accepted.path[: stop + 1], np.int64)


def logprobs_of(
    seq: SequenceState, result: Result, rows: Sequence[int], tokens: Sequence[int]
) -> list[Candidates]:
    """For each token the candidates of the row that it was drawn from."""
    if not seq.num_logprobs:
        return []
    return top_log_probs(result.logits.take(np.array(rows)), seq.num_logprobs, tokens)
