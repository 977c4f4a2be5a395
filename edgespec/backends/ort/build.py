"""Builds an ONNX Runtime engine: lowers the canonical graph, writes its weights, and proves it on
the golden outputs.

Knows the order of the work. The rewrites stand in `lowering`, the directory's rules in
`backends.engine_dir`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from safetensors.numpy import load_file

from edgespec import bundle
from edgespec.backends import engine_dir as engines
from edgespec.backends.base import Advance
from edgespec.backends.golden import MOVED, RECURRENT, ROUNDED, Agreement, check_golden, rounding
from edgespec.backends.ort import fingerprint
from edgespec.backends.ort.cache import cache_bytes
from edgespec.backends.ort.lowering import Lowered, lower
from edgespec.backends.ort.recurrent import uncommitted_bytes
from edgespec.backends.ort.runner import OrtRunner, head_table, padding_of
from edgespec.backends.ort.stored_codes import StoredCodes
from edgespec.backends.ort.weights import (
    AnyWeight,
    DequantizedWeight,
    IntegerWeight,
    LowBitWeight,
    pieces,
)
from edgespec.backends.weights import (
    EXACT_BLOCK,
    FP32,
    KEPT,
    WeightFormat,
    are_rounded,
    why_rows_differ,
)
from edgespec.config import RopeConfig
from edgespec.contract import RECURRENT_CHUNK, Limits, Role, canonical_contract, lowered_contract
from edgespec.errors import BuildError
from edgespec.schemes import EMULATED, SCHEMES, Scheme

# The cosine that a rounded engine's outputs must have with the golden ones, by bits. Measured: 0.96
# and 0.9996 on the demo base, 0.86 and 0.997 on random weights of seven layers, the worst case, and
# 0.79 where the embedding is of 4 bits too. Each weight is proven by itself before.
MIN_COSINE = {4: 0.65, 8: SCHEMES["int8_wo"].min_logits_cosine}
# The same where the export is quantised: the golden outputs have its weights and its static
# roundings of activations, but no dynamic ones. Measured on random weights, the worst case, of 2, 8
# and 24 layers: nvfp4 0.935, 0.803, 0.785; mxfp8 0.991, 0.975, 0.972; fp8_token 0.996, 0.986,
# 0.989; int8_token 0.999, 0.997, 0.997. Static ones: above 0.999. Each rounding is proven by itself
# before.
EXPORTED_COSINE = {"nvfp4": 0.7, "mxfp8": 0.95, "fp8_token": 0.95, "int8_token": 0.98}
STATIC_COSINE = 0.99
# Where layers are recurrent: what they read of their state is normed, however small it is, and so
# is its error. Measured on random weights of 4 and 24 layers: int4 0.54 and 0.48, int8 0.97 and
# more.
RECURRENT_COSINE = {4: 0.3, 8: 0.9}
UNMEASURED_ROUNDING = 1.0  # nats, where there are no golden outputs to measure it on
# Where edges of activations are few, 1e-5 met none on a golden prompt, and another prompt did: of
# FP4's sixteen values, and of a static scale, where one step of one value moved logits by a nat.
MOVED_BY = {"nvfp4": 1e-3, "fp8": 1e-4, "int8_sq": 1e-4, "w4a8_awq": 1e-4}


@dataclass(frozen=True, slots=True)
class Built:
    """What `build` made: role, engine file, its size, how far it is from the golden outputs (None:
    there were none).

    `golden_cosine` is told for weights that are not float32: of the engine's outputs with the
    golden ones.
    """

    role: Role
    engine: Path
    size_bytes: int
    golden_difference: float | None
    seconds: float
    notes: tuple[str, ...] = ()
    weights: Mapping[str, Any] = field(default_factory=FP32.to_dict)
    golden_cosine: float | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """An engine in its staging directory, and what was measured of it."""

    path: Path
    weights: Mapping[str, Any]
    agreement: Agreement | None


def build(
    onnx_dir: Path,
    engine_dir: Path,
    limits: Limits,
    *,
    spec_base: bool = False,
    spec_draft: bool = False,
    weight_format: WeightFormat = FP32,
    start: Advance = lambda total: None,
    advance: Advance = lambda amount: None,
) -> Built:
    """Build the engine of an exported directory into `engine_dir`; nothing is left behind when it
    fails.

    `start` is told the bytes to write, `advance` each part written. Raises BundleError, LimitError,
    PairingError or BuildError.
    """
    began = time.monotonic()
    engines.check_limits(limits)
    onnx = engines.open_onnx_dir(onnx_dir, spec_base=spec_base, spec_draft=spec_draft)
    engines.check_block_limit(onnx, limits)
    engines.check_against_other(engine_dir, onnx)
    engines.read_engines(engine_dir)
    made = not engine_dir.exists()
    with bundle.writing(engine_dir):
        engine_dir.mkdir(parents=True, exist_ok=True)
        staging = bundle.make_staging(engine_dir, onnx.role.value)
    try:
        with bundle.writing(engine_dir):
            written = write_engine(onnx, limits, staging, weight_format, start, advance)
            engines.install(staging, engine_dir, onnx.role, manifest_entry(onnx, written))
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if made:
            bundle.remove_if_empty(engine_dir)
    size = sum(
        file["bytes"]
        for file in engines.read_engines(engine_dir)[onnx.role.value]["files"].values()
    )
    agreement, rounded = written.agreement, are_rounded(written.weights)
    return Built(
        onnx.role,
        engine_dir / written.path.name,
        size,
        agreement.difference if agreement else None,
        time.monotonic() - began,
        (*remarks(onnx, limits), *weight_remarks(onnx, written.weights)),
        written.weights,
        agreement.cosine if agreement and rounded else None,
    )


def remarks(onnx: engines.OnnxDir, limits: Limits) -> tuple[str, ...]:
    """What the user should know about these limits for this model."""
    notes = []
    most, capacity = onnx.config.get("max_position_embeddings"), limits.max_kv_cache_capacity
    if most is not None and capacity > most:
        notes.append(
            f"the capacity of {capacity} goes beyond the {most} positions the model was made for"
        )
    if any(rope.kind == "longrope" for rope in engines.ropes_of(onnx.config)):
        notes.append(longrope_note(engines.rope_of(onnx.config), capacity))
    if limits.max_batch_size > 1:
        shape = engines.shape_of(onnx.config)
        slots = capacity + padding_of(
            engines.engine_config(onnx, limits)["builder_config"], block=shape.block
        )
        size = cache_bytes(shape, limits.max_batch_size, slots)
        notes.append(
            f"the KV cache takes {size / 1e9:.2f} GB when all {limits.max_batch_size} sequences are"
            f" {capacity} tokens long; memory is taken as it is written"
        )
    return (*notes, *recurrent_remarks(onnx, limits))


def longrope_note(rope: RopeConfig, capacity: int) -> str:
    """Which of longrope's factors the engine takes for all positions (decision 0012)."""
    original = rope.original_max_position
    if capacity > original:
        how = f"the long factors, as the capacity of {capacity} exceeds the original {original}"
    else:
        how = f"the short factors, as the capacity is within the original {original} tokens"
    return f"longrope: {how}"


def recurrent_remarks(onnx: engines.OnnxDir, limits: Limits) -> tuple[str, ...]:
    """What states cost, and what a partial acceptance costs beside them: the cap of it."""
    shape = engines.shape_of(onnx.config).recurrent
    if shape is None:
        return ()
    lanes, rows = limits.max_batch_size, max(RECURRENT_CHUNK, limits.max_verify_tree_size)
    sequences = f"{lanes} sequences takes" if lanes > 1 else "a sequence takes"
    states = f"the recurrent state of {sequences} {lanes * shape.state_bytes / 1e6:.1f} MB"
    cap = (
        f"rows that may be rejected at most {uncommitted_bytes(shape, lanes, rows) / 1e6:.1f} MB,"
        f" for {rows} a pass"
    )
    instead = f"a state a row would take {rows * lanes * shape.state_bytes / 1e6:.0f} MB"
    return (f"{states}; {cap} ({instead})",)


def weight_remarks(onnx: engines.OnnxDir, weights: Mapping[str, Any]) -> tuple[str, ...]:
    """What weights that are not float32 mean for the answers."""
    notes, role, recurrent = [], onnx.role, engines.shape_of(onnx.config).recurrent
    if emulated := weights.get("emulated"):
        notes.append(f"{weights['scheme']} is {emulated}")
    elif "float32" in weights.get("compute", ""):
        notes.append(
            f"{weights['scheme']} is computed in float32 here: as large and as slow as unquantised"
            " weights"
        )
    if "rounding" in weights and not are_rounded(weights) and role is not Role.DRAFT:
        notes.append(
            f"recurrent layers: lossless up to kernel rounding (margin {weights['rounding']:.2g}"
            " nats)"
        )
    if not are_rounded(weights):
        return tuple(notes)
    block = f" in blocks of {weights['block']}" if "block" in weights else ""
    if "embedding" in weights:
        notes.append(
            "the head's weights are the embedding too: --no-share-embedding keeps that as exported"
        )
    method = weights["method"] if weights["method"] == KEPT else "rounded to nearest"
    what = f"the weights of its matrix products are {weights['scheme']}{block}, {method}"
    if role is Role.DRAFT:
        return (*notes, f"{what}; a draft's weights change how much is accepted, not what is said")
    bitwise = (
        ", and bitwise with --exact"
        if recurrent is None and why_rows_differ(weights) is None
        else ""
    )
    margin = weights["rounding"]
    return (
        *notes,
        (
            f"{what}; speculation is lossless up to kernel rounding (margin {margin:.2g}"
            f" nats){bitwise}"
        ),
    )


def write_engine(
    onnx: engines.OnnxDir,
    limits: Limits,
    staging: Path,
    weight_format: WeightFormat,
    start: Advance,
    advance: Advance,
) -> Written:
    """Write all files of the engine to `staging` and compare it with the golden outputs."""
    path, batched = staging / f"{engines.STEMS[onnx.role]}.onnx", limits.max_batch_size > 1
    lowered = lower(ir.load(onnx.path / bundle.MODEL), f"{path.name}.data", batched, weight_format)
    promise = promise_of(onnx, lowered, weight_format)
    table = shared_table(lowered) if weight_format.share_embedding else None
    if table is not None:
        promise = replace(promise, weights=promise.weights | {"embedding": table})
    start(sum(weight.num_bytes for weight in lowered.weights))
    write_data(lowered, onnx.path, path.with_name(f"{path.name}.data"), advance)
    ir.save(lowered.model, path)
    engines.copy_sidecars(onnx, staging, skip=(bundle.EMBEDDING,) if table else ())
    weights, agreement = measured(onnx, path, promise, batched=batched)
    config = engines.engine_config(onnx, limits) | {"weights": weights}
    bundle.write_json(staging / engines.CONFIGS[onnx.role], config)
    return Written(path, weights, agreement)


@dataclass(frozen=True, slots=True)
class Promise:
    """What the weights of an engine are, as its config has it, and what may be asked of its
    outputs.

    `min_cosine` None: they are the golden ones but for the order of sums. `rounds`: activations are
    rounded, so that one row alone and one among many may differ; `moved_by` is how far embeddings
    are moved to find by how much.
    """

    weights: dict[str, Any]
    min_cosine: float | None
    rounds: bool
    moved_by: float = MOVED


def promise_of(onnx: engines.OnnxDir, lowered: Lowered, weight_format: WeightFormat) -> Promise:
    """Of weights that are rounded here, or of those that the export has. BuildError where both are
    asked for."""
    found = [
        (weight.source.scheme, weight)
        for weight in lowered.weights
        if isinstance(weight.source, StoredCodes)
    ]
    if not found:
        bits = weight_format.bits
        least_of = RECURRENT_COSINE if engines.shape_of(onnx.config).recurrent else MIN_COSINE
        return Promise(weight_format.to_dict(), least_of[bits] if bits else None, bits is not None)
    names = ", ".join(sorted({scheme.name for scheme, _ in found}))
    if weight_format.bits is not None:
        what = (
            f"{onnx.path} is quantised already ({names}), and --weights asks for"
            f" {weight_format.scheme}"
        )
        raise BuildError(what, "Leave --weights out, or export the unquantised checkpoint.")
    weights: dict[str, Any] = {"scheme": names, "method": KEPT}
    blocks = {weight.kernel.block for _, weight in found if isinstance(weight, LowBitWeight)}
    if len(blocks) == 1 and "," not in names:
        weights["block"] = blocks.pop()
    if computes := sorted(
        {COMPUTES[type(weight)] for _, weight in found if type(weight) in COMPUTES}
    ):
        weights["compute"] = ", ".join(computes)
    if any(
        isinstance(weight, DequantizedWeight) and is_emulated(scheme) for scheme, weight in found
    ):
        weights["emulated"] = EMULATED
    if all(keeps_bits(weight) for _, weight in found):
        weights["exact"] = True
    rounds = any(
        not isinstance(weight, DequantizedWeight) or scheme.activations != "none"
        for scheme, weight in found
    )
    least = min(EXPORTED_COSINE.get(scheme.name, STATIC_COSINE) for scheme, _ in found)
    if engines.shape_of(onnx.config).recurrent:
        least = min(
            least, RECURRENT_COSINE[4 if any(scheme.name == "nvfp4" for scheme, _ in found) else 8]
        )
    moved_by = max(MOVED_BY.get(scheme.name, MOVED) for scheme, _ in found)
    return Promise(weights, least if rounds else None, rounds, moved_by)


COMPUTES: dict[type[AnyWeight], str] = {DequantizedWeight: "float32", IntegerWeight: "int8"}


def is_emulated(scheme: Scheme) -> bool:
    return scheme.cpu == EMULATED or scheme.activations.startswith("dynamic")


def keeps_bits(weight: AnyWeight) -> bool:
    """Whether a row of the product has the same bits in every call of at least two rows (decision
    0006)."""
    if isinstance(weight, LowBitWeight):
        return (weight.kernel.bits, weight.kernel.block) == (4, EXACT_BLOCK)
    return isinstance(weight, IntegerWeight)


def measured(
    onnx: engines.OnnxDir, path: Path, promise: Promise, *, batched: bool
) -> tuple[dict[str, Any], Agreement | None]:
    """What the engine's config says of its weights, and how it agrees with the golden outputs, if
    there are any."""
    weights = promise.weights
    if not (onnx.path / bundle.GOLDEN).is_file():
        unmeasured = promise.rounds or engines.shape_of(onnx.config).recurrent is not None
        return weights | ({"rounding": UNMEASURED_ROUNDING} if unmeasured else {}), None
    golden, ropes = load_file(onnx.path / bundle.GOLDEN), engines.ropes_of(onnx.config)
    if "embedding" in weights:  # what the engine will read
        table = head_table(path, weights["embedding"], engines.shape_of(onnx.config).hidden_size)
        golden |= {
            f"{label}_inputs_embeds": table.rows(golden[f"{label}_ids"])[None]
            for label in ("prompt", "tree")
        }
    capacity = golden["tree_attention_mask"].shape[-1]
    contract = lowered_contract(canonical_contract(engines.shape_of(onnx.config)), batched)
    runner = OrtRunner(path, contract, capacity, lanes=2 if batched else 1)
    try:
        agreement = check_golden(runner, golden, ropes, promise.min_cosine)
        recurrent = contract.shape.recurrent is not None
        if promise.rounds or recurrent:
            margin, moved_by = (ROUNDED, promise.moved_by) if promise.rounds else (RECURRENT, 0.0)
            weights = weights | {"rounding": rounding(runner, golden, ropes, moved_by, margin)}
        return weights, agreement
    finally:
        runner.close()


def shared_table(lowered: Lowered) -> dict[str, int] | None:
    """Where the codes of a tied head stand, which serve as the embedding; None where the head is
    not tied."""
    for weight in lowered.weights:
        if (
            isinstance(weight, LowBitWeight)
            and getattr(weight.source, "location", None) == bundle.EMBEDDING
        ):
            kernel = weight.kernel
            form = {"bits": kernel.bits, "block": kernel.block, "rows": kernel.out_features}
            return form | {"offset": weight.offset, "scales_offset": weight.scales_offset}
    return None


def write_data(lowered: Lowered, source: Path, path: Path, advance: Advance) -> None:
    with path.open("wb") as file:
        for weight in lowered.weights:
            for offset, array in pieces(weight, source):
                file.seek(offset)
                file.write(array.data)
                advance(array.nbytes)


def manifest_entry(onnx: engines.OnnxDir, written: Written) -> dict[str, Any]:
    agreement = written.agreement
    entry = {
        "backend": "ort",
        "fingerprint": fingerprint.fingerprint(),
        "source": onnx.manifest.get("source"),
        "golden_difference": agreement.difference if agreement else None,
        "weights": dict(written.weights),
    }
    return entry | (
        {"golden_cosine": agreement.cosine} if agreement and are_rounded(written.weights) else {}
    )
