"""What /metrics says, under vLLM's names: clients of vLLM read those.

Knows requests, and what the engine counts at every step. Knows no protocol.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from edgespec.prompts import CANCELLED, CAPACITY, END_OF_SEQUENCE, MAX_LENGTH, STOP_WORDS
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.loop.stats import ITERATION_TOKENS

if TYPE_CHECKING:
    from edgespec.serve.answering import Ask

# The engine's finish reasons, as OpenAI's clients know them
FINISH_REASONS = {
    END_OF_SEQUENCE: "stop",
    STOP_WORDS: "stop",
    MAX_LENGTH: "length",
    CAPACITY: "length",
    CANCELLED: "abort",
}
SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
LONG_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
# What the engine counts itself: the name, that of EngineStats, and what it is
GAUGES = (
    ("num_requests_running", "running", "Requests that have a lane."),
    ("num_requests_waiting", "waiting", "Requests that wait for a lane."),
)
COUNTERS = (
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens that were looked up."),
    ("prefix_cache_hits", "prefix_cache_hits", "Those whose KV rows were kept."),
    ("prompt_tokens", "prompt_tokens", "Tokens of prompts that were read."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("spec_decode_num_drafts", "drafts", "Steps that verified drafts."),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Drafts that were verified."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Drafts that were accepted."),
)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From request to first token.", SHORT_S),
    "e2e_request_latency_seconds": ("From request to last token.", LONG_S),
    "request_queue_time_seconds": ("Waiting for a lane.", LONG_S),
    "request_prefill_time_seconds": ("From lane to first token.", LONG_S),
    "request_decode_time_seconds": ("From first to last token.", LONG_S),
    "request_params_max_tokens": ("The max_tokens of requests.", TOKENS),
}
LABELS = ("model_name", "engine")


class TokenGaps(Collector):
    """The seconds between two tokens. A Histogram of the client library takes ten times as long,
    which counts where it is asked for each token."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels, self.counts, self.seconds = labels, [0] * (len(SHORT_S) + 1), 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """A step that came so many seconds behind the one before it, with so many tokens."""
        self.counts[bisect_left(SHORT_S, seconds / tokens)] += tokens
        self.seconds += seconds

    def collect(self) -> Iterator[Metric]:
        """The one histogram."""
        about = "Between two tokens: a step's, by its tokens."
        name = "vllm:inter_token_latency_seconds"
        found = HistogramMetricFamily(name, about, labels=LABELS)
        ends = (*map(str, map(float, SHORT_S)), "+Inf")
        buckets = [*zip(ends, accumulate(self.counts), strict=True)]
        found.add_metric(self.labels, buckets, self.seconds)
        yield found


class EngineCollector(Collector):
    """What the engine itself has counted, step by step, as it is when somebody asks."""

    def __init__(self, engine: Engine, labels: Sequence[str]) -> None:
        self.engine, self.labels = engine, labels
        self.levels = 0 if engine.drafter is None else engine.plan().steps

    def collect(self) -> Iterator[Metric]:
        """Gauges and counters, and tokens by iteration."""
        engine, stats, labels = self.engine, self.engine.stats(), self.labels
        for name, field, about in GAUGES:
            gauge = GaugeMetricFamily(f"vllm:{name}", about, labels=LABELS)
            gauge.add_metric(labels, getattr(stats, field))
            yield gauge
        for name, field, about in COUNTERS:
            counter = CounterMetricFamily(f"vllm:{name}", about, labels=LABELS)
            counter.add_metric(labels, getattr(stats, field))
            yield counter
        slots = engine.max_batch_size * engine.configs["base"].limits.max_kv_cache_capacity
        about = "Share of the lanes' slots that hold tokens, 0 to 1."
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", about, labels=LABELS)
        held = sum(len(seq.tokens) for seq in [*engine.scheduler.active])
        usage.add_metric(labels, held / slots)
        yield usage
        name, about = "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted at each position."
        accepted = CounterMetricFamily(f"vllm:{name}", about, labels=(*LABELS, "position"))
        counts = stats.accepted_per_position
        unseen = [0] * (self.levels - len(counts))  # a series begins at 0 with the server
        for position, count in enumerate([*counts, *unseen]):
            accepted.add_metric((*labels, str(position)), count)
        yield accepted
        about = "Tokens of an engine step, of prompts and generated."
        iterations = HistogramMetricFamily("vllm:iteration_tokens_total", about, labels=LABELS)
        ends = (*map(str, map(float, ITERATION_TOKENS)), "+Inf")
        buckets = [*zip(ends, accumulate(stats.iterations), strict=True)]
        iterations.add_metric(labels, buckets, stats.iteration_tokens)
        yield iterations


class ServeMetrics:
    """The metrics of one engine, in a registry of their own."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry, labels = CollectorRegistry(), (model_name, "0")
        self.registry.register(EngineCollector(engine, labels))
        self.gaps = TokenGaps(labels)
        self.registry.register(self.gaps)
        own: dict[str, Any] = {"registry": self.registry}
        self.histograms = {
            name: Histogram(f"vllm:{name}", about, LABELS, buckets=buckets, **own).labels(*labels)
            for name, (about, buckets) in HISTOGRAMS.items()
        }
        of_success = (*LABELS, "finished_reason")
        success = Counter("vllm:request_success", "Ended requests.", of_success, **own)
        reasons = (*sorted(set(FINISH_REASONS.values())), "error")
        self.success = {reason: success.labels(*labels, reason) for reason in reasons}

    def watch(self, ask: Ask) -> RequestWatch:
        """What counts one request."""
        self.histograms["request_params_max_tokens"].observe(ask.sampling.max_generate_length)
        return RequestWatch(self)

    def exposition(self) -> bytes:
        """All of them, in Prometheus' text form."""
        return generate_latest(self.registry)


class RequestWatch:
    """Counts a request's times: between its steps as they come, the others at its end."""

    def __init__(self, metrics: ServeMetrics) -> None:
        self.metrics = metrics
        self.last_s: float | None = None  # of the step before

    def step(self, chunk: Chunk) -> None:
        """One step of it."""
        now_s, count = time.perf_counter(), len(chunk.token_ids)
        if self.last_s is not None and count:
            self.metrics.gaps.add(now_s - self.last_s, count)
        self.last_s = now_s

    def ended(self, response: Response) -> None:
        """Its end, with its times."""
        histograms, of = self.metrics.histograms, response.metrics
        self.metrics.success[FINISH_REASONS.get(response.finish_reason, "error")].inc()
        for name, seconds in (
            ("time_to_first_token_seconds", of.time_to_first_token),
            ("e2e_request_latency_seconds", of.request_latency),
            ("request_queue_time_seconds", of.queue_time),
            ("request_prefill_time_seconds", of.time_to_first_token_without_queue),
            ("request_decode_time_seconds", of.decode_s),
        ):
            histograms[name].observe(seconds)

    def failed(self, error: BaseException) -> None:
        """Its end by an error, or because nobody reads it."""
        self.metrics.success["error" if isinstance(error, Exception) else "abort"].inc()
