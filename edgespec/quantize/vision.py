"""An image encoder's Linears in FP8: a scale for each weight, and one for what it multiplies, from
the largest values that occur over all images.

The encoder runs as its canonical graph, by ONNX Runtime: what is calibrated and compared here is
what `export` writes. Knows no text decoder and no ModelOpt, whose layout the tensors have.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.artifacts.manifest import QuantizeVision
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_weight
from edgespec.checkpoint.source import ByteSink
from edgespec.checkpoint.vision import (
    is_linear,
    stored_vision_names,
    vision_prefix,
    vision_quantization,
    vision_tensors,
)
from edgespec.checkpoint.writing import TensorChunk, array_piece, as_bytes
from edgespec.config import VisionConfig
from edgespec.errors import BuildError, UnsupportedModel
from edgespec.graphs.builder import WeightPlan, save
from edgespec.graphs.vision import VisionGraph
from edgespec.images import PreparedImage, read_processor
from edgespec.quantization.quantized_weight import dequantize
from edgespec.quantization.schemes import SCHEMES
from edgespec.quantize.base import Base, base_config
from edgespec.quantize.calibration_images import CalibrationImages
from edgespec.vision.contract import PIXELS
from edgespec.vision.grid import encoder_inputs

Array = NDArray[Any]
FP8 = SCHEMES["fp8"]
E4M3_MAX = 448.0
MAX_COMPARED = 16  # images of the check: their rows stay in memory
MIN_COSINE = 0.95  # of a row, in the mean: random weights give 0.998 in 4 layers, 0.986 in 32
_AMAX = "/amax"
_SAME_INPUT = ("gate_proj", "up_proj")  # they share their scales, so that engines may join them


@dataclass(frozen=True, slots=True)
class VisionPlan:
    """What is quantized of an image encoder: `layers`, own name -> module on disk. `kept` are the
    modules that keep their weights, as the settings name them."""

    checkpoint: Checkpoint
    config: VisionConfig
    prefix: str
    layers: Mapping[str, str]
    kept: tuple[str, ...]
    images: CalibrationImages

    @classmethod
    def of(cls, base: Base, dataset: Path | None) -> VisionPlan:
        """All Linears but the patch embedding. Raises UnsupportedModel without an image encoder,
        CheckpointError where its tensors or its processor's file are not those of its
        configuration, RequestError for a folder without images."""
        checkpoint = base.checkpoint
        config, prefix = base_config(checkpoint).vision, vision_prefix(checkpoint)
        if config is None or prefix is None:
            raise UnsupportedModel(
                f"`visual_quantization`: {checkpoint.place} has no image encoder.",
                "Omit the flag: this is a text model.",
            )
        stored = stored_vision_names(checkpoint, config)
        tensors = vision_tensors(config)
        layers = {
            name.removesuffix(".weight"): stored[name].removesuffix(".weight")
            for name, shape in tensors.items()
            if is_linear(name, shape)
        }
        others = (n for n, shape in tensors.items() if len(shape) > 1 and not is_linear(n, shape))
        kept = tuple(f"{prefix}{name.partition('.')[0]}*" for name in others)
        images = CalibrationImages.of(dataset, read_processor(checkpoint.path))
        return cls(checkpoint, config, prefix, layers, kept, images)

    def without(self, left_out: Iterable[str]) -> VisionPlan:
        """The same without modules on disk. Raises UnsupportedModel where none is left."""
        gone = set(left_out)
        layers = {own: module for own, module in self.layers.items() if module not in gone}
        if not layers:
            message = "no Linear of the image encoder is left to quantize."
            raise UnsupportedModel(message, "Omit some `exclude` flags, or `visual_quantization`.")
        out = (module for module in self.layers.values() if module in gone)
        return replace(self, layers=layers, kept=(*out, *self.kept))

    @property
    def size_bytes(self) -> int:
        """The size of the encoder's tensors."""
        tensors = self.checkpoint.tensors.items()
        return sum(info.num_bytes for name, info in tensors if name.startswith(self.prefix))


@dataclass(slots=True)
class Scales:
    """What calibration finds: the largest magnitude that each Linear multiplies, by own name, and
    the rows [T, H] of the first images in float32."""

    amax: dict[str, float]
    rows: list[list[Array]] = field(default_factory=list)
    num_images: int = 0
    num_patches: int = 0


def calibrate(plan: VisionPlan, advance: Callable[[int], None]) -> Scales:
    """Runs all images through the encoder as it is; calls `advance(1)` after each.

    Raises BuildError for a value that is not finite.
    """
    scales = Scales(dict.fromkeys(plan.layers, 0.0))
    with tempfile.TemporaryDirectory() as directory:
        encoder = RunningEncoder(plan.checkpoint, plan.config, Path(directory), tuple(plan.layers))
        for image in plan.images:
            rows, largest = encoder.run(image)
            for name, value in largest.items():
                if not math.isfinite(value):
                    raise BuildError(
                        f"{image.source}: what {plan.layers[name]} multiplies is not finite.",
                        "The image encoder's weights overflow: they cannot be quantized.",
                    )
                scales.amax[name] = max(scales.amax[name], value)
            if scales.num_images < MAX_COMPARED:
                scales.rows.append(rows)
            scales.num_images += 1
            scales.num_patches += len(image.pixel_values)
            advance(1)
    return scales


class RunningEncoder:
    """The canonical graph of an encoder in ONNX Runtime, which says what `probed` Linears (by own
    name) multiply. Its weights are written to `directory`, and mapped."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: VisionConfig,
        directory: Path,
        probed: Sequence[str] = (),
    ) -> None:
        import onnxruntime as ort

        self.config, plan = config, WeightPlan("vision.data")
        model = VisionGraph.open(checkpoint, config).build(plan)
        self.outputs = [str(value.name) for value in model.graph.outputs]
        if probed:
            probe(model, set(probed))
        with (directory / plan.location).open("wb") as file:
            for weight in plan.written_here():
                file.seek(weight.offset)
                weight.source.write_to(weight.info.name, file)
        path = directory / "vision.onnx"
        save(model, path)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        # Unchanged: fused nodes lack kernels for FP8
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.disable_prepacking", "1")
        self.session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_outputs()]

    def run(self, image: PreparedImage) -> tuple[list[Array], dict[str, float]]:
        """The outputs for an image, and the largest magnitudes by own name."""
        feeds = {PIXELS: image.pixel_values, **encoder_inputs(self.config, image.grid)}
        outputs = dict(zip(self.names, self.session.run(self.names, feeds), strict=True))
        largest = {
            name.removesuffix(_AMAX): float(value)
            for name, value in outputs.items()
            if name.endswith(_AMAX)
        }
        return [outputs[name] for name in self.outputs], largest


def probe(model: ir.Model, names: set[str]) -> None:
    """Adds an output to the graph for what each Linear multiplies: its largest magnitude."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "MatMul"]:
        own = weight_name(node)
        if own not in names:
            continue
        magnitude = ir.node("Abs", [node.inputs[0]])
        largest = ir.node("ReduceMax", [magnitude.outputs[0]], {"keepdims": 0})
        magnitude.outputs[0].name = f"{own}/abs"
        value = largest.outputs[0]
        value.name, value.shape = f"{own}{_AMAX}", ir.Shape(())
        value.type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(node, [magnitude, largest])
        graph.outputs.append(value)


def weight_name(node: ir.Node) -> str | None:
    """The own name of the Linear whose float weight a MatMul reads."""
    value = node.inputs[1]
    while value is not None and (maker := value.producer()) is not None:
        if maker.op_type not in ("Transpose", "Cast"):
            return None
        value = maker.inputs[0]
    return None if value is None or value.name is None else value.name.removesuffix(".weight")


# ---- what is written


class VisionPieces:
    """Replaces the weights of a plan among the tensors that are written."""

    def __init__(self, plan: VisionPlan, scales: Scales) -> None:
        self.plan, self.scales = plan, scales
        self.own = {f"{module}.weight": own for own, module in plan.layers.items()}

    def __call__(self, pieces: Iterable[TensorChunk]) -> Iterator[TensorChunk]:
        """Yields the pieces; a quantized weight is followed by its scales."""
        for piece in pieces:
            own = self.own.get(piece.name)
            if own is None:
                yield piece
            else:
                yield from self.linear(own, piece)

    def linear(self, own: str, piece: TensorChunk) -> Iterator[TensorChunk]:
        """Weight, input_scale and weight_scale of a Linear, as ModelOpt writes them."""
        checkpoint, module = self.plan.checkpoint, self.plan.layers[own]
        scale = scale_of(max(self.amax(name) for name in sharing(own, self.plan.layers)))

        def write(file: ByteSink) -> None:
            file.write(as_bytes(rounded(checkpoint.read(piece.name), scale)))

        yield TensorChunk(piece.name, "float8_e4m3fn", piece.shape, write)
        yield array_piece(f"{module}.input_scale", np.array(scale_of(self.scales.amax[own])))
        yield array_piece(f"{module}.weight_scale", np.array(scale))

    def amax(self, own: str) -> float:
        """The largest magnitude of a weight."""
        weight = self.plan.checkpoint.read(f"{self.plan.layers[own]}.weight")
        return float(np.abs(weight.astype(np.float32)).max())


def sharing(own: str, layers: Mapping[str, str]) -> list[str]:
    """The Linears whose weights have one scale: those of one input that engines may join."""
    parent, _, last = own.rpartition(".")
    names = [f"{parent}.{part}" for part in _SAME_INPUT] if last in _SAME_INPUT else [own]
    return [name for name in names if name in layers]


def scale_of(amax: float) -> np.float32:
    """The scale with which `amax` becomes the largest number of E4M3; 1 where all is zero."""
    return np.float32(amax / E4M3_MAX) if amax else np.float32(1)


def rounded(weight: Array, scale: np.float32) -> Array:
    """A weight in E4M3."""
    values = np.clip(weight.astype(np.float32) / scale, -E4M3_MAX, E4M3_MAX)
    codes: Array = values.astype(ml_dtypes.float8_e4m3fn)
    return codes


# ---- check


def compare(
    plan: VisionPlan, scales: Scales, written: Checkpoint, advance: Callable[[int], None]
) -> QuantizeVision:
    """The written encoder, read back and run with rounded activations, against the original over
    the first images. Raises BuildError for a result that is broken."""
    errors = weight_errors(plan, written)
    cosines: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        encoder = RunningEncoder(written, plan.config, Path(directory))
        for wanted, image in zip(scales.rows, plan.images, strict=False):
            rows, _ = encoder.run(image)
            for before, after in zip(wanted, rows, strict=True):
                cosines += cosine_of_rows(before, after).tolist()
            advance(1)
    check = QuantizeVision(
        num_images=scales.num_images,
        num_patches=scales.num_patches,
        rows_cosine=float(np.mean(cosines)),
        weight_errors=errors,
    )
    refuse_broken(check)
    return check


def weight_errors(plan: VisionPlan, written: Checkpoint) -> dict[str, float]:
    """The relative RMS error of each weight by its module on disk."""
    quantization = vision_quantization(written, plan.config)
    errors: dict[str, float] = {}
    for module in plan.layers.values():
        weight = quantization and read_weight(written, quantization, module)
        if not weight or weight.scheme is not FP8:
            raise BuildError(f"{module} was not written as {FP8.name}.", "Please report this.")
        wanted = plan.checkpoint.read(f"{module}.weight").astype(np.float32)
        size = float(np.linalg.norm(wanted))
        errors[module] = float(np.linalg.norm(dequantize(weight) - wanted)) / max(size, 1e-30)
    return errors


def cosine_of_rows(before: Array, after: Array) -> NDArray[np.float64]:
    """The cosine of each row [T]."""
    before, after = before.astype(np.float64), after.astype(np.float64)
    sizes = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
    cosines: NDArray[np.float64] = (before * after).sum(-1) / np.maximum(sizes, 1e-30)
    return cosines


def refuse_broken(check: QuantizeVision) -> None:
    """Raises BuildError for a check beyond the limits of FP8."""
    remedy = (
        "The result is broken and was removed. Give other images (`image_dataset`), or omit"
        " `visual_quantization`; if it happens again, please report it."
    )
    worst = check.max_weight_error
    if not worst <= FP8.max_weight_error:
        name = max(check.weight_errors, key=check.weight_errors.__getitem__)
        message = f"{name}: the relative error of the written weight is {worst:.3f}"
        raise BuildError(f"{message}; the limit is {FP8.max_weight_error}.", remedy)
    if not check.rows_cosine >= MIN_COSINE:
        raise BuildError(
            f"the quantized image encoder's rows have a cosine of {check.rows_cosine:.4f} with the"
            f" original's; {FP8.name} gives at least {MIN_COSINE}.",
            remedy,
        )
