"""A drafter that was written for TensorRT-LLM: `prepare_draft_tokens(scheduled_requests,
resource_manager)` sets `py_draft_tokens` of each request.

Knows the names that such drafters use, and no more of TensorRT-LLM: import `Drafter` and the others
from here where they were imported from there. What fails costs drafts and never the request: see
`guard`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, final

from edgespec.runtime.drafters.attributes import attribute
from edgespec.runtime.drafters.base import DraftRequest, EndObserver, Observation
from edgespec.runtime.drafters.guard import BOOKKEEPING, DraftFailed, Guard
from edgespec.runtime.drafters.user import SequenceDrafter, TokenView, UserSequence, tree_of
from edgespec.runtime.plans.schedules import Schedule
from edgespec.runtime.trees.tree import DraftTree

# ---- the names of TensorRT-LLM


class ResourceManagerType(Enum):
    """The resource managers that a drafter may ask for: here there is its own alone."""

    SPEC_RESOURCE_MANAGER = "SPEC_RESOURCE_MANAGER"


class BaseResourceManager:
    """A drafter's own manager of resources: what it does not need it leaves out."""

    def get_max_resource_count(self) -> int:
        """How many resources there are; 0 for no limit."""
        return 0

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """How many of them a request needs."""
        return 0

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Called before the drafts of a step."""

    def update_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Called after a step, with what was accepted."""

    def free_resources(self, request: LlmRequest) -> None:
        """Called when a request has ended."""

    def shutdown(self) -> None:
        """Called when the engine is closed."""


class ResourceManager:
    """The managers by their type."""

    def __init__(self, resource_managers: Mapping[Any, Any]) -> None:
        self.resource_managers = dict(resource_managers)

    def get_resource_manager(self, name: ResourceManagerType | str) -> Any:
        """The manager of a type, or by the type's name; None where there is none."""
        key = getattr(name, "value", name)
        return next(
            (m for t, m in self.resource_managers.items() if getattr(t, "value", t) == key), None
        )


@dataclass(eq=False)
class LlmRequest:
    """A request as a drafter sees it. It sets `py_draft_tokens`; the rest is to be read."""

    request_id: int
    tokens: Sequence[int]
    py_prompt_len: int
    py_max_new_tokens: int
    py_end_id: int | None = None
    py_batch_idx: int = 0
    py_draft_tokens: list[int] = field(default_factory=list)
    py_num_accepted_draft_tokens: int = 0
    py_decoding_iter: int = 0

    @property
    def py_request_id(self) -> int:
        """The same as `request_id`."""
        return self.request_id

    @property
    def py_seq_slot(self) -> int:
        """The lane of the request."""
        return self.py_batch_idx

    @property
    def py_orig_prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.py_prompt_len

    @property
    def orig_prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.py_prompt_len

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return self.py_prompt_len

    @property
    def max_beam_num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.tokens)

    def get_num_tokens(self, beam: int = 0) -> int:
        """Tokens of prompt and answer."""
        return len(self.tokens)

    def get_tokens(self, beam: int | None = None) -> list[int] | list[list[int]]:
        """The tokens of a beam; without one, a list with those of the only beam."""
        return [[*self.tokens]] if beam is None else [*self.tokens]

    def get_last_tokens(self, beam: int = 0) -> int:
        """The pending token."""
        return self.tokens[-1]


@dataclass(eq=False)
class ScheduledRequests:
    """The requests of a step, all of them generating."""

    generation_requests: list[LlmRequest]
    context_requests: list[LlmRequest] = field(default_factory=list)
    paused_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        """How many requests there are."""
        return len(self.generation_requests)

    @property
    def num_generation_requests(self) -> int:
        """How many requests there are."""
        return len(self.generation_requests)

    def all_requests(self) -> list[LlmRequest]:
        """The requests of all kinds."""
        return [*self.context_requests, *self.generation_requests]


class Drafter(ABC):
    """What a drafter of TensorRT-LLM derives from.

    It is not asked where more than `max_concurrency` requests run; `draft_len_schedule` are the
    longest chains by the number of requests, each up to its key, and 0 above the last one.
    """

    def __init__(
        self,
        max_draft_len: int | None = None,
        max_total_draft_tokens: int | None = None,
        max_concurrency: int | None = None,
        draft_len_schedule: Mapping[int, int] | None = None,
    ) -> None:
        self.max_draft_len = max_draft_len
        self.max_total_draft_tokens = max_total_draft_tokens
        self.max_concurrency = max_concurrency
        self.draft_len_schedule = draft_len_schedule

    @abstractmethod
    def prepare_draft_tokens(
        self,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager | None = None,
    ) -> None:
        """Set `py_draft_tokens` of each of `scheduled_requests.generation_requests`."""

    @final
    def should_use_spec_decode(self, requests: Sequence[LlmRequest], *limits: int) -> bool:
        """Whether it is to be asked: by `max_concurrency`."""
        return self.max_concurrency is None or len(requests) <= self.max_concurrency


class PreparesDraftTokens(Protocol):
    """What makes an object a drafter of this kind."""

    def prepare_draft_tokens(self, scheduled_requests: Any, resource_manager: Any = None) -> None:
        """Set `py_draft_tokens` of each request."""


# ---- as the loop has it

OWN_MANAGER = ResourceManagerType.SPEC_RESOURCE_MANAGER


class TrtLlmDrafter(SequenceDrafter, EndObserver):
    """Such a drafter as a Drafter.

    Its resource manager is its attribute `resource_manager` or, as TensorRT-LLM's n-gram drafter
    names it, `spec_resource_manager`.
    """

    def __init__(
        self, drafter: PreparesDraftTokens, guard: Guard, vocab_size: int, end_id: int | None
    ) -> None:
        super().__init__(guard, vocab_size)
        self.drafter, self.end_id = drafter, end_id
        names = ("resource_manager", "spec_resource_manager")
        managers = [attribute(drafter, name) for name in names]
        self.resources = next((manager for manager in managers if manager is not None), None)
        own = {} if self.resources is None else {OWN_MANAGER: self.resources}
        self.managers = ResourceManager(own)
        self.requests: dict[int, LlmRequest] = {}  # by request id
        self.scheduled: ScheduledRequests | None = None  # of the last step

    def begin(self, lane: int, tokens: Sequence[int], num_reused: int) -> None:
        """A sequence begins in a lane, with its whole prompt."""
        sequence = self.sequences.begin(lane, tokens, num_reused)
        self.requests[sequence.request_id] = LlmRequest(
            sequence.request_id, TokenView(sequence.tokens), sequence.num_prompt, 0, self.end_id
        )

    def observe(self, observations: Sequence[Observation]) -> None:
        """Take in what was committed; the resource manager is notified."""
        for item in observations:
            self.sequences.observe(item)
            if (sequence := self.sequences.lanes.get(item.lane)) is not None:
                request = self.requests[sequence.request_id]
                request.tokens = TokenView(sequence.tokens)
                request.py_num_accepted_draft_tokens = sequence.num_accepted or 0
        self.update()

    def update(self) -> None:
        """Notify the resource manager of a step that has ended, once."""
        scheduled, self.scheduled = self.scheduled, None
        if scheduled is not None:
            self.manage("update_resources", scheduled)

    def propose(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """One call for all requests of the step."""
        try:
            self.guard.check_ready()
            prepared = self.guard.call(lambda: self.prepared(requests))
        except DraftFailed as lost:
            why = self.guard.failed(lost)
            return [DraftTree.root_only(request.pending, why) for request in requests]
        if prepared is None:
            return [DraftTree.root_only(request.pending) for request in requests]
        self.guard.succeeded()
        self.scheduled, trees = prepared
        return trees

    def scheduled_of(self, requests: Sequence[DraftRequest]) -> ScheduledRequests:
        """The requests of a step as the drafter sees them, without drafts."""
        scheduled = []
        for place, request in enumerate(requests):
            sequence = self.sequences.lanes[request.lane]
            own = self.requests[sequence.request_id]
            own.request_id, own.py_prompt_len = sequence.request_id, sequence.num_prompt
            own.tokens = TokenView(sequence.tokens)
            own.py_batch_idx, own.py_draft_tokens = place, []
            own.py_decoding_iter += 1
            own.py_max_new_tokens = len(own.tokens) - own.py_prompt_len + request.plan.steps + 1
            scheduled.append(own)
        return ScheduledRequests(scheduled)

    def prepared(
        self, requests: Sequence[DraftRequest]
    ) -> tuple[ScheduledRequests, list[DraftTree]] | None:
        """The requests of a step with their drafts; None where they are too many to be asked for.
        Raises DraftFailed for what is no draft."""
        asked = self.scheduled_of(requests)
        together = getattr(self.drafter, "max_concurrency", None)
        if together is not None and asked.batch_size > together:
            return None
        schedule = getattr(self.drafter, "draft_len_schedule", None)
        most = Schedule(tuple(sorted(schedule.items()))).levels(len(requests)) if schedule else None
        if most == 0:
            return None
        mine = [*asked.generation_requests]  # what the drafter does to the list is its own matter
        if self.resources is not None and hasattr(self.resources, "prepare_resources"):
            self.resources.prepare_resources(asked)
        self.drafter.prepare_draft_tokens(asked, self.managers)
        for own in mine:
            if isinstance(own.py_draft_tokens, list):
                own.py_draft_tokens = own.py_draft_tokens[:most]
        trees = [
            tree_of(own.py_draft_tokens, request, self.vocab_size)
            for own, request in zip(mine, requests, strict=True)
        ]
        return asked, trees

    def manage(self, name: str, *arguments: object) -> None:
        """Call a method of the resource manager, where it has it."""

        def call() -> None:
            method = getattr(self.resources, name, None)
            if method is not None:
                method(*arguments)

        if self.resources is not None:
            self.notify(call, share=BOOKKEEPING)

    def finish(self, ended: UserSequence) -> None:
        """Frees what a sequence held, once its last step is known to the resource manager."""
        self.update()
        self.manage("free_resources", self.requests.pop(ended.request_id))

    def shut_down(self) -> None:
        """Shut the resource manager down."""
        self.manage("shutdown")


__all__ = [
    "BaseResourceManager",
    "Drafter",
    "LlmRequest",
    "ResourceManager",
    "ResourceManagerType",
    "ScheduledRequests",
    "TrtLlmDrafter",
]
