"""The Python API: an open engine directory that turns prompts into text.

Knows the limits of the engines that it has open and checks requests by them. What is opened stands
in `opening`, which request runs when in `scheduler`, the loop in `session`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import EdgeSpecError, EnvironmentProblem, LimitError, RequestError
from edgespec.prompts import Message, SamplingParams
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.generation import (
    Chunk,
    Event,
    Generation,
    GenerationRequest,
    Inbox,
    Response,
)
from edgespec.runtime.opening import choose_draft, open_base, open_draft
from edgespec.runtime.plans import PlanLimits, TreeLimits
from edgespec.runtime.prefix import PrefixCache
from edgespec.runtime.sampling import NEAR_TIE
from edgespec.runtime.scheduler import FAULTS, Scheduler, as_error
from edgespec.runtime.session import Session
from edgespec.runtime.thinking import thinking_note
from edgespec.runtime.tokenizer import Tokenizer
from edgespec.runtime.tree import DraftPlan
from edgespec.runtime.verify import ACCEPT_RULES

PREFIX_CACHE_BYTES = 256 * 2**20


class Queue(Protocol):
    """Requests that wait, such as a deque; it may still grow while it is emptied."""

    def __len__(self) -> int: ...

    def popleft(self) -> GenerationRequest | None:
        """The next one; None where it could not be asked."""


def never() -> bool:
    """The `stopping` of a run that nothing stops: False."""
    return False


class Stream:
    """A request as it is answered: iterate over its Chunks and, last, its Response.

    Streams of one engine share its lanes: one that finds none free waits. A stream that is dropped
    is cancelled.
    """

    def __init__(self, engine: Engine, request: GenerationRequest) -> None:
        self.engine, self.inbox = engine, Inbox()
        self.handle = engine.submit(request, self.inbox)
        self.finished = False
        finalize(self, engine.scheduler.cancel, self.handle)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Chunk | Response:
        if self.finished:
            raise StopIteration
        while not self.inbox:
            self.engine.advance()
        _, event = self.inbox.popleft()
        self.finished = not isinstance(event, Chunk)
        if isinstance(event, EdgeSpecError):
            raise event
        return event

    def cancel(self) -> None:
        """Stop after the step that is under way; the Response still comes, and its finish reason
        says so."""
        self.engine.scheduler.cancel(self.handle)


class Engine:
    """An open engine directory; use it in a `with` block.

    `spec_decode` opens base and draft; without it a plain engine is opened where there is one, else
    the base alone. `drafter` drafts instead of a draft engine: the name of a method in DRAFTERS
    that needs no engine, or a Drafter of your own. With `exact` drafts leave every bit as it is:
    for float32, int4 in blocks of 32 and int8 GEMM, one sequence, chains only.
    `prefix_cache_bytes` bounds the KV rows that are kept for later prompts with the same prefix; 0
    keeps none. Raises BundleError, PairingError, EngineMismatch, EnvironmentProblem or, for what
    cannot be exact or cannot draft, LimitError, with the remedy.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        spec_decode: bool | None = None,
        drafter: str | Drafter | None = None,
        exact: bool = False,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ) -> None:
        path = Path(engine_dir)
        choice = choose_draft(path, spec_decode, drafter)
        opened = open_base(path, choice, exact=exact)
        self.base, self.config, self.exact = opened.decoder, opened.config, exact
        self.plan_hints = opened.hints
        self.tokenizer = Tokenizer.open(path)
        draft = open_draft(path, choice, opened)
        self.drafter = None if draft is None else draft.drafter
        self.method = None if draft is None else draft.method
        self.draft_config = None if draft is None else draft.config
        self.spec_decode = draft is not None
        self.session = Session(self.base, self.drafter, PrefixCache(prefix_cache_bytes))
        self.scheduler = Scheduler(self.session, self.prepare, self.max_batch_size)
        self.stop_ids = frozenset(self.config.component.eos_token_ids)
        self.notes = (*([choice.note] if choice.note else []), *self.warnings())

    @property
    def configs(self) -> dict[str, EngineConfig]:
        """The configs of the engines that are open, by role."""
        draft = {} if self.draft_config is None else {"draft": self.draft_config}
        return {"base": self.config, **draft}

    @property
    def rounding(self) -> float:
        """How far apart, in nats, two candidates may be where a run with drafts takes the other
        one."""
        margin = self.config.weights.rounding
        return 0.0 if self.exact else NEAR_TIE if margin is None else margin

    def warnings(self) -> Iterator[str]:
        """What a user should know about these engines."""
        capacity = None if self.drafter is None else self.drafter.capacity
        if capacity is not None and capacity < self.base.capacity:
            yield (
                f"the draft's KV cache holds {capacity} tokens, the base's {self.base.capacity}:"
                f" beyond {capacity} nothing is drafted"
            )
        weights = self.config.weights
        if weights.emulated:
            yield f"weights in {weights.scheme}: {weights.emulated}"
        if self.rounding > NEAR_TIE and self.drafter is not None:
            yield (
                f"{weights.rounded_by}: lossless up to kernel rounding (margin"
                f" {self.rounding:.2g} nats)"
            )

    def thinking_note(self, asked: Sequence[bool], *, by_flag: bool = False) -> str | None:
        """A warning where requests, by their `enable_thinking`, are not in the mode that the draft
        was trained in.

        With `by_flag` the mode is that of a chat, set by --enable-thinking.
        """
        if self.method is None:
            return None
        return thinking_note(
            DRAFTERS[self.method].trained_with_thinking(self.config, self.draft_config),
            asked,
            template_has_mode=self.tokenizer.knows_thinking(),
            by_flag=by_flag,
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the engines; closing twice is harmless."""
        self.base.runner.close()
        if self.drafter is not None:
            self.drafter.close()

    # ---- what to draft

    def plan(
        self, top_k: int | None = None, steps: int | None = None, verify_size: int | None = None
    ) -> DraftPlan:
        """The drafting plan: the values given, the others chosen to go with them; LimitError where
        it cannot be.

        With no value a short chain, as the backend hints. A value left open follows from the
        others: top_k 1, steps 3 on a CPU (verify_size - 1 for a chain), and verify_size the
        smallest of 60, the nodes that can exist and what the base was built for. Only values that
        were not given shrink to what the engines were built for. With a draft that makes blocks
        `steps` is 1 or left open.
        """
        plan = self.plan_limits().plan(top_k, steps, verify_size, self.plan_hints)
        self.check_chain(plan)
        return plan

    def check_chain(self, plan: DraftPlan) -> None:
        """Raises LimitError for a tree where only chains are exact."""
        if self.exact and plan.top_k != 1:
            what = f"--spec-draft-top-k {plan.top_k} drafts trees, and only chains are exact"
            raise LimitError(what, "Set it to 1, or leave --exact out.")

    def plan_limits(self) -> PlanLimits:
        """What base and drafter can take; LimitError where nothing drafts."""
        if self.drafter is None:
            what = "a drafting plan was asked for, and this engine was opened without its draft"
            raise LimitError(what, "Open it with spec_decode=True, or decode without a plan.")
        if self.method is None:
            return TreeLimits(self.config.limits.verify_tree_size)
        return DRAFTERS[self.method].limits(self.config, self.draft_config)

    @property
    def drafter_words(self) -> str:
        """What follows "chain" or "tree" where a plan is shown."""
        return DRAFTERS[self.method].words if self.method is not None else ""

    @property
    def max_batch_size(self) -> int:
        """Sequences that run at a time, as the engines were built."""
        draft_lanes = None if self.drafter is None else self.drafter.num_lanes
        lanes = len(self.base.lanes)
        return lanes if draft_lanes is None else min(lanes, draft_lanes)

    def check_batch_size(self, count: int) -> None:
        """LimitError where an engine was built for smaller batches, or the drafter holds fewer
        sequences."""
        for role, config in self.configs.items():
            most = config.limits.max_batch_size
            if count > most:
                what = f"batch_size {count}; the {role} engine was built for {most}"
                raise LimitError(
                    what,
                    f"Set batch_size to {most}, or build the {role} with --max-batch-size {count}.",
                )
        if count > self.max_batch_size:
            what = f"batch_size {count}; the drafter holds {self.max_batch_size} sequences"
            raise LimitError(what, f"Set batch_size to {self.max_batch_size}.")

    # ---- generation

    def render(
        self,
        messages: Sequence[Message],
        *,
        apply_chat_template: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> str:
        """The text of messages: by the model's chat template, or joined. Raises RequestError for
        what the template rejects."""
        if not apply_chat_template:
            if enable_thinking or not add_generation_prompt:
                flag = "enable_thinking" if enable_thinking else "add_generation_prompt"
                what = f"{flag} is a matter of the chat template, and apply_chat_template is false"
                raise RequestError(what, f"Remove {flag}, or let the template be applied.")
            return "".join(m.content for m in messages)
        return self.tokenizer.render(
            messages, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    def encode(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        """Token ids of a text, of messages (through the chat template), or of ids given as such.
        Raises RequestError for a mixture."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        items: list[Any] = list(prompt)
        if items and all(isinstance(item, Message) for item in items):
            return self.tokenizer.encode(self.render(items))
        try:
            return [operator.index(item) for item in items]
        except TypeError:
            what = "a prompt is a text, a list of edgespec.Message or a list of token ids"
            raise RequestError(what, "Give one of the three, not a mixture.") from None

    def check_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Raises LimitError or RequestError for a prompt that these engines cannot take."""
        count = len(prompt_ids)
        for role, config in self.configs.items():
            limits = config.limits
            most = limits.max_input_len
            if count > most:
                flags = f"--max-input-len {count}"
                if count > limits.max_kv_cache_capacity:
                    flags += f" --max-kv-cache-capacity {count}"
                what = f"the prompt has {count} tokens, the {role} engine was built for {most}"
                raise LimitError(what, f"Shorten it, or build the {role} with {flags} or more.")
        rows = self.config.component.vocab_size
        if invalid := [token for token in prompt_ids if not 0 <= token < rows]:
            what = (
                f"the prompt holds the token id {invalid[0]}, the model's vocabulary ends at"
                f" {rows - 1}"
            )
            raise RequestError(what, "The tokenizer does not fit the model, or the ids are wrong.")

    def check(self, request: GenerationRequest) -> None:
        """Raises LimitError or RequestError for a request that these engines cannot answer."""
        self.check_prompt(request.prompt_ids)
        if request.plan is not None:
            self.plan_limits().check(request.plan)
            self.check_chain(request.plan)
        if request.accept_rule not in ACCEPT_RULES:
            what = f"there is no accept rule {request.accept_rule!r}"
            raise RequestError(what, f"Rules: {', '.join(ACCEPT_RULES)}.")
        rows = self.config.component.vocab_size
        if invalid := [token for token in request.sampling.logit_bias if token >= rows]:
            what = (
                f"logit_bias names the token id {invalid[0]}, the model's vocabulary ends at"
                f" {rows - 1}"
            )
            raise RequestError(what, "Remove it.")

    def prepare(self, request: GenerationRequest) -> Generation:
        """A request's handle, once it is checked. Raises LimitError or RequestError."""
        self.check(request)
        return Generation(request, self.tokenizer, self.stop_ids)

    def submit(self, request: GenerationRequest, inbox: Inbox) -> Generation:
        """Add a request to the scheduler and return its handle; `advance` puts its events into
        `inbox`. Raises what `prepare` raises."""
        handle = self.scheduler.add(request)
        handle.inbox = inbox
        return handle

    def advance(self) -> None:
        """One step of the scheduler, no matter whose requests it serves. Raises EnvironmentProblem
        where an interrupt has dropped them."""
        if not self.scheduler.has_work:
            what = "this request was dropped: a step was interrupted"
            raise EnvironmentProblem(what, "Ask again.")
        for handle, event in self.scheduler.step():
            if handle.inbox is not None:
                handle.inbox.append((handle, event))

    def serve(
        self, queue: Queue, batch_size: int = 1, stopping: Callable[[], bool] = never
    ) -> Iterator[tuple[GenerationRequest, Event]]:
        """Answer the requests of `queue`, `batch_size` at a time; while this runs more may be put
        into it.

        Yields each request's Chunks and at last its Response, or the error that it met. One that
        ends makes room for the next; none waits for others of its batch. Once `stopping` says so,
        those under way end after their step. Raises LimitError if the engines were built for
        smaller batches.
        """
        self.check_batch_size(batch_size)
        inbox, active = Inbox(), list[Generation]()
        try:
            while queue or active:
                while queue and len(active) < batch_size:
                    request = queue.popleft()
                    if request is None:
                        continue
                    try:
                        active.append(self.submit(request, inbox))
                    except FAULTS as error:
                        yield request, as_error(error)
                if active and not inbox:
                    self.advance()
                while inbox:
                    handle, event = inbox.popleft()
                    if not isinstance(event, Chunk):
                        active.remove(handle)
                    yield handle.request, event
                if stopping():
                    self.cancel_all(active)
        finally:
            self.cancel_all(active)

    def cancel_all(self, handles: Sequence[Generation]) -> None:
        """Ends requests: after their step each yields a Response with `cancelled`."""
        for handle in handles:
            self.scheduler.cancel(handle)

    def stream(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        plan: DraftPlan | None = None,
        *,
        keep: bool = False,
    ) -> Stream:
        """Yield a Chunk a step and, last, the Response. `plan` None decodes plainly.

        With `keep` the KV rows of prompt and answer are kept for a later prompt that begins with
        them. Raises LimitError or RequestError for what cannot be answered.
        """
        return Stream(self, GenerationRequest(prompt_ids, sampling, plan, keep_all=keep))

    def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        sampling: SamplingParams | None = None,
        plan: DraftPlan | None = None,
    ) -> Response:
        """The whole answer. Without a plan an engine with a draft takes `plan()`; see `stream` for
        plain decoding."""
        if plan is None and self.spec_decode:
            plan = self.plan()
        return self.finish(self.encode(prompt), sampling or SamplingParams(), plan)

    def plainly(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Response:
        """The same request without drafts: the reference that speculation must equal."""
        return self.finish(prompt_ids, sampling, None)

    def finish(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, plan: DraftPlan | None
    ) -> Response:
        """The Response of one request, its chunks dropped. Raises what `stream` raises."""
        *_, last = self.stream(prompt_ids, sampling, plan)
        assert isinstance(last, Response)
        return last

    def next_logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """The base's logits [V] after `prefix`, computed as a prompt in a lane that is free;
        LimitError where none is."""
        if not self.session.num_free_lanes:
            raise LimitError("all lanes of the engine are taken", "Finish a stream first.")
        lane = len(self.base.lanes) - self.session.num_free_lanes
        self.base.reset(lane)
        result = self.base.read(lane, np.array(prefix, np.int64))
        logits: NDArray[np.float32] = result.logits[0].copy()
        self.base.reset(lane)
        return logits
