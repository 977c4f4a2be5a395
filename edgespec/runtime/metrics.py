"""Counts and times of one request and of many, under the names that the field's clients read.

Knows numbers. The per-request block follows the schema that vLLM publishes for `speculative_decoding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.runtime.session import StageTimes, Step


@dataclass
class RequestMetrics:
    """One request. Times are seconds since the request began; lists have one entry a verify step."""

    prompt_tokens: int
    num_spec_tokens: int = 0  # levels of the drafting plan: the most drafts that a step can accept
    completion_tokens: int = 0
    time_to_first_token: float = 0.0
    request_latency: float = 0.0
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)
    stages: StageTimes = field(default_factory=StageTimes)

    def add(self, step: Step, elapsed: float) -> None:
        if not self.completion_tokens:
            self.time_to_first_token = elapsed
        self.completion_tokens += len(step.tokens)
        self.request_latency = elapsed
        if step.verified:
            self.per_step_accepted.append(step.accepted)
            self.per_step_drafted.append(step.drafted)

    @property
    def steps(self) -> int:
        """Base passes after prefill."""
        return len(self.per_step_accepted)

    @property
    def decode_tokens(self) -> int:
        """Tokens that verify steps emitted: all but the one of prefill."""
        return max(0, self.completion_tokens - 1)

    @property
    def decode_s(self) -> float:
        return self.request_latency - self.time_to_first_token

    @property
    def inter_token_latency(self) -> float:
        return self.decode_s / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def host_s(self) -> float:
        """Time outside the engines, prefill included."""
        times = self.stages
        return times.prefill + times.draft + times.verify + times.commit - times.engine

    def to_dict(self, *, speculative: bool) -> dict[str, Any]:
        out: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "base_passes_after_prefill": self.steps,
            "time_to_first_token_s": self.time_to_first_token,
            "inter_token_latency_s": self.inter_token_latency,
            "request_latency_s": self.request_latency,
            "output_tokens_per_s": self.decode_tokens / self.decode_s if self.decode_s else 0.0,
            "stages_s": {
                "prefill": self.stages.prefill,
                "draft": self.stages.draft,
                "verify": self.stages.verify,
                "commit": self.stages.commit,
                "host": self.host_s,
            },
        }
        return out | ({"speculative_decoding": self.speculative_decoding()} if speculative else {})

    def speculative_decoding(self) -> dict[str, Any]:
        """vLLM's per-request block. acceptance_histogram[a] counts the steps that accepted a drafts.

        mean_acceptance_length is 1 + accepted / steps, the bonus counted in every step, as vLLM defines it.
        """
        accepted, drafted = sum(self.per_step_accepted), sum(self.per_step_drafted)
        pairs = list(zip(self.per_step_accepted, self.per_step_drafted, strict=True))
        return {
            "mean_acceptance_length": 1 + accepted / self.steps if self.steps else None,
            "draft_acceptance_rate": accepted / drafted if drafted else None,
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
        """[num_spec_tokens + 1] counts."""
        return [accepted.count(a) for a in range(self.num_spec_tokens + 1)]


@dataclass(frozen=True)
class Pooled:
    """Many requests as one: sums over sums, so that long requests weigh more."""

    requests: Sequence[RequestMetrics]

    @property
    def steps(self) -> int:
        """Base passes after prefill."""
        return sum(r.steps for r in self.requests)

    @property
    def decode_tokens(self) -> int:
        return sum(r.decode_tokens for r in self.requests)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted a verify step, bonus included, the token of prefill excluded."""
        return self.decode_tokens / self.steps if self.steps else None

    @property
    def acceptance_rate(self) -> float | None:
        drafted = sum(sum(r.per_step_drafted) for r in self.requests)
        return sum(sum(r.per_step_accepted) for r in self.requests) / drafted if drafted else None

    @property
    def per_position_acceptance(self) -> list[float]:
        """r_k: share of steps with at least k accepted drafts, for k = 1, 2, ..."""
        counts = [a for r in self.requests for a in r.per_step_accepted]
        return [sum(a >= k for a in counts) / len(counts) for k in range(1, max(counts, default=0) + 1)]

    @property
    def tokens_per_s(self) -> float:
        seconds = sum(r.decode_s for r in self.requests)
        return self.decode_tokens / seconds if seconds else 0.0

    @property
    def time_to_first_token(self) -> float:
        """Mean over requests, seconds."""
        return sum(r.time_to_first_token for r in self.requests) / len(self.requests) if self.requests else 0.0

    @property
    def inter_token_latency(self) -> float:
        """Pooled, seconds."""
        seconds = sum(r.decode_s for r in self.requests)
        return seconds / self.decode_tokens if self.decode_tokens else 0.0
