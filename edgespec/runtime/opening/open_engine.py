"""Opens an engine directory: the base, and whatever drafts for it.

Knows which engines stand where, and that a drafting method is a row of DRAFTERS. Knows no search
and no loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Final, Literal, cast

from edgespec.artifacts import file_names
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import PlanHints, Table
from edgespec.backends.engine_config import NO_DRAFTS, EngineConfig
from edgespec.backends.pair_check import check_pairing
from edgespec.backends.registry import Devices, backend_of, open_runner
from edgespec.contract import Role
from edgespec.errors import BundleError, LimitError, OptionError
from edgespec.methods import METHODS, find_method
from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.costs.cost_profile import MEASURE_AGAIN, find_profile
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.drafters.guard import Guard
from edgespec.runtime.drafters.loading import (
    OwnOptions,
    UserLimits,
    guarded,
    is_own_drafter,
    load_drafter,
    needs_hidden_states,
)
from edgespec.runtime.drafters.options import DrafterOptions, read_options
from edgespec.runtime.drafters.registry import DRAFTERS, engineless_methods
from edgespec.runtime.drafters.row import DraftEngine, DrafterSources
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.lanes.embedding import EmbeddingTable
from edgespec.runtime.opening.tuned_plan import TunedPlan, find_tuned, not_taken
from edgespec.runtime.plans.plan import PlanLimits

EXACT_ROWS = 2  # from here on kernels give a row the same bits whatever their number
AUTO: Final = "auto"
SpecDecode = bool | Literal["auto"] | None
BUILD_AGAIN = "Build it again: edgespec build leaves room for drafts (`max_verify_tree_size`)."


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What is to draft: a method by its name, or a drafter that the user made; neither decodes
    plainly. `note` says so where the choice was not the user's; `options` are those of either:
    see `with_options`."""

    method: str | None = None
    drafter: object | None = None
    note: str | None = None
    options: DrafterOptions | None = None

    @property
    def drafts(self) -> bool:
        """Whether something is to draft: a draft engine or a given drafter."""
        return self.method is not None or self.drafter is not None

    @property
    def needs_base(self) -> bool:
        """Whether only an engine that emits hidden states will do."""
        if self.method is not None:
            return METHODS[self.method].reads_base
        return self.drafter is not None and needs_hidden_states(self.drafter)


@dataclass(frozen=True, slots=True)
class OpenBase:
    """A base, or a plain engine, that is open. `table` is its embedding; `hints` say how much to
    draft where it runs, and `row_cost` what each row of a pass takes beside the first;
    `tolerance` is how far its kernels may compute from one another in float32, relative to the
    largest value. A draft's engine is opened on the same `devices`."""

    decoder: CachedDecoder
    config: EngineConfig
    table: Table
    hints: PlanHints
    row_cost: float
    tolerance: float
    devices: Devices = field(default_factory=Devices)


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """What drafts. `method` and `config` are None for a drafter that the user made, which has a
    guard and maybe a length of its own; `config` also where the method needs no engine, and
    `options` where it has none."""

    drafter: Drafter
    method: str | None = None
    config: EngineConfig | None = None
    options: DrafterOptions | None = None
    guard: Guard | None = None
    draft_len: int | None = None

    def limits(self, base: EngineConfig) -> PlanLimits:
        """What a base and this drafter can take."""
        if self.method is None:
            return UserLimits(base.limits.verify_tree_size, draft_len=self.draft_len)
        row = DRAFTERS[self.method]
        if row.limits_by_options is not None and self.options is not None:
            return row.limits_by_options(base, self.options)
        return row.limits(base, self.config)


def directory_of(engine_dir: object) -> Path:
    """The path of an engine directory. BundleError for what is no path, and for an empty one, which
    would be the working directory."""
    if not isinstance(engine_dir, str | PathLike) or not str(engine_dir):
        message = f"engine_dir is {engine_dir!r:.60}, not the path of a directory"
        raise BundleError(message, "Give a directory that edgespec build made.")
    return Path(engine_dir)


def choose_draft(engine_dir: Path, spec_decode: SpecDecode, drafter: object | None) -> DraftChoice:
    """What is to draft with the engines of a directory.

    Without a `drafter` that is the draft engine. Where there is none, but a plain engine, it is the
    first registered method that needs no engine: if drafts are asked for, and with "auto" if the
    engine verifies any. Raises LimitError for a name that cannot be, BundleError where a draft
    engine is missing.
    """
    there = engines.finished_engines(engine_dir).engines
    has_draft = Role.DRAFT in there
    if drafter is not None and spec_decode is False:
        message = "a drafter was given, and spec_decode=False decodes without drafts"
        raise LimitError(message, "Leave one of the two out.")
    if isinstance(drafter, str) and not is_own_drafter(drafter):
        return DraftChoice(engineless(drafter))
    if drafter is not None:
        own = load_drafter(drafter) if isinstance(drafter, str) else drafter
        return DraftChoice(drafter=own)
    if spec_decode is False or (spec_decode is None and not has_draft):
        return DraftChoice()
    candidates = engineless_methods() if Role.LLM in there and not has_draft else []
    if spec_decode == AUTO and not has_draft:
        if not candidates:
            return DraftChoice()
        plain, _ = engines.open_engine(engine_dir, Role.LLM)
        if plain.limits.verify_tree_size == NO_DRAFTS:
            return DraftChoice()
    if not candidates:
        draft, _ = engines.open_engine(engine_dir, Role.DRAFT)  # says what is missing
        return DraftChoice(draft.component.method)
    title = METHODS[candidates[0]].title
    note = f"{engine_dir} has no draft engine: drafting by {title}, which needs none"
    return DraftChoice(candidates[0], note=note)


def engineless(name: str) -> str:
    """A method, by its name or an alias, that drafts without an engine; LimitError for others."""
    row, known = find_method(name), ", ".join(engineless_methods()) or "none in this version"
    if row is None or row.name not in DRAFTERS:
        raise LimitError(
            f"there is no drafting method {name!r}", f"Methods without an engine: {known}."
        )
    if row.needs_engine:
        message = f"{row.title} drafts with an engine of its own, which spec_decode opens"
        raise LimitError(message, f"Leave the drafter out. Methods without an engine: {known}.")
    return row.name


def role_for(engine_dir: Path, choice: DraftChoice) -> Role:
    """The role of the engine that the drafts are for. Raises BundleError."""
    there = engines.finished_engines(engine_dir).engines
    plain = Role.LLM in there or not there
    return Role.LLM if plain and not choice.needs_base else Role.BASE


def open_base(engine_dir: Path, choice: DraftChoice, *, exact: bool) -> OpenBase:
    """The engine that the drafts are for: a plain one where there is one and it will do, else the
    base. Raises LimitError where it verifies no drafts, or cannot be exact but should."""
    there = engines.finished_engines(engine_dir).engines
    role = role_for(engine_dir, choice)
    if choice.drafter is not None and role is Role.BASE and role not in there and there:
        name = type(choice.drafter).__name__
        message = (
            f"the drafter {name} has needs_hidden_states, and {engine_dir} has no base engine,"
            " which alone gives hidden states"
        )
        remedy = f"{engines.missing_remedy(role)} Or let the drafter do without hidden states."
        raise BundleError(message, remedy)
    config, _ = engines.open_engine(engine_dir, role)  # refused before a large engine is loaded
    if exact:
        check_exact(engine_dir, config)
    if choice.drafts and config.limits.verify_tree_size == NO_DRAFTS and not choice.needs_base:
        message = f"the {role.value} engine in {engine_dir} was built to verify no drafts"
        raise LimitError(message, BUILD_AGAIN)
    devices = Devices()
    try:
        runner, config = open_runner(engine_dir, role, devices)
    except BaseException:
        devices.close()
        raise
    table = runner.table or EmbeddingTable(engine_dir / file_names.EMBEDDING, config.component)
    min_rows = EXACT_ROWS if exact and not config.weights.is_bitwise else 1
    decoder = CachedDecoder.of(runner, table, config.component, min_rows)
    backend = backend_of(engine_dir, role)
    return OpenBase(
        decoder,
        config,
        table,
        backend.plan_hints,
        backend.row_cost(config),
        backend.float32_tolerance,
        devices,
    )


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """What drafts where the user leaves it open, once a plan was tuned: `tuned` is that plan, where
    it fits and drafts. `note` is for the user, where there is one and it is not taken."""

    choice: DraftChoice
    tuned: TunedPlan | None = None
    note: str | None = None


def choose_tuned(engine_dir: Path, choice: DraftChoice, spec_decode: SpecDecode) -> TunedChoice:
    """The choice by what `tune` found for this directory: its method with its options; with "auto"
    plain decoding where drafts do not pay. Where nothing was to draft, nothing does."""
    if choice.method is None:
        return TunedChoice(choice)
    stored = find_tuned(engine_dir)
    tuned = stored.tuned
    if tuned is None:
        return TunedChoice(choice, note=stored.note)
    if tuned.method is None:
        note = "drafts did not pay here when they were tuned"
        if spec_decode == AUTO:
            return TunedChoice(DraftChoice(note=f"decoding plainly: {note}"))
        return TunedChoice(choice, note=note)
    try:
        options = options_of(tuned.method, tuned.options)
    except OptionError as error:
        return TunedChoice(choice, note=not_taken(engine_dir, error.what))
    best = replace(choice, method=tuned.method, options=options)
    if role_for(engine_dir, best) is not tuned.role:
        return TunedChoice(choice)
    return TunedChoice(replace(best, note=None), tuned)


@dataclass(frozen=True, slots=True)
class OpenCosts:
    """What steps cost here; else None, and `why` they are not known. `note` is for the user, where
    costs were measured and do not fit any more, or the machine was busy."""

    model: CostModel | None = None
    why: str | None = None
    note: str | None = None


def open_costs(engine_dir: Path, base: OpenBase, choice: DraftChoice) -> OpenCosts:
    """The costs of an open base beside what is to draft, as they were measured."""
    if choice.method is None:
        return OpenCosts(why="no method drafts")
    has_engine = METHODS[choice.method].needs_engine
    stored = find_profile(engine_dir, base.config.role, choice.method, has_engine=has_engine)
    if stored.profile is not None:
        busy = stored.profile.busy
        return OpenCosts(CostModel(stored.profile), note=busy and f"{busy}. {MEASURE_AGAIN}")
    note = None
    if stored.stale:
        note = f"drafting by a fixed plan: {stored.why}. {MEASURE_AGAIN}"
    return OpenCosts(why=stored.why, note=note)


def open_draft(engine_dir: Path, choice: DraftChoice, base: OpenBase) -> OpenDraft | None:
    """What drafts for an open base; None where nothing does. PairingError where the two do not
    belong together."""
    if choice.drafter is not None:
        assert isinstance(choice.options, OwnOptions)
        budget_s = choice.options.time_budget_s
        drafter, guard, draft_len = guarded(choice.drafter, base.config, engine_dir, budget_s)
        return OpenDraft(drafter, options=choice.options, guard=guard, draft_len=draft_len)
    if choice.method is None:
        return None
    row = DRAFTERS[choice.method]
    draft = open_draft_engine(engine_dir, base) if METHODS[choice.method].needs_engine else None
    sources = DrafterSources(
        engine_dir=engine_dir,
        base=base.config,
        num_lanes=len(base.decoder.lanes),
        capacity=base.decoder.capacity,
        draft=draft,
        row_cost=base.row_cost,
        options=choice.options,
    )
    config = draft.config if draft else None
    return OpenDraft(row.open(sources), choice.method, config, choice.options)


def with_options(
    choice: DraftChoice, given: DrafterOptions | Mapping[str, object] | None
) -> DraftChoice:
    """A choice with the options of its method, or of a drafter of the user's. Raises
    OptionError."""
    if choice.drafter is None:
        return replace(choice, options=options_of(choice.method, given))
    own = cast("OwnOptions | Mapping[str, object] | None", given)
    return replace(choice, options=read_options(OwnOptions, own, "a drafter of your own"))


def options_of(
    method: str | None, given: DrafterOptions | Mapping[str, object] | None
) -> DrafterOptions | None:
    """The options of a method by what was given, its defaults where that is None; None where it has
    none, and without a method. Raises OptionError."""
    if method is None:
        if given:
            message = "options of a drafting method were given, and no method is named"
            raise OptionError(message, "Name the method, or leave its options out.")
        return None
    return read_options(DRAFTERS[method].options, given, METHODS[method].title)


def open_draft_engine(engine_dir: Path, base: OpenBase) -> DraftEngine:
    """The draft engine beside a base, with its own embedding or the base's. Raises BundleError,
    EngineMismatch, or PairingError where the two do not belong together."""
    runner, config = open_runner(engine_dir, Role.DRAFT, base.devices)
    check_pairing(base.config.component, config.component)
    assert config.component.pair is not None
    table = base.table
    if config.component.pair.own_embedding:
        path = engine_dir / engines.DRAFT_EMBEDDING
        table = runner.table or EmbeddingTable(path, config.component)
    return DraftEngine(runner=runner, config=config, table=table)


def check_exact(engine_dir: Path, config: EngineConfig) -> None:
    """Raises LimitError where passes of one and of many rows give other bits."""
    if why := config.why_not_exact:
        message = f"the engine in {engine_dir} cannot be exact: {why}"
        if config.component.graph.recurrent:
            raise LimitError(message, "Leave `exact` out: no engine of such a base is.")
        known = "`weights` fp32, int4 `weight_block` 32 or int8 `weight_block` 0"
        quantized = "of quantized exports int8_sq, int8_token and int4 in blocks of 32 are exact"
        raise LimitError(
            message,
            f"Build it with `kernels` native, or for one sequence, with {known}; {quantized}.",
        )
