"""Plans and writes the engine of an image encoder: its lowered graph, its profile, its build.

Knows the order of the work; what a build asks of device and library stands in `staging`.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from edgespec.backends.base import Progress, Staged
from edgespec.backends.onnx_dir import VisionOnnxDir
from edgespec.backends.tensorrt import lowered_files, staging
from edgespec.backends.tensorrt.accuracy import accuracy_of
from edgespec.backends.tensorrt.devices import check_formats, title_of
from edgespec.backends.tensorrt.estimate import profile_lines
from edgespec.backends.tensorrt.fingerprint import fingerprint_of
from edgespec.backends.tensorrt.lowering.vision import lower_vision
from edgespec.backends.tensorrt.options import TensorRTOptions
from edgespec.backends.tensorrt.profiles import Profile, Range, made
from edgespec.backends.tensorrt.target import Target
from edgespec.backends.tensorrt.versions import Library, capabilities_of
from edgespec.backends.tensorrt.vision_contract import lowered_contract
from edgespec.backends.vision.golden import read_golden
from edgespec.config import VisionConfig
from edgespec.contract import Contract, Limits
from edgespec.vision.contract import vision_contract
from edgespec.vision.grid import num_tokens


def stage_vision(
    library: Library,
    onnx: VisionOnnxDir,
    limits: Limits,
    options: TensorRTOptions,
    path: Path,
    progress: Progress,
) -> Staged:
    """Lower the graph of an export and build the engine `path`. MissingDependency without the
    library, BuildError or EnvironmentProblem where it cannot be built."""
    version, model = staging.installed(library, options), ir.load(onnx.model)
    plan = plan_of(library, onnx, limits, options, version, model)
    staging.check_device(plan)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="lowered-") as directory:
        lowered = lower_vision(model, vision_contract(onnx.config.vision), plan.target)
        graph = lowered_files.write(lowered, onnx.path, Path(directory))
        job = staging.job_of(plan, options, graph, path)
        decomposed = staging.run(job, progress, staging.environment_of(plan))
    return Staged(
        engine=path,
        weights=plan.weights,
        accuracy=accuracy_of(plan.schemes, plan.target.compute, recurrent=False),
        settings=plan.settings(decomposed_attention=decomposed).to_dict(),
        fingerprint=fingerprint_of(library, version, plan.sm),
        unproven=staging.unproven(plan),
    )


def planned(
    library: Library,
    onnx: VisionOnnxDir,
    limits: Limits,
    options: TensorRTOptions,
    version: str,
) -> tuple[str, ...]:
    """What a build with this version would make, a line each. Raises what `plan_of` does, and
    BuildError for a graph that its parser refuses."""
    model = ir.load(onnx.model)
    plan = plan_of(library, onnx, limits, options, version, model)
    lowered = lower_vision(model, vision_contract(onnx.config.vision), plan.target)
    staging.check_rules(lowered, plan)
    where, target = f"{library.title} {version} for {title_of(plan.sm)}", plan.target
    line = f"{where}: {target.dialect.value} graph, {target.compute}"
    return (line, *profile_lines(plan.profiles))


def plan_of(
    library: Library,
    onnx: VisionOnnxDir,
    limits: Limits,
    options: TensorRTOptions,
    version: str,
    model: ir.Model,
) -> staging.DevicePlan:
    """The plan of a build with this version of the library; `model` is the canonical graph. Refuses
    what the version or the device cannot: EnvironmentProblem, UnsupportedModel."""
    capabilities, vision = capabilities_of(library, version), onnx.config.vision
    stored, quantization = lowered_files.stored_compute(model), onnx.config.quantization
    compute = options.compute or stored
    target = Target(dialect=capabilities.dialect, compute=compute, capacity=1, max_rows=1)
    contract = lowered_contract(vision_contract(vision), target)
    plan = staging.DevicePlan(
        library=library,
        version=version,
        capabilities=capabilities,
        sm=staging.sm_of(capabilities, options),
        target=target,
        profiles=(profile_of(contract, vision, proven(onnx, limits)),),
        schemes=tuple(sorted(quantization.schemes)) if quantization else (),
        stored=stored,
    )
    check_formats(plan.sm, plan.schemes, compute)
    return plan


def proven(onnx: VisionOnnxDir, limits: Limits) -> Limits:
    """The limits, with room for the golden image. Raises BundleError for a damaged one."""
    if onnx.golden is None:
        return limits
    vision = onnx.config.vision
    tokens = num_tokens(vision, read_golden(onnx.golden, vision)[0])
    return replace(
        limits,
        min_image_tokens=min(tokens, limits.min_image_tokens),
        max_image_tokens_per_image=max(tokens, limits.max_image_tokens_per_image),
    )


def profile_of(contract: Contract, config: VisionConfig, limits: Limits) -> Profile:
    """The one profile of an encoder: images within the limits, most often half as large as the
    largest."""
    block = config.merge_size**2
    least, most = limits.min_image_tokens * block, limits.max_image_tokens_per_image * block
    often = max(least, most // 2 // block * block)
    ranges: dict[str, Range] = {"P": (least, often, most)}
    if config.has_windows:
        side = config.window_side
        # the most windows has an image of one row of tokens
        many = -(-most // (config.merge_size * side))
        ranges["W"] = (1, min(many, -(-often // side**2)), many)
    return made("image", contract, ranges)
