"""The Python API: an open engine directory that turns prompts into text.

Makes requests of what a caller gives, and answers of what the loop gives back. What is opened
stands in `opening`, what drafts for which request in `drafting`, how much in `planner`, what a
prompt may be in `prompt`, what the engines take in `limits`, who steps in `driver`, how answers
come in `streams`, which request runs when in `scheduler`, the loop in `session`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeVar, cast, overload
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.engine_config import EngineConfig
from edgespec.errors import (
    EdgeSpecError,
    InternalError,
    LimitError,
    OptionError,
    RequestError,
    command,
    counted,
    in_terms_of,
)
from edgespec.images import ImageRules
from edgespec.methods import METHODS
from edgespec.prompts import SamplingParams
from edgespec.runtime.acceptance.verify import (
    ACCEPT_RULES,
    EXACT,
    Acceptance,
    AcceptOptions,
    acceptance_of,
    acceptance_words,
)
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.drafters.decoding import DecodingConfig
from edgespec.runtime.drafters.options import DrafterOptions
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.drafters.trtllm import PreparesDraftTokens
from edgespec.runtime.drafters.user import UserDrafter
from edgespec.runtime.faults import FAULTS, as_error
from edgespec.runtime.limits import EngineLimits
from edgespec.runtime.loop.driver import Driver
from edgespec.runtime.loop.generation import Chunk, Event, Generation, GenerationRequest, Response
from edgespec.runtime.loop.prefix import PREFIX_CACHE_BYTES, PrefixCache, check_bytes
from edgespec.runtime.loop.scheduler import Scheduler
from edgespec.runtime.loop.session import Session
from edgespec.runtime.opening.drafting import Drafting
from edgespec.runtime.opening.open_engine import (
    TunedChoice,
    choose_draft,
    choose_tuned,
    directory_of,
    open_base,
    open_costs,
    with_options,
)
from edgespec.runtime.opening.planner import Planner
from edgespec.runtime.opening.speculative_config import (
    check_of_request,
    drafts_of,
    gates_of,
    of_engine,
    read_config,
)
from edgespec.runtime.opening.tuned_plan import not_taken
from edgespec.runtime.plans.acceptance_estimate import AcceptanceEstimate
from edgespec.runtime.plans.policy import (
    ADAPTIVE,
    FIXED,
    POLICIES,
    AdaptivePolicy,
    AdaptiveState,
    SpecPolicy,
)
from edgespec.runtime.plans.schedules import Gates
from edgespec.runtime.sampling.sampler import NEAR_TIE
from edgespec.runtime.streams import AsyncStream, Ends, Stream, cancelling, future_end
from edgespec.runtime.text.prompt import (
    Conversation,
    Prompt,
    has_images,
    read_messages,
    read_prompt,
)
from edgespec.runtime.text.prompt_value import Prompt as PromptValue
from edgespec.runtime.text.thinking import thinking_note
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.runtime.trees.tree import PLAIN, DraftPlan, Plain
from edgespec.runtime.vision.image_prompts import ImagePrompts, beside
from edgespec.vision.placeholders import refuse_marks

logger = logging.getLogger(__name__)
# What the library has to say goes where the application's logging sends it, else nowhere
logging.getLogger("edgespec").addHandler(logging.NullHandler())

# How Python spells parameters that have another name here
KEYWORDS = {
    "spec_draft_top_k": "top_k",
    "spec_draft_step": "steps",
    "spec_verify_size": "verify_size",
    "allow_image_root": "image_root",
}

T = TypeVar("T")
Plan = DraftPlan | DecodingConfig | Plain | None
# Of a batch: one for all requests, or one for each
Samplings = SamplingParams | None | Sequence[SamplingParams | None]
Plans = Plan | Sequence[Plan]
Acceptances = Acceptance | Sequence[Acceptance]


class Queue(Protocol):
    """Requests that wait, such as a deque; it may still grow while it is emptied."""

    def __len__(self) -> int: ...

    def popleft(self) -> GenerationRequest | None:
        """The next one; None where it could not be asked."""


def never() -> bool:
    """The `stopping` of a run that nothing stops: False."""
    return False


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
    that are kept for later prompts with the same prefix; 0 keeps none. `acceptance` is the accept
    rule of requests that name none: `exact`, `rejection`, `typical` or `relaxed`, or such a rule
    with its options. `spec_policy` says how much is drafted: "adaptive" each step as it pays, up to
    the plan; "fixed" the plan; None is adaptive where no sizes are given and what a step costs here
    was measured (docs/adaptive.md). What `edgespec tune` found best for these engines is taken
    where method and sizes are left open; not with `tuned` False (docs/tuning.md).
    `multimodal_engine_dir` holds the image encoder; None is `visual` in the engine directory, where
    that is there. `image_rules` say which images may be read (docs/images.md).

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
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
        acceptance: Acceptance = None,
        spec_policy: SpecPolicy | None = None,
        tuned: bool = True,
        multimodal_engine_dir: str | Path | None = None,
        image_rules: ImageRules | None = None,
    ) -> None:
        check_policy(spec_policy)
        path = directory_of(engine_dir)
        check_bytes(prefix_cache_bytes)
        config, notes = read_config(speculative_config)
        if config is not None:
            drafts = drafts_of(config, spec_decode, drafter, drafter_options)
            spec_decode, drafter = True, cast(str | Drafter | None, drafts)
            acceptance = config.acceptance if acceptance is None else acceptance
        acceptance = acceptance_of(acceptance)  # before a large engine is loaded
        choice = choose_draft(path, spec_decode, drafter)
        if config is not None:
            config = of_engine(config, choice.method, str(path))
            drafter_options = config.options
        choice = with_options(choice, drafter_options)
        chosen = TunedChoice(choice)
        if tuned and drafter is None and config is None and not drafter_options:
            chosen = choose_tuned(path, choice, spec_decode)
        choice, self.tuned = chosen.choice, chosen.tuned
        # The acceptance by depth that adaptive drafting begins with; empty: of a usual draft
        self.prior: Sequence[float] = () if self.tuned is None else self.tuned.prior
        opened = open_base(path, choice, exact=exact)
        self.base, self.config, self.exact = opened.decoder, opened.config, exact
        self.tolerance = opened.tolerance
        self.tokenizer = Tokenizer.open(path)
        self.acceptance = self.acceptance_for(acceptance)
        costs = open_costs(path, opened, choice)
        self.costs, self.why_no_costs = costs.model, costs.why
        if costs.model is not None:
            opened = replace(opened, row_cost=costs.model.row_cost)
        self.drafting = Drafting(path, opened, choice)
        draft = self.drafting.default
        self.drafter = None if draft is None else draft.drafter
        self.method = None if draft is None else draft.method
        self.draft_config = None if draft is None else draft.config
        self.spec_decode = draft is not None
        self.speculative_config = config
        self.gates = gates_of(config)
        self.limits = EngineLimits(self.configs, self.max_batch_size)
        self.path, self.spec_policy = path, spec_policy
        self.images = self.open_images(multimodal_engine_dir, image_rules)
        if self.spec_decode:
            self.close_unless_adaptive()
        self.planner = Planner(
            self.config,
            opened.hints,
            self.drafting,
            exact,
            self.acceptance,
            config,
            spec_policy,
            self.can_adapt,
        )
        misfit = self.take_tuned_plan()
        policy = None if self.costs is None else AdaptivePolicy(self.costs)
        self.session = Session(self.base, self.drafter, PrefixCache(prefix_cache_bytes), policy)
        self.session.log.recording = False
        if self.images is not None:
            self.images.log = self.session.log
        self.scheduler = Scheduler(self.session, self.prepare, self.max_batch_size)
        self.driver = Driver(self.scheduler)
        # An engine that is dropped without `close` leaves no thread behind
        finalize(self, self.driver.work.close).atexit = False
        self.stop_ids = frozenset(self.config.component.eos_token_ids)
        chosen_by = [note for note in (choice.note, chosen.note, misfit) if note]
        fixed = [costs.note] if costs.note and spec_policy is None else []
        self.notes = (*chosen_by, *notes, *self.warnings(), *fixed)
        self.log_opening(path)

    def take_tuned_plan(self) -> str | None:
        """Let the planner plan as tuned.json says; where base or drafter do not take that plan, it
        is left, and a note says so."""
        tuned = self.tuned
        if tuned is None:
            return None
        planner = replace(self.planner, tuned=tuned.plan)
        try:
            planner.by_tuning()
        except LimitError:
            self.tuned, self.prior = None, ()
            return not_taken(self.path, f"these engines do not take its plan ({tuned.words})")
        self.planner = planner
        return None

    def open_images(
        self, directory: str | Path | None, rules: ImageRules | None
    ) -> ImagePrompts | None:
        """What reads the images of prompts; None where there is no encoder. Raises what
        `ImagePrompts.open` does, and then nothing stays open."""
        found = beside(self.path) if directory is None else Path(directory)
        if found is None:
            return None
        try:
            return ImagePrompts.open(found, self.config.component, rules)
        except BaseException:
            self.base.runner.close()
            self.drafting.close()
            raise

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
                f"the draft follows {capacity} tokens, the base's KV cache holds"
                f" {self.base.capacity}: beyond {capacity} nothing is drafted"
            )
        weights = self.config.weights
        if weights.emulated:
            yield f"weights in {weights.scheme}: {weights.emulated}"
        if self.rounding > NEAR_TIE and self.drafter is not None:
            yield (
                f"{weights.rounded_by}: lossless up to kernel rounding (margin"
                f" {self.rounding:.2g} nats)"
            )
        if weights.is_quantized and weights.is_bitwise and self.drafter is not None:
            yield f"{weights.scheme}, lossless: bitwise (a row has the same bits in every pass)"
        if self.acceptance.rule != EXACT and self.drafter is not None:
            yield f"acceptance: {acceptance_words(self.acceptance.rule)}"
            if self.acceptance.note is not None:
                yield self.acceptance.note

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
        if self.method is None:
            return None
        return thinking_note(
            DRAFTERS[self.method].trained_with_thinking(self.config, self.draft_config),
            asked,
            template_has_mode=self.tokenizer.knows_thinking(),
            by_flag=by_flag,
        )

    def log_opening(self, path: Path) -> None:
        """What was opened, and as warnings what a user should know of it."""
        drafts = self.method or ("a drafter of the caller's" if self.spec_decode else "no drafts")
        logger.info(
            "opened %s: %s, %s, up to %s at a time, %d tokens each",
            path,
            self.config.weights.scheme,
            drafts,
            counted(self.max_batch_size, "request"),
            self.base.capacity,
        )
        for note in self.notes:
            logger.warning("%s: %s", path, note)

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
        self.base.runner.close()
        self.drafting.close()
        self.drafting.base.devices.close()
        if self.images is not None:
            self.images.close()

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

    def tuned_line(self, plan: DraftPlan) -> str | None:
        """What is said of the plan that `tune` found; None of any other."""
        if self.tuned is None or plan != self.planner.by_tuning():
            return None
        return self.tuned.line

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

    @property
    def can_adapt(self) -> bool:
        """Whether how much is drafted can be decided step by step: the costs of its steps are
        known, and the method leaves the decision to others."""
        return self.method is not None and self.costs is not None and not self.is_paced

    @property
    def has_trained_draft(self) -> bool:
        """Whether an engine drafts, that was made for the base."""
        return self.method is not None and METHODS[self.method].needs_engine

    @property
    def is_paced(self) -> bool:
        """Whether the method decides by itself how much to draft."""
        return self.method is not None and DRAFTERS[self.method].paces_itself

    def close_unless_adaptive(self) -> None:
        """`check_adaptive` of its own policy; where it raises, nothing stays open."""
        try:
            self.check_adaptive(self.spec_policy)
        except LimitError:
            self.drafting.close()
            self.base.runner.close()
            raise

    def check_adaptive(self, spec_policy: SpecPolicy | None) -> None:
        """Raises LimitError for adaptive drafting where nothing says what a step costs here."""
        if spec_policy != ADAPTIVE or self.can_adapt or self.is_paced:
            return
        if self.method is None:
            what = "spec_policy adaptive: nothing is known of the cost of a drafter of your own"
            raise LimitError(what, "Leave it out, or set it to fixed.")
        what = f"spec_policy adaptive: {self.why_no_costs}"
        raise LimitError(what, f"Measure it: {command('bench', self.path, measure_costs=True)}.")

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

    def render(
        self,
        messages: Conversation,
        *,
        apply_chat_template: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> str:
        """The text of messages: by the model's chat template, or joined. Raises RequestError for
        what the template rejects."""
        found = read_messages(messages)
        if not apply_chat_template:
            if enable_thinking or not add_generation_prompt:
                flag = "enable_thinking" if enable_thinking else "add_generation_prompt"
                what = f"{flag} is a matter of the chat template, and apply_chat_template is false"
                raise RequestError(what, f"Remove {flag}, or let the template be applied.")
            return "".join(m.content for m in found)
        return self.tokenizer.render(
            found, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    def encode(self, prompt: Prompt, *, enable_thinking: bool = False) -> Sequence[int]:
        """The token ids of a prompt, with the rows of its images where it has some.

        A text is taken as it is, with the special tokens that the tokenizer adds, as vLLM does;
        messages go through the chat template; ids stay, and so does a prompt that was encoded
        before. Raises RequestError for anything else, and
        what reading and encoding images raise.
        """
        self.driver.check_open()
        found = prompt if isinstance(prompt, PromptValue) else read_prompt(prompt)
        if isinstance(found, tuple):
            rendered = self.render(found, enable_thinking=enable_thinking)
            add = not self.tokenizer.template.has_special_tokens
            with in_terms_of(KEYWORDS):
                return self.encode_rendered(rendered, found, add_special_tokens=add)
        if enable_thinking:
            what = (
                "enable_thinking is a matter of the chat template, and the prompt has no messages"
            )
            raise RequestError(what, "Give messages, or leave it out.")
        if isinstance(found, str):
            return self.tokenizer.encode(found, add_special_tokens=True)
        return found

    def encode_rendered(
        self,
        rendered: str,
        messages: Conversation,
        *,
        add_special_tokens: bool,
        stopping: Callable[[], bool] = never,
    ) -> Sequence[int]:
        """The ids of rendered messages, with the rows of their images where they have some.

        A text of theirs must not have the model's own mark of an image, unless they were joined
        without a template, which adds special tokens; then the marks are the caller's. `stopping`
        is asked before each image. Raises RequestError or LimitError for images that cannot be
        taken, what opening and running the encoder raise, and Stopped.
        """
        found = read_messages(messages)
        if self.images is not None and not add_special_tokens:
            tokens = self.images.config.component.tokens
            image, video = map(self.tokenizer.token, (tokens.image, tokens.video))
            refuse_marks(found, image=image, video=video)
        ids = self.tokenizer.encode(rendered, add_special_tokens=add_special_tokens)
        items = [item for message in found for item in message.images]
        if not items:
            return ids
        if self.images is None:
            what = f"the prompt has {counted(len(items), 'image')}, and there is no image encoder"
            raise RequestError(
                what,
                "Name its directory, ENGINES/visual, by `multimodal_engine_dir`, or remove the"
                " images.",
            )
        check = partial(self.limits.check_prompt, drafts=False)
        return self.images.prompt(ids, items, check=check, stopping=stopping)

    def takes_long(self, prompt: object) -> bool:
        """Whether encoding a prompt would hold up an event loop: there are images to be read and
        encoded."""
        return self.images is not None and has_images(prompt)

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
        enable_thinking: bool = False,
        keep: bool = False,
        acceptance: Acceptance = None,
    ) -> GenerationRequest:
        """A request as the scheduler takes it. Raises RequestError, or LimitError for the plan."""
        if not isinstance(sampling, SamplingParams | None):
            what = f"sampling is of type {type(sampling).__name__}"
            raise RequestError(what, "Give edgespec.SamplingParams(temperature=0), for example.")
        ids = self.encode(prompt, enable_thinking=enable_thinking)
        rule = None if acceptance is None else self.acceptance_for(acceptance)
        drafts = self.drafts_of(plan, rule)
        if rule is not None:
            drafts["acceptance"] = rule
        return GenerationRequest(ids, sampling or SamplingParams(), keep_all=keep, **drafts)

    def drafts_of(self, plan: Plan, rule: AcceptOptions | None = None) -> dict[str, Any]:
        """What a request's `plan` means, as fields of a GenerationRequest: None is `plan()` where
        something drafts, or what suits an accept rule of the request's own. Raises RequestError,
        LimitError or OptionError."""
        if isinstance(plan, DecodingConfig):
            return self.drafts_by(plan, rule)
        if plan is None:
            return {"plan": self.default_plan(rule) if self.spec_decode else None}
        if not isinstance(plan, DraftPlan | Plain):
            what = f"plan is of type {type(plan).__name__}"
            remedy = (
                "Give engine.plan(...), a decoding config such as edgespec.AutoDecodingConfig(...),"
                " edgespec.PLAIN for no drafts, or leave it out."
            )
            raise RequestError(what, remedy)
        return {"plan": None if plan is PLAIN else plan}

    def default_plan(self, rule: AcceptOptions | None = None) -> DraftPlan:
        """`plan()`, for an accept rule of a request's own: a chain where only chains will do."""
        self.driver.check_open()
        planner = self.planner if rule is None else replace(self.planner, acceptance=rule)
        with in_terms_of(KEYWORDS):
            return planner.by_sizes()

    def drafts_by(
        self, config: DecodingConfig, rule: AcceptOptions | None = None
    ) -> dict[str, Any]:
        """What a request's own config means, as fields of a GenerationRequest; `rule` is an accept
        rule that was given beside it. Raises LimitError, and OptionError for keys that are a matter
        of the engine or a method that it does not have."""
        check_of_request(config)
        config = of_engine(config, self.method, "this engine")
        fields: dict[str, Any] = {"plan": self.planner.by_config(config, rule)}
        fields["schedule"] = config.schedule
        if config.drafts_by is not None:
            fields |= {"drafter": config.drafts_by, "drafter_options": config.options}
        if config.acceptance is not None:
            fields["acceptance"] = self.acceptance_for(config.acceptance)
        return fields

    def handle(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        plan: Plan,
        enable_thinking: bool,
        keep: bool,
        acceptance: Acceptance,
    ) -> Generation:
        """The handle of what a caller asks for. Raises what `generate` does."""
        request = self.request(
            prompt,
            sampling,
            plan,
            enable_thinking=enable_thinking,
            keep=keep,
            acceptance=acceptance,
        )
        return self.prepare(request)

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
        self.limits.check_logit_bias(request.sampling.logit_bias)

    def prepare(self, request: GenerationRequest) -> Generation:
        """A request's handle, once it is checked. Raises LimitError or RequestError."""
        self.check(request)
        acceptance = self.acceptance_for(request.acceptance)
        drafter = None  # the session's own
        if request.drafter is not None or request.drafter_options:
            draft = self.drafting.of(request.drafter, request.drafter_options)
            drafter = None if draft is None else draft.drafter
        gates = self.gates_for(request)
        handle = Generation(request, self.tokenizer, self.stop_ids, acceptance, drafter, gates)
        if gates is not None and gates.stopped and ACCEPT_RULES[acceptance.rule].lossless != "no":
            handle.plan = None  # lossy rules decide without drafts too
        plan = handle.plan
        if self.can_adapt and drafter is None and plan is not None and plan.adaptive:
            handle.adaptive = AdaptiveState(AcceptanceEstimate(self.prior))
            handle.metrics.spec_policy = ADAPTIVE
        return handle

    def gates_for(self, request: GenerationRequest) -> Gates | None:
        """What limits a request's drafts: its own schedule or the engine's, and how well the drafts
        of the engine's own drafter were accepted."""
        own = self.gates
        if request.drafter is not None or own is None:
            return None if request.schedule is None else Gates(request.schedule)
        return Gates(request.schedule or own.schedule, own.acceptance)

    @property
    def drafting_stopped(self) -> str | None:
        """Why nothing is drafted any more, where acceptance_length_threshold has ended it."""
        return (
            None
            if self.gates is None or self.gates.acceptance is None
            else (self.gates.acceptance.stopped)
        )

    # ---- answers

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        *,
        enable_thinking: bool = False,
        keep: bool = False,
        acceptance: Acceptance = None,
    ) -> Response:
        """The whole answer to one prompt.

        `prompt` is a text, which goes to the model as it is; a list of messages (dicts as OpenAI's
        clients write them, or Message), which go through the chat template; or a list of token ids.
        Without a `plan` an engine with a draft takes `plan()`, or for `rejection` a chain;
        `edgespec.PLAIN` decodes without drafts. `enable_thinking` is the chat template's. With
        `keep` the KV rows of prompt and answer are kept for a later prompt that begins with them,
        such as a chat's next turn. `acceptance` is an accept rule by its name, or with its options;
        None is the engine's.

        Any number of threads may call this at the same time. Raises RequestError or LimitError for
        what cannot be answered, EngineClosed, and EnvironmentProblem where the machine cannot.
        """
        handle = self.handle(prompt, sampling, plan, enable_thinking, keep, acceptance)
        with cancelling([handle]):
            _, end = next(self.ends([handle]))
        if isinstance(end, EdgeSpecError):
            raise end
        return end

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        *,
        enable_thinking: bool = False,
        keep: bool = False,
        acceptance: Acceptance = None,
    ) -> Stream:
        """The answer to one prompt, piece by piece: see Stream. Takes and raises what `generate`
        does."""
        handle = self.handle(prompt, sampling, plan, enable_thinking, keep, acceptance)
        return Stream(self.driver, handle)

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        enable_thinking: bool = False,
        acceptance: Acceptances = None,
        return_exceptions: Literal[False] = False,
    ) -> list[Response]: ...

    @overload
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        enable_thinking: bool = False,
        acceptance: Acceptances = None,
        return_exceptions: bool,
    ) -> list[Response | EdgeSpecError]: ...

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        enable_thinking: bool = False,
        acceptance: Acceptances = None,
        return_exceptions: bool = False,
    ) -> list[Response] | list[Response | EdgeSpecError]:
        """The answers to several prompts, in their order; as many run at a time as the engines were
        built for.

        `sampling`, `plan` and `acceptance` are one for all, or a list with one for each. The first
        error is raised, and ends the other requests; with `return_exceptions` each stands in the
        place of its answer, and harms no other. Takes and raises what `generate` does.
        """
        found, handles = self.batch(
            prompts,
            sampling,
            plan,
            enable_thinking,
            acceptance,
            return_exceptions=return_exceptions,
        )
        places = list(handles)
        with cancelling([*handles.values()]):
            for index, end in self.ends([*handles.values()]):
                found[places[index]] = end
                if isinstance(end, EdgeSpecError) and not return_exceptions:
                    raise of_prompt(places[index], end)
        return [found[index] for index in range(len(prompts))]

    async def agenerate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        *,
        enable_thinking: bool = False,
        keep: bool = False,
        acceptance: Acceptance = None,
    ) -> Response:
        """`generate` for an event loop. A task that is cancelled ends its request."""
        make = partial(self.handle, prompt, sampling, plan, enable_thinking, keep, acceptance)
        handle = await asyncio.to_thread(make) if self.takes_long(prompt) else make()
        with cancelling([handle]):
            future = future_end(handle)
            self.driver.submit([handle])
            return await future

    def astream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        plan: Plan = None,
        *,
        enable_thinking: bool = False,
        keep: bool = False,
        acceptance: Acceptance = None,
    ) -> AsyncStream:
        """`stream` for the event loop that runs: see AsyncStream."""
        make = partial(self.handle, prompt, sampling, plan, enable_thinking, keep, acceptance)
        return AsyncStream(self.driver, make if self.takes_long(prompt) else make())

    @overload
    async def agenerate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        enable_thinking: bool = False,
        acceptance: Acceptances = None,
        return_exceptions: Literal[False] = False,
    ) -> list[Response]: ...

    @overload
    async def agenerate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        enable_thinking: bool = False,
        acceptance: Acceptances = None,
        return_exceptions: bool,
    ) -> list[Response | EdgeSpecError]: ...

    async def agenerate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings = None,
        plan: Plans = None,
        *,
        enable_thinking: bool = False,
        acceptance: Acceptances = None,
        return_exceptions: bool = False,
    ) -> list[Response] | list[Response | EdgeSpecError]:
        """`generate_batch` for an event loop. A task that is cancelled ends its requests."""
        make = partial(
            self.batch,
            prompts,
            sampling,
            plan,
            enable_thinking,
            acceptance,
            return_exceptions=return_exceptions,
        )
        takes_long = isinstance(prompts, Sequence) and any(map(self.takes_long, prompts))
        found, handles = await asyncio.to_thread(make) if takes_long else make()
        with cancelling([*handles.values()]):
            futures = {index: future_end(handle) for index, handle in handles.items()}
            self.driver.submit([*handles.values()])
            for index, future in futures.items():
                try:
                    found[index] = await future
                except EdgeSpecError as error:
                    if not return_exceptions:
                        raise of_prompt(index, error) from error
                    found[index] = error
        return [found[index] for index in range(len(prompts))]

    def ends(self, handles: Sequence[Generation]) -> Iterator[tuple[int, Response | EdgeSpecError]]:
        """Submit requests; the index and the end of each, in the order in which they end."""
        ends = Ends(handles)
        self.driver.submit(handles)
        return iter(ends)

    def batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Samplings,
        plan: Plans,
        enable_thinking: bool,
        acceptance: Acceptances,
        *,
        return_exceptions: bool,
    ) -> tuple[dict[int, Any], dict[int, Generation]]:
        """The handles of a batch's requests by their place, and the errors of those that cannot be
        answered. Raises such an error unless `return_exceptions`."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            what = f"prompts is of type {type(prompts).__name__}, not a list of prompts"
            raise RequestError(what, "Give a list of prompts, or call generate for one.")
        errors, handles = dict[int, Any](), dict[int, Generation]()
        samplings: Sequence[SamplingParams | None] = one_each("sampling", sampling, len(prompts))
        plans: Sequence[Plan] = one_each("plan", plan, len(prompts))
        rules: Sequence[Acceptance] = one_each("acceptance", acceptance, len(prompts))
        each = zip(prompts, samplings, plans, rules, strict=True)
        for index, (prompt, params, own_plan, rule) in enumerate(each):
            try:
                handles[index] = self.handle(prompt, params, own_plan, enable_thinking, False, rule)
            except FAULTS as error:
                found = as_error(error)
                if not return_exceptions:
                    raise of_prompt(index, found) from error
                errors[index] = found
        return errors, handles

    # ---- the requests of a file

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
        self.limits.check_batch_size(batch_size)
        inbox, active = deque[tuple[Generation, Event]](), list[Generation]()
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
                    self.driver.step(unless=lambda: inbox)
                while inbox:
                    handle, event = inbox.popleft()
                    if not isinstance(event, Chunk):
                        active.remove(handle)
                    if isinstance(event, InternalError) and event.__cause__ is not None:
                        raise event.__cause__  # a bug ends a run over a file
                    yield handle.request, event
                if stopping():
                    self.cancel_all(active)
        finally:
            self.cancel_all(active)

    def submit(
        self, request: GenerationRequest, inbox: deque[tuple[Generation, Event]]
    ) -> Generation:
        """Add a request for which the caller steps; its events go into `inbox`. Raises what
        `prepare` and `Driver.submit` raise."""
        handle = self.prepare(request)
        handle.deliver = lambda event: inbox.append((handle, event))
        self.driver.submit([handle], by_thread=False)
        return handle

    def cancel_all(self, handles: Sequence[Generation]) -> None:
        """Ends requests: after their step each yields a Response with `cancelled`."""
        for handle in handles:
            self.scheduler.cancel(handle)

    def plainly(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Response:
        """The same request without drafts: the reference that speculation must equal."""
        return self.generate(prompt, sampling, PLAIN)

    def next_logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """The base's logits [V] after `prefix`, computed as a prompt in a lane that is free;
        LimitError where none is."""
        with self.driver.paused():
            if not self.session.num_free_lanes:
                raise LimitError("all lanes of the engine are taken", "Finish a stream first.")
            lane = len(self.base.lanes) - self.session.num_free_lanes
            self.base.reset(lane)
            result = self.base.read(lane, prefix)
            logits: NDArray[np.float32] = result.logits.row(0).copy()
            self.base.reset(lane)
        return logits


def check_policy(spec_policy: object) -> None:
    """Raises OptionError for a policy that there is none of."""
    if spec_policy not in (None, *POLICIES):
        what = f"spec_policy is {spec_policy!r:.60}"
        raise OptionError(what, f"Give {ADAPTIVE!r} or {FIXED!r}, or leave it out.")


def one_each(name: str, given: T | Sequence[T], count: int) -> Sequence[T]:
    """One value for each request of a batch. RequestError for a list of another length."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        what = f"{name} is a list of {len(given)}, and there are {count} prompts"
        raise RequestError(what, "Give one for all, or one for each.")
    return given


def of_prompt(index: int, error: EdgeSpecError) -> EdgeSpecError:
    """An error of a batch, with the place of its prompt."""
    placed = copy(error)
    placed.add_note(f"at prompts[{index}]")
    return placed
