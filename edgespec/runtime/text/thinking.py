"""Thoughts before an answer: between which tokens they stand, whether a prompt leaves them open,
and the warning for requests that are not in the mode that a draft was trained in: with thinking or
without.

Knows tokens, and the flags and keys that set the mode. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# What chat templates put around thoughts
THOUGHTS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
CLOSED_WITHIN = 4  # tokens at the end of a prompt: a template that closes thoughts does so there
NO_SUCH_MODE = (
    "drafts for this base are trained with thinking, and its chat template has no such mode: {} "
    "Export the base again with the chat template of the original download."
)
COSTS = "fewer of them will be accepted, the answers are the same."
# (set by a flag, trained with thinking) -> what to do
REMEDIES = {
    (True, True): "Give `enable_thinking`.",
    (True, False): "Leave `enable_thinking` out.",
    (False, True): 'Set "enable_thinking": true.',
    (False, False): 'Leave "enable_thinking" out.',
}


class TokenIds(Protocol):
    """What a tokenizer says of one token."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text; None where the model has none."""


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The tokens around an answer's thoughts. `open`: the prompt has begun them; else the answer
    may begin with them."""

    begin: int
    end: int
    open: bool

    @classmethod
    def of(cls, prompt: Sequence[int], tokenizer: TokenIds) -> Thoughts | None:
        """Those of an answer to a prompt; None where the model has none, or the prompt's last
        tokens close them."""
        for pair in THOUGHTS:
            begin, end = map(tokenizer.token_id, pair)
            if begin is None or end is None:
                continue
            marks = (i for i in range(len(prompt) - 1, -1, -1) if prompt[i] in (begin, end))
            last = next(marks, None)
            if last is not None and prompt[last] == end and last >= len(prompt) - CLOSED_WITHIN:
                return None
            return cls(begin, end, last is not None and prompt[last] == begin)
        return None

    def begun_in(self, tokens: Sequence[int], start: int) -> int | None:
        """Where the answer itself begins in a path whose prompt has `start` tokens; None within the
        thoughts."""
        if not self.open and (len(tokens) == start or tokens[start] != self.begin):
            return start
        try:
            return tokens.index(self.end, start) + 1
        except ValueError:
            return None


def thinking_note(
    trained: bool | None, asked: Sequence[bool], *, template_has_mode: bool, by_flag: bool
) -> str | None:
    """A warning where requests, by their `enable_thinking`, are not in the mode that the draft was
    `trained` in; None where all are, or it knows both.

    With `by_flag` the mode is that of a chat, set by --enable-thinking.
    """
    num_others = sum(mode is not trained for mode in asked)
    if trained is None or not num_others:
        return None
    if not template_has_mode:
        # a request for a mode that the template has not is refused by itself
        return NO_SUCH_MODE.format(COSTS) if trained else None
    mode, other = ("on", "off") if trained else ("off", "on")
    who = (
        "`enable_thinking` is"
        if by_flag
        else f"{num_others} of {len(asked)} requests have enable_thinking"
    )
    message = f"{who} {other}, and drafts for this base are trained with it {mode}"
    return f"{message}: {COSTS} {REMEDIES[by_flag, trained]}"
