"""TensorRT and TensorRT-RTX as backends: two rows of one class.

Knows their words, their options and where their parts stand. Imports the library where an engine is
built, and not before: --help and `inspect` need none.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from edgespec.backends.base import (
    AccuracySpec,
    Backend,
    BuildOptions,
    Emission,
    EncoderRunner,
    EngineMemory,
    Listeners,
    OptionValue,
    PairDevice,
    PlanHints,
    Remedies,
    Runner,
    Staged,
)
from edgespec.backends.emitted import SCRIPT
from edgespec.backends.engine_config import EngineConfig
from edgespec.backends.findings import Finding
from edgespec.backends.onnx_dir import AnyOnnxDir, OnnxDir, VisionOnnxDir
from edgespec.backends.tensorrt import fingerprint
from edgespec.backends.tensorrt.accuracy import FLOAT32_TOLERANCE, accuracy_of, schemes_in
from edgespec.backends.tensorrt.contract import lowered_contract
from edgespec.backends.tensorrt.devices import device_here
from edgespec.backends.tensorrt.options import TensorRTOptions, options_of, parse_options
from edgespec.backends.tensorrt.settings import EngineSettings
from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.backends.tensorrt.versions import RTX, TENSORRT, Library
from edgespec.config import VisionConfig
from edgespec.contract import GraphContract, Limits, Role, canonical_contract
from edgespec.errors import EnvironmentProblem, LimitError
from edgespec.vision.contract import vision_contract


class TensorRTBackend(Backend):
    """Engines of TensorRT, which builds them on their own device."""

    library: ClassVar[Library] = TENSORRT
    name, title = TENSORRT.backend, TENSORRT.title
    options = options_of(TENSORRT)
    suffixes = (".engine",)
    remedies = Remedies(
        mismatch="This version of the library, or this device, computes another result.",
        too_coarse="Build with a finer type (`compute` fp32), or export a finer format.",
    )
    # A verified row costs little on a GPU until its arithmetic is full
    plan_hints = PlanHints(steps=5, block_nodes=16)
    float32_tolerance = FLOAT32_TOLERANCE
    roles = tuple(Role)
    several_capacities = True  # a call reads the whole cache, which has a fixed length

    def parse_options(self, values: Mapping[str, OptionValue]) -> TensorRTOptions:
        """What the user chose; OptionError names a flag with a wrong value."""
        return parse_options(values)

    def stage(
        self,
        onnx: AnyOnnxDir,
        limits: Limits,
        options: BuildOptions,
        staging: Path,
        progress: Listeners,
    ) -> Staged:
        """Lower the canonical graph and build it in a process of its own. MissingDependency without
        the library, BuildError with its words where it refuses."""
        from edgespec.backends.tensorrt.staging import stage

        assert isinstance(options, TensorRTOptions)
        path = self.engine_path(staging, onnx.role)
        return stage(self.library, onnx, limits, options, path, progress)

    def check(self, onnx: OnnxDir, limits: Limits, options: BuildOptions) -> tuple[str, ...]:
        """What is slow, or may not fit. LimitError or EnvironmentProblem where an engine cannot be
        built here, or cannot be on its device."""
        from edgespec.backends.tensorrt.estimate import estimate
        from edgespec.backends.tensorrt.staging import plan_to_build, warnings_of

        assert isinstance(options, TensorRTOptions)
        warnings = list[str]()
        for capacity in reversed(limits.capacities):
            plan = plan_to_build(self.library, onnx, limits.at(capacity), options)
            warnings += warnings_of(plan, estimate(onnx.config, plan))
        return tuple(dict.fromkeys(warnings))

    def plan(self, onnx: AnyOnnxDir, limits: Limits, options: BuildOptions) -> tuple[str, ...]:
        """What a build would make: its profiles and its memory, for each capacity. Refuses what a
        build would, but for a device that is not here."""
        from edgespec.backends.tensorrt import estimate
        from edgespec.backends.tensorrt.staging import (
            checked_model,
            plan_of,
            version_here,
            warnings_of,
        )

        assert isinstance(options, TensorRTOptions)
        version = version_here(self.library, options)
        if isinstance(onnx, VisionOnnxDir):
            plan = plan_of(self.library, onnx, limits, options, version)
            checked_model(onnx, plan)
            return tuple(estimate.lines(plan, None))
        lines, memories = list[str](), list[estimate.MemoryEstimate]()
        for capacity in limits.capacities:
            plan = plan_of(self.library, onnx, limits.at(capacity), options, version)
            memory = estimate.estimate(onnx.config, plan)
            warnings = [f"warning: {text}" for text in warnings_of(plan, memory)]
            checked_model(onnx, plan)
            lines += estimate.lines(plan, memory)
            lines += [text for text in warnings if text not in lines]
            memories.append(memory)
        return (*lines, *estimate.together(memories))

    def emit_dir(self, options: BuildOptions) -> Path | None:
        """The directory of --emit-onnx."""
        assert isinstance(options, TensorRTOptions)
        return options.emit_onnx

    def emit(
        self, onnx: OnnxDir, limits: Limits, options: BuildOptions, directory: Path
    ) -> Emission:
        """Write the lowered graph with its weights to `directory`, and the command that builds
        it."""
        from edgespec.backends.tensorrt import emit, lowered_files
        from edgespec.backends.tensorrt.staging import (
            checked_model,
            decomposes_attention,
            plan_of,
            version_here,
        )
        from edgespec.backends.tensorrt.versions import build_environment, faults_of

        assert isinstance(options, TensorRTOptions)
        if len(limits.capacities) > 1:
            message = "`emit_onnx` writes the graph of one capacity, and several are named"
            raise LimitError(message, "Write each to a directory of its own.")
        version = version_here(self.library, options)
        plan = plan_of(self.library, onnx, limits, options, version)
        model = checked_model(onnx, plan)
        decomposed = decomposes_attention(plan)
        if decomposed:
            emit.let_decompose(model)
        lowered_files.write(model, onnx.path, directory, shutil.copyfile)
        words = emit.command_of(plan, options, self.engine_path(Path(), onnx.role).name)
        variables = build_environment(faults_of(self.library, version), {})
        script = emit.script_of(words, variables)
        emit.write_script(directory, script)
        return Emission(
            lines=(
                f"on the device run {SCRIPT} in it, and edgespec import with its directory:",
                script.rstrip(),
            ),
            weights=plan.weights,
            settings=plan.settings(decomposed_attention=decomposed).to_dict(),
        )

    def imported(self, engine: Path, config: EngineConfig) -> Staged:
        """An engine of this device and of the installed version: no other ones open here."""
        from edgespec.backends.tensorrt.bindings import load
        from edgespec.backends.tensorrt.devices import check_formats

        settings, device = self.settings_of(config), device_here()
        version = load(self.library).version
        if device is None:
            message = "no CUDA device is here, and an engine says what it is when it is opened"
            raise EnvironmentProblem(message, "Import it on the device that it was built for.")
        schemes = schemes_in(config.weights.scheme)
        check_formats(device.sm, schemes, settings.compute)
        settings, graph = replace(settings, version=version, sm=device.sm), config.component.graph
        recurrent = graph.recurrent is not None
        return Staged(
            engine=engine,
            contract=lowered_contract(canonical_contract(graph), settings),
            weights=config.weights,
            accuracy=accuracy_of(schemes, settings.compute, recurrent=recurrent),
            settings=settings.to_dict(),
            fingerprint=fingerprint.fingerprint_of(self.library, version, device.sm),
        )

    def open_staged(self, staged: Staged, capacity: int, lanes: int) -> Runner:
        """A runner of a staged engine. MissingDependency without the library or a Python package
        of CUDA."""
        assert staged.contract is not None
        canonical = canonical_contract(staged.contract.shape)
        settings = EngineSettings.read(staged.settings, canonical, "the staged engine")
        from edgespec.backends.cuda.device.opening import open_device
        from edgespec.backends.cuda.workspace import Workspace

        device = Workspace(open_device())
        return self.opened(staged.engine, settings, device, capacity, lanes, canonical)

    def open_device(self) -> PairDevice:
        """The workspace of a pair. MissingDependency without a Python package of CUDA,
        EnvironmentProblem without a device."""
        from edgespec.backends.cuda.device.opening import open_device
        from edgespec.backends.cuda.workspace import Workspace

        return Workspace(open_device(), shared=True)

    def open(self, engine_dir: Path, config: EngineConfig, device: PairDevice) -> Runner:
        """A runner of a finished engine. MissingDependency without the library or a Python package
        of CUDA, EnvironmentProblem where memory does not do."""
        component, limits = config.component, config.limits
        canonical = canonical_contract(component.graph)
        settings = self.settings_of(config)
        path = self.engine_path(engine_dir, component.graph.role, config.variant)
        slots, lanes = limits.max_kv_cache_capacity, limits.max_batch_size
        return self.opened(path, settings, device, slots, lanes, canonical)

    def open_capacities(
        self,
        engine_dir: Path,
        config: EngineConfig,
        device: PairDevice,
        closing: Callable[[], None],
    ) -> Runner:
        """The engines of one role, opened as they are needed."""
        from edgespec.backends.tensorrt.capacities import CapacityEngine, VariantRunner

        variants = []
        for capacity in config.limits.capacities:
            own = config.at(capacity)
            path = self.engine_path(engine_dir, config.role, own.variant)
            opening = partial(self.open, engine_dir, own, device)
            variants.append(CapacityEngine(capacity, self.slots(own), path.stat().st_size, opening))
        return VariantRunner(variants, closing)

    def opened(
        self,
        path: Path,
        settings: EngineSettings,
        device: PairDevice,
        capacity: int,
        lanes: int,
        canonical: GraphContract,
    ) -> Runner:
        """A runner of an engine file on a device."""
        from edgespec.backends.cuda.workspace import Workspace
        from edgespec.backends.tensorrt import bindings, runner

        assert isinstance(device, Workspace)
        loaded, contract = bindings.load(self.library), lowered_contract(canonical, settings)
        return runner.open_runner(loaded, path, contract, settings, device, capacity, lanes)

    def fingerprint(self) -> dict[str, Any]:
        """Version, compute capability and system of this machine. MissingDependency without the
        library, EnvironmentProblem without a CUDA device."""
        from edgespec.backends.tensorrt.bindings import load

        version, device = load(self.library).version, device_here()
        if device is None:
            raise EnvironmentProblem("no CUDA device is here", "Install NVIDIA's driver.")
        return fingerprint.fingerprint_of(self.library, version, device.sm)

    def check_fingerprint(self, stored: Mapping[str, Any], name: str) -> None:
        """EngineMismatch where the engine is for another version, device or system."""
        fingerprint.check(stored, self.library, name)

    def memory(self, config: EngineConfig) -> EngineMemory:
        """Bytes of KV cache per token, and of recurrent state per sequence, which has two places:
        one that is read and one that is written."""
        contract = self.contract(config)
        return EngineMemory(
            kv_bytes_per_token=contract.kv_bytes_per_token, state_bytes=2 * contract.state_bytes
        )

    def slots(self, config: EngineConfig) -> int:
        """The length of a lane's cache in the engine."""
        return self.settings_of(config).capacity

    def contract(self, config: EngineConfig) -> GraphContract:
        """The contract of an engine's graph with one slot; before it is built, of one in
        float16."""
        canonical = canonical_contract(config.component.graph)
        target = Target(dialect=Dialect.NATIVE, compute="float16", capacity=1, max_rows=1)
        if config.settings:
            target = replace(self.settings_of(config), capacity=1)
        return lowered_contract(canonical, target)

    def total_memory_bytes(self) -> int | None:
        """The memory of the CUDA device that is here; None where there is none: engines are for
        another machine then."""
        device = device_here()
        return None if device is None else device.memory_bytes

    def notes(self, config: EngineConfig) -> tuple[str, ...]:
        """What was built, and for which device."""
        from edgespec.backends.tensorrt.devices import title_of

        settings = self.settings_of(config)
        library = f"{self.title} {settings.version}"
        how = f"{settings.dialect.value} graph, {settings.compute}"
        how += ", attention of basic operators" if settings.decomposed_attention else ""
        notes = [f"for {title_of(settings.sm)} and {library} alone: {how}"]
        quantization = config.component.quantization
        if quantization is not None and quantization.kv_cache is not None:  # it takes no FP8
            scales = f"the checkpoint's scales for a {quantization.kv_cache.type} KV cache"
            notes.append(f"{scales} are not applied: the cache is {settings.compute}")
        return tuple(notes)

    def open_encoder(
        self, path: Path, config: VisionConfig, settings: Mapping[str, Any]
    ) -> EncoderRunner:
        """A runner of an image encoder, on a workspace of its own. MissingDependency without the
        library or a Python package of CUDA, EnvironmentProblem where memory does not do."""
        from edgespec.backends.cuda.device import opening
        from edgespec.backends.cuda.workspace import Workspace
        from edgespec.backends.tensorrt.bindings import load
        from edgespec.backends.tensorrt.vision_runner import open_encoder

        own = EngineSettings.read(settings, vision_contract(config), str(path))
        loaded = load(self.library)
        return open_encoder(loaded, path, config, own, Workspace(opening.open_device()))

    # ---- what `edgespec verify` asks

    def settings_of(self, config: EngineConfig) -> EngineSettings:
        """The engine's part of its config.json."""
        canonical = canonical_contract(config.component.graph)
        return EngineSettings.read(config.settings, canonical, config.component.model)

    def accuracy(self, config: EngineConfig) -> AccuracySpec:
        """What the outputs of a finished engine must keep."""
        compute, recurrent = (
            self.settings_of(config).compute,
            bool(config.component.graph.recurrent),
        )
        return accuracy_of(schemes_in(config.weights.scheme), compute, recurrent=recurrent)

    def self_test(self, runner: Runner) -> list[Finding]:
        """What is written in place, and where calls write."""
        from edgespec.backends.tensorrt.self_test import self_test

        return self_test(runner)

    def kernels(self, engine_dir: Path, config: EngineConfig, runner: Runner) -> dict[str, int]:
        """The engine's layers, as the library's inspector tells them."""
        from edgespec.backends.tensorrt.runner import TensorRTRunner
        from edgespec.backends.tensorrt.self_test import layers_of

        assert isinstance(runner, TensorRTRunner)
        return layers_of(runner.engine)

    def device(self) -> dict[str, Any]:
        """The library's version, and the CUDA device with its driver."""
        device = device_here()
        return self.fingerprint() | ({} if device is None else asdict(device))

    def device_memory(self, runner: Runner) -> dict[str, int]:
        """Weights, caches, states, and the memory in which engines work."""
        from edgespec.backends.tensorrt.runner import TensorRTRunner
        from edgespec.backends.tensorrt.self_test import memory_of

        assert isinstance(runner, TensorRTRunner)
        return memory_of(runner)


class RtxBackend(TensorRTBackend):
    """Engines of TensorRT-RTX, which compiles for RTX cards on any machine."""

    library = RTX
    name, title = RTX.backend, RTX.title
    options = options_of(RTX)


BACKEND = TensorRTBackend()
RTX_BACKEND = RtxBackend()
