"""Writes an ONNX Runtime engine: lowers the canonical graph, and writes its weights.

Knows the order of the work. The rewrites stand in `lowering`, what becomes of weights in `weights`,
and how close the engine has to come in `accuracy`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.artifacts import atomic, file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.artifacts.component_files import embedding_tensor
from edgespec.backends.base import Listeners, Staged
from edgespec.backends.engine_config import LargestWeight, SharedEmbedding, head_file
from edgespec.backends.onnx_dir import OnnxDir, VisionOnnxDir
from edgespec.backends.ort.accuracy import (
    accuracy_of,
    exported_weights,
    is_rounded,
    weights_of,
)
from edgespec.backends.ort.calibration import (
    CalibratedWeights,
    calibrated,
    key_of,
    working_directory,
)
from edgespec.backends.ort.contract import lowered_contract
from edgespec.backends.ort.data_file import (
    HEAD_DATA,
    AnyWeight,
    ExpertWeight,
    LowBitWeight,
    PackedWeight,
)
from edgespec.backends.ort.head_form import FORM, HeadForm, layout_keys
from edgespec.backends.ort.lowering import Lowered, lower
from edgespec.backends.ort.native.layout import FACTORS
from edgespec.backends.ort.options import WeightFormat
from edgespec.backends.ort.quantized_values import QuantizedValues
from edgespec.backends.ort.sensitivity import measured_groups
from edgespec.backends.ort.settings import EngineSettings
from edgespec.backends.ort.vision_lowering import lower_vision
from edgespec.backends.ort.weight_data import pieces
from edgespec.contract import Limits, canonical_contract
from edgespec.errors import BuildError
from edgespec.quantization.bit_budget import BitsByWeight, spend
from edgespec.quantization.block_forms import FORMS, FOUR_BITS, SIX_BITS
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize_stored
from edgespec.quantization.super_blocks import quantize_super_blocks
from edgespec.safe_read.tensors import numpy_dtype

HEAD = "lm_head"  # the name of its product
HEAD_WEIGHT = f"{HEAD}.weight"
COMPARED = 1 << 20  # numbers at a time


def stage(
    onnx: OnnxDir, path: Path, *, limits: Limits, weight_format: WeightFormat, progress: Listeners
) -> Staged:
    """Write the engine `path` and its weights beside it. BuildError where its weights cannot be
    what is asked for. Where they are calibrated, finished layers of a run that is stopped stay
    in the user's cache."""
    batched = limits.max_batch_size > 1
    data = path.with_name(f"{path.name}.data")
    graph = onnx.config.graph
    tree_cache = EngineSettings.of(weight_format, cached=not graph.heads).tree_cache
    bits = head_bits(onnx.config) if weight_format.size is None else None
    lowered = lower(ir.load(onnx.model), data.name, batched, weight_format, tree_cache, bits)
    capacity = limits.max_kv_cache_capacity
    calibration = None
    if weight_format.size is not None:
        refuse_too_few_bits(weight_format.size, four_bit_weights(lowered))
    if weight_format.calib_data is not None and weight_format.windows is not None:
        directory, windows = atomic.user_cache() / "gptq", np.array(weight_format.windows)
        names = {str(weight.source.name) for weight in four_bit_weights(lowered)}
        calibration = calibrated(onnx, windows, capacity, names, directory, progress)
    if weight_format.size is not None:
        bits = chosen_bits(onnx, lowered, weight_format, capacity, calibration, progress)
        lowered = lower(ir.load(onnx.model), data.name, batched, weight_format, tree_cache, bits)
    low_bit = any(isinstance(weight, PackedWeight) for weight in lowered.weights)
    settings = EngineSettings.of(weight_format, cached=not graph.heads, low_bit=low_bit)
    head = head_of(lowered)
    if lowered.head is not None:
        assert head is not None
        settings = replace(settings, head=HeadForm(head.layout, head.rounding))
    exported = exported_weights(lowered.weights)
    weights = weights_of(exported, weight_format, str(onnx.path))
    if weight_format.share_embedding:
        weights = replace(weights, embedding=shared_embedding(lowered, onnx))
    if weight_format.minimums and not exported:
        stored = stored_bits(lowered)
        weights = replace(weights, bits=round(stored.size, 4), mix=stored.text)
    progress.start(sum(weight.num_bytes for weight in lowered.weights))
    largest = write_data(lowered, onnx.path, data, progress.advance, calibration)
    if calibration is not None:
        atomic.remove_whole(calibration.directory)
    weights = replace(weights, largest=largest)
    ir.save(lowered.model, path)
    accuracy = accuracy_of(
        weights,
        rounded=is_rounded(exported, weight_format),
        recurrent=graph.recurrent is not None,
        cache=settings.cache,
    )
    return Staged(
        engine=path,
        contract=lowered_contract(
            canonical_contract(graph), batched, settings.tree_cache, settings.head_width
        ),
        weights=weights,
        # rows of a block see each other: none of them could be alone
        accuracy=replace(accuracy, bitwise=tree_cache is not None and not graph.block),
        settings=settings.to_dict(),
    )


def stage_vision(
    onnx: VisionOnnxDir, path: Path, weight_format: WeightFormat, progress: Listeners
) -> Staged:
    """Write the engine `path` and its weights beside it. BuildError where its weights cannot be
    what is asked for."""
    data = path.with_name(f"{path.name}.data")
    lowered = lower_vision(ir.load(onnx.model), data.name, weight_format)
    exported = exported_weights(lowered.weights)
    weights = weights_of(exported, weight_format, str(onnx.path))
    progress.start(sum(weight.num_bytes for weight in lowered.weights))
    write_data(lowered, onnx.path, data, progress.advance)
    ir.save(lowered.model, path)
    accuracy = accuracy_of(weights, rounded=is_rounded(exported, weight_format), recurrent=False)
    low_bit = any(isinstance(weight, PackedWeight) for weight in lowered.weights)
    settings = EngineSettings.of(weight_format, cached=False, low_bit=low_bit)
    return Staged(engine=path, weights=weights, accuracy=accuracy, settings=settings.to_dict())


def planned(onnx: VisionOnnxDir, weight_format: WeightFormat) -> tuple[str, ...]:
    """What `stage_vision` would make, a line each. Raises what it would, but for kernels."""
    lowered = lower_vision(ir.load(onnx.model), "", weight_format)
    weights = weights_of(exported_weights(lowered.weights), weight_format, str(onnx.path))
    return (f"weights {weights.scheme}",)


def shared_embedding(lowered: Lowered, onnx: OnnxDir) -> SharedEmbedding | None:
    """Where the quantized values of a tied lm_head stand, which serve as the embedding; None where
    it is not tied, or not of low bits in blocks."""
    for weight in lowered.weights:
        if isinstance(weight, PackedWeight) and weight.rounding.in_blocks:
            layout, scales_offset = weight.layout, None
            form: Any = {k: v for k, v in layout_keys(layout).items() if k in FORM} or None
            bits, block, rows = layout.bits, layout.block, layout.out_features
        elif isinstance(weight, LowBitWeight) and not weight.kernel.zero_points:
            kernel, form, scales_offset = weight.kernel, None, weight.scales_offset
            bits, block, rows = kernel.bits, kernel.block, kernel.out_features
        else:
            continue
        if is_embedding(weight.source, onnx):
            return SharedEmbedding(
                bits=bits,
                block=block,
                rows=rows,
                offset=weight.offset,
                scales_offset=scales_offset,
                form=form,
            )
    return None


def is_embedding(source: ir.ExternalTensor | QuantizedValues, onnx: OnnxDir) -> bool:
    """Whether a weight is the embedding: the same tensor, or quantized values of an lm_head that
    stand for its very numbers."""
    if isinstance(source, ir.ExternalTensor):
        return bool(source.location == file_names.EMBEDDING)
    path = onnx.path / file_names.EMBEDDING
    if source.name != HEAD or source.scheme.activations != "none" or not path.is_file():
        return False
    tensor = embedding_tensor(path, onnx.config)
    if tensor.shape != source.shape:
        return False
    dtype, step = numpy_dtype(tensor.dtype), max(1, COMPARED // tensor.shape[1])
    table = np.memmap(path, np.uint8, "r", tensor.offset, (tensor.num_bytes,)).view(dtype)
    table, weight = table.reshape(tensor.shape), None
    for low in range(0, len(table), step):
        some = slice(low, low + step)
        weight = weight or source.read(onnx.path)
        if not np.array_equal(table[some].astype(np.float32), dequantize_stored(weight, some)):
            return False
    return True


def head_of(lowered: Lowered) -> PackedWeight | None:
    """The weight of an lm_head that a kernel of our own reads, in a file of its own; None where
    there is none."""
    packed = (weight for weight in lowered.weights if isinstance(weight, PackedWeight))
    return next((weight for weight in packed if weight.alone), None)


def refuse_too_few_bits(size: float, weights: Sequence[PackedWeight]) -> None:
    """Raises BuildError for a budget of bits a weight that is below what all take in 4 bits."""
    shapes = [(weight.layout.out_features, weight.layout.in_features) for weight in weights]
    total = sum(rows * columns for rows, columns in shapes)
    bits = sum(rows * columns * FOUR_BITS.bits_of(columns) for rows, columns in shapes)
    if size * total < bits:
        message = f"`size` {size:g} is less than this model takes in int4: {bits / total:.4g}"
        raise BuildError(message, "Give more, or leave it out.")


def chosen_bits(
    onnx: OnnxDir,
    lowered: Lowered,
    weight_format: WeightFormat,
    capacity: int,
    calibration: CalibratedWeights | None,
    progress: Listeners,
) -> Mapping[str, int]:
    """The bits of each weight that is rounded here, within the budget of the format. What is
    measured for it stays in the user's cache where the run is stopped."""
    assert weight_format.size is not None
    windows = np.array(weight_format.windows)
    names = {str(weight.source.name) for weight in four_bit_weights(lowered)}
    tied = weight_format.share_embedding and shared_embedding(lowered, onnx) is not None
    method = f"sensitivity {tied} {weight_format.weights.method}"
    key = key_of(onnx, windows, capacity, {*names, method})
    directory = working_directory(atomic.user_cache() / "gptq", key)

    def rounded(name: str, array: NDArray[np.float32]) -> QuantizedWeight:
        if calibration is not None:
            return calibration.read(name)
        return quantize_super_blocks(array, name=name)

    groups = measured_groups(
        onnx, windows, capacity, names, rounded, directory, progress, tied=tied
    )
    atomic.remove_whole(directory)
    return spend(groups, weight_format.size)


def head_bits(config: ComponentConfig) -> Mapping[str, int]:
    """6 bits for an lm_head, which 4 would hurt most. Not for one of fewer tokens than the base
    has: a draft's, which changes no answer."""
    is_whole = config.draft_vocab_size in (None, config.vocab_size)
    return {HEAD_WEIGHT: SIX_BITS.bits} if is_whole else {}


def rounded_weights(lowered: Lowered) -> list[PackedWeight]:
    """The weights that are rounded here, to one of FORMS."""
    return [
        weight
        for weight in lowered.weights
        if isinstance(weight, PackedWeight)
        and isinstance(weight.source, ir.ExternalTensor)
        and weight.layout.scales in FACTORS
    ]


def four_bit_weights(lowered: Lowered) -> list[PackedWeight]:
    """Those of them that get 4 bits."""
    return [one for one in rounded_weights(lowered) if one.layout.bits == FOUR_BITS.bits]


def stored_bits(lowered: Lowered) -> BitsByWeight:
    """The bits of the weights that are rounded here."""
    weights = rounded_weights(lowered)
    bits = {str(weight.source.name): weight.layout.bits for weight in weights}
    layouts = [weight.layout for weight in weights]
    counts = [one.out_features * one.in_features for one in layouts]
    sizes = [FORMS[one.bits].bits_of(one.in_features) for one in layouts]
    return BitsByWeight(bits, float(np.average(sizes, weights=counts)))


def write_data(
    lowered: Lowered,
    source: Path,
    path: Path,
    advance: Callable[[int], None],
    calibration: CalibratedWeights | None = None,
) -> LargestWeight | None:
    """Write the weights, one at a time, to where the lowered graph looks for them, an lm_head to a
    file that has the name of its hash. Returns the lm_head, or the largest where it has no such
    file, if a kernel of our own reads it."""
    head = head_of(lowered)
    largest: AnyWeight | None = head
    if largest is None:
        whole = [weight for weight in lowered.weights if not isinstance(weight, ExpertWeight)]
        largest = max(whole, key=lambda weight: weight.num_bytes, default=None)
    digest = hashlib.sha256()
    with path.open("wb") as file, ExitStack() as stack:
        for weight in lowered.weights:
            into = file
            if weight is head:
                into = stack.enter_context(path.with_name(HEAD_DATA).open("wb"))
            for offset, array in pieces(weight, source, calibration):
                into.seek(offset)
                into.write(array.data)
                advance(array.nbytes)
                if weight is largest:
                    digest.update(array.data)
    if not isinstance(largest, PackedWeight):
        return None
    location = HEAD_DATA if head is not None else path.name
    value, sha256 = initializer_at(lowered.model, location, largest.offset), digest.hexdigest()
    record = LargestWeight(
        name=str(value.name), offset=largest.offset, shape=largest.layout.shape, sha256=sha256
    )
    if head is None:
        return record
    name = head_file(sha256)
    path.with_name(HEAD_DATA).replace(path.with_name(name))
    tensor = value.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    value.const_value = ir.ExternalTensor(
        name, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name
    )
    return replace(record, file=name)


def initializer_at(model: ir.Model, location: str, offset: int) -> ir.Value:
    """The initializer whose bytes begin there."""
    for value in model.graph.initializers.values():
        match value.const_value:
            case ir.ExternalTensor(location=file, offset=start):
                if (str(file), start) == (location, offset):
                    return value
    raise AssertionError(f"no initializer begins at {offset} of {location}")
