"""Writes the engine of an image encoder: lowers the canonical graph, and writes its weights.

Knows the order of the work. Imports ONNX, which running an engine does not need.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from edgespec.backends.base import Progress, Staged
from edgespec.backends.onnx_dir import VisionOnnxDir
from edgespec.backends.ort.accuracy import accuracy_of, exported_weights, weights_of
from edgespec.backends.ort.data_layout import PackedWeight
from edgespec.backends.ort.options import WeightFormat
from edgespec.backends.ort.settings import EngineSettings
from edgespec.backends.ort.staging import write_data
from edgespec.backends.ort.vision_lowering import lower_vision


def stage_vision(
    onnx: VisionOnnxDir, path: Path, weight_format: WeightFormat, progress: Progress
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
    accuracy = accuracy_of(exported, weight_format, recurrent=False)
    low_bit = any(isinstance(weight, PackedWeight) for weight in lowered.weights)
    settings = EngineSettings.of(weight_format, cached=False, low_bit=low_bit)
    return Staged(engine=path, weights=weights, accuracy=accuracy, settings=settings.to_dict())


def planned(onnx: VisionOnnxDir, weight_format: WeightFormat) -> tuple[str, ...]:
    """What `stage_vision` would make, a line each. Raises what it would, but for kernels."""
    lowered = lower_vision(ir.load(onnx.model), "", weight_format)
    weights = weights_of(exported_weights(lowered.weights), weight_format, str(onnx.path))
    return (f"weights {weights.scheme}",)
