"""From the name of a model to an engine directory: downloads, checks the pair, exports, builds, and
keeps the result in the cache.

Knows the order of the work and all that an engine depends on. How each step is done stands in the
wings, where the result is kept in `cache`. Prints nothing.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgespec import __version__
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import BuildOptions
from edgespec.backends.machine import machine_bytes
from edgespec.backends.manifest import EngineManifest
from edgespec.backends.registry import DEFAULT_BACKEND, find_backend, get_backend
from edgespec.checkpoint.gguf.encoder import is_named
from edgespec.checkpoint.gguf.header import parts_of
from edgespec.checkpoint.gguf.source import is_gguf
from edgespec.checkpoint.hub import download, is_repo_id
from edgespec.contract import DECODERS, Limits, Role
from edgespec.errors import (
    BundleError,
    CheckpointError,
    EdgeSpecError,
    OptionError,
    PairingError,
    UnsupportedModel,
    command,
)
from edgespec.methods import METHODS, as_draft
from edgespec.pipeline.cache import EXPORT, Busy, Cache, key_of
from edgespec.pipeline.inspection import heads_of, kind_of
from edgespec.progress import Progress

if TYPE_CHECKING:
    from edgespec.backends.build import Built
    from edgespec.checkpoint.files import Checkpoint
    from edgespec.config import DraftConfig, ModelConfig
    from edgespec.export.options import ExportOptions

FORMAT = 1  # of an entry; raise it when an entry of before cannot be read
SETTLED_S = 2.0  # a file that changed so shortly ago may change again within its time stamp
TITLES = {
    Role.LLM.value: "model",
    Role.BASE.value: "base",
    Role.DRAFT.value: "draft",
    Role.VISUAL.value: "image encoder",
}
LANES = (16, 8, 4)  # of a server's engine
FLOAT_BYTES = 4  # of a key or value
ATTEMPTS = 3  # at making an entry that others make or use
RECIPES = (".yaml", ".yml")
NO_DRAFT = "no draft was given, and the model brings none (`draft` names one)"


class Reporter(Progress, Protocol):
    """What shows how far the work is. `start` and `advance` are of the step that began last."""

    def step(self, title: str) -> None:
        """A step begins; the one before it has ended."""

    def finish(self) -> None:
        """The step under way has ended."""

    def note(self, text: str) -> None:
        """A line that the user should read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A target and its draft, each a directory or a hub name, and how engines are made of them.

    `aux_layers`, `golden` and `skip_visual` are those of an export, `limits`, `backend` and
    `options` those of a build; with `measure_costs` what their steps cost is measured then.
    `update` asks the hub again for names that were prepared before. `check_method` raises an error
    for a method of the pair, None for none, that is another than was asked for. With `has_drafter`
    something else than a draft was asked to draft.
    """

    target: str
    draft: str | None = None
    limits: Limits = field(default_factory=Limits)
    backend: str = DEFAULT_BACKEND
    options: BuildOptions | None = None
    aux_layers: tuple[int, ...] | None = None
    allow_pickle: bool = False
    golden: bool = True
    skip_visual: bool = False
    update: bool = False
    measure_costs: bool = True
    check_method: Callable[[str | None], object] = lambda method: None
    has_drafter: bool = False


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What will be made: of which checkpoints, for which method (None: a plain engine), and under
    which key. `about` is what the cache shows of it."""

    base: Path
    draft: Path | None
    method: str | None
    aux_layers: tuple[int, ...] | None  # that the base emits, where the method has a choice
    key: str
    size_bytes: int  # of the checkpoints' tensors
    about: Mapping[str, Any]


def is_engine_dir(target: str) -> bool:
    """Whether a target holds finished engines, so that nothing needs to be made."""
    return Path(target).is_dir() and kind_of(Path(target)) == "engines"


@contextmanager
def prepared(request: RunRequest, cache: Cache, report: Reporter) -> Iterator[Path]:
    """Yields the engine directory of a request, which stays in the cache during the block.

    What was made before is taken from the cache: by the target's name or the sizes and time stamps
    of its files, and else by its identity. Raises CheckpointError, UnsupportedModel, PairingError,
    BundleError, BuildError, OutputError and whatever else export and build raise.
    """
    refuse_what_is_no_model(request)
    if is_engine_dir(request.target):
        if request.draft is not None:
            message = (
                f"{request.target} is an engine directory, and `draft` {request.draft} was given"
            )
            raise OptionError(message, "Give the model instead, or leave `draft` out.")
        yield Path(request.target)
        return
    start = start_of(request)
    key = None if request.update else cache.started(start)
    if key is None or fault_of(cache, key) is not None:
        key = made(request, start, cache, report)
    with cache.locked(key, shared=True, waiting=lambda: report.note(WAITING)):
        if (fault := fault_of(cache, key)) is not None:  # removed meanwhile
            raise fault
        cache.touch(key)
        if warning := cache.warning():
            report.note(warning)
        if cache.about(key).get("method") is None and not request.has_drafter:
            report.note(NO_DRAFT)
        yield cache.engine_dir(key)


WAITING = "another run prepares or removes this model: waiting for it"


def refuse_what_is_no_model(request: RunRequest) -> None:
    """Raises UnsupportedModel or CheckpointError for a target or draft that is no directory and
    cannot be the name of one on the hub."""
    for name in (request.target, request.draft):
        if name is None:
            continue
        path = Path(name)
        if not name:
            raise CheckpointError("an empty name was given", "Name a directory, or a model.")
        if path.suffix in RECIPES:
            message = f"{name} is a recipe, and this version does not run recipes yet"
            raise UnsupportedModel(message, "Pass a model: its directory or its name on the hub.")
        if is_gguf(path):
            if not path.is_file():
                raise CheckpointError(f"there is no file {name!r}", "Pass a GGUF file's path.")
            continue
        if path.is_file():
            raise CheckpointError(f"{path} is a file, not a model", f"Pass {path.parent} instead.")
        if not path.is_dir() and not is_repo_id(name):
            message = f"there is no directory {name!r}, and it is no name of the hub"
            raise CheckpointError(message, "Pass a directory, or a name such as Qwen/Qwen3-8B.")


# ---- by which a start is known again


def start_of(request: RunRequest) -> str:
    """The key of what can be seen of a request without reading weights or asking the hub."""
    names = {"target": request.target, "draft": request.draft}
    seen = {role: seen_of(name) for role, name in names.items() if name is not None}
    return key_of(
        {**seen, **settings_of(request), "pickle": request.allow_pickle, "format": FORMAT}
    )


def seen_of(name: str) -> list[Any]:
    """A hub name as it is; a directory or a GGUF file with size, times and inode of each of its
    files. The time at which an inode changed cannot be set back, as that of the content can."""
    path = Path(name)
    if not is_local(path):
        return ["hub", name]
    stats = sorted((file.name, file.stat()) for file in files_of(path))
    files = [
        [name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_dev, s.st_ino] for name, s in stats
    ]
    return ["directory", str(path.resolve()), files]


def is_local(path: Path) -> bool:
    """Whether a name is a checkpoint here: a directory, or a GGUF file."""
    return path.is_dir() or is_gguf(path)


def files_of(path: Path) -> list[Path]:
    """The files of a directory; of a model in GGUF its parts, and image encoders beside it."""
    if not path.is_dir():
        encoders = [file for file in path.parent.iterdir() if is_named(file.name)]
        return [*parts_of(path), *encoders]
    return [file for file in path.iterdir() if file.is_file()]


def settings_of(request: RunRequest) -> dict[str, Any]:
    """All that an engine depends on beside the checkpoints, as JSON. Raises RequestError for a
    calibration text that cannot be read."""
    from edgespec.pipeline.calibration import texts_of

    backend = backend_of(request)
    options = backend.parse_options({}) if request.options is None else request.options
    texts = texts_of(options)
    return {
        "aux_layers": request.aux_layers,
        "golden": request.golden,
        "skip_visual": request.skip_visual,
        "limits": asdict(request.limits),
        "backend": request.backend,
        "options": asdict(options),
        "calibration": None if texts is None else texts.sha256,
        "fingerprint": backend.fingerprint(),
        "edgespec": __version__,
    }


def backend_of(request: RunRequest) -> Any:
    """The backend of a request. Raises OptionError where there is none of that name."""
    backend = find_backend(request.backend)
    if backend is None:
        message = f"there is no backend {request.backend!r}"
        raise OptionError(message, f"See {command('build', help=True)}.")
    return backend


def is_settled(name: str) -> bool:
    """Whether the files of a directory have been as they are for longer than time stamps are
    coarse, so that a later change will show; a hub name always is."""
    path = Path(name)
    if not is_local(path):
        return True
    stats = [file.stat() for file in files_of(path)]
    newest_s = max((max(stat.st_mtime, stat.st_ctime) for stat in stats), default=0.0)
    return time.time() - newest_s > SETTLED_S


def fault_of(cache: Cache, key: str) -> EdgeSpecError | None:
    """Why an entry cannot be used: it is not there, damaged, or of another machine."""
    try:
        cache.about(key)
        path = cache.engine_dir(key)
        there = EngineManifest.read(path).engines if path.is_dir() else {}
        if not there:
            return BundleError(f"{path} has no engines", "Run again.")
        for role in there:
            _, entry = engines.open_engine(path, role)
            where = f"the {role.value} engine in {path}"
            get_backend(entry.backend, where).check_fingerprint(entry.fingerprint, where)
    except EdgeSpecError as error:
        return error
    return None


def is_of_no_use(cache: Cache, key: str) -> bool:
    """Whether no start of this version on this machine will come back to an entry."""
    if fault_of(cache, key) is not None:
        return True
    made_of = cache.about(key).get("made_of")
    here = {"format": FORMAT, "edgespec": __version__}
    return not isinstance(made_of, dict) or any(made_of.get(k) != v for k, v in here.items())


# ---- making


def made(request: RunRequest, start: str, cache: Cache, report: Reporter) -> str:
    """The key of the request's entry, which is made where it is not there or damaged."""
    cache.make_root()  # before hours of downloads
    base = located(request.target, request, report)
    draft = None if request.draft is None else located(request.draft, request, report)
    seen = [seen_of(str(path)) for path in (base, draft) if path is not None]
    settled = all(is_settled(name) for name in (request.target, request.draft) if name is not None)
    plan = planned(request, base, draft, report)

    def make() -> None:
        cache.remove(plan.key)
        cache.check_room(plan.size_bytes)
        with cache.fill(plan.key, plan.about) as staging:
            make_engines(plan, request, staging, report)
            check_unchanged(plan, seen)
            if request.measure_costs:
                measure(staging / "engine", report)

    with made_once(plan.key, cache, make, report):
        if settled:
            cache.remember(start, plan.key)
    report.finish()
    return plan.key


@contextmanager
def made_once(key: str, cache: Cache, make: Callable[[], None], report: Reporter) -> Iterator[None]:
    """Holds the lock of an entry in the block, once it is there: made here, or by a run that was
    first. Who waits asks for the shared lock, as the first one goes on to use its entry. Raises
    BundleError where others keep using one that is damaged."""
    for _ in range(ATTEMPTS):
        with suppress(Busy), cache.locked(key):
            if fault_of(cache, key) is not None:
                make()
            yield
            return
        with cache.locked(key, shared=True, waiting=lambda: report.note(WAITING)):
            if fault_of(cache, key) is None:
                yield
                return
        time.sleep(0.1)  # others who waited give the damaged entry back
    message = f"{cache.engine_dir(key)} is damaged, and another run uses it"
    raise BundleError(message, "End that run, then start again.")


def located(name: str, request: RunRequest, report: Reporter) -> Path:
    """The directory or GGUF file of a target or draft, downloaded where it is not here."""
    path = Path(name)
    if is_local(path):
        return path
    report.step(f"download {name}")
    return download(name, allow_pickle=request.allow_pickle, progress=report)


def lanes_that_fit(request: RunRequest, report: Reporter) -> int:
    """How many sequences an engine for a server runs at a time: the most of LANES whose keys and
    values are a quarter of this machine's memory at most, else the least. The machine's size and
    not what is free now decides, so that a second start finds the same engine. Raises what
    `planned` does."""
    from edgespec.checkpoint.detect import detect
    from edgespec.checkpoint.files import open_checkpoint

    base = located(request.target, request, report)
    opened = open_checkpoint(base, allow_pickle=request.allow_pickle)
    decoder = as_base(opened, detect(opened), request).decoder
    width = 2 * len(decoder.attentions) * decoder.num_kv_heads * decoder.head_dim
    lane_bytes = FLOAT_BYTES * width * request.limits.max_kv_cache_capacity
    room = (machine_bytes() or 0) // 4
    return next((lanes for lanes in LANES if lanes * lane_bytes <= room), LANES[-1])


def planned(request: RunRequest, base: Path, draft: Path | None, report: Reporter) -> PipelinePlan:
    """What a request asks for, once base and draft were found to be a pair. Raises PairingError
    where they are none, and what opening a checkpoint raises."""
    from edgespec.checkpoint.detect import detect
    from edgespec.checkpoint.files import open_checkpoint

    report.step("check the model" if draft is None else "check the pair")
    opened = open_checkpoint(base, allow_pickle=request.allow_pickle)
    model = as_base(opened, detect(opened), request)
    drafted = None if draft is None else open_checkpoint(draft, allow_pickle=request.allow_pickle)
    config = None if drafted is None else as_draft(detect(drafted))
    method = config.method if config is not None else own_method(opened, model, report)
    request.check_method(method)
    if method is None or not METHODS[method].reads_base:
        refuse_aux_layers(request)
    if method is not None:
        check_pair(request, base, draft, report)
    aux_layers = aux_layers_of(request, model, config)
    report.step("identify the weights")
    checkpoints = [opened] if drafted is None else [opened, drafted]
    parts = {
        "format": FORMAT,
        "checkpoints": [identities(checkpoint, report) for checkpoint in checkpoints],
        "method": method,
        **settings_of(request),
    }
    return PipelinePlan(
        base=base,
        draft=draft,
        method=method,
        aux_layers=aux_layers,
        key=key_of(parts),
        size_bytes=sum(t.num_bytes for c in checkpoints for t in c.tensors.values()),
        about=about(request, base, draft, method, parts),
    )


def as_base(
    checkpoint: Checkpoint, config: ModelConfig | DraftConfig, request: RunRequest
) -> ModelConfig:
    """The configuration of a base. Raises PairingError for a draft."""
    from edgespec.config import ModelConfig

    if isinstance(config, ModelConfig):
        return config
    message = f"{checkpoint.place} is {METHODS[config.method].draft_title}, not a base model"
    base = config.base_name or "BASE"
    if request.draft is not None:
        raise PairingError(message, "Give the base first, and the draft with `draft`.")
    raise PairingError(
        message, f"Run its base with it: {command('run', base, draft=request.target)}"
    )


def own_method(checkpoint: Checkpoint, model: ModelConfig, report: Reporter) -> str | None:
    """The method whose draft the base's checkpoint holds; None where it holds none that can be
    used."""
    heads = heads_of(checkpoint, model)
    for why in filter(None, heads.values()):
        report.note(why)
    return next((method for method, why in heads.items() if why is None), None)


def refuse_aux_layers(request: RunRequest) -> None:
    """Raises OptionError for aux layers where no draft reads them."""
    if request.aux_layers is not None:
        raise OptionError(
            "`aux_layers` is for a draft that reads hidden states, and there is none",
            "Pass `draft` with one, or leave it out.",
        )


def check_pair(request: RunRequest, base: Path, draft: Path | None, report: Reporter) -> None:
    """Reports the warnings of a pair. Raises PairingError with all that is refused."""
    from edgespec.pairing.check import check

    pair_report = check(
        str(base),
        None if draft is None else str(draft),
        aux_layers=request.aux_layers if draft is not None else None,
        allow_pickle=request.allow_pickle,
        progress=report,
    )
    refused = [result for result in pair_report.results if result.level == "refused"]
    if refused:
        message = "; ".join(f"{result.topic}: {result.what.rstrip('.')}" for result in refused)
        who = request.target if draft is None else f"{request.target} and {request.draft}"
        raise PairingError(f"{who} are no pair: {message}", refused[0].remedy)
    for result in pair_report.results:
        if result.level == "warning":
            remedy = f" {result.remedy}" if result.remedy else ""
            report.note(f"warning: {result.topic}: {result.what.rstrip('.')}.{remedy}")


def aux_layers_of(
    request: RunRequest, model: ModelConfig, config: DraftConfig | None
) -> tuple[int, ...] | None:
    """The aux layers that the base is exported with: those that its draft reads."""
    from edgespec.methods import resolve_aux_layers

    if config is None or not METHODS[config.method].takes_aux_layers:
        return request.aux_layers
    return resolve_aux_layers(config, model.decoder.num_layers, request.aux_layers)


def identities(checkpoint: Checkpoint, report: Reporter) -> list[Any]:
    """What a checkpoint is known by: its weights, its texts, what it was quantized from, and how
    its images are prepared."""
    from edgespec.checkpoint.origin import origin_of
    from edgespec.export.sidecars import processor_hashes, text_identity

    weights, texts = checkpoint.identity(report), text_identity(checkpoint)
    return [weights, texts, origin_of(checkpoint).identity, processor_hashes(checkpoint)]


def about(
    request: RunRequest,
    base: Path,
    draft: Path | None,
    method: str | None,
    parts: Mapping[str, Any],
) -> dict[str, Any]:
    """What `edgespec cache list` shows of an entry, and all that it depends on."""

    def shown(name: str | None, path: Path | None) -> str | None:
        if name is None or path is None:
            return None
        return str(path.resolve()) if is_local(Path(name)) else name

    return {
        "target": shown(request.target, base),
        "draft": shown(request.draft, draft),
        "method": method,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "made_of": dict(parts),
    }


def make_engines(plan: PipelinePlan, request: RunRequest, staging: Path, report: Reporter) -> None:
    """Export and build below `staging`: the engines stay, each export goes once it is built."""
    from edgespec.backends import base as backends
    from edgespec.backends.build import build
    from edgespec.export.components import export
    from edgespec.pipeline.calibration import with_windows

    progress = backends.Listeners(
        start=lambda total: report.start("weights", total),
        advance=report.advance,
        prove=lambda passes: report.start("comparison with the golden outputs", passes),
        warn=lambda text: report.note(f"warning: {text}"),
    )
    for number, (label, model, wanted) in enumerate(exports_of(plan, request)):
        report.step(f"export {label}")
        first = export(str(model), staging / EXPORT / str(number), wanted, report)
        for component in (first, *first.beside):
            title = TITLES[component.role]
            report.step(f"build the {title}")
            encodes = component.role not in DECODERS  # on ONNX Runtime, whatever the others run on
            options = with_windows(
                request.options, component.directory, Role(component.role), request.limits
            )
            built = build(
                component.directory,
                staging / "engine",
                request.limits,
                backend=DEFAULT_BACKEND if encodes else request.backend,
                options=None if encodes else options,
                progress=progress,
            )
            if request.measure_costs and not encodes:
                measure_loss(component.directory, staging / "engine", built, title, report)
            shutil.rmtree(component.directory)
            for note in built.notes:
                report.note(f"{title}: {note}")
    shutil.rmtree(staging / EXPORT)


def measure_loss(
    onnx_dir: Path, engine_dir: Path, built: Built, title: str, report: Reporter
) -> None:
    """Measure what quantized weights of a new engine cost; that it failed is said, and no more."""
    from edgespec.backends import base as backends
    from edgespec.runtime.measuring.quantization_loss import after_build

    progress = backends.Listeners(
        start=lambda total: report.start("quantization loss", total),
        advance=report.advance,
        warn=report.note,
    )
    found = after_build(
        onnx_dir, engine_dir, built.role, measure=True, unproven=built.unproven, progress=progress
    )
    if found is not None:
        report.note(f"{title}: {found.line}")
        for warning in found.warnings:
            report.note(f"warning: {title}: {warning}")


def measure(engine_dir: Path, report: Reporter) -> None:
    """Measure what the engines' steps cost; that it failed is said, and no more."""
    from edgespec.backends import base as backends
    from edgespec.runtime.measuring.cost_measure import after_build

    report.step("measure what steps cost")
    progress = backends.Listeners(
        start=lambda total: report.start("steps", total), advance=report.advance
    )
    line = after_build(engine_dir, measure=True, opens=True, progress=progress)
    if line is not None:
        report.note(line)


def exports_of(plan: PipelinePlan, request: RunRequest) -> list[tuple[str, Path, ExportOptions]]:
    """The exports that a plan takes, in their order: a title, the checkpoint and the options."""
    from edgespec.export.options import ExportOptions
    from edgespec.export.table import COMPONENTS

    common = ExportOptions(
        allow_pickle=request.allow_pickle, golden=request.golden, skip_visual=request.skip_visual
    )
    if plan.method is None:
        return [("the model", plan.base, common)]
    method = METHODS[plan.method]
    base = replace(common, base_for=plan.method, aux_layers=plan.aux_layers)
    if not method.reads_base:
        base = common  # a plain decoder verifies the drafts
    if plan.draft is None:
        return [("the base and its draft", plan.base, base)]
    if COMPONENTS[plan.method].base_needs_draft:
        base = replace(base, draft_dir=str(plan.draft))
    draft = replace(common, base_model_dir=str(plan.base), aux_layers=request.aux_layers)
    if method.of_model is not None:
        draft = replace(draft, as_draft=method.name)
    return [("the base", plan.base, base), ("the draft", plan.draft, draft)]


def check_unchanged(plan: PipelinePlan, before: list[list[Any]]) -> None:
    """Raises CheckpointError where a checkpoint changed while it was read."""
    paths = [path for path in (plan.base, plan.draft) if path is not None]
    for path, seen in zip(paths, before, strict=True):
        if seen_of(str(path)) != seen:
            raise CheckpointError(
                f"{path} changed while it was read", "Run again once it is complete."
            )
