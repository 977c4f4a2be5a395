"""How many drafts a base accepts, measured in torch: greedy drafts held against what the base
itself answers greedily.

The base answers once. From then on one pass over a text gives the hidden states of all its tokens,
and one of the draft what it would draft behind each: no cache, and no pass a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edgespec.training.row import Task, TrainRow

AT_ONCE = 16  # prompts that the base answers together


@dataclass(frozen=True, slots=True)
class Answer:
    """Ids of a prompt and of the base's greedy answer."""

    ids: tuple[int, ...]
    prompt_len: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Pooled over answers. Tokens are those of verify steps: the first is the prefill's."""

    num_tokens: int
    num_steps: int
    per_position: tuple[float, ...]  # share of steps that accept at least 1, 2, ... drafts

    @property
    def length(self) -> float:
        """Tokens a verify step, the bonus included."""
        return self.num_tokens / max(1, self.num_steps)


@torch.no_grad()
def answers_of(
    base: Any, prompts: Sequence[Sequence[int]], new: int, stops: Sequence[int], device: Any
) -> list[Answer]:
    """What the base answers greedily, at most `new` tokens, up to a stop token. Answers of one
    token have nothing to draft and are left out."""
    found = []
    rows = sorted(prompts, key=len)
    for part in (rows[i : i + AT_ONCE] for i in range(0, len(rows), AT_ONCE)):
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(row)) + [*row] for row in part], device=device)
        mask = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in part], device=device
        )
        whole = base.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False,
            eos_token_id=[*stops] or None, pad_token_id=0,
        )  # fmt: skip
        for row, out in zip(part, whole[:, width:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(out) if token in stops), len(out))
            if end > 1:
                found.append(Answer((*row, *out[:end]), len(row)))
    return found


@torch.no_grad()
def measure(row: TrainRow, draft: Any, task: Task, answers: Sequence[Answer]) -> Acceptance:
    """The acceptance of a draft over answers."""

    def drafts(answer: Answer) -> list[list[int]]:
        ids = torch.tensor([answer.ids], device=task.device)
        with task.cast(measuring=True):
            aux, _ = task.states(ids)
            found = row.drafts(draft, task, aux.float(), ids, answer.prompt_len)
        return found.tolist()

    training = draft.training
    draft.eval()
    found = counted(answers, drafts)
    draft.train(training)
    return found


def counted(
    answers: Sequence[Answer], drafts: Callable[[Answer], Sequence[Sequence[int]]]
) -> Acceptance:
    """How many of the `drafts` behind each token of an answer but the last are accepted."""
    accepted = [count for answer in answers for count in accepted_in(answer, drafts(answer))]
    num_tokens = sum(len(answer.ids) - answer.prompt_len - 1 for answer in answers)
    longest = max(accepted, default=0)
    shares = [sum(n >= k for n in accepted) / len(accepted) for k in range(1, longest + 1)]
    return Acceptance(num_tokens, len(accepted), tuple(shares))


def accepted_in(answer: Answer, drafts: Sequence[Sequence[int]]) -> list[int]:
    """How many drafts each verify step accepts; `drafts[i]` are those behind the answer's token
    i."""
    answered, accepted, pending = answer.ids[answer.prompt_len :], list[int](), 0
    while pending < len(answered) - 1:
        behind = answered[pending + 1 :]
        right = 0
        while right < min(len(drafts[pending]), len(behind)) and (
            drafts[pending][right] == behind[right]
        ):
            right += 1
        accepted.append(right)
        pending += right + 1
    return accepted
