"""Plans and writes an engine of TensorRT: what it is built for, its lowered graph, its build.

Knows the order of the work. The rewrites stand in `lowering`, the library's calls in `network`, and
the process in which they run in `process`.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import onnx_ir as ir

from edgespec.backends.base import Listeners, Staged
from edgespec.backends.engine_config import (
    AS_EXPORTED,
    EngineLimits,
    EngineWeights,
)
from edgespec.backends.onnx_dir import AnyOnnxDir, VisionOnnxDir
from edgespec.backends.tensorrt import bindings, estimate, lowered_files, process, timing_cache
from edgespec.backends.tensorrt.accuracy import accuracy_of
from edgespec.backends.tensorrt.build_job import BuildJob
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.devices import check_formats, device_here, title_of
from edgespec.backends.tensorrt.encoder_profiles import encoder_profiles
from edgespec.backends.tensorrt.estimate import MemoryEstimate
from edgespec.backends.tensorrt.fingerprint import fingerprint_of
from edgespec.backends.tensorrt.linter import lint
from edgespec.backends.tensorrt.options import SHORT, TensorRTOptions
from edgespec.backends.tensorrt.profiles import Profile, max_rows, profiles_of, slots_of
from edgespec.backends.tensorrt.rules import Level
from edgespec.backends.tensorrt.settings import EngineSettings
from edgespec.backends.tensorrt.target import Compute, Target
from edgespec.backends.tensorrt.versions import (
    RTX,
    Capabilities,
    Library,
    build_environment,
    capabilities_of,
    faults_of,
)
from edgespec.contract import Contract, GraphContract, Limits, canonical_contract
from edgespec.errors import (
    BuildError,
    EnvironmentProblem,
    MissingDependency,
    OptionError,
)
from edgespec.vision.contract import vision_contract

logger = logging.getLogger(__name__)
STEPS = 1000  # of a progress bar
# Attention in float32 is let be built of basic operators, which a graph cannot say
KEPT = "attention-float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """All that a build of an export depends on, of a language model or an image encoder; `schemes`
    are those of its quantized weights, `stored` the type of the others, `model` is the canonical
    graph."""

    library: Library
    version: str
    capabilities: Capabilities
    sm: int
    target: Target
    contract: Contract  # the lowered one
    limits: EngineLimits
    profiles: tuple[Profile, ...]
    schemes: tuple[str, ...]
    stored: Compute
    model: ir.Model

    @property
    def weights(self) -> EngineWeights:
        """The engine's weights, without the rounding margin."""
        compute = self.target.compute
        unquantized = SHORT[compute]
        return EngineWeights(
            scheme=", ".join(self.schemes) or unquantized,
            method=AS_EXPORTED if self.schemes or self.stored == compute else "rtn",
            compute=unquantized,
            exact=False,  # kernels of one row and of many are chosen apart
        )

    def settings(self, *, decomposed_attention: bool) -> EngineSettings:
        """What the engine's config.json says of it."""
        return EngineSettings(
            library=self.library.module,
            version=self.version,
            sm=self.sm,
            **asdict(self.target),
            decomposed_attention=decomposed_attention,
            profiles=self.profiles,
        )


def plan_of(
    library: Library, onnx: AnyOnnxDir, limits: Limits, options: TensorRTOptions, version: str
) -> BuildPlan:
    """The plan of a build with this version of the library. Refuses what the version or the device
    cannot: EnvironmentProblem, UnsupportedModel."""
    capabilities = capabilities_of(library, version)
    sm = sm_of(capabilities, options)
    model = ir.load(onnx.model)
    stored = lowered_files.stored_compute(model)
    compute = options.compute or stored
    quantization = onnx.config.quantization
    schemes = tuple(sorted(quantization.schemes)) if quantization else ()
    check_formats(sm, schemes, compute)
    own = EngineLimits.of(limits, onnx.role)
    target = Target(dialect=capabilities.dialect, compute=compute, capacity=1, max_rows=1)
    contract: Contract
    if isinstance(onnx, VisionOnnxDir):
        contract = lowered_contract(vision_contract(onnx.config.vision), target)
        profiles = encoder_profiles(contract, onnx, limits)
    else:
        graph = onnx.config.graph
        target = replace(target, capacity=slots_of(own), max_rows=max_rows(graph, own))
        contract = decoder = lowered_contract(canonical_contract(graph), target)
        profiles = profiles_of(decoder, own)
    return BuildPlan(
        library=library,
        version=version,
        capabilities=capabilities,
        sm=sm,
        target=target,
        contract=contract,
        limits=own,
        profiles=profiles,
        schemes=schemes,
        stored=stored,
        model=model,
    )


def sm_of(capabilities: Capabilities, options: TensorRTOptions) -> int:
    """The compute capability (times ten) that an engine is for. EnvironmentProblem where nothing
    says it, OptionError where the library does not compile for it."""
    device = device_here()
    if options.sm is None:
        if device is None:
            message = "no CUDA device is here, and nothing says for which one the engine is"
            raise EnvironmentProblem(message, "Name it: `compute_capability` SM120.")
        return device.sm
    known = capabilities.compiles_for
    if known and options.sm not in known:
        names = ", ".join(f"SM{sm}" for sm in known)
        message = f"{capabilities.name} does not compile for {title_of(options.sm)}"
        raise OptionError(f"`compute_capability` SM{options.sm}: {message}", f"It knows: {names}.")
    return options.sm


def warnings_of(plan: BuildPlan, memory: MemoryEstimate) -> Iterator[str]:
    """What is slow in the engine of a plan, or may not fit. LimitError or EnvironmentProblem where
    it cannot."""
    yield from estimate.slow_attention(plan.target.compute, plan.sm)
    yield from estimate.check_device(memory, plan.limits, plan.sm)
    if can_build_here(plan):
        yield from estimate.check_host(memory)


def can_build_here(plan: BuildPlan) -> bool:
    """Whether this machine is one on which the library builds the engine of a plan."""
    device = device_here()
    return bool(plan.capabilities.compiles_for) or (device is not None and device.sm == plan.sm)


def version_here(library: Library, options: TensorRTOptions) -> str:
    """The version that a graph is for where nothing is built: the one that was named, or the
    installed one. MissingDependency where there is neither."""
    if options.library_version is not None:
        return options.library_version
    try:
        return bindings.load(library).version
    except MissingDependency as error:
        remedy = f"{error.remedy} Or name a version: `library_version`."
        raise MissingDependency(error.what, remedy) from error


def checked_model(onnx: AnyOnnxDir, plan: BuildPlan) -> ir.Model:
    """The lowered graph, which keeps the rules of the version's parser: for where the parser itself
    is not asked. BuildError names what it breaks."""
    model = lowered_files.lowered_model(onnx, plan.target, plan.model)
    report = lint(ir.to_proto(model), plan.capabilities)
    broken = [row for row in report.findings if row.level is Level.REFUSED and row.rule != KEPT]
    if broken:
        lines = "\n  ".join(f"{row.rule} at {row.node}: {row.what}" for row in broken)
        message = f"the graph breaks rules of {plan.capabilities.name}:\n  {lines}"
        raise BuildError(message, broken[0].remedy)
    return model


# ---- a build


def stage(
    library: Library,
    onnx: AnyOnnxDir,
    limits: Limits,
    options: TensorRTOptions,
    path: Path,
    progress: Listeners,
) -> Staged:
    """Lower the graph of an export and build the engine `path`. MissingDependency without the
    library, BuildError or EnvironmentProblem where it cannot be built."""
    plan = plan_to_build(library, onnx, limits, options)
    version = plan.version
    for fault in faults_of(library, version):
        logger.warning("%s %s: %s; it is built around that", library.title, version, fault.effect)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="lowered-") as directory:
        model = lowered_files.lowered_model(onnx, plan.target, plan.model)
        graph = lowered_files.write(model, onnx.path, Path(directory))
        environment = build_environment(faults_of(library, version), os.environ)
        decomposed = run(job_of(plan, options, graph, path), progress, environment)
    decoder = plan.contract if isinstance(plan.contract, GraphContract) else None
    recurrent = decoder is not None and decoder.shape.recurrent is not None
    return Staged(
        engine=path,
        contract=decoder,
        weights=plan.weights,
        accuracy=accuracy_of(plan.schemes, plan.target.compute, recurrent=recurrent),
        settings=plan.settings(decomposed_attention=decomposed).to_dict(),
        fingerprint=fingerprint_of(library, version, plan.sm),
        unproven=unproven(plan),
    )


def plan_to_build(
    library: Library, onnx: AnyOnnxDir, limits: Limits, options: TensorRTOptions
) -> BuildPlan:
    """The plan of a build with the installed library. MissingDependency without it, OptionError
    where another version is named, EnvironmentProblem where it needs a device that is not here,
    and what `plan_of` raises."""
    if options.library_version is not None:
        message = "`library_version` is for `dry_run` and `emit_onnx`"
        raise OptionError(message, "Leave it out: the installed version builds.")
    plan = plan_of(library, onnx, limits, options, bindings.load(library).version)
    check_device(plan)
    return plan


def unproven(plan: BuildPlan) -> str | None:
    """Why the engine of a plan cannot be run here; None where it can."""
    device = device_here()
    if device is None:
        return "no CUDA device is here"
    return None if device.sm == plan.sm else f"this is SM{device.sm} ({device.name})"


def check_device(plan: BuildPlan) -> None:
    """EnvironmentProblem where the library needs a device for this build, and it is not here."""
    device = device_here()
    if device is None and plan.schemes and not plan.capabilities.quantized_without_device:
        message = f"{plan.capabilities.name} compiles no quantized weights where no CUDA device is"
        remedy = f"Install {RTX.title} 1.7, or build on {title_of(plan.sm)}."
        raise EnvironmentProblem(message, remedy)
    if can_build_here(plan):
        return
    here = "no CUDA device is here" if device is None else f"here is {title_of(device.sm)}"
    message = f"{plan.library.title} builds on the device itself: {here}"
    raise EnvironmentProblem(
        message,
        f"Build on {title_of(plan.sm)}, or write the graph for it with `emit_onnx` DIR.",
    )


def job_of(plan: BuildPlan, options: TensorRTOptions, graph: Path, engine: Path) -> BuildJob:
    """The job of the build's process."""
    device = device_here()
    times = None
    if plan.capabilities.timing_cache and options.keep_times and device is not None:
        path = options.timing_cache or timing_cache.cache_path(plan.library, plan.version, device)
        times = None if path is None else str(path.absolute())
    ahead = plan.capabilities.compiles_for and (options.sm is not None or device is None)
    return BuildJob(
        backend=plan.library.backend,
        model=str(graph.absolute()),
        engine=str(engine.absolute()),
        profiles=plan.profiles,
        compute_capability=plan.sm if ahead else None,
        workspace_bytes=options.workspace_bytes,
        optimization_level=options.optimization_level,
        timing_cache=times,
        decompose_attention=decomposes_attention(plan),
    )


def decomposes_attention(plan: BuildPlan) -> bool:
    """Whether attention is built of basic operators from the start: no version has a fused kernel
    for float32 with a mask. Where the parser knows no Attention, the graph has none."""
    return plan.target.compute == "float32" and plan.capabilities.has_attention


def run(job: BuildJob, progress: Listeners, environment: dict[str, str]) -> bool:
    """Build the engine of a job, where attention has no fused kernel once more without one; whether
    attention is built of basic operators."""
    try:
        report = process.run(job, advances(progress), environment)
    except process.BuildRefused as error:
        if job.decompose_attention or not error.lacks_kernel:
            raise
        logger.warning("no fused kernel for this attention: built of basic operators instead")
        job = replace(job, decompose_attention=True)
        report = process.run(job, advances(progress), environment)
    logger.info(
        "%d layers parsed in %.1f s, %.1f MB built in %.1f s, %.2f GB of memory at most",
        report.layers,
        report.parse_s,
        report.engine_bytes / 1e6,
        report.build_s,
        report.peak_bytes / 1e9,
    )
    return job.decompose_attention


def advances(progress: Listeners) -> Callable[[float], None]:
    """Starts a bar; the listener that advances it to a share."""
    progress.start(STEPS)
    shown = 0

    def advance(share: float) -> None:
        nonlocal shown
        steps = int(STEPS * share)
        progress.advance(max(0, steps - shown))
        shown = max(shown, steps)

    return advance
