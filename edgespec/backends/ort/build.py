"""Builds an ONNX Runtime engine: lowers the canonical graph, writes its weights, and proves it on the golden outputs.

Knows the order of the work. The rewrites stand in `lowering`, the directory's rules in `backends.engine_dir`.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from safetensors.numpy import load_file

from edgespec import bundle
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import Advance
from edgespec.backends.golden import check_golden
from edgespec.backends.ort import fingerprint
from edgespec.backends.ort.cache import cache_bytes
from edgespec.backends.ort.lowering import Lowered, lower
from edgespec.backends.ort.runner import OrtRunner, padding_of
from edgespec.backends.ort.weights import read_fp32
from edgespec.contract import Limits, Role, canonical_contract, lowered_contract


@dataclass(frozen=True, slots=True)
class Built:
    """What `build` made: role, engine file, its size, how far it is from the golden outputs (None: there were none)."""

    role: Role
    engine: Path
    size_bytes: int
    golden_difference: float | None
    seconds: float
    notes: tuple[str, ...] = ()


def build(
    onnx_dir: Path, engine_dir: Path, limits: Limits, *, spec_base: bool = False, spec_draft: bool = False,
    start: Advance = lambda total: None, advance: Advance = lambda amount: None,
) -> Built:  # fmt: skip
    """Build the engine of an exported directory into `engine_dir`; nothing is left behind when it fails.

    `start` is told the bytes to write, `advance` each part written. Raises BundleError, LimitError, PairingError or
    BuildError.
    """
    began = time.monotonic()
    engines.check_limits(limits)
    onnx = engines.open_onnx_dir(onnx_dir, spec_base=spec_base, spec_draft=spec_draft)
    engines.check_against_other(engine_dir, onnx)
    engines.read_engines(engine_dir)
    made = not engine_dir.exists()
    with bundle.writing(engine_dir):
        engine_dir.mkdir(parents=True, exist_ok=True)
        staging = bundle.make_staging(engine_dir, onnx.role.value)
    try:
        with bundle.writing(engine_dir):
            engine, difference = write_engine(onnx, limits, staging, start, advance)
            entry = manifest_entry(onnx, difference)
            engines.install(staging, engine_dir, onnx.role, entry)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if made:
            bundle.remove_if_empty(engine_dir)
    size = sum(file["bytes"] for file in engines.read_engines(engine_dir)[onnx.role.value]["files"].values())
    seconds = time.monotonic() - began
    return Built(onnx.role, engine_dir / engine.name, size, difference, seconds, remarks(onnx, limits))


def remarks(onnx: engines.OnnxDir, limits: Limits) -> tuple[str, ...]:
    """What the user should know about these limits for this model."""
    notes = []
    most, capacity = onnx.config.get("max_position_embeddings"), limits.max_kv_cache_capacity
    if most is not None and capacity > most:
        notes.append(f"the capacity of {capacity} goes beyond the {most} positions the model was made for")
    if limits.max_batch_size > 1:
        slots = capacity + padding_of(engines.engine_config(onnx, limits)["builder_config"])
        size = cache_bytes(engines.shape_of(onnx.config), limits.max_batch_size, slots)
        notes.append(
            f"the KV cache takes {size / 1e9:.2f} GB when all {limits.max_batch_size} sequences are {capacity} tokens "
            "long; memory is taken as it is written"
        )
    return tuple(notes)


def write_engine(
    onnx: engines.OnnxDir, limits: Limits, staging: Path, start: Advance, advance: Advance
) -> tuple[Path, float | None]:
    """Write all files of the engine to `staging` and compare it with the golden outputs."""
    path, batched = staging / f"{engines.STEMS[onnx.role]}.onnx", limits.max_batch_size > 1
    lowered = lower(ir.load(onnx.path / bundle.MODEL), f"{path.name}.data", batched)
    start(sum(weight.num_bytes for weight in lowered.weights))
    write_data(lowered, onnx.path, path.with_name(f"{path.name}.data"), advance)
    ir.save(lowered.model, path)
    bundle.write_json(staging / engines.CONFIGS[onnx.role], engines.engine_config(onnx, limits))
    engines.copy_sidecars(onnx, staging)
    if not (onnx.path / bundle.GOLDEN).is_file():
        return path, None
    golden = load_file(onnx.path / bundle.GOLDEN)
    capacity = golden["tree_attention_mask"].shape[-1]
    contract = lowered_contract(canonical_contract(engines.shape_of(onnx.config)), batched)
    runner = OrtRunner(path, contract, capacity, lanes=2 if batched else 1)
    try:
        return path, check_golden(runner, golden, engines.rope_of(onnx.config), capacity)
    finally:
        runner.close()


def write_data(lowered: Lowered, source: Path, path: Path, advance: Advance) -> None:
    with path.open("wb") as file:
        for weight in lowered.weights:
            file.write(b"\0" * (weight.offset - file.tell()))
            file.write(read_fp32(weight, source).data)
            advance(weight.num_bytes)


def manifest_entry(onnx: engines.OnnxDir, difference: float | None) -> dict[str, Any]:
    return {
        "backend": "ort",
        "fingerprint": fingerprint.fingerprint(),
        "source": onnx.manifest.get("source"),
        "golden_difference": difference,
    }
