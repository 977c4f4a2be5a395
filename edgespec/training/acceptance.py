"""How many drafts a base accepts, measured in torch: greedy drafts held against what the base
itself answers greedily.

The base answers once. From then on one pass over a text gives the hidden states of all its tokens,
and one of the draft what it would draft behind each: no cache, and no pass a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from edgespec.training.data import Ids, Question, Row, Template
from edgespec.training.pictures import Picture, Pictures
from edgespec.training.ranks import ALONE, Ranks
from edgespec.training.row import Batch, Task, TrainRow

AT_ONCE = 16  # prompts that the base answers together


@dataclass(frozen=True, slots=True)
class Answer:
    """Ids of a prompt and of the base's greedy answer, to which question and to which turn of it.
    `read` gives the base's aux hidden states [S, k * Ht] where they were dumped."""

    ids: tuple[int, ...]
    prompt_len: int
    pictures: tuple[Picture, ...] = ()
    read: Callable[[], torch.Tensor] | None = None
    place: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Pooled over answers. Tokens are those of verify steps: the first is the prefill's."""

    num_tokens: int
    num_steps: int
    per_position: tuple[float, ...]  # share of steps that accept at least 1, 2, ... drafts
    draft_len: int = 0  # drafts of a step
    emitted: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)  # see `place`

    @property
    def length(self) -> float:
        """Tokens a verify step, the bonus included."""
        return self.num_tokens / max(1, self.num_steps)


# Prompts in, the ids of an answer for each out
Answering = Callable[[Sequence[Question]], Sequence[Sequence[int]]]


def answers_of(
    questions: Sequence[Question], template: Template, answering: Answering
) -> list[Answer]:
    """What the base answers, turn by turn where a question has several. Answers of one token have
    nothing to draft and are left out."""
    found, open_, turn = list[Answer](), dict(enumerate(questions)), 0
    while open_:
        answered = answering([*open_.values()])
        pairs = dict(zip(open_, zip(open_.values(), answered, strict=True), strict=True))
        found += [
            Answer((*q.ids, *out), len(q.ids), q.pictures, place=(number, turn))
            for number, (q, out) in pairs.items()
            if len(out) > 1
        ]
        open_ = {n: template.followed(q, out) for n, (q, out) in pairs.items() if q.later}
        turn += 1
    return found


def greedy(
    base: Any, new: int, stops: Sequence[int], device: Any,
    pictures: Pictures | None = None, ranks: Ranks = ALONE,
) -> Answering:  # fmt: skip
    """What the base answers greedily, at most `new` tokens, up to a stop token. Each process
    answers some."""

    @torch.no_grad()
    def answering(prompts: Sequence[Question]) -> Sequence[Sequence[int]]:
        found: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
        at_once = 1 if pictures else AT_ONCE
        parts = [order[i : i + at_once] for i in range(0, len(order), at_once)]
        for part in parts[ranks.rank :: ranks.world]:
            rows = [np.array(prompts[i].ids, np.int64) for i in part]
            width, given = max(map(len, rows)), {}
            ids = torch.stack([padded_before(row, width) for row in rows]).to(device)
            mask = torch.stack([padded_before(np.ones_like(row), width) for row in rows])
            if pictures is not None and (shown := prompts[part[0]].pictures):
                read = pictures.inputs([(rows[0], shown)], width)
                given = {n: torch.from_numpy(read[n]).to(device) for n in read if n != "positions"}
                given["mm_token_type_ids"] = (ids == pictures.tokens.image).int()
            whole = base.generate(
                ids, attention_mask=mask.to(device), max_new_tokens=new, do_sample=False,
                eos_token_id=[*stops] or None, pad_token_id=0, **given,
            )  # fmt: skip
            for i, out in zip(part, whole[:, width:].tolist(), strict=True):
                end = next((n + 1 for n, token in enumerate(out) if token in stops), len(out))
                found[i] = out[:end]
        answers = {i: out for theirs in ranks.gathered(found) for i, out in theirs.items()}
        return [answers[i] for i in range(len(prompts))]

    return answering


def padded_before(ids: Ids, width: int) -> torch.Tensor:
    """[width], with zeros before the ids."""
    return torch.from_numpy(np.pad(ids, (width - len(ids), 0)))


@torch.no_grad()
def measure(
    row: TrainRow, draft: Any, task: Task, answers: Sequence[Answer],
    pictures: Pictures | None = None,
) -> Acceptance:  # fmt: skip
    """The acceptance of a draft over answers, of which each process measures some."""

    def drafts(answer: Answer) -> list[list[int]]:
        ids = torch.tensor([answer.ids], device=task.device)
        batch, more = read_of(answer, pictures, task.device), {}
        if batch is not None:
            more = {"positions": batch["positions"]}
        with task.cast(measuring=True):
            if answer.read is None:
                aux, _ = task.states(ids, batch)
            else:
                aux = answer.read().to(task.device)[None]
            found = row.drafts(draft, task, aux.float(), ids, answer.prompt_len, **more)
        return found.tolist()

    training = draft.training
    draft.eval()
    found = counted(answers, drafts, task.ranks)
    draft.train(training)
    return found


def counted(
    answers: Sequence[Answer],
    drafts: Callable[[Answer], Sequence[Sequence[int]]],
    ranks: Ranks = ALONE,
) -> Acceptance:
    """How many of the `drafts` behind each token of an answer but the last are accepted."""
    accepted, draft_len = list[int](), 0
    emitted = dict[tuple[int, int], Sequence[int]]()
    for answer in answers[ranks.rank :: ranks.world]:
        found = drafts(answer)
        own = accepted_in(answer, found)
        last = len(answer.ids) - answer.prompt_len - 1 - sum(own[:-1]) - len(own[:-1])
        accepted += own
        emitted[answer.place] = [*(count + 1 for count in own[:-1]), last]
        draft_len = len(found[0])
    each = ranks.gathered((accepted, emitted, draft_len))
    accepted = [count for theirs, *_ in each for count in theirs]
    emitted = {place: steps for _, theirs, _ in each for place, steps in theirs.items()}
    num_tokens, draft_len = sum(map(sum, emitted.values())), max(part[2] for part in each)
    longest = max(accepted, default=0)
    shares = [sum(n >= k for n in accepted) / len(accepted) for k in range(1, longest + 1)]
    return Acceptance(num_tokens, len(accepted), tuple(shares), draft_len, emitted)


@torch.no_grad()
def surprise(task: Task, rows: Sequence[Row]) -> tuple[float, float] | None:
    """Nats a token of what rows learn, under the base, and of what it would say there itself, which
    is its entropy: equal for answers that it sampled. None where nothing is learned."""
    said, own, count = 0.0, 0.0, 0
    for row in rows:
        places = torch.from_numpy(np.flatnonzero(row.predicts[:-1])).to(task.device)
        if not len(places):
            continue
        ids = torch.from_numpy(row.ids)[None].to(task.device)
        with task.cast(measuring=True):
            logs = task.logits(task.states(ids)[1][0, places]).log_softmax(-1)
        said -= float(logs.gather(1, ids[0, places + 1, None]).sum())
        own -= float((logs.exp() * logs).sum())
        count += len(places)
    return (said / count, own / count) if count else None


def read_of(answer: Answer, pictures: Pictures | None, device: Any) -> Batch | None:
    """What the base reads of an answer's images, where the data has some."""
    if pictures is None:
        return None
    ids = np.array(answer.ids, np.int64)
    read = pictures.inputs([(ids, answer.pictures)], len(ids))
    return {name: torch.from_numpy(values).to(device) for name, values in read.items()}


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
