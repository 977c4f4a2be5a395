"""One request inside the runtime: what is asked, the pieces that stream out, and the whole answer.

Knows token ids, text and metrics of one request. Knows no files and no engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.prompts import STOP_WORDS, SamplingParams
from edgespec.runtime.metrics import RequestMetrics
from edgespec.runtime.sampling import Sampler
from edgespec.runtime.session import Candidates, Running, Step, Task
from edgespec.runtime.text import TextStream
from edgespec.runtime.tokenizer import Tokenizer
from edgespec.runtime.tree import DraftPlan


@dataclass(eq=False)
class Job:
    """Continue a prompt; `plan` None decodes plainly. `keep` and `keep_all` are those of
    `session.Task`.

    `cancel()` takes effect at the next step, from any thread.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingParams
    plan: DraftPlan | None = None
    keep: int = 0
    keep_all: bool = False
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added. `pieces` is the text that each token made certain: it waits for whole
    UTF-8 characters and for the end of what might become a stop string; what a cancelled request
    held back comes as a piece without a token. The first `accepted` tokens are drafts that the base
    accepted.
    """

    token_ids: list[int]
    pieces: list[str]
    accepted: int
    finish_reason: str | None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class Response:
    """A finished request. `seed` is the one that was used, drawn where none was given and one was
    needed.

    `logprobs` has one entry a token where num_logprobs asks for them: its most probable candidates,
    descending, and the token itself behind them where it is not among them.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics
    seed: int | None
    prompt_ids: list[int] = field(default_factory=list)
    logprobs: list[Candidates] = field(default_factory=list)
    slot: int = 0  # the lane that it began in


class Answering:
    """A job on its way: steps become chunks, and at the end a response. The job's sampling has its
    seed."""

    def __init__(self, job: Job, tokenizer: Tokenizer, stop_ids: frozenset[int]) -> None:
        self.job, self.stop_ids = job, stop_ids
        self.stop_word_ids, strings = tokenizer.split_stops(job.sampling.stop)
        self.text = TextStream(tokenizer, stop=strings)
        self.pieces: list[str] = []
        self.rest = ""  # what became certain only at the end
        self.token_ids: list[int] = []
        self.logprobs: list[Candidates] = []
        self.began = time.perf_counter()
        self.metrics = RequestMetrics(len(job.prompt_ids), job.plan.steps if job.plan else 0)

    def task(self) -> Task:
        job = self.job
        return Task(
            job.prompt_ids,
            sampler_of(job.sampling),
            job.sampling.max_generate_length,
            self.stop_ids,
            job.plan,
            self.watch,
            job.sampling.num_logprobs,
            job.keep,
            job.keep_all,
        )

    def watch(self, token: int) -> str | None:
        """Take in one emitted token; the reason to stop at it, if a stop string or its token says
        so."""
        self.pieces.append(self.text.push(token))
        return STOP_WORDS if self.text.stopped or token in self.stop_word_ids else None

    def chunk(self, step: Step) -> Chunk:
        """What a step added; at the end also the text that was held back."""
        self.metrics.add(step, time.perf_counter() - self.began)
        self.token_ids += step.tokens
        self.logprobs += step.logprobs
        pieces = self.pieces[len(self.pieces) - len(step.tokens) :]
        reason = step.finish_reason
        if reason is not None:
            rest = self.text.flush()
            reason = STOP_WORDS if self.text.stopped else reason
            pieces = [*pieces[:-1], pieces[-1] + rest] if pieces else [rest] * bool(rest)
            self.rest = rest
        return Chunk(step.tokens, pieces, step.accepted, reason)

    def response(self, reason: str, running: Running) -> Response:
        """The whole answer, for a sequence that ended for `reason` or was ended."""
        self.metrics.stages, self.metrics.reused_tokens = running.times, running.reused
        seed = self.job.sampling.seed if self.job.sampling.temperature else None
        return Response(
            "".join(self.pieces) + self.rest,
            self.token_ids,
            STOP_WORDS if self.text.stopped else reason,
            self.metrics,
            seed,
            list(self.job.prompt_ids),
            self.logprobs,
            running.slot,
        )


def sampler_of(sampling: SamplingParams) -> Sampler:
    assert sampling.seed is not None
    return Sampler(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.seed,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.logit_bias,
    )
