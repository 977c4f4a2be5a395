"""What is asked of an engine before it is opened, and how it is opened: the same for every command
of the command line and for a server.

Knows what drafts by a speculative_config, by a drafter's name, by options and by sizes, and makes
of them what Engine takes. Knows no flags and no requests for text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.artifacts.component import ComponentConfig
from edgespec.compat.decoding import TYPE_KEY, DecodingConfig
from edgespec.compat.speculative_config import OWN, of_engine, read_config
from edgespec.methods.names import SpecPolicy
from edgespec.runtime.acceptance.verify import AcceptOptions
from edgespec.runtime.drafters.loading import is_own_drafter
from edgespec.runtime.drafters.options import fields_of
from edgespec.runtime.drafters.registry import DRAFTERS
from edgespec.runtime.loop.prefix import PREFIX_CACHE_BYTES
from edgespec.runtime.opening.open_engine import SpecDecode, choose_draft
from edgespec.runtime.plans.plan import NO_SIZES, Sizes, TreeSpec
from edgespec.runtime.trees.tree import DraftPlan

if TYPE_CHECKING:
    from edgespec.images import ImageRules
    from edgespec.runtime.engine import Engine

LENGTH = "max_draft_len"  # an option of methods with a pool of drafts of one length
BUDGET = "time_budget_ms"
# Compares the draft and the layers that a speculative_config names with the draft engine's
CheckNamed = Callable[[ComponentConfig, str | None, Sequence[int] | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """What an engine is to be opened with; the defaults are those of Engine.

    `speculative_config` is a block that was read, with `notes` on it for its user. `options` are
    further keys of it, or of what drafts without one. How much to draft is said by `sizes`, or by
    `tree`. `time_budget_ms` is for a drafter of the user's. `tuned` None takes the plan of `tune`
    where nothing else says how much to draft.
    """

    spec_decode: SpecDecode = None
    drafter: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    time_budget_ms: float | None = None
    speculative_config: DecodingConfig | None = None
    notes: tuple[str, ...] = ()
    sizes: Sizes = NO_SIZES
    tree: TreeSpec | None = None
    tuned: bool | None = None
    acceptance: AcceptOptions | None = None
    spec_policy: SpecPolicy | None = None
    exact: bool = False
    prefix_cache_bytes: int | None = PREFIX_CACHE_BYTES
    prefix_cache_dir: str | Path | None = None
    multimodal_engine_dir: str | Path | None = None
    image_rules: ImageRules | None = None
    max_queue: int | None = None

    @property
    def is_sized(self) -> bool:
        """Whether sizes or a tree say how much to draft."""
        return any(self.sizes) or self.tree is not None

    @property
    def has_sizes(self) -> bool:
        """Whether anything says how much to draft."""
        config = self.speculative_config
        return self.is_sized or (config is not None and (any(config.sizes) or bool(config.tree)))

    @property
    def names_drafter(self) -> bool:
        """Whether it says what drafts."""
        return self.drafter is not None or self.speculative_config is not None

    @property
    def accepts(self) -> AcceptOptions | None:
        """The accept rule that it asks for."""
        config = self.speculative_config
        return config.acceptance if self.acceptance is None and config else self.acceptance

    @property
    def has_own_drafter(self) -> bool:
        """Whether a drafter of the user's drafts."""
        return self.drafter is not None and is_own_drafter(self.drafter)

    def open(self, engine_dir: Path, check_named: CheckNamed | None = None) -> Opened:
        """The engine of a directory. Raises what Engine raises, OptionError for options that are
        none of what drafts, and what `check_named` does."""
        from edgespec.runtime.engine import Engine

        request = self.settled(engine_dir)
        engine = Engine(
            engine_dir,
            spec_decode=request.spec_decode,
            drafter=request.drafter,
            drafter_options=request.drafter_options,
            speculative_config=request.speculative_config,
            exact=request.exact,
            prefix_cache_bytes=request.prefix_cache_bytes,
            prefix_cache_dir=request.prefix_cache_dir,
            acceptance=request.acceptance,
            spec_policy=request.spec_policy,
            tuned=not request.is_sized if request.tuned is None else request.tuned,
            multimodal_engine_dir=request.multimodal_engine_dir,
            image_rules=request.image_rules,
            max_queue=request.max_queue,
        )
        if check_named is not None:
            compare_named(engine, check_named)
        return Opened(request, engine)

    @property
    def drafter_options(self) -> dict[str, Any] | None:
        """The options that follow from the budget, for a drafter of the user's, or from the number
        of steps, for a method that has a pool of drafts of one length."""
        if self.has_own_drafter:
            return {} if self.time_budget_ms is None else {BUDGET: self.time_budget_ms}
        if self.drafter not in DRAFTERS or self.sizes.steps is None:
            return None
        options = DRAFTERS[self.drafter].options
        has_length = options is not None and LENGTH in fields_of(options)
        return {LENGTH: self.sizes.steps} if has_length else None

    def settled(self, engine_dir: Path) -> EngineRequest:
        """The same with `options` as keys of a speculative_config, of the decoding type of what
        drafts with the engines of a directory. Raises OptionError for keys that it does not have,
        BundleError where nothing can draft."""
        is_own, given = self.has_own_drafter, self.speculative_config
        if not self.options or (given is not None and self.drafter is not None and not is_own):
            return self
        config, notes = given or DecodingConfig(), self.notes
        if is_own:
            kind = OWN
        elif config.method is not None or not config.needs_engine:
            kind = type(config)
        else:
            choice = choose_draft(engine_dir, True if self.drafter is None else None, self.drafter)
            kind = type(of_engine(config, choice.method, str(engine_dir)))
            notes += () if choice.note is None else (choice.note,)
        keys = {
            name: getattr(config, name)
            for name, key in fields_of(type(config)).items()
            if getattr(config, name) != key.default
        }
        pool = kind.options_class
        if self.sizes.steps is not None and pool is not None and LENGTH in fields_of(pool):
            keys[LENGTH] = self.sizes.steps
        if is_own and self.time_budget_ms is not None:
            keys[BUDGET] = self.time_budget_ms
        block = {**keys, **self.options, TYPE_KEY: kind.decoding_type}
        made, more = read_config(block, "the command line")
        return replace(
            self,
            options={},
            time_budget_ms=None,
            drafter=self.drafter if is_own else None,
            speculative_config=made,
            notes=(*notes, *(note for note in more if note not in notes)),
        )


def compare_named(engine: Engine, check_named: CheckNamed) -> None:
    """Closes an engine whose draft is not the one that it was asked for, and raises what
    `check_named` does."""
    asked, draft = engine.speculation, engine.draft_config
    try:
        if asked is not None and draft is not None:
            check_named(draft.component, asked.draft, asked.aux_layers)
    except BaseException:
        engine.close()
        raise


@dataclass(frozen=True, slots=True)
class Opened:
    """An open engine, and the request that it was opened for; use it in a `with` block."""

    request: EngineRequest
    engine: Engine

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.engine.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """What its user should know of the block and of the engines."""
        return (*self.request.notes, *self.engine.notes)


def plan_of(
    engine: Engine,
    sizes: Sizes,
    tree: TreeSpec | None = None,
    acceptance: AcceptOptions | None = None,
    spec_policy: SpecPolicy | None = None,
) -> DraftPlan:
    """The drafting plan by a tree, or by the three sizes, for an accept rule and a policy, or those
    of the engine. Raises OptionError, and LimitError where it cannot be."""
    planner = engine.planner
    if spec_policy is not None:
        engine.planner.check_adaptive(spec_policy)
        planner = replace(planner, policy=spec_policy)
    if acceptance is not None:
        planner = replace(planner, acceptance=acceptance)
    return planner.by_sizes(*sizes) if tree is None else planner.by_tree(tree)
