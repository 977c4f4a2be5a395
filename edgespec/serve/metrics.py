"""What /metrics says, under vLLM's names: clients of vLLM read those.

Knows requests and their steps. A draft counts in the step that verified it. Knows no protocol.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from edgespec.prompts import CANCELLED, CAPACITY, END_OF_SEQUENCE, MAX_LENGTH, STOP_WORDS
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, Response

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
GAUGES = {
    "num_requests_running": "Requests that have a lane.",
    "num_requests_waiting": "Requests that wait for a lane.",
    "kv_cache_usage_perc": "Share of the lanes' slots that hold tokens, 0 to 1.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens that were looked up among kept prefixes.",
    "prefix_cache_hits": "Prompt tokens whose KV rows were there.",
    "prompt_tokens": "Prompt tokens of ended requests.",
    "generation_tokens": "Tokens generated.",
    "spec_decode_num_drafts": "Steps that verified drafts.",
    "spec_decode_num_draft_tokens": "Drafts that were verified.",
    "spec_decode_num_accepted_tokens": "Drafts that were accepted.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From request to first token.", SHORT_S),
    "inter_token_latency_seconds": ("Between two tokens: a step's, by its tokens.", SHORT_S),
    "e2e_request_latency_seconds": ("From request to last token.", LONG_S),
    "request_queue_time_seconds": ("Waiting for a lane.", LONG_S),
    "request_prefill_time_seconds": ("From lane to first token.", LONG_S),
    "request_decode_time_seconds": ("From first to last token.", LONG_S),
    "request_params_max_tokens": ("The max_tokens of requests.", TOKENS),
}
LABELS = ("model_name", "engine")


class ServeMetrics:
    """The metrics of one engine, in a registry of their own."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.engine, self.registry = engine, CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": ""}
        labels = (model_name, "0")

        def named(name: str) -> str:
            return f"vllm:{name}"

        self.gauges = {
            n: Gauge(named(n), about, LABELS, **own).labels(*labels) for n, about in GAUGES.items()
        }
        self.counters = {
            n: Counter(named(n), about, LABELS, **own).labels(*labels)
            for n, about in COUNTERS.items()
        }
        self.histograms = {
            n: Histogram(named(n), about, LABELS, buckets=buckets, **own).labels(*labels)
            for n, (about, buckets) in HISTOGRAMS.items()
        }
        of_success = (*LABELS, "finished_reason")
        success = Counter(named("request_success"), "Ended requests.", of_success, **own)
        reasons = (*sorted(set(FINISH_REASONS.values())), "error")
        self.success = {reason: success.labels(*labels, reason) for reason in reasons}
        of_position, about = (*LABELS, "position"), "Drafts accepted at each position."
        name = "spec_decode_num_accepted_tokens_per_pos"
        self.per_position = Counter(named(name), about, of_position, **own)
        self.labels = labels

    def watch(self, ask: Ask) -> RequestWatch:
        """What counts one request."""
        self.histograms["request_params_max_tokens"].observe(ask.sampling.max_generate_length)
        return RequestWatch(self, len(ask.prompt))

    def exposition(self) -> bytes:
        """All of them, in Prometheus' text form."""
        stats, active = self.engine.stats(), list(self.engine.scheduler.active)
        self.gauges["num_requests_running"].set(stats.running)
        self.gauges["num_requests_waiting"].set(stats.waiting)
        slots = (
            self.engine.max_batch_size * self.engine.configs["base"].limits.max_kv_cache_capacity
        )
        self.gauges["kv_cache_usage_perc"].set(sum(len(seq.tokens) for seq in active) / slots)
        return generate_latest(self.registry)


class RequestWatch:
    """Counts a request's steps as they come, and its times at the end."""

    def __init__(self, metrics: ServeMetrics, num_prompt: int) -> None:
        self.metrics, self.num_prompt = metrics, num_prompt
        self.last_s: float | None = None  # of the step before

    def step(self, chunk: Chunk) -> None:
        """One step of it."""
        counters, now_s, count = self.metrics.counters, time.perf_counter(), len(chunk.token_ids)
        counters["generation_tokens"].inc(count)
        if self.last_s is not None and count:
            latency_s = (now_s - self.last_s) / count
            for _ in range(count):
                self.metrics.histograms["inter_token_latency_seconds"].observe(latency_s)
        self.last_s = now_s
        drafted = 0 if chunk.tree is None else len(chunk.tree.tokens) - 1
        if drafted:
            counters["spec_decode_num_drafts"].inc()
            counters["spec_decode_num_draft_tokens"].inc(drafted)
            counters["spec_decode_num_accepted_tokens"].inc(chunk.accepted)
            for position in range(chunk.accepted):
                self.metrics.per_position.labels(*self.metrics.labels, str(position)).inc()

    def ended(self, response: Response) -> None:
        """Its end, with its times."""
        counters, histograms, of = self.metrics.counters, self.metrics.histograms, response.metrics
        counters["prompt_tokens"].inc(self.num_prompt)
        counters["prefix_cache_queries"].inc(self.num_prompt)
        counters["prefix_cache_hits"].inc(of.reused_tokens)
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
