"""ONNX Runtime on the CPU as a backend.

Knows its words, its options and where its parts stand. Imports ONNX Runtime where an engine is
built or opened, and not before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec.backends.base import (
    AccuracySpec,
    Backend,
    BuildOptions,
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
from edgespec.backends.engine_config import EngineConfig, EngineWeights
from edgespec.backends.findings import Finding
from edgespec.backends.onnx_dir import AnyOnnxDir, VisionOnnxDir
from edgespec.backends.ort import fingerprint
from edgespec.backends.ort.cache import padding_of
from edgespec.backends.ort.contract import lowered_contract
from edgespec.backends.ort.native.library import why_missing
from edgespec.backends.ort.options import (
    FLOAT32_TOLERANCE,
    NATIVE,
    OPTIONS,
    WeightFormat,
    better_weights,
    parse_options,
)
from edgespec.backends.ort.settings import EngineSettings, settings_of
from edgespec.config import VisionConfig
from edgespec.contract import RECURRENT_CHUNK, Limits, Role, canonical_contract

if TYPE_CHECKING:
    from edgespec.backends.ort.runner import OrtRunner


class OrtBackend(Backend):
    """Engines of ONNX Runtime's CPU kernels."""

    name = "ort"
    title = "ONNX Runtime on the CPU"
    suffixes = (".onnx", ".onnx.data")
    roles = tuple(Role)
    options = OPTIONS
    remedies = Remedies(
        mismatch="This ONNX Runtime computes another result.",
        too_coarse=(
            "Build with finer weights (`weights` int8, `weight_block` 32 or fp32) or a finer cache"
            " (`kv_cache_dtype` fp16 or fp32), or export a finer format."
        ),
    )
    # More rows cost more than they bring on a CPU: of a block's rows each costs nearly in full
    # from about eight on (decision 0003)
    plan_hints = PlanHints(steps=3, block_nodes=8)
    float32_tolerance = FLOAT32_TOLERANCE

    def row_cost(self, config: EngineConfig) -> float:
        """Measured on Qwen3-0.6B's shape behind 128 tokens, of 2 to 60 rows: ONNX Runtime expands
        low-bit weights in blocks again for each few rows, others are read once for all."""
        weights = config.weights
        read_once = not weights.is_low_bit or (
            weights.scheme.startswith("int8") and weights.block is None
        )
        if read_once:
            return 0.05
        return 0.08 if settings_of(config).kernels == NATIVE else 0.18

    def parse_options(self, values: Mapping[str, OptionValue]) -> WeightFormat:
        """The format of the engine's weights; OptionError where options contradict each other."""
        return parse_options(values)

    def stage(
        self,
        onnx: AnyOnnxDir,
        limits: Limits,
        options: BuildOptions,
        staging: Path,
        progress: Listeners,
    ) -> Staged:
        """Lower the canonical graph and write it with its data file to `staging`. ContractError
        where the graph has another form, BuildError where a kernel computes something else."""
        fingerprint.ort_version()  # before what imports it
        from edgespec.backends.ort.staging import stage, stage_vision

        assert isinstance(options, WeightFormat)
        path = self.engine_path(staging, onnx.role)
        if isinstance(onnx, VisionOnnxDir):  # its sizes are those of each call
            return stage_vision(onnx, path, options, progress)
        return stage(onnx, path, limits=limits, weight_format=options, progress=progress)

    def plan(self, onnx: AnyOnnxDir, limits: Limits, options: BuildOptions) -> tuple[str, ...]:
        """The weights of an image encoder. BuildError where they cannot be what is asked for."""
        fingerprint.ort_version()
        from edgespec.backends.ort.staging import planned

        del limits
        assert isinstance(options, WeightFormat)
        return planned(onnx, options) if isinstance(onnx, VisionOnnxDir) else ()

    def open_staged(self, staged: Staged, capacity: int, lanes: int) -> Runner:
        """A runner of the staged engine, with its lm_head as embedding table where they are
        shared."""
        from edgespec.backends.ort.pair_weights import PairWeights
        from edgespec.backends.ort.runner import OrtRunner, lm_head_table, open_head

        assert staged.contract is not None
        form, weights = EngineSettings.read(staged.settings, "").head, staged.weights
        head = open_head(staged.engine, form, weights, PairWeights())
        runner = OrtRunner(staged.engine, staged.contract, capacity, lanes, head=head)
        hidden_size = staged.contract.shape.hidden_size
        runner.table = lm_head_table(staged.engine, weights, hidden_size)
        return runner

    def open_device(self) -> PairDevice:
        """What the engines of a pair share: their largest weight."""
        from edgespec.backends.ort.pair_weights import PairWeights

        return PairWeights()

    def open(self, engine_dir: Path, config: EngineConfig, device: PairDevice) -> OrtRunner:
        """A runner of a finished engine. EnvironmentProblem where it cannot be opened."""
        from edgespec.backends.ort.pair_weights import PairWeights
        from edgespec.backends.ort.runner import open_engine

        assert isinstance(device, PairWeights)
        return open_engine(self.engine_path(engine_dir, config.role), config, device)

    def fingerprint(self) -> dict[str, Any]:
        """The version of ONNX Runtime and the CPU, as JSON."""
        return fingerprint.fingerprint()

    def check_fingerprint(self, stored: Mapping[str, Any], name: str) -> None:
        """EngineMismatch where the engine was built by another ONNX Runtime or for another CPU."""
        fingerprint.check(stored, name)

    def memory(self, config: EngineConfig) -> EngineMemory:
        """Bytes of KV cache per token, and of recurrent state per sequence."""
        own = settings_of(config)
        contract = lowered_contract(
            canonical_contract(config.component.graph), tree_cache=own.tree_cache
        )
        return EngineMemory(
            kv_bytes_per_token=contract.kv_bytes_per_token, state_bytes=contract.state_bytes
        )

    def notes(self, config: EngineConfig) -> tuple[str, ...]:
        """Notes on the KV cache, the recurrent state, kernels in float32 and a shared lm_head."""
        notes = (*self.kernel_notes(config), *self.cache_notes(config), *self.state_notes(config))
        weights = config.weights
        if "float32" in (weights.compute or "") and not weights.emulated:
            subject = f"{weights.scheme} is computed in float32 here"
            notes += (f"{subject}: as large and as slow as unquantized weights",)
        if weights.embedding is not None:
            subject = "the lm_head's weights are the embedding too"
            notes += (f"{subject}: `no_share_embedding` keeps that as exported",)
        return notes

    def kernel_notes(self, config: EngineConfig) -> tuple[str, ...]:
        """Notes on whose kernels attend, and on a KV cache that is rounded."""
        own = settings_of(config)
        if own.kernels != NATIVE:
            missing = why_missing()
            return () if missing is None else (f"on ONNX Runtime's kernels: {missing}",)
        if own.cache == "float32":
            return ()
        return (f"keys and values are rounded to {own.cache} in the cache",)

    def cache_notes(self, config: EngineConfig) -> tuple[str, ...]:
        """Notes on the size of the KV cache of several sequences, in GB."""
        limits = config.limits
        lanes, capacity = limits.max_batch_size, limits.max_kv_cache_capacity
        if lanes == 1 or not self.memory(config).kv_bytes_per_token:
            return ()
        slots = capacity + padding_of(limits, block=config.component.graph.block)
        size = lanes * slots * self.memory(config).kv_bytes_per_token
        full = f"when all {lanes} sequences are {capacity} tokens long"
        return (f"the KV cache takes {size / 1e9:.2f} GB {full}; memory is taken as it is written",)

    def state_notes(self, config: EngineConfig) -> tuple[str, ...]:
        """A note on the size of recurrent states, and of the rows that wait for acceptance, in
        MB."""
        from edgespec.backends.ort.recurrent import uncommitted_bytes

        shape = config.component.graph.recurrent
        if shape is None:
            return ()
        lanes = config.limits.max_batch_size
        rows = max(RECURRENT_CHUNK, config.limits.verify_tree_size)
        state_bytes = self.memory(config).state_bytes
        sequences = f"{lanes} sequences takes" if lanes > 1 else "a sequence takes"
        states = f"the recurrent state of {sequences} {lanes * state_bytes / 1e6:.1f} MB"
        cap = (
            "rows that may be rejected at most"
            f" {uncommitted_bytes(shape, lanes, rows) / 1e6:.1f} MB, for {rows} a pass"
        )
        instead = f"a state a row would take {rows * lanes * state_bytes / 1e6:.0f} MB"
        return (f"{states}; {cap} ({instead})",)

    def better_weights(self, weights: EngineWeights) -> str | None:
        """Smaller blocks, then more bits."""
        return better_weights(weights)

    def open_encoder(
        self, path: Path, config: VisionConfig, settings: Mapping[str, Any]
    ) -> EncoderRunner:
        """A runner of an image encoder. EnvironmentProblem where it cannot be opened."""
        from edgespec.backends.ort.vision_runner import OrtEncoder

        return OrtEncoder(path, config, EngineSettings.read(settings, str(path)))

    # ---- what `edgespec verify` asks

    def accuracy(self, config: EngineConfig) -> AccuracySpec:
        """What the outputs of a finished engine must keep."""
        from edgespec.backends.ort.accuracy import accuracy_of

        return accuracy_of(
            config.weights,
            rounded=config.weights.is_quantized,
            recurrent=config.component.graph.recurrent is not None,
            cache=settings_of(config).cache,
        )

    def self_test(self, runner: Runner) -> list[Finding]:
        """Where calls write in the cache."""
        from edgespec.backends.ort.self_test import self_test

        return self_test(runner)

    def kernels(self, engine_dir: Path, config: EngineConfig, runner: Runner) -> dict[str, int]:
        """The nodes of the engine's graph by operator."""
        from edgespec.backends.ort.self_test import nodes_of

        return nodes_of(self.engine_path(engine_dir, config.role))

    def device(self) -> dict[str, Any]:
        """The version of ONNX Runtime, and the CPU with its name and cores."""
        return self.fingerprint() | {"cpu": fingerprint.cpu_name(), "cores": os.cpu_count()}

    def device_memory(self, runner: Runner) -> dict[str, int]:
        """The KV cache, in host memory, of which pages are taken as they are written."""
        from edgespec.backends.ort.runner import OrtRunner

        assert isinstance(runner, OrtRunner)
        return {"kv_cache": runner.cache.memory.nbytes}


BACKEND = OrtBackend()
