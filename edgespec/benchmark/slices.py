"""One measured run: the requests of one batch from their arrival to their ends, and its figures.

Knows an engine and answers. What runs when stands in `schedule`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter

from edgespec.benchmark.cases import DecodingVariant
from edgespec.benchmark.synthetic import Truth, synthetic
from edgespec.errors import EdgeSpecError
from edgespec.prompts import CANCELLED, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, GenerationRequest, Response
from edgespec.runtime.loop.metrics import Pooled, RequestMetrics, mean, ratio
from edgespec.runtime.text.prompt_value import PromptValue
from edgespec.runtime.trees.tree import DraftPlan

Stopping = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """What is asked, and after the reference run its plain answer with the draws of dialled
    acceptance. `number` is that among all prompts."""

    number: int
    ids: Sequence[int]  # with images a prompt value
    sampling: SamplingParams
    truth: Truth | None = None

    @property
    def cache_key(self) -> tuple[int, ...]:
        """What two prompts with the same ids and other images differ in."""
        return PromptValue.of(self.ids).cache_key


@dataclass(frozen=True)
class Slice:
    """The answers of one batch. `depths` are, for each request, the levels drafted a step."""

    responses: Sequence[Response]
    depths: Sequence[Sequence[int]]
    wall_s: float = field(default=0.0)

    @property
    def metrics(self) -> list[RequestMetrics]:
        """Of each request, in the order of the prompts."""
        return [response.metrics for response in self.responses]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all sequences a second, from the last first token to the first end: while all
        of them decode. None where that is no step."""
        tokens, seconds = window(self.metrics)
        return tokens / seconds if tokens and seconds else None

    @property
    def output_tokens_per_s(self) -> float | None:
        """Tokens of all sequences over the whole run, prompts included."""
        return ratio(sum(m.completion_tokens for m in self.metrics), self.wall_s)

    @property
    def time_to_first_token_s(self) -> float | None:
        """Mean over the requests, which arrive together: the prompts before it included."""
        return mean(m.time_to_first_token for m in self.metrics)

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens of all requests over the time until the last first token."""
        last = max(m.time_to_first_token for m in self.metrics)
        return ratio(sum(m.computed_tokens for m in self.metrics), last)

    @property
    def inter_token_latency_s(self) -> float | None:
        """Seconds between two tokens of a request."""
        return Pooled(self.metrics).inter_token_latency

    @property
    def step_s(self) -> float | None:
        """Seconds of a step, from one to the next."""
        return ratio(sum(m.decode_s for m in self.metrics), sum(m.steps for m in self.metrics))

    def stage_s(self, stage: str) -> float | None:
        """Seconds a step in a stage: `draft`, `verify` or `commit`. A batch shares its steps."""
        spent = sum(getattr(m.stages, stage) for m in self.metrics)
        return ratio(spent, sum(m.steps for m in self.metrics))


def window(requests: Sequence[RequestMetrics]) -> tuple[int, float]:
    """Tokens that all requests made while all of them decoded, and its seconds; 0 and 0 where they
    never did. Their times have one origin."""
    steps = [(at, tokens) for m in requests for at, tokens in zip(*steps_of(m), strict=True)]
    begin, end = (
        max(m.time_to_first_token for m in requests),
        min(m.request_latency for m in requests),
    )
    shortest = min((s for m in requests for s in m.per_step_s if s > 0), default=0.0)
    # Sequences of one step are reported one behind the other
    inside = [(at, n) for at, n in steps if begin < at < end + shortest / 2]
    if not inside:
        return 0, 0.0
    return sum(n for _, n in inside), max(at for at, _ in inside) - begin


def steps_of(request: RequestMetrics) -> tuple[list[float], list[int]]:
    """When each step ended, in seconds since the request came, and how many tokens it made: of the
    last one those that belong to the answer."""
    ends = [*accumulate(request.per_step_s, initial=request.time_to_first_token)][1:]
    tokens = [accepted + 1 for accepted in request.per_step_accepted]
    if tokens:
        tokens[-1] -= sum(tokens) - request.decode_tokens
    return ends, tokens


class Interrupted(Exception):
    """The run was to stop in the middle of a slice."""


@dataclass
class SliceRunner:
    """Runs batches of prompts with one engine. `stopping` is asked after every step."""

    engine: Engine
    stopping: Stopping = lambda: False

    def run(self, prompts: Sequence[BenchPrompt], variant: DecodingVariant) -> Slice:
        """One batch. Raises Interrupted, and the first error of a request."""
        session, real = self.engine.session, self.engine.session.drafter
        plan = variant.plan
        if variant.dial is not None and plan is not None and real is not None:
            truths = {p.cache_key: p.truth for p in prompts if p.truth is not None}
            vocab_size, chains = self.engine.config.component.vocab_size, plan.top_k == 1
            session.drafter = synthetic(real, variant.dial, truths, vocab_size, chains=chains)
        try:
            return self.answered(prompts, plan)
        finally:
            session.drafter = real

    def answered(self, prompts: Sequence[BenchPrompt], plan: DraftPlan | None) -> Slice:
        """`run` with whatever drafts."""
        began = perf_counter()
        asked = [
            GenerationRequest(prompt.ids, prompt.sampling, plan, arrived_s=began)
            for prompt in prompts
        ]
        return served(self.engine, asked, self.stopping)[0]


def served(
    engine: Engine, asked: Sequence[GenerationRequest], stopping: Stopping
) -> tuple[Slice, list[list[Chunk]]]:
    """One batch of requests, which arrive now, and the chunks of each. Raises Interrupted, and the
    first error of a request."""
    began = perf_counter()
    chunks: dict[GenerationRequest, list[Chunk]] = {request: [] for request in asked}
    responses: dict[GenerationRequest, Response] = {}
    for request, event in engine.run_queue(deque(asked), len(asked), stopping):
        if isinstance(event, EdgeSpecError):
            raise event
        if isinstance(event, Chunk):
            chunks[request].append(event)
        else:
            responses[request] = event
    wall_s = perf_counter() - began
    if any(response.finish_reason == CANCELLED for response in responses.values()):
        raise Interrupted
    depths = [
        [int(chunk.tree.depths.max()) for chunk in own if chunk.tree is not None]
        for own in chunks.values()
    ]
    whole = Slice([responses[request] for request in asked], depths, wall_s)
    return whole, [*chunks.values()]
