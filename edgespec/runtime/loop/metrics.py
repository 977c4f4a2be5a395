"""Counts and times of one request and of many, under the names that the field's clients read.

Knows numbers. The per-request block follows the schema that vLLM publishes for
`speculative_decoding`. What is not defined, such as a latency between tokens where there is one
token, is None and never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from edgespec.errors import counted
from edgespec.methods.names import ADAPTIVE, FIXED, SpecPolicy
from edgespec.runtime.acceptance.base import GUARANTEES, Lossless
from edgespec.runtime.lanes.stages import StageTimes
from edgespec.runtime.loop.sequence import StepOutput


@dataclass
class RequestMetrics:
    """One request. Times are seconds since it came, as vLLM counts them: `queue_time` is what it
    waited for a lane, and part of `time_to_first_token` and `request_latency`. Lists have one entry
    a verify step.

    In a batch its steps are those of the others too, and where a chunk of a newcomer's prompt is
    read between two steps that time is in the second one. `stages` are the passes that it took
    part in: in a batch the rows of the others are in them, so that their sum over requests exceeds
    what was spent.

    `lossless` is what the accept rule guarantees: the `tokens` of plain decoding, their
    `distribution`, or `no`. `lost_drafts` counts by its reason how often a drafter failed to make
    drafts, `steps_without_drafts` the steps in which too many sequences ran for any, by
    max_concurrency or draft_len_schedule, `steps_paused` those in which adaptive drafting decided
    to decode plainly. `forced_tokens` are those that a grammar left no choice and that came as
    drafts: they are in no count of what a drafter drafted.
    """

    prompt_tokens: int
    num_spec_tokens: int = 0  # levels of the drafting plan: the most drafts that a step can accept
    reused_tokens: int = 0  # of the prompt, whose KV rows were there already
    completion_tokens: int = 0
    queue_time: float = 0.0
    time_to_first_token: float = 0.0
    request_latency: float = 0.0
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    per_step_path: list[list[int]] = field(default_factory=list)  # accepted nodes, the root first
    per_step_s: list[float] = field(default_factory=list)  # since the step before it
    stages: StageTimes = field(default_factory=StageTimes)
    acceptance: str = "exact"  # the accept rule
    acceptance_options: dict[str, Any] = field(default_factory=dict)
    lossless: Lossless = "tokens"
    lost_drafts: dict[str, int] = field(default_factory=dict)
    steps_without_drafts: int = 0
    spec_policy: SpecPolicy = FIXED
    steps_paused: int = 0
    forced_tokens: int = 0

    def add(self, step: StepOutput, elapsed: float) -> None:
        """Take in one step that ended `elapsed` seconds after the request came."""
        if not self.completion_tokens:
            self.time_to_first_token = elapsed
        if step.verified and step.tokens:
            given = 0 if step.tree is None else step.tree.num_forced
            taken = sum(0 < node <= given for node in step.path) if given else 0
            self.forced_tokens += taken
            self.per_step_accepted.append(step.accepted - taken)
            self.per_step_drafted.append(step.drafted - given)
            self.per_step_path.append(step.path)
            self.steps_without_drafts += step.held_back
            self.steps_paused += step.paused
            self.per_step_s.append(elapsed - self.request_latency)
            if step.tree is not None and step.tree.lost is not None:
                self.lost_drafts[step.tree.lost] = self.lost_drafts.get(step.tree.lost, 0) + 1
        self.completion_tokens += len(step.tokens)
        self.request_latency = elapsed

    @property
    def computed_tokens(self) -> int:
        """Tokens of the prompt that prefill went through."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def steps(self) -> int:
        """Base passes after prefill."""
        return len(self.per_step_accepted)

    @property
    def decode_tokens(self) -> int:
        """Tokens that verify steps emitted: all but the one of prefill."""
        return max(0, self.completion_tokens - 1)

    @property
    def time_to_first_token_without_queue(self) -> float:
        """Seconds from the lane to the first token."""
        return max(0.0, self.time_to_first_token - self.queue_time)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last one."""
        return self.request_latency - self.time_to_first_token

    @property
    def inter_token_latency(self) -> float | None:
        """Seconds from the first token to the last one a token between: a step's tokens come at
        once."""
        return ratio(self.decode_s, self.decode_tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of decoding, as one user sees it: the first token and the time before it
        are left out. None where there is one token."""
        return ratio(self.decode_tokens, self.decode_s)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted a verify step, bonus included, the token of prefill excluded; None without
        a step."""
        return ratio(self.decode_tokens, self.steps)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted drafts over drafted ones; None where nothing was drafted."""
        return ratio(self.num_accepted, self.num_drafted)

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(self.per_step_accepted)

    @property
    def num_drafted(self) -> int:
        """Drafts that were made: nodes beside the root."""
        return sum(self.per_step_drafted)

    @property
    def guarantee(self) -> str:
        """The accept rule and what it guarantees, as it is shown."""
        return f"{self.acceptance} acceptance: {GUARANTEES[self.lossless]}"

    def in_words(self) -> str:
        """The main figures in one line, without those that are undefined."""
        figures = [
            (counted(self.prompt_tokens, "prompt token"), "{}"),
            (self.reused_tokens or None, "{} of them reused"),
            (counted(self.completion_tokens, "token"), "{}"),
            (counted(self.steps, "base pass", "es"), "{} after prefill"),
            (self.acceptance_length, "acceptance length {:.2f}"),
            (None if self.lossless == "tokens" else self.guarantee, "{}"),
            (self.tokens_per_s, "{:.1f} tokens/s"),
            (self.queue_time, "queue time {:.3f} s"),
            (self.time_to_first_token, "time to first token {:.3f} s"),
            (self.request_latency, "latency {:.3f} s"),
        ]
        return ", ".join(form.format(value) for value, form in figures if value is not None)

    def to_dict(self, *, speculative: bool) -> dict[str, Any]:
        """The `metrics` of output.json. `output_tokens_per_s` is over the time that it had a
        lane, `tokens_per_s` of decoding."""
        out: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "computed_tokens": self.computed_tokens,
            "completion_tokens": self.completion_tokens,
            "base_passes_after_prefill": self.steps,
            "queue_time_s": self.queue_time,
            "time_to_first_token_s": self.time_to_first_token,
            "time_to_first_token_without_queue_s": self.time_to_first_token_without_queue,
            "inter_token_latency_s": self.inter_token_latency,
            **percentiles("step_latency", self.per_step_s),
            "request_latency_s": self.request_latency,
            "tokens_per_s": self.tokens_per_s,
            "output_tokens_per_s": ratio(
                self.completion_tokens, self.request_latency - self.queue_time
            ),
            "stages_s": {
                "prefill": self.stages.prefill,
                "draft": self.stages.draft,
                "verify": self.stages.verify,
                "commit": self.stages.commit,
            },
            "engine_s": self.stages.engine,
            "host_s": self.stages.host,
        }
        if self.forced_tokens:
            out["forced_tokens"] = self.forced_tokens
        if speculative:
            out |= {
                "acceptance": {
                    "rule": self.acceptance,
                    "lossless": self.lossless,
                    **({"options": self.acceptance_options} if self.acceptance_options else {}),
                },
                "acceptance_length": self.acceptance_length,
                "acceptance_rate": self.acceptance_rate,
                "per_position_acceptance": per_position(self.drafting_steps, self.num_spec_tokens),
                "spec_policy": self.spec_policy,
                "speculative_decoding": self.speculative_decoding(),
                **({"lost_drafts": self.lost_drafts} if self.lost_drafts else {}),
            }
            if self.steps_without_drafts:
                out["steps_without_drafts"] = self.steps_without_drafts
            if self.spec_policy == ADAPTIVE:
                out["steps_paused"] = self.steps_paused
        return out

    @property
    def drafting_steps(self) -> list[int]:
        """How many drafts each step accepted that had some."""
        steps = zip(self.per_step_accepted, self.per_step_drafted, strict=True)
        return [accepted for accepted, drafted in steps if drafted]

    def speculative_decoding(self) -> dict[str, Any]:
        """vLLM's per-request block. acceptance_histogram[a] counts the steps that accepted a
        drafts.

        mean_acceptance_length is 1 + accepted / steps, the bonus counted in every step, as vLLM
        defines it; where a stop takes the last step's bonus away our acceptance_length, which
        counts what was emitted, is a little less.
        """
        accepted, drafted = self.num_accepted, self.num_drafted
        pairs = list(zip(self.per_step_accepted, self.per_step_drafted, strict=True))
        return {
            "mean_acceptance_length": 1 + accepted / self.steps if self.steps else None,
            "draft_acceptance_rate": ratio(accepted, drafted),
            "acceptance_histogram": self.histogram(self.per_step_accepted),
            "acceptance_histogram_by_draft_length": {
                str(length): self.histogram([a for a, d in pairs if d == length])
                for length in sorted(set(self.per_step_drafted))
            },
            "num_spec_steps": self.steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": self.num_spec_tokens,
            "per_step_accepted": self.per_step_accepted,
            "per_step_drafted": self.per_step_drafted,
        }

    def histogram(self, accepted: list[int]) -> list[int]:
        """[num_spec_tokens + 1]: how many steps accepted 0, 1, ... drafts."""
        return [accepted.count(a) for a in range(self.num_spec_tokens + 1)]


SUMS = (
    *("steps", "steps_without_drafts", "steps_paused", "completion_tokens", "decode_tokens"),
    *("decode_s", "reused_tokens", "computed_tokens", "num_accepted", "num_drafted"),
)
MEANS = ("queue_time", "time_to_first_token", "time_to_first_token_without_queue")


class Pooled:
    """Many requests as one: SUMS over all, so that long requests weigh more, and MEANS. `to_dict`
    has the means of other values beside them."""

    steps: int  # in a batch several of them are one pass of the engine
    steps_without_drafts: int
    steps_paused: int
    completion_tokens: int
    decode_tokens: int
    decode_s: float  # each request's own; in a batch they overlap
    reused_tokens: int
    computed_tokens: int
    num_accepted: int
    num_drafted: int
    inter_token_latency: float | None
    tokens_per_s: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    queue_time: float | None
    time_to_first_token: float | None
    time_to_first_token_without_queue: float | None

    def __init__(self, requests: Sequence[RequestMetrics]) -> None:
        self.requests = requests
        for name in SUMS:
            setattr(self, name, sum(getattr(request, name) for request in requests))
        for name in MEANS:
            setattr(self, name, mean(getattr(request, name) for request in requests))
        self.inter_token_latency = ratio(self.decode_s, self.decode_tokens)
        self.tokens_per_s = ratio(self.decode_tokens, self.decode_s)
        self.acceptance_length = ratio(self.decode_tokens, self.steps)
        self.acceptance_rate = ratio(self.num_accepted, self.num_drafted)

    @property
    def per_position_acceptance(self) -> list[float]:
        """For each draft position the share of the steps with drafts that accepted it, as vLLM
        counts."""
        counts = [a for r in self.requests for a in r.drafting_steps]
        return per_position(counts, max((r.num_spec_tokens for r in self.requests), default=0))

    def to_dict(self, *, speculative: bool) -> dict[str, Any]:
        """Pooled, and under names that say so the mean over the requests in which a value is
        defined.

        Percentiles over requests where there is more than one; those of a step's latency are over
        all steps.
        """
        latencies = [r.inter_token_latency for r in self.requests]
        out: dict[str, Any] = {
            "completion_tokens": self.completion_tokens,
            "base_passes_after_prefill": self.steps,
            "tokens_per_s": self.tokens_per_s,
            "queue_time_s": self.queue_time,
            "time_to_first_token_s": self.time_to_first_token,
            "time_to_first_token_without_queue_s": self.time_to_first_token_without_queue,
            "inter_token_latency_s": self.inter_token_latency,
            "inter_token_latency_mean_of_requests_s": mean(latencies),
            **percentiles("step_latency", [s for r in self.requests for s in r.per_step_s]),
        }
        if len(self.requests) > 1:
            out |= percentiles(
                "time_to_first_token", [r.time_to_first_token for r in self.requests]
            )
            out |= percentiles("inter_token_latency", [s for s in latencies if s is not None])
        if speculative:
            out |= {
                "acceptance_length": self.acceptance_length,
                "acceptance_length_mean_of_requests": mean(
                    r.acceptance_length for r in self.requests
                ),
                "acceptance_rate": self.acceptance_rate,
                "acceptance_rate_mean_of_requests": mean(r.acceptance_rate for r in self.requests),
                "per_position_acceptance": self.per_position_acceptance,
            }
        return out


def per_position(accepted: Sequence[int], levels: int) -> list[float]:
    """r_k: share of steps with at least k accepted drafts, for k = 1 to the levels drafted; empty
    without a step. `accepted` are those of steps that had drafts: others say nothing of them."""
    deepest = max(levels, max(accepted, default=0))
    return (
        [sum(a >= k for a in accepted) / len(accepted) for k in range(1, deepest + 1)]
        if accepted
        else []
    )


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """`{name}_p50_s` and `{name}_p95_s`, between two values in proportion; None without values."""
    return {
        f"{name}_p{q}_s": float(np.percentile(seconds, q)) if seconds else None for q in (50, 95)
    }


def ratio(part: float, whole: float) -> float | None:
    """The quotient; None where the denominator is 0."""
    return part / whole if whole else None


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are defined; None where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
