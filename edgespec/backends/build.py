"""Builds an engine with any backend: checks, stages, proves on the golden outputs, installs.

Knows the order of the work, and what it says to the user. How a graph is lowered and what its
weights become stand in the backend, the directory's rules in `engine_dir`.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise
from operator import or_
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic, json_files
from edgespec.artifacts.directories import DirectoryKind
from edgespec.artifacts.outputs import refuse_model_directory, refuse_overwriting
from edgespec.backends import emitted, row_bits
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import SILENT, Backend, BuildOptions, Listeners, Runner, Staged
from edgespec.backends.capacity import check_capacity, gigabytes
from edgespec.backends.engine_config import (
    FP32_WEIGHTS,
    BuiltConfig,
    EngineConfig,
    EngineLimits,
    EngineWeights,
)
from edgespec.backends.golden import Agreement, check_golden, num_passes, rounding
from edgespec.backends.golden_file import Golden, read_golden, slots_of
from edgespec.backends.manifest import EngineEntry, EngineManifest
from edgespec.backends.onnx_dir import AnyOnnxDir, OnnxDir, exported_role, open_export
from edgespec.backends.registry import BACKENDS, DEFAULT_BACKEND, find_backend
from edgespec.backends.vision.steps import VisionSteps
from edgespec.config import RopeConfig
from edgespec.contract import DECODERS, MAX_BATCH_SIZE, Limits, Role, canonical_contract
from edgespec.errors import (
    BundleError,
    ContractError,
    LimitError,
    OptionError,
    UnsupportedModel,
    counted,
)
from edgespec.methods import METHODS
from edgespec.safe_read.fields import EXPORT_AGAIN

logger = logging.getLogger(__name__)
ENCODERS: Mapping[Role, VisionSteps] = {Role.VISUAL: VisionSteps()}
BATCH_OF_PROOF = 2  # sequences: enough for a batch kernel to mix them up


@dataclass(frozen=True, slots=True)
class Built:
    """What `build` made. `size_bytes` counts all its files, `seconds` the whole build.

    `golden_difference` is how far it is from the golden outputs, relative to their largest value;
    None: there were none. `golden_cosine` is that of quantized weights.
    """

    role: Role
    engine: Path
    size_bytes: int
    golden_difference: float | None
    seconds: float
    weights: EngineWeights
    notes: tuple[str, ...] = ()
    golden_cosine: float | None = None
    unproven: str | None = None  # why it could not be run here, and was not compared


@dataclass(frozen=True, slots=True)
class Proven:
    """A staged engine: its config, and how it agrees with the golden outputs (None: there were
    none, or `staged` says why it cannot be run here)."""

    staged: Staged
    config: BuiltConfig[Any, Any]
    agreement: Agreement | None


@dataclass(frozen=True, slots=True)
class Planned:
    """What a build would make, or what was written instead of an engine, in `lines` for the
    user."""

    role: Role
    lines: tuple[str, ...]


def build(
    onnx_dir: Path,
    engine_dir: Path,
    limits: Limits,
    *,
    backend: str = DEFAULT_BACKEND,
    options: BuildOptions | None = None,
    spec_base: bool = False,
    spec_draft: bool = False,
    progress: Listeners = SILENT,
) -> Built:
    """Build the engine of an exported directory into `engine_dir`, that of an image encoder into
    `engine_dir`/visual; nothing is left behind when it fails.

    `options` None: the backend's defaults. Raises OptionError, BundleError, LimitError,
    UnsupportedModel, PairingError, OverwriteError, BuildError or OutputError.
    """
    began = time.monotonic()
    builder = chosen_backend(backend)
    options = builder.parse_options({}) if options is None else options
    onnx = checked_export(
        builder, onnx_dir, engine_dir, limits, options, spec_base=spec_base, spec_draft=spec_draft
    )
    engine_dir = engines.home(engine_dir, onnx.role)
    asked, limits = limits, of_engines(onnx, limits)
    engines.remove_killed(engine_dir)
    smaller = limits.smaller_kv_cache_capacities
    engines.refuse_foreign(engine_dir, engines.names_to_write(onnx, builder.suffixes, smaller))
    with staging_directory(engine_dir, onnx.role) as staging:
        proven = write_engine(builder, onnx, limits, options, staging, progress)
        built = installed(builder, onnx, proven, staging, engine_dir, began)
    return replace(built, notes=(*left_out(asked, limits), *built.notes))


def plan(
    onnx_dir: Path,
    engine_dir: Path,
    limits: Limits,
    *,
    emit_to: Path | None = None,
    backend: str = DEFAULT_BACKEND,
    options: BuildOptions | None = None,
    spec_base: bool = False,
    spec_draft: bool = False,
) -> Planned:
    """What `build` would make of the same arguments, without building. With `emit_to` the graph
    that it would build from is written to that new directory, whole or not at all; else nothing is
    written. Raises what `build` would raise before its work begins."""
    builder = chosen_backend(backend)
    options = builder.parse_options({}) if options is None else options
    onnx = checked_export(
        builder, onnx_dir, engine_dir, limits, options, spec_base=spec_base, spec_draft=spec_draft
    )
    check_canonical(onnx)
    asked, limits = limits, of_engines(onnx, limits)
    if emit_to is None or not isinstance(onnx, OnnxDir):
        with as_bundle_error(onnx):
            lines = builder.plan(onnx, limits, options)
        about = (*left_out(asked, limits), *plan_lines(builder, onnx, limits))
        return Planned(onnx.role, (*about, *lines))
    refuse_overwriting(emit_to, [onnx_dir])
    with atomic.staged_directory(emit_to) as staging, as_bundle_error(onnx):
        emission = builder.emit(onnx, limits, options, staging)
        config = EngineConfig(
            component=onnx.config,
            limits=EngineLimits.of(limits, onnx.role),
            weights=emission.weights,
            settings=emission.settings,
        )
        emitted.complete(staging, onnx, builder.name, config)
    line = f"{emit_to}: the graph, its weights, and what its engine needs beside it"
    return Planned(onnx.role, (line, *emission.lines))


def plan_lines(backend: Backend, onnx: AnyOnnxDir, limits: Limits) -> Iterator[str]:
    """What the caches of an engine would take, or what an encoder is."""
    if not isinstance(onnx, OnnxDir):
        yield from ENCODERS[onnx.role].plan_lines(backend, onnx, limits)
        return
    own = EngineLimits.of(limits, onnx.role)
    config = EngineConfig(component=onnx.config, limits=own, weights=FP32_WEIGHTS)
    memory, lanes = backend.memory(config), own.max_batch_size
    for capacity in own.capacities:
        cache = lanes * capacity * memory.kv_bytes_per_token
        of = f", each of {capacity} tokens" if own.smaller_kv_cache_capacities else ""
        if cache:
            caches = f"KV cache of {counted(lanes, 'sequence')}{of}"
            yield f"{caches}: {gigabytes(cache)} when it is full"
    if memory.state_bytes:
        yield f"recurrent states: {gigabytes(lanes * memory.state_bytes)}"


def checked_export(
    builder: Backend,
    onnx_dir: Path,
    engine_dir: Path,
    limits: Limits,
    options: BuildOptions,
    *,
    spec_base: bool,
    spec_draft: bool,
) -> AnyOnnxDir:
    """The export, checked with all that may be said of a build before its work begins."""
    role = exported_role(onnx_dir)
    check_role(builder, role, options)
    if role in ENCODERS:
        ENCODERS[role].check_limits(limits)
    else:
        check_limits(limits)
        check_capacities(builder, limits)
    engine_dir = engines.home(engine_dir, role)
    place = engine_dir if role in DECODERS else engine_dir.parent  # beside the decoders, or alone
    refuse_overwriting(place, [onnx_dir])
    refuse_model_directory(
        place, "`engine_dir` is", "Choose another `engine_dir`.", but=(DirectoryKind.ENGINES,)
    )
    onnx = open_export(onnx_dir, spec_base=spec_base, spec_draft=spec_draft)
    logger.info("%s: %s of %s, files as recorded", onnx_dir, onnx.role.value, onnx.config.model)
    if isinstance(onnx, OnnxDir):
        check_draft_size(onnx, limits)
        check_memory(builder, onnx, limits)
    engines.check_against_others(engine_dir, onnx)
    return onnx


def check_role(backend: Backend, role: Role, options: BuildOptions) -> None:
    """UnsupportedModel where a backend builds no engines of a role, OptionError where the options
    ask for what an encoder does not have."""
    if role not in backend.roles:
        message = f"`backend` {backend.name}: {backend.title} builds no {role.value} engines"
        raise UnsupportedModel(
            message, "Leave `backend` out: the engines of a model may differ in it."
        )
    if role not in DECODERS and backend.emit_dir(options) is not None:
        message = "`emit_onnx` writes the graph of a language model, and this is an image encoder's"
        raise OptionError(message, "Leave it out, or build the image encoder on its device.")


def check_canonical(onnx: AnyOnnxDir) -> None:
    """BundleError where the graph is not one that export writes."""
    if not isinstance(onnx, OnnxDir):
        ENCODERS[onnx.role].check_graph(onnx)
        return
    from edgespec.backends.canonical_graph import check_graph

    check_graph(onnx.model, canonical_contract(onnx.config.graph), onnx.manifest.files)


@contextmanager
def as_bundle_error(onnx: AnyOnnxDir) -> Iterator[None]:
    """Converts a ContractError: what was checked is data, it may be of another exporter."""
    try:
        yield
    except ContractError as error:
        remedy = f"{EXPORT_AGAIN} If that does not help, please report it."
        raise BundleError(f"{onnx.model}: {error.what}", remedy) from error


def chosen_backend(name: str) -> Backend:
    """The backend of that name; OptionError where there is none."""
    backend = find_backend(name)
    if backend is None:
        message = f"`backend` {name}: this version has no such backend"
        raise OptionError(message, f"Choose one of: {', '.join(BACKENDS)}.")
    return backend


@contextmanager
def staging_directory(engine_dir: Path, role: Role) -> Iterator[Path]:
    """A new directory inside `engine_dir`, removed at the end, and with it what the block made of
    `engine_dir` and left empty. BundleError where engines of another kind are there."""
    EngineManifest.read(engine_dir)
    made = [] if engine_dir.exists() else [engine_dir, *atomic.missing_parents(engine_dir)]
    try:
        with atomic.writing(engine_dir):
            engine_dir.mkdir(parents=True, exist_ok=True)
            with atomic.staging_in(engine_dir, role.value) as staging:
                yield staging
    finally:
        atomic.remove_if_empty(*made)


# ---- limits


DECODER_LIMITS = (
    *("max_batch_size", "max_input_len", "max_kv_cache_capacity"),
    *("max_verify_tree_size", "max_draft_tree_size"),
)


def check_limits(limits: Limits) -> None:
    """LimitError that names the flag of a size below 1, or beyond what it or another size
    allows."""
    sizes = {name: getattr(limits, name) for name in DECODER_LIMITS}
    smaller = limits.smaller_kv_cache_capacities
    for name, value in (*sizes.items(), *(("max_kv_cache_capacity", each) for each in smaller)):
        if value < 1:
            raise LimitError(f"`{name}` is {value}", "It must be at least 1.")
    if limits.max_input_len > limits.max_kv_cache_capacity:
        raise LimitError(
            f"`max_input_len` {limits.max_input_len} exceeds `max_kv_cache_capacity`"
            f" {limits.max_kv_cache_capacity}",
            "Raise the capacity or lower the input length.",
        )
    if limits.max_batch_size > MAX_BATCH_SIZE:
        raise LimitError(
            f"`max_batch_size` {limits.max_batch_size} exceeds {MAX_BATCH_SIZE}: with so many"
            " sequences a step takes longer in proportion, and nobody is served sooner",
            f"Build with `max_batch_size` {MAX_BATCH_SIZE} at most.",
        )


def check_capacities(backend: Backend, limits: Limits) -> None:
    """LimitError for several capacities that do not ascend, or that the backend has no use for."""
    if not limits.smaller_kv_cache_capacities:
        return
    flag = f"`max_kv_cache_capacity` {','.join(map(str, limits.capacities))}"
    if any(a >= b for a, b in pairwise(limits.capacities)):
        raise LimitError(f"{flag}: the capacities do not ascend", "Give each once.")
    if not backend.several_capacities:
        message = (
            f"{flag}: a step of {backend.title} costs by what is in the cache, not by its length"
        )
        raise LimitError(message, f"Give the largest alone: {limits.max_kv_cache_capacity}.")


def of_engines(onnx: AnyOnnxDir, limits: Limits) -> Limits:
    """The limits of what is built of an export: what keeps no cache has one engine."""
    has_cache = isinstance(onnx, OnnxDir) and not onnx.config.graph.heads
    return limits if has_cache else limits.at(limits.max_kv_cache_capacity)


def left_out(asked: Limits, limits: Limits) -> Iterator[str]:
    """What is said where several capacities were asked for, and one engine does for all."""
    if asked.capacities != limits.capacities:
        yield "it keeps no cache: one engine does for every capacity"


def check_draft_size(onnx: OnnxDir, limits: Limits) -> None:
    """LimitError where the draft's block, which is written in one call, does not fit."""
    if onnx.role is not Role.DRAFT or onnx.config.method is None:
        return
    size = METHODS[onnx.config.method].min_draft_tree_size(onnx.config.spec)
    if limits.max_draft_tree_size < size:
        message = (
            f"`max_draft_tree_size` {limits.max_draft_tree_size}: the draft makes blocks of {size}"
        )
        raise LimitError(message, f"Build with `max_draft_tree_size` {size} or more.")


def check_memory(backend: Backend, onnx: OnnxDir, limits: Limits) -> None:
    """LimitError where the engine's cache, or a pass of its largest tree, has no room here."""
    own = EngineLimits.of(limits, onnx.role)
    config = EngineConfig(component=onnx.config, limits=own, weights=FP32_WEIGHTS)
    check_capacity(onnx.config, own, backend.memory(config), backend.total_memory_bytes())


# ---- an engine in its staging directory


def write_engine(
    backend: Backend,
    onnx: AnyOnnxDir,
    limits: Limits,
    options: BuildOptions,
    staging: Path,
    progress: Listeners,
) -> Proven:
    """Write all files of the engine to `staging` and compare it with the golden outputs."""
    check_canonical(onnx)
    with as_bundle_error(onnx):
        warnings = backend.check(onnx, limits, options) if isinstance(onnx, OnnxDir) else ()
        for warning in warnings:
            logger.warning("%s", warning)
            progress.warn(warning)
    all_staged = {
        capacity: staged_engine(backend, onnx, limits, capacity, options, staging, progress)
        for capacity in limits.capacities
    }
    staged = all_staged[limits.max_kv_cache_capacity]
    engines.copy_sidecars(onnx, staging, with_embedding=staged.weights.embedding is None)
    proven_later = staged.unproven and onnx.role in DECODERS  # by `edgespec verify` on its device
    if proven_later and onnx.golden is not None:
        shutil.copyfile(onnx.golden, staging / engines.golden_name(onnx.role))
    proofs = [
        prove(backend, onnx, row, limits.at(capacity), progress)
        for capacity, row in all_staged.items()
    ]
    agreement, weights = worst([row[0] for row in proofs]), coarsest([row[1] for row in proofs])
    config: BuiltConfig[Any, Any]
    if not isinstance(onnx, OnnxDir):
        config = ENCODERS[onnx.role].config(onnx, limits, staged)
    else:
        config = EngineConfig(
            component=onnx.config,
            limits=EngineLimits.of(limits, onnx.role),
            weights=weights,
            settings=staged.settings,
            variants={c: all_staged[c].settings for c in limits.smaller_kv_cache_capacities},
        )
    json_files.write_json(staging / engines.CONFIGS[onnx.role], config.to_dict())
    return Proven(staged, config, agreement)


def staged_engine(
    backend: Backend,
    onnx: AnyOnnxDir,
    limits: Limits,
    capacity: int,
    options: BuildOptions,
    staging: Path,
    progress: Listeners,
) -> Staged:
    """The engine of one capacity in `staging`, by its own name where it is a smaller one."""
    began, own = time.monotonic(), limits.at(capacity)
    with as_bundle_error(onnx):
        if capacity == limits.max_kv_cache_capacity:
            staged = backend.stage(onnx, own, options, staging, progress)
        else:
            directory = staging / str(capacity)
            directory.mkdir()
            staged = backend.stage(onnx, own, options, directory, progress)
            name = engines.move_variant(directory, staging, capacity, staged.engine.name)
            staged = replace(staged, engine=staging / name)
    of = f" for {capacity} tokens" if limits.smaller_kv_cache_capacities else ""
    seconds = time.monotonic() - began
    logger.info("%s engine%s written in %.2f s", onnx.role.value, of, seconds)
    return staged


def worst(agreements: Sequence[Agreement | None]) -> Agreement | None:
    """Of several engines the agreement that is the farthest from the golden outputs; None where
    they were not compared."""
    known = [row for row in agreements if row is not None]
    return reduce(or_, known) if known else None


def coarsest(weights: Sequence[EngineWeights]) -> EngineWeights:
    """The weights of several engines, which are the same, with the largest margin."""
    margins = [row.rounding for row in weights if row.rounding is not None]
    return replace(weights[0], rounding=max(margins, default=None))


def prove(
    backend: Backend,
    onnx: AnyOnnxDir,
    staged: Staged,
    limits: Limits,
    progress: Listeners,
) -> tuple[Agreement | None, EngineWeights]:
    """How a staged engine agrees with the golden outputs, if there are any and it can be run here,
    and its weights with the margin that was measured. BuildError where it computes something
    else."""
    if not isinstance(onnx, OnnxDir):
        return ENCODERS[onnx.role].prove(backend, onnx, staged, progress), staged.weights
    margin, bitwise, config = staged.accuracy.margin, staged.accuracy.bitwise, onnx.config
    unmeasured = replace(
        staged.weights, rounding=None if margin is None else margin.unmeasured_nats
    )
    if staged.unproven or (onnx.golden is None and not bitwise):
        return None, unmeasured
    golden, slots, passes = None, row_bits.NUM_ROWS if bitwise else 0, 0
    if onnx.golden is not None:
        golden = read_golden(onnx.golden, config.graph, config.vocab_size)
        slots = max(slots, slots_of(golden))
    began, lanes = time.monotonic(), min(limits.max_batch_size, BATCH_OF_PROOF)
    runner = backend.open_staged(staged, slots, lanes)
    accuracy = replace(staged.accuracy, margin=None) if bitwise else staged.accuracy
    compared = 0 if golden is None else num_passes(runner.lanes, golden, accuracy)
    if bitwise:
        recurrent = config.graph.recurrent is not None
        passes = row_bits.num_passes(runner.lanes, recurrent=recurrent)
    progress.prove(compared + passes)
    done, agreement = partial(progress.advance, 1), None
    try:
        if golden is not None:
            golden = with_own_embedding(golden, runner)
            agreement = check_golden(
                runner, golden, config.ropes, staged.accuracy, backend.remedies, done
            )
            logger.info("compared with the golden outputs in %.2f s", time.monotonic() - began)
        if bitwise:
            differs = row_bits.first_difference(runner, done)
            if differs is None:
                return agreement, replace(staged.weights, rounding=0.0)
            logger.warning("not bitwise: %s", differs)
        if margin is None or golden is None:
            return agreement, unmeasured
        if bitwise:
            progress.prove(num_passes(runner.lanes, golden, staged.accuracy) - compared)
        measured = rounding(runner, golden, config.ropes, margin, done)
        return agreement, replace(staged.weights, rounding=measured)
    finally:
        runner.close()


def with_own_embedding(golden: Golden, runner: Runner) -> Golden:
    """The golden inputs, with embeddings that are read from the engine's lm_head where it is the
    embedding too."""
    if runner.table is None:
        return golden
    inputs = {
        f"{label}_inputs_embeds": runner.table.rows(golden[f"{label}_ids"])[None]
        for label in ("prompt", "tree")
    }
    return golden | inputs


def installed(
    backend: Backend,
    onnx: AnyOnnxDir,
    proven: Proven,
    staging: Path,
    engine_dir: Path,
    began: float,
) -> Built:
    """Move a proven engine from `staging` into its directory; the work `began` then."""
    entry = engines.install(staging, engine_dir, onnx.role, entry_of(backend, onnx, proven))
    return Built(
        onnx.role,
        engine_dir / proven.staged.engine.name,
        entry.size_bytes,
        entry.golden_difference,
        time.monotonic() - began,
        entry.weights,
        notes_of(backend, onnx, proven.config),
        entry.golden_cosine,
        proven.staged.unproven,
    )


def entry_of(backend: Backend, onnx: AnyOnnxDir, proven: Proven) -> EngineEntry:
    """The manifest entry of a proven engine, without its files."""
    agreement, weights = proven.agreement, proven.config.weights
    by_direction = weights.is_quantized
    if onnx.role in ENCODERS:  # whose margin nobody measures
        by_direction = proven.staged.accuracy.min_cosine is not None
    return EngineEntry(
        backend=backend.name,
        fingerprint=proven.staged.fingerprint or backend.fingerprint(),
        source=onnx.manifest.source.to_dict(),
        weights=weights,
        golden_difference=agreement.difference if agreement else None,
        golden_cosine=agreement.cosine if agreement and by_direction else None,
    )


# ---- notes


def notes_of(backend: Backend, onnx: AnyOnnxDir, config: BuiltConfig[Any, Any]) -> tuple[str, ...]:
    """What the user should know about this engine."""
    emulated = emulation_notes(config.weights)
    if not isinstance(onnx, OnnxDir):
        return (*emulated, *ENCODERS[onnx.role].notes(onnx, config.weights))
    assert isinstance(config, EngineConfig)
    positions, capacity = config.component.max_position, config.limits.max_kv_cache_capacity
    notes = []
    if positions is not None and capacity > positions:
        notes.append(
            f"the capacity of {capacity} goes beyond the {positions} positions the model was made"
            " for"
        )
    rope = config.component.rope
    if rope and any(table.kind == "longrope" for table in config.component.ropes):
        notes.append(longrope_note(rope, capacity))
    if config.variants:
        notes.append(several_note(config))
    return (*notes, *backend.notes(config), *emulated, *weight_notes(config))


def several_note(config: EngineConfig) -> str:
    """What engines for several capacities mean, in one sentence."""
    *smaller, largest = map(str, config.limits.capacities)
    return (
        f"engines for {', '.join(smaller)} and {largest} tokens: a request runs in the smallest"
        " that holds its prompt and its answer; each engine that is open has the weights in memory"
    )


def longrope_note(rope: RopeConfig, capacity: int) -> str:
    """Which of longrope's factors the engine takes for all positions (decision 0012)."""
    original = rope.original_max_position
    if capacity > original:
        how = f"the long factors, as the capacity of {capacity} exceeds the original {original}"
    else:
        how = f"the short factors, as the capacity is within the original {original} tokens"
    return f"longrope: {how}"


def emulation_notes(weights: EngineWeights) -> Iterator[str]:
    """What becomes of a scheme that a backend has no kernels for."""
    if weights.emulated:
        yield f"{weights.scheme} is {weights.emulated}"


def weight_notes(config: EngineConfig) -> Iterator[str]:
    """What weights that are not float32 mean for the answers."""
    weights, draft = config.weights, config.role is Role.DRAFT
    margin = f"margin {weights.rounding:.2g} nats" if weights.rounding else ""
    if weights.is_quantized:
        yield f"{weights.products_text}; {draft_note() if draft else losslessness(config, margin)}"
    elif margin and not draft:
        yield f"recurrent layers: lossless up to kernel rounding ({margin})"


def draft_note() -> str:
    """Why a draft with quantized weights stays lossless, in one sentence."""
    return "a draft's weights change how much is accepted, not the text"


def losslessness(config: EngineConfig, margin: str) -> str:
    """How lossless speculation with this base is, in one sentence; `margin` is in nats."""
    if config.weights.is_bitwise:
        return "speculation is lossless, bitwise: a row has the same bits in every pass"
    exact = config.component.graph.recurrent is None and config.weights.why_not_exact is None
    bitwise = ", and bitwise with `exact`" if exact else ""
    return f"speculation is lossless up to kernel rounding ({margin}){bitwise}"
