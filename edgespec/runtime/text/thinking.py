"""The warning for requests that are not in the mode, with thinking or without, that a draft was
trained in.

Knows the flags and keys that set the mode. Knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence

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
