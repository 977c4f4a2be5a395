"""One request inside the runtime: what is asked, its state on the way, the pieces that stream out,
and the whole answer.

Knows token ids, text and metrics of one request. Knows no files and no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import randbits

from edgespec.errors import EdgeSpecError
from edgespec.prompts import STOP_WORDS, SamplingParams
from edgespec.runtime.acceptance.verify import EXACT_ACCEPTANCE, AcceptOptions, lossless
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.drafters.options import DrafterOptions
from edgespec.runtime.grammar.guide import Guide
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.loop.sequence import Candidates, SequenceState, StepOutput
from edgespec.runtime.plans.schedules import Gates, Schedule
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.text.detokenizer import TextStream
from edgespec.runtime.text.prompt_value import PromptValue
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

SEED_BITS = 63


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """Continue a prompt; `plan` None decodes without drafts. `keep` and `keep_all` are those of
    `SequenceState`.

    `drafter` None is the one that the engine was opened with; else the name of a method that needs
    no engine, with its `drafter_options`, or a Drafter. `schedule` is what it may draft while so
    many run, None as the engine was opened. `acceptance` is a rule of `verify.ACCEPT_RULES` with
    its options; None: the engine's. `prior` is the acceptance by depth that adaptive drafting
    begins with; None: the engine's. `takes_forced`: tokens that a grammar leaves no choice come as
    drafts, without a drafter too. `arrived_s` is when the request came, by `time.perf_counter`;
    None: when it is added to the scheduler. `priority`: lower ones run first. Prefixes are shared
    between requests of one `cache_salt`. After `timeout_s` seconds since it came it ends.
    """

    prompt_ids: Sequence[int]  # with images a Prompt
    sampling: SamplingParams
    plan: DraftPlan | None = None
    keep: int = 0
    keep_all: bool = False
    acceptance: AcceptOptions | None = None
    arrived_s: float | None = None
    drafter: str | Drafter | None = None
    drafter_options: DrafterOptions | Mapping[str, object] | None = None
    schedule: Schedule | None = None
    prior: Sequence[float] | None = None
    takes_forced: bool = True
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None

    @property
    def prompt(self) -> PromptValue:
        """The prompt with its images, where it has some."""
        return PromptValue.of(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added. `pieces` is the text that each token made certain: it waits for whole
    UTF-8 characters and for the end of what might become a stop string; what a cancelled request
    held back comes as a piece without a token. The first `accepted` tokens are drafts that the base
    accepted: `path` are their nodes in the `tree` that was verified, the root first. Prefill has no
    tree. `logprobs` are those of these tokens, as in Response.
    """

    token_ids: list[int]
    pieces: list[str]
    accepted: int
    finish_reason: str | None
    tree: DraftTree | None = None
    path: Sequence[int] = ()
    logprobs: Sequence[Candidates] = ()

    @property
    def text(self) -> str:
        """What a client shows of this step; may be empty."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Response:
    """A finished request. `seed` is the one that was used, drawn where none was given and one was
    needed.

    `finish_reason` is `end-of-sequence`, `stop-words`, `max-length`, `capacity` (the KV cache is
    full), `timeout` or `cancelled`. `slot` is the lane that it began in.

    `logprobs` has one entry a token where num_logprobs asks for them: its most probable candidates,
    descending, and the token itself behind them where it is not among them. `prompt_logprobs` has
    the same for the prompt's, where they were asked for: None for the first, which follows nothing.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    metrics: RequestMetrics
    seed: int | None
    prompt_ids: Sequence[int] = field(default_factory=list)  # with images a Prompt
    logprobs: list[Candidates] = field(default_factory=list)
    slot: int = 0
    prompt_logprobs: list[Candidates | None] = field(default_factory=list)


Event = Chunk | Response | EdgeSpecError


def nobody(event: Event) -> None:
    """Takes the events of a request that nobody waits for."""


def nothing() -> None:
    """Of a request that does not wait for its end."""


class Generation(SequenceState):
    """A request while it is answered, and the handle by which it can be cancelled: steps become
    chunks, and at the end a response. `drafter` and `gates` are those of `SequenceState`.

    Raises RequestError for a stop string that the tokenizer cannot watch for.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        acceptance: AcceptOptions | None = None,
        drafter: Drafter | None = None,
        gates: Gates | None = None,
        guide: Guide | None = None,
    ) -> None:
        sampling, prompt = with_seed(request.sampling), request.prompt
        ends = end_ids(sampling, stop_ids)
        self.stop_word_ids, strings = tokenizer.split_stops(sampling.stop)
        super().__init__(
            prompt=prompt,
            sampler=Sampler.of(sampling, len(prompt), ends | self.stop_word_ids, guide),
            max_new_tokens=sampling.max_generate_length,
            stop_ids=ends,
            plan=request.plan if sampling.max_generate_length else None,
            prompt_logprobs=sampling.prompt_logprobs,
            num_logprobs=sampling.num_logprobs,
            keep=request.keep,
            keep_all=request.keep_all,
            acceptance=acceptance or request.acceptance or EXACT_ACCEPTANCE,
            drafter=drafter,
            gates=gates,
            guide=guide,
            takes_forced=request.takes_forced,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        self.request, self.seed = request, sampling.seed
        self.cancelled = self.is_over = False
        self.on_cancel: Callable[[], object] = nothing
        self.number = 0  # in logs
        # Takes each event, in order; what it gives is called behind the events of a step
        self.deliver: Callable[[Event], Callable[[], None] | None] = nobody
        self.text = TextStream(tokenizer, stop=strings)
        self.pieces: list[str] = []
        self.rest = ""  # what became certain only at the end
        self.logprobs: list[Candidates] = []
        now = time.perf_counter()
        self.arrived_s = now if request.arrived_s is None else request.arrived_s
        levels = request.plan.steps if request.plan else 0
        options = self.accept_options
        self.metrics = RequestMetrics(
            len(request.prompt_ids),
            levels,
            acceptance=options.rule,
            acceptance_options=options.to_dict(),
            lossless=lossless(options, sampling.temperature),
        )

    def __str__(self) -> str:
        return f"request {self.number}"

    def cancel(self) -> None:
        """End it before the next step; any thread may, and it is harmless once it has ended. Its
        response still comes, and its finish reason says so."""
        self.cancelled = True
        self.on_cancel()

    def begun(self) -> None:
        """Notes the time at which the request got a lane."""
        self.metrics.queue_time = time.perf_counter() - self.arrived_s

    def watch(self, token: int) -> str | None:
        """Take in one emitted token; the reason to stop at it, if a stop string or its token says
        so."""
        searching = self.num_emitted > self.sampler.min_tokens
        ends = token in self.stop_ids
        self.pieces.append("" if ends else self.text.push(token, searching=searching))
        return STOP_WORDS if self.text.stopped or token in self.stop_word_ids else None

    def chunk(self, output: StepOutput) -> Chunk:
        """What a step added; at the end also the text that was held back."""
        self.metrics.add(output, time.perf_counter() - self.arrived_s)
        self.logprobs += output.logprobs
        pieces = self.pieces[len(self.pieces) - len(output.tokens) :]
        reason = output.finish_reason
        if reason is not None:
            self.rest = self.text.flush()
            reason = STOP_WORDS if self.text.stopped else reason
            pieces = with_rest(pieces, self.rest)
        return Chunk(
            output.tokens,
            pieces,
            output.accepted,
            reason,
            output.tree,
            output.path,
            output.logprobs,
        )

    def response(self, reason: str) -> Response:
        """The whole answer, once it ended for `reason` or was ended."""
        self.metrics.stages, self.metrics.reused_tokens = self.times, self.num_reused
        if self.gates is not None and self.plan is not None:
            self.gates.record(self.metrics.per_step_drafted, self.metrics.per_step_accepted)
        return Response(
            text="".join(self.pieces) + self.rest,
            token_ids=self.tokens[len(self.prompt) :],
            finish_reason=STOP_WORDS if self.text.stopped else reason,
            metrics=self.metrics,
            seed=self.seed if self.request.sampling.temperature else None,
            prompt_ids=self.prompt if self.prompt.images else list(self.prompt),
            logprobs=self.logprobs,
            slot=self.slot,
            prompt_logprobs=self.prompt_candidates,
        )


def end_ids(sampling: SamplingParams, stop_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end an answer: the model's own, if they are to, and the request's."""
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | stop_ids


def with_rest(pieces: list[str], rest: str) -> list[str]:
    """The pieces of a last step with the text that was held back: in the last one, or by itself."""
    if not pieces:
        return [rest] if rest else []
    return [*pieces[:-1], pieces[-1] + rest]


def with_seed(sampling: SamplingParams) -> SamplingParams:
    """The sampling with a seed, drawn where none was given, so that a run can be repeated from its
    output."""
    return sampling if sampling.seed is not None else replace(sampling, seed=randbits(SEED_BITS))
