"""Relaxed acceptance for thinking, as TensorRT-LLM has it: between the tokens that begin and end a
model's thoughts, a draft is accepted where it is among the base's `relaxed_topk` best tokens and
its log-probability at most `relaxed_delta` below the best one's. Outside the thoughts the rule is
sample and walk. The thoughts are others than the base's, and the answer behind them with them: the
rule is lossy.

What differs from there: log-probabilities are compared, as its documentation says (its kernel
compares probabilities); a sampled request draws first, and only where no child carries the token
drawn is the best of those within the delta accepted; the end of the thoughts counts from its token
on, in the middle of a step too; and what a prompt has thought to its end does not relax the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from edgespec.backends.call import Floats, Logits
from edgespec.errors import OptionError
from edgespec.methods.names import RELAXED
from edgespec.runtime.acceptance.base import (
    AcceptOptions,
    AcceptResult,
    AcceptRow,
    ModelTokens,
    is_number,
)
from edgespec.runtime.sampling.sampler import Sampler, largest
from edgespec.runtime.text.thinking import THOUGHTS
from edgespec.runtime.trees.tree import DraftTree

MAX_TOKENS = 2**31  # ids of a vocabulary are below


@dataclass(frozen=True)
class RelaxedAcceptance(AcceptOptions):
    """Drafts near the base's best token are accepted within thoughts: faster, and lossy.

    `relaxed_topk` (10) and `relaxed_delta` (0.6 nats) are the values of TensorRT-LLM's guides; its
    own defaults, 1 and 0, relax nothing. The two tokens are ids, or tokens as the tokenizer writes
    them; None are those of the model. Raises OptionError for other values.
    """

    rule: ClassVar[str] = RELAXED

    relaxed_topk: int = 10
    relaxed_delta: float = 0.6
    begin_thinking_phase_token: int | str | None = None
    end_thinking_phase_token: int | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.relaxed_topk, int) or not is_number(self.relaxed_topk):
            self.refuse("relaxed_topk", "an integer of 1 or more")
        if self.relaxed_topk < 1:
            self.refuse("relaxed_topk", "an integer of 1 or more")
        if not is_number(self.relaxed_delta) or self.relaxed_delta < 0:
            self.refuse("relaxed_delta", "a difference of log-probabilities, 0 or more")
        for name in ("begin_thinking_phase_token", "end_thinking_phase_token"):
            if not is_token(getattr(self, name)):
                self.refuse(name, "the id of a token or the token itself, or leave it out")
        if (self.begin_thinking_phase_token is None) != (self.end_thinking_phase_token is None):
            self.refuse("begin_thinking_phase_token", "both tokens of the thoughts, or none")

    def for_model(self, tokens: ModelTokens) -> RelaxedAcceptance:
        """The same with the ids of the model's tokens. Raises OptionError where it has none."""
        begin, end = self.begin_thinking_phase_token, self.end_thinking_phase_token
        if begin is not None and end is not None:
            return replace(
                self,
                begin_thinking_phase_token=id_of(begin, tokens),
                end_thinking_phase_token=id_of(end, tokens),
            )
        for begin, end in THOUGHTS:
            ids = tokens.token_id(begin), tokens.token_id(end)
            if ids[0] is not None and ids[1] is not None:
                return replace(
                    self, begin_thinking_phase_token=ids[0], end_thinking_phase_token=ids[1]
                )
        raise OptionError(
            "relaxed acceptance is for thoughts, and this model has no tokens that begin and end"
            f" them ({', '.join(begin for begin, _ in THOUGHTS)})",
            "Name them with begin_thinking_phase_token and end_thinking_phase_token, or take"
            " another rule.",
        )

    def is_thinking(self, tokens: Sequence[int]) -> bool:
        """Whether the thoughts have begun, and not ended, behind `tokens`."""
        ends = (self.begin_thinking_phase_token, self.end_thinking_phase_token)
        last = next((token for token in reversed(tokens) if token in ends), None)
        return last is not None and last == self.begin_thinking_phase_token


def is_token(value: object) -> bool:
    """Whether a value may be the id of a token, a token, or None."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 0 <= value < MAX_TOKENS
    return value is None or (isinstance(value, str) and value != "")


def id_of(token: int | str, tokens: ModelTokens) -> int:
    """The id of a token that is given by its id or as it is written. Raises OptionError where the
    model has no such token."""
    if isinstance(token, int):
        token_id = None if tokens.token(token) is None else token
    else:
        token_id = tokens.token_id(token)
    if token_id is None:
        message = f"the model has no token {token!r:.60}, and thoughts begin and end with one token"
        raise OptionError(message, "Give a token of its tokenizer, or a token's id.")
    return token_id


def accept(
    tree: DraftTree,
    logits: Logits,
    sampler: Sampler,
    before: Sequence[int],
    options: RelaxedAcceptance,
) -> AcceptResult:
    """Walk `tree` by the base's logits [N, V]; within thoughts also along children near its best
    token."""
    tokens, path, thinking = [*before], [0], options.is_thinking(before)
    while True:
        node = path[-1]
        token = sampler.pick_from(logits, node, tokens)
        child = tree.child(node, token)
        if child is None and thinking:
            child = near(tree, node, logits.row(node), sampler, tokens, options)
            token = token if child is None else int(tree.tokens[child])
        tokens.append(token)
        if child is None:
            return AcceptResult(path, tokens[len(before) :])
        path.append(child)
        if token in (options.begin_thinking_phase_token, options.end_thinking_phase_token):
            thinking = token == options.begin_thinking_phase_token


def near(
    tree: DraftTree,
    node: int,
    row: Floats,
    sampler: Sampler,
    tokens: Sequence[int],
    options: RelaxedAcceptance,
) -> int | None:
    """The child of `node` with the best token by the base's logits [V] there, of those among its
    best and within the delta; None where no child is.

    A difference of log-probabilities is one of logits. A sampled request never gets a token that
    its top-k, top-p or min-p removes.
    """
    children = np.flatnonzero(tree.parents == node)
    if not len(children):
        return None
    adjusted = sampler.checked(row, tokens).astype(np.float64)
    best = largest(adjusted, min(options.relaxed_topk, len(adjusted)))
    if sampler.temperature:
        best = np.intersect1d(best, sampler.warped(adjusted)[0])
    close = best[adjusted[best] >= adjusted.max() - options.relaxed_delta]
    fitting = children[np.isin(tree.tokens[children], close)]
    if not len(fitting):
        return None
    return int(fitting[np.argmax(adjusted[tree.tokens[fitting]])])


ROW = AcceptRow(
    title="relaxed acceptance for thinking",
    lossless="no",
    accept=accept,
    options=RelaxedAcceptance,
)
