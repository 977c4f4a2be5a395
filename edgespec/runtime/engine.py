"""The Python API: an open engine directory that turns prompts into text.

Makes requests of what a caller gives, and answers of what the loop gives back. What is opened
stands in `opening.parts`, what drafts for which request in `opening.drafting`, how much in
`opening.planner`, what a prompt may be in `text.prompt_encoder`, what the engines take in `limits`,
who steps in `loop.driver`, how answers come in `streams` and `batch`, which request runs when in
`loop.scheduler`, the loop in `loop.session`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn, TypeGuard, Unpack, overload
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from edgespec.compat.decoding import DecodingConfig
from edgespec.compat.speculative_config import for_engine, for_request
from edgespec.errors import EdgeSpecError, LimitError, OptionError, RequestError, in_terms_of
from edgespec.images import ImageRules
from edgespec.methods.names import ADAPTIVE, SpecPolicy
from edgespec.prompts import SamplingParams
from edgespec.prompts.rendering import PromptOptions, Rendering, RenderOptions
from edgespec.runtime.acceptance.verify import (
    ACCEPT_RULES,
    Acceptance,
    AcceptOptions,
    acceptance_of,
)
from edgespec.runtime.batch import Batch, one_each
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.drafters.options import DrafterOptions
from edgespec.runtime.drafters.trtllm import PreparesDraftTokens
from edgespec.runtime.drafters.user import UserDrafter
from edgespec.runtime.grammar.grammars import Grammars
from edgespec.runtime.grammar.guide import Guide
from edgespec.runtime.loop.driver import Driver
from edgespec.runtime.loop.generation import Event, Generation, GenerationRequest, Response
from edgespec.runtime.loop.prefix import PREFIX_CACHE_BYTES, check_bytes, reader
from edgespec.runtime.loop.request_queue import RequestSource, run_queue
from edgespec.runtime.loop.scheduler import Scheduler
from edgespec.runtime.loop.session import Session
from edgespec.runtime.loop.stats import EngineStats
from edgespec.runtime.opening.parts import open_parts, open_prefixes
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.plans.policy import AdaptivePolicy, AdaptiveState
from edgespec.runtime.streams import AsyncStream, Ends, Stream, cancelling, future_end
from edgespec.runtime.text.prompt import Conversation, Prompt
from edgespec.runtime.text.prompt_encoder import PromptEncoder, never
from edgespec.runtime.text.thinking import thinking_note
from edgespec.runtime.trees.tree import PLAIN, DraftPlan, Plain

logger = logging.getLogger(__name__)
# What the library has to say goes where the application's logging sends it, else nowhere
logging.getLogger("edgespec").addHandler(logging.NullHandler())

# How Python spells parameters that have another name here
KEYWORDS = {
    "spec_draft_top_k": "top_k",
    "spec_draft_step": "steps",
    "spec_verify_size": "verify_size",
    "allow_image_root": "image_root=[..., DIR]",
    "allow_image_urls": "allow_image_urls=True",
}

# Of a batch: one for all requests, or one for each
Samplings = SamplingParams | None | Sequence[SamplingParams | None]
Plan = DraftPlan | DecodingConfig | Plain | None
Plans = Plan | Sequence[Plan]
Acceptances = Acceptance | Sequence[Acceptance]


class SharedOptions(PromptOptions, total=False):
    """What all requests of a batch share."""

    priority: int
    cache_salt: str
    timeout_s: float | None


class GenerateOptions(SharedOptions, total=False):
    """What all forms of a request take beside prompt, sampling and plan."""

    keep: bool
    acceptance: Acceptance


class BatchOptions(SharedOptions, total=False):
    """The same for several requests; each `acceptance` may be its own."""

    acceptance: Acceptances


class Engine:
    """An open engine directory; use it in a `with` block.

    `spec_decode` opens base and draft; without it a plain engine is opened where there is one, else
    the base alone. "auto" drafts with what there is: the draft, or for a plain engine a method that
    needs none. `drafter` drafts instead of a draft engine: the name of a method that needs no
    engine, or a drafter of your own, as an object or as `package.module:Class`. `drafter_options`
    are those of the method, or of a drafter of your own (`time_budget_ms`): an object of their
    class, or keys and values. `speculative_config` names a method with its sizes and options
    instead, as TensorRT-LLM does: such as edgespec.AutoDecodingConfig(max_draft_len=3), or a
    mapping with a decoding_type; edgespec.load compares its speculative_model with the draft, this
    class does not. With `exact` drafts leave every bit as it is: engines on kernels of our own do
    so anyway, on ONNX Runtime's it is for float32, int4 in blocks of 32 and int8 GEMM, one
    sequence, chains only. `prefix_cache_bytes` bounds the KV rows
    that are kept for later prompts with the same prefix; 0 keeps none, None as many as prompts of
    the whole context in all lanes have, up to an eighth of the memory. In `prefix_cache_dir` they
    are kept when there is no room for them and when the engine is closed, 16 times as many, for
    engines that are opened later (docs/serving.md). With `max_queue` a request that finds so many
    waiting for a lane raises QueueFull. `acceptance` is the accept rule of requests that name none:
    `exact`, `rejection`, `typical` or `relaxed`, or such a rule with its options. `spec_policy`
    says how much is drafted: "adaptive" each step as it pays, up to the plan; "fixed" the plan;
    None is adaptive where no sizes are given and what a step costs here was measured
    (docs/adaptive.md). What `edgespec tune` found best for these engines is taken where method and
    sizes are left open; not with `tuned` False (docs/tuning.md). `multimodal_engine_dir` holds the
    image encoder; None is `visual` in the engine directory, where that is there. `image_rules` say
    which images may be read (docs/images.md).

    Raises BundleError, PairingError, EngineMismatch, EnvironmentProblem or, for what cannot be
    exact or cannot draft, LimitError, with the remedy; OptionError or RequestError for options, an
    accept rule or a drafter that cannot be.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        spec_decode: bool | Literal["auto"] | None = None,
        drafter: str | Drafter | UserDrafter | PreparesDraftTokens | None = None,
        drafter_options: DrafterOptions | Mapping[str, object] | None = None,
        speculative_config: DecodingConfig | Mapping[str, object] | None = None,
        exact: bool = False,
        prefix_cache_bytes: int | None = PREFIX_CACHE_BYTES,
        prefix_cache_dir: str | Path | None = None,
        acceptance: Acceptance = None,
        spec_policy: SpecPolicy | None = None,
        tuned: bool = True,
        multimodal_engine_dir: str | Path | None = None,
        image_rules: ImageRules | None = None,
        max_queue: int | None = None,
    ) -> None:
        check_bytes(prefix_cache_bytes)
        check_queue(max_queue)
        asked = for_engine(speculative_config, engine_dir, spec_decode, drafter, drafter_options)
        self.parts = parts = open_parts(
            engine_dir,
            spec_decode=spec_decode,
            drafter=drafter if asked is None else asked.drafter,
            drafter_options=drafter_options,
            speculation=None if asked is None else asked.speculation,
            exact=exact,
            acceptance=acceptance,
            spec_policy=spec_policy,
            tuned=tuned,
            multimodal_engine_dir=multimodal_engine_dir,
            image_rules=image_rules,
            notes=() if asked is None else asked.notes,
        )
        self.path, self.exact, self.notes = parts.path, exact, parts.notes
        self.base, self.config = parts.base.decoder, parts.base.config
        self.tolerance, self.rounding = parts.base.tolerance, parts.rounding
        self.drafting, self.planner = parts.drafting, parts.planner
        draft = self.drafting.default
        self.drafter = None if draft is None else draft.drafter
        self.method = None if draft is None else draft.method
        self.draft_config = None if draft is None else draft.config
        self.spec_decode = draft is not None
        self.acceptance = self.planner.acceptance
        self.speculation = self.planner.speculation
        self.costs, self.why_no_costs = parts.costs.model, parts.costs.why
        self.limits, self.configs = parts.limits, parts.limits.configs
        self.max_batch_size = self.limits.max_batch_size
        self.tokenizer, self.images = parts.tokenizer, parts.images
        self.stop_ids = frozenset(self.config.component.eos_token_ids)
        policy = None if self.costs is None else AdaptivePolicy(self.costs)
        self.grammars = Grammars(self.tokenizer, self.config.component.vocab_size, self.stop_ids)
        prefixes, self.prefix_store = open_prefixes(parts, prefix_cache_bytes, prefix_cache_dir)
        self.session = Session(
            self.base,
            self.drafter,
            prefixes,
            policy,
            self.config.limits.verify_tree_size,
        )
        self.session.log.recording = False
        if self.images is not None:
            self.images.log = self.session.log
        self.scheduler = Scheduler(self.session, self.prepare, self.max_batch_size, max_queue)
        self.driver = Driver(self.scheduler)
        # An engine that is dropped without `close` leaves no thread behind
        finalize(self, self.driver.work.close).atexit = False
        parts.log()

    @property
    def drafter_notes(self) -> tuple[str, ...]:
        """What a drafter of your own failed at so far: one line for each reason, as it first
        was."""
        return self.drafting.notes()

    def thinking_note(self, asked: Sequence[bool], *, by_flag: bool = False) -> str | None:
        """A warning where requests, by their `enable_thinking`, are not in the mode that the draft
        was trained in.

        With `by_flag` the mode is that of a chat, set by --enable-thinking.
        """
        return thinking_note(
            self.drafting.trained_with_thinking,
            asked,
            template_has_mode=self.tokenizer.knows_thinking(),
            by_flag=by_flag,
        )

    @property
    def drafting_stopped(self) -> str | None:
        """Why nothing is drafted any more, where acceptance_length_threshold has ended it."""
        gates = self.planner.gates
        return None if gates is None or gates.acceptance is None else gates.acceptance.stopped

    # ---- open and closed

    def __enter__(self) -> Engine:
        self.driver.check_open()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        self.driver.check_open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def close(self) -> None:
        """End what is under way, after the step that runs, and free the engines.

        Requests that have not ended, and later ones, get EngineClosed. Closing twice is harmless.
        """
        self.driver.close()
        if self.prefix_store is not None and self.driver.is_own_process:
            self.prefix_store.close()
        self.parts.close()

    async def aclose(self) -> None:
        """`close`, without holding up the event loop for the step that runs."""
        await asyncio.to_thread(self.close)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Engine cannot be pickled or copied: it holds threads and open files. Open one in"
            " each process, with edgespec.load."
        )

    # ---- what to draft

    def plan(
        self,
        top_k: int | None = None,
        steps: int | None = None,
        verify_size: int | None = None,
        *,
        drafter: str | Drafter | None = None,
    ) -> DraftPlan:
        """The drafting plan: the values given, the others chosen to go with them; LimitError where
        it cannot be, EngineClosed after `close`. `drafter` None is the engine's own; else it is the
        name of a method that needs no engine, or a Drafter.

        With no value an adaptive chain of up to 8 drafts, or a short one, as the backend hints,
        where the costs of steps were not measured. A value left open follows from the
        others: top_k 1, steps 3 on a CPU (verify_size - 1 for a chain), and verify_size the
        smallest of 60, the nodes that can exist and what the base was built for. Only values that
        were not given shrink to what the engines were built for. With a draft that makes blocks
        `steps` is 1 or left open.
        """
        self.driver.check_open()
        with in_terms_of(KEYWORDS):
            return self.planner.by_sizes(top_k, steps, verify_size, drafter=drafter)

    # ---- which drafts are accepted

    def acceptance_for(self, asked: Acceptance) -> AcceptOptions:
        """An accept rule as this model has it; None is the engine's own.

        Raises RequestError for a rule that there is none of, OptionError for what the rule does not
        take or the model lacks.
        """
        if asked is None:
            return self.acceptance
        return acceptance_of(asked).for_model(self.tokenizer)

    # ---- prompts

    @property
    def prompts(self) -> PromptEncoder:
        """What makes token ids of prompts."""
        return PromptEncoder(self.tokenizer, self.limits, self.images)

    def render(self, messages: Conversation, **options: Unpack[RenderOptions]) -> str:
        """The text of messages: by the model's chat template, or joined. `options` are those of
        `generate` for the template, `add_generation_prompt` and `apply_chat_template`. Raises
        RequestError for what the template rejects."""
        return self.prompts.render(messages, Rendering(**options))

    def encode(self, prompt: Prompt, **options: Unpack[PromptOptions]) -> Sequence[int]:
        """The token ids of a prompt, with the rows of its images where it has some.

        A text is taken as it is, with the special tokens that the tokenizer adds, as vLLM does;
        messages go through the chat template; ids stay, and so does a prompt that was encoded
        before. Raises RequestError for anything else, and
        what reading and encoding images raise.
        """
        self.driver.check_open()
        with in_terms_of(KEYWORDS):
            return self.prompts.encode(prompt, Rendering(**options))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.tokenizer.decode(token_ids)

    # ---- requests

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        *,
        keep: bool = False,
        acceptance: Acceptance = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
        **options: Unpack[PromptOptions],
    ) -> GenerationRequest:
        """A request as the scheduler takes it. Raises RequestError, or LimitError for the plan."""
        if not isinstance(sampling, SamplingParams | None):
            message = f"sampling is of type {type(sampling).__name__}"
            raise RequestError(message, "Give edgespec.SamplingParams(temperature=0), for example.")
        check_turn(priority, cache_salt, timeout_s)
        ids = self.encode(prompt, **options)
        rule = None if acceptance is None else self.acceptance_for(acceptance)
        own = for_request(plan, self.method) if isinstance(plan, DecodingConfig) else plan
        with in_terms_of(KEYWORDS):
            drafts = self.planner.drafts_of(own, rule)
        if rule is not None:
            drafts["acceptance"] = rule
        return GenerationRequest(
            ids,
            sampling or SamplingParams(),
            keep_all=keep,
            takes_forced=plan is not PLAIN,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            **drafts,
        )

    def check(self, request: GenerationRequest) -> None:
        """Raises LimitError or RequestError for a request that these engines cannot answer."""
        by_engine = request.plan is not None and request.drafter is None
        self.limits.check_prompt(request.prompt_ids, drafts=by_engine)
        if request.plan is not None:
            acceptance = request.acceptance or self.acceptance
            with in_terms_of(KEYWORDS):
                self.planner.check(
                    request.plan, acceptance, request.drafter, request.drafter_options
                )
        self.limits.check_sampling(request.sampling)

    def prepare(self, request: GenerationRequest) -> Generation:
        """A request's handle, once it is checked. Raises LimitError or RequestError."""
        self.check(request)
        acceptance = self.acceptance_for(request.acceptance)
        drafter = None  # the session's own
        if request.drafter is not None or request.drafter_options:
            draft = self.drafting.of(request.drafter, request.drafter_options)
            drafter = None if draft is None else draft.drafter
        gates = self.planner.gates_for(request)
        guide = self.guide(request.sampling, request.prompt_ids)
        handle = Generation(
            request, self.tokenizer, self.stop_ids, acceptance, drafter, gates, guide
        )
        if gates is not None and gates.stopped and ACCEPT_RULES[acceptance.rule].lossless != "no":
            handle.plan = None  # lossy rules decide without drafts too
        plan = handle.plan
        if self.planner.can_adapt and drafter is None and plan is not None and plan.adaptive:
            prior = self.parts.prior if request.prior is None else request.prior
            handle.adaptive = AdaptiveState(AcceptanceEstimate(prior))
            handle.metrics.spec_policy = ADAPTIVE
        if self.prefix_store is not None and handle.prompt_logprobs is None:
            reading = None if plan is None else reader(drafter or self.drafter)
            self.prefix_store.fetch(handle.prompt.cache_key, reading, handle.cache_salt)
        return handle

    def guide(self, sampling: SamplingParams, prompt_ids: Sequence[int]) -> Guide | None:
        """What the grammar of a request allows behind its prompt; None where it has none. Compiles
        it, unless it was asked for lately: raises RequestError or LimitError for one that cannot
        be."""
        guided = sampling.guided
        return None if guided is None else self.grammars.guide(guided, prompt_ids)

    # ---- answers

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        **options: Unpack[GenerateOptions],
    ) -> Response:
        """The whole answer to one prompt.

        `prompt` is a text, which goes to the model as it is; a list of messages (dicts as OpenAI's
        clients write them, or Message), which go through the chat template; or a list of token ids.
        Without a `plan` an engine with a draft takes `plan()`, or for `rejection` a chain;
        `edgespec.PLAIN` decodes without drafts. `enable_thinking`, `tools` and
        `chat_template_kwargs` are the chat template's (docs/requests.md); without
        `allow_control_tokens` such tokens stay text where they are spelled in one. With
        `keep` the KV rows of prompt and answer are kept for a later prompt that begins with them,
        such as a chat's next turn; those of the prompt are kept anyway, as `prefix_cache_bytes`
        allows, for requests of the same `cache_salt`. `acceptance` is an accept rule by its name,
        or with its options; None is the engine's. Requests of a lower `priority` have lanes and are
        read first. One that takes longer than `timeout_s` seconds ends with what there is.

        Any number of threads may call this at the same time. Raises RequestError or LimitError for
        what cannot be answered, QueueFull, EngineClosed, and EnvironmentProblem where the machine
        cannot.
        """
        handle = self.prepare(self.request(prompt, sampling, plan, **options))
        with cancelling([handle]):
            ends = Ends([handle])
            self.driver.submit([handle])
            _, end = next(iter(ends))
        if isinstance(end, EdgeSpecError):
            raise end
        return end

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """The answer to one prompt, piece by piece: see Stream. Takes and raises what `generate`
        does."""
        return Stream(self.driver, self.prepare(self.request(prompt, sampling, plan, **options)))

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[BatchOptions],
    ) -> list[Response]: ...

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        return_exceptions: bool,
        **options: Unpack[BatchOptions],
    ) -> list[Response | EdgeSpecError]: ...

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[BatchOptions],
    ) -> list[Response] | list[Response | EdgeSpecError]:
        """The answers to several prompts, in their order; as many run at a time as the engines were
        built for.

        `sampling`, `plan` and `acceptance` are one for all, or a list with one for each. The first
        error is raised, and ends the other requests; with `return_exceptions` each stands in the
        place of its answer, and harms no other. Takes and raises what `generate` does.
        """
        batch = self.batch(prompts, sampling, plan, return_exceptions, **options)
        return batch.run(self.driver)

    async def agenerate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        **options: Unpack[GenerateOptions],
    ) -> Response:
        """`generate` for an event loop. A task that is cancelled ends its request."""
        make = self.making(prompt, sampling, plan, **options)
        handle = await asyncio.to_thread(make)
        with cancelling([handle]):
            future = future_end(handle)
            self.driver.submit([handle])
            return await future

    def astream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncStream:
        """`stream` for the event loop that runs: see AsyncStream."""
        make = self.making(prompt, sampling, plan, **options)
        return AsyncStream(self.driver, make)

    @overload
    async def agenerate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[BatchOptions],
    ) -> list[Response]: ...

    @overload
    async def agenerate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        return_exceptions: bool,
        **options: Unpack[BatchOptions],
    ) -> list[Response | EdgeSpecError]: ...

    async def agenerate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[BatchOptions],
    ) -> list[Response] | list[Response | EdgeSpecError]:
        """`generate_batch` for an event loop. A task that is cancelled ends its requests."""
        make = partial(self.batch, prompts, sampling, plan, return_exceptions, **options)
        batch = await asyncio.to_thread(make)
        return await batch.arun(self.driver)

    def making(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        plan: Plan,
        **options: Unpack[GenerateOptions],
    ) -> Callable[[], Generation]:
        """What makes the handle of what a caller asks for; it raises what `generate` does. The
        request comes now, whenever that is called."""
        now = time.perf_counter()

        def make() -> Generation:
            request = self.request(prompt, sampling, plan, **options)
            return self.prepare(replace(request, arrived_s=now))

        return make

    def batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings,
        plan: Plans,
        return_exceptions: bool,
        *,
        acceptance: Acceptances = None,
        **options: Unpack[SharedOptions],
    ) -> Batch:
        """The requests of several prompts. Raises the first error of one that cannot be asked,
        unless `return_exceptions`."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            message = f"prompts is of type {type(prompts).__name__}, not a list of prompts"
            raise RequestError(message, "Give a list of prompts, or call generate for one.")
        count = len(prompts)
        samplings: Sequence[SamplingParams | None] = one_each("sampling", sampling, count)
        plans: Sequence[Plan] = one_each("plan", plan, count)
        rules: Sequence[Acceptance] = one_each("acceptance", acceptance, count)
        makes = (
            self.making(prompt, params, own, acceptance=rule, **options)
            for prompt, params, own, rule in zip(prompts, samplings, plans, rules, strict=True)
        )
        return Batch(makes, return_exceptions=return_exceptions)

    # ---- the requests of a file

    def run_queue(
        self, queue: RequestSource, batch_size: int = 1, stopping: Callable[[], bool] = never
    ) -> Iterator[tuple[GenerationRequest, Event]]:
        """Answer the requests of `queue`, `batch_size` at a time; while this runs more may be put
        into it.

        Yields each request's Chunks and at last its Response, or the error that it met. One that
        ends makes room for the next; none waits for others of its batch. Once `stopping` says so,
        those under way end after their step. Raises LimitError if the engines were built for
        smaller batches.
        """
        self.limits.check_batch_size(batch_size)
        yield from run_queue(self.driver, queue, batch_size, stopping)

    # ---- measuring

    def stats(self) -> EngineStats:
        """What runs and waits, and what was done since the engine was opened; from any thread."""
        return self.scheduler.stats()

    def measured(self) -> AbstractContextManager[dict[str, list[float]]]:
        """The seconds of every pass of each stage, while a block runs."""
        return self.session.log.recorded()

    def forget_prefixes(self) -> None:
        """Drop the rows that are kept for prompts that begin alike, on disk too."""
        self.session.prefixes.clear()
        if self.prefix_store is not None:
            self.prefix_store.clear()

    def forget_answers(self) -> None:
        """Drop what drafters have kept of the texts of earlier requests; none may be running."""
        self.drafting.forget()

    def plainly(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Response:
        """The same request without drafts: the reference that speculation must equal."""
        return self.generate(prompt, sampling, PLAIN)

    def next_logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """The base's logits [V] after `prefix`, computed as a prompt in a lane that is free;
        LimitError where none is."""
        with self.free_lane() as lane:
            return self.base.read(lane, prefix).logits.row(0).copy()

    @contextmanager
    def free_lane(self) -> Iterator[int]:
        """A lane of the base in which nothing runs, and no step meanwhile; LimitError where there
        is none."""
        with self.driver.paused():
            if not (free := self.session.free_lanes):
                raise LimitError("all lanes of the engine are taken", "Finish a stream first.")
            lane = free[0]
            self.base.reset(lane)
            try:
                yield lane
            finally:
                self.base.reset(lane)


def check_queue(max_queue: object) -> None:
    """OptionError for a length of the queue that is not a whole number of 0 or more."""
    if max_queue is not None and (not is_whole(max_queue) or max_queue < 0):
        message = f"`max_queue` is {max_queue!r:.60}"
        raise OptionError(message, "Give a whole number of 0 or more, or None for no bound.")


def check_turn(priority: object, cache_salt: object, timeout_s: object) -> None:
    """RequestError for a priority, a salt or a deadline that cannot be."""
    if not is_whole(priority):
        message = f"`priority` is {priority!r:.60}"
        raise RequestError(message, "Give a whole number; lower ones run first.")
    if not isinstance(cache_salt, str):
        raise RequestError(f"`cache_salt` is of type {type(cache_salt).__name__}", "Give a text.")
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):
        message = f"`timeout_s` is {timeout_s!r:.60}"
        raise RequestError(message, "Give a number of seconds above 0, or None for no deadline.")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, and not True or False."""
    return isinstance(value, int) and not isinstance(value, bool)
