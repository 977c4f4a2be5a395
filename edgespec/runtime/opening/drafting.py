"""What drafts for an open engine: the drafter that it was opened with, and methods without an
engine that requests name.

Knows names, options and open drafters. What drafts for which sequence is the session's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from pathlib import Path

from edgespec.backends.engine_config import NO_DRAFTS
from edgespec.errors import LimitError
from edgespec.methods import METHODS, find_method
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.drafters.options import DrafterOptions
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.opening.open_engine import (
    BUILD_AGAIN,
    DraftChoice,
    OpenBase,
    OpenDraft,
    engineless,
    open_draft,
    options_of,
    with_options,
)

MAX_NAMED = 16  # drafters that are open at a time beside the default

Options = DrafterOptions | Mapping[str, object] | None


class Drafting:
    """The drafters of an open base. `default` is None where the engine was opened without drafts.

    Any thread may ask.
    """

    def __init__(self, engine_dir: Path, base: OpenBase, choice: DraftChoice) -> None:
        self.engine_dir, self.base = engine_dir, base
        self.default = open_draft(engine_dir, choice, base)
        # By method and options, or by the id of a user's drafter, which its choice keeps alive; the
        # least recently named first
        self.named: OrderedDict[Hashable, tuple[DraftChoice, OpenDraft]] = OrderedDict()
        self.lock = threading.Lock()

    @property
    def method(self) -> str | None:
        """The method that the engine was opened with; None without drafts, or with a drafter of the
        user's own."""
        return None if self.default is None else self.default.method

    @property
    def max_batch_size(self) -> int:
        """Sequences that run at a time, as the engines were built."""
        held = None if self.default is None else self.default.drafter.num_lanes
        lanes = len(self.base.decoder.lanes)
        return lanes if held is None else min(lanes, held)

    @property
    def words(self) -> str:
        """What follows "chain" or "tree" where a plan is shown."""
        return DRAFTERS[self.method].words if self.method is not None else ""

    @property
    def is_paced(self) -> bool:
        """Whether the method decides by itself how much to draft."""
        return self.method is not None and DRAFTERS[self.method].paces_itself

    @property
    def has_trained_draft(self) -> bool:
        """Whether an engine drafts, that was made for the base."""
        return self.method is not None and METHODS[self.method].needs_engine

    @property
    def trained_with_thinking(self) -> bool | None:
        """Whether the draft was trained with thinking; None where it knows both, and without
        one."""
        if self.default is None or self.method is None:
            return None
        return DRAFTERS[self.method].trained_with_thinking(self.base.config, self.default.config)

    def of(self, drafter: str | Drafter | None, options: Options = None) -> OpenDraft | None:
        """What a request drafts with: by default that of the engine, or by a method's name, which
        is opened when it is first named, or a drafter of the user's own.

        Raises LimitError for a name that cannot be, or where these engines cannot, and OptionError
        for options that the method does not have.
        """
        default = self.default
        if drafter is None and not options:
            return default
        if drafter is None and default is not None:
            drafter = default.method
        if isinstance(drafter, str):
            draft = self.by_name(drafter, options)
        elif drafter is None:
            options_of(None, options)  # there is no method that they could be of
            return default
        else:
            draft = self.by_object(drafter, options)
        self.check(draft)
        return draft

    def by_name(self, name: str, options: Options) -> OpenDraft:
        """A method that is open already, with these options or, where none were given, with those
        of the engine; else it is opened."""
        default, row = self.default, find_method(name)
        if default is not None and row is not None and row.name == default.method:
            if not options or options_of(row.name, options) == default.options:
                return default
            if default.config is not None:
                message = f"the drafter of this engine was opened with other options than {options}"
                raise LimitError(message, "Open the engine with them: drafter_options.")
        method = engineless(name)
        choice = DraftChoice(method, options=options_of(method, options))
        return self.opened((method, choice.options), choice)

    def by_object(self, drafter: object, options: Options) -> OpenDraft:
        """A drafter of the user's own, behind one guard for all requests that give it. The options
        are those of the first."""
        choice = with_options(DraftChoice(drafter=drafter), options)
        return self.opened(id(drafter), choice)

    def opened(self, key: Hashable, choice: DraftChoice) -> OpenDraft:
        """What is open by a key, or is opened by a choice; the least recently named goes."""
        with self.lock:
            if key not in self.named:
                draft = open_draft(self.engine_dir, choice, self.base)
                assert draft is not None
                self.named[key] = choice, draft
            self.named.move_to_end(key)
            # A sequence that still drafts with what goes here keeps it alive
            while len(self.named) > MAX_NAMED:
                _, (_, idle) = self.named.popitem(last=False)
                if idle.guard is not None:
                    idle.guard.close()  # its thread, which a later call begins anew
            return self.named[key][1]

    def drafts(self) -> list[OpenDraft]:
        """All that is open."""
        default = [] if self.default is None else [self.default]
        return [*default, *(draft for _, draft in self.named.values())]

    def notes(self) -> tuple[str, ...]:
        """What drafters of the user's failed at so far, once for each reason."""
        with self.lock:
            guards = [draft.guard for draft in self.drafts() if draft.guard is not None]
        return tuple(note for guard in guards for note in guard.notes)

    def check(self, draft: OpenDraft) -> None:
        """Raises LimitError where the base verifies no drafts, has no hidden states for a drafter
        that reads them, or runs more sequences than the drafter holds."""
        base = self.base.config
        if base.limits.verify_tree_size == NO_DRAFTS:
            raise LimitError("the engine was built to verify no drafts", BUILD_AGAIN)
        if draft.drafter.needs_hidden_states and not base.component.graph.features:
            message = "the drafter reads the base's hidden states, and this engine gives none"
            raise LimitError(message, "Open the engine with spec_decode=True, or name another.")
        lanes, held = len(self.base.decoder.lanes), draft.drafter.num_lanes
        if held is not None and held < lanes:
            message = f"the drafter holds {held} sequences at a time, and the engine runs {lanes}"
            raise LimitError(message, "Give one that holds as many.")

    def forget(self) -> None:
        """Drop what sequences that ended have left behind for later ones; none may be running."""
        for draft in self.drafts():
            row = None if draft.method is None else DRAFTERS[draft.method]
            if row is not None and row.forget is not None:
                row.forget(draft.drafter)

    def close(self) -> None:
        """Free what is open; closing twice is harmless."""
        for draft in self.drafts():
            draft.drafter.close()
