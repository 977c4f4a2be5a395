"""The component of an image encoder, beside that of its language model: a small value, and the
function that writes its files.

Knows the order in which files are made. Knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.artifacts import file_names, json_files
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.vision import vision_prefix
from edgespec.config import VisionConfig
from edgespec.contract import Role
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.export import sidecars, writer
from edgespec.export.component import Exported, finished, quantization_of, write_model
from edgespec.export.pieces import OpenPiece, open_piece
from edgespec.export.request import ExportRequest
from edgespec.families.vision import SECTION
from edgespec.graphs.assembly import GraphPart
from edgespec.graphs.builder import WeightPlan
from edgespec.graphs.completeness import WITHOUT_IMAGES, check_vision
from edgespec.graphs.vision import VisionGraph
from edgespec.progress import Progress
from edgespec.vision.component import VisionComponentConfig
from edgespec.vision.contract import PIXELS, vision_contract
from edgespec.vision.grid import Grid, encoder_inputs, num_patches

NO_PROCESSOR = (
    "the checkpoint has no preprocessor_config.json: put it beside config.json, remove visual/ of"
    " the export and export again, or no image can be prepared"
)
NO_VISION = "the checkpoint has no tensors of its image encoder: text alone is exported"
LEFT_OUT = "this version has no image encoder of this family: text alone is exported"


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionComponent:
    """What an export directory will hold of an image encoder. `config` has no identity yet."""

    graph: VisionGraph
    config: VisionComponentConfig
    checkpoint: Checkpoint
    directory: str = Role.VISUAL.value  # below OUT
    notes: tuple[str, ...] = ()


def vision_component(request: ExportRequest) -> VisionComponent | None:
    """The image encoder of the base of a request; None where there is none, or none is asked for.
    Raises CheckpointError where its tensors are not those of its configuration."""
    base = request.base
    if base is None or not request.writes_base or request.options.skip_visual:
        return None
    model, checkpoint = base.config, base.checkpoint
    if model.vision is None or model.image_tokens is None or lacks_vision(request):
        return None
    check_vision(checkpoint, model)
    config = VisionComponentConfig(
        model=model.architecture,
        vision=model.vision,
        tokens=model.image_tokens,
        identity="",  # write_vision knows it, once the weights are read
        quantized_from=base.origin.identity,
    )
    return VisionComponent(
        graph=VisionGraph.open(checkpoint, model.vision),
        config=config,
        checkpoint=checkpoint,
        notes=() if sidecars.processor_hashes(checkpoint) else (NO_PROCESSOR,),
    )


def why_no_vision(request: ExportRequest) -> str | None:
    """Why the base of a request, whose config.json has an image encoder, is exported without one
    that was asked for; None where it is not."""
    base = request.base
    if base is None or not request.writes_base or request.options.skip_visual:
        return None
    if base.config.vision is None and base.checkpoint.config.get(SECTION):
        return LEFT_OUT
    return NO_VISION if lacks_vision(request) else None


def lacks_vision(request: ExportRequest) -> bool:
    """Whether the base of a request declares an image encoder and has no tensors of one."""
    base = request.base
    return (
        base is not None
        and base.config.vision is not None
        and vision_prefix(base.checkpoint) is None
    )


def write_vision(
    component: VisionComponent,
    staging: Path,
    request: ExportRequest,
    recorded: Mapping[str, Any],
    progress: Progress,
) -> Exported:
    """Write the files of an image encoder to `staging`; `recorded` are the options of its
    manifest."""
    sidecars.copy_processor(component.checkpoint, staging)
    plan = WeightPlan(file_names.MODEL_DATA)
    model = built_graph(component, plan)
    quantization = quantization_of(model, component.graph.table)
    progress.start("image encoder", plan.size_bytes)
    digests = write_model(model, plan, staging, progress)
    identity = request.source(progress).identity
    config = replace(component.config, identity=identity, quantization=quantization)
    json_files.write_json(staging / file_names.CONFIG, config.to_dict())
    if request.options.golden:
        progress.start("golden", 1)
        arrays = golden_arrays(component.graph, staging)
        writer.write_small(arrays, staging / file_names.GOLDEN)
        progress.advance(1)
    return finished(config, staging, request, recorded, progress, digests, component.notes)


def built_graph(component: VisionComponent, plan: WeightPlan) -> ir.Model:
    """The canonical graph. UnsupportedModel or CheckpointError, with the way to text alone, for
    weights that it cannot represent and for damaged ones."""
    try:
        return component.graph.build(plan)
    except (CheckpointError, UnsupportedModel) as error:
        raise type(error)(error.what, f"{error.remedy} {WITHOUT_IMAGES}") from error


def vision_options(component: VisionComponent, request: ExportRequest) -> dict[str, Any]:
    """The options on which an image encoder depends: the same beside any base."""
    processor = sidecars.processor_hashes(component.checkpoint)
    return {"golden": request.options.golden, "processor": processor}


# ---- golden inputs and outputs


def golden_grid(config: VisionConfig) -> Grid:
    """An image that no window fits: some of them are cut off at both edges."""
    side = max(config.window_side, config.merge_size)
    return 1, side + config.merge_size, side + 3 * config.merge_size


def golden_arrays(graph: VisionGraph, directory: Path) -> dict[str, NDArray[Any]]:
    """One image, as pixels and grid, and what the canonical graph in `directory` makes of it; its
    weights are mapped, and none of them stands in memory in float32 as a whole."""
    config, grid = graph.config, golden_grid(graph.config)
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((num_patches(grid), config.patch_width), np.float32)
    piece = open_piece(encoder_piece(graph, WeightPlan(file_names.MODEL_DATA)), directory)
    stored: dict[str, NDArray[Any]] = {PIXELS: pixels, "grid": np.array(grid, np.int64)}
    return stored | encode(piece, config, pixels, grid)


# ---- the canonical graph, run without an engine


def encoder_piece(graph: VisionGraph, plan: WeightPlan) -> GraphPart:
    """The whole graph as one piece."""
    inputs = vision_contract(graph.config).inputs
    return GraphPart(graph.build(plan), tuple(spec.name for spec in inputs))


def encode(
    piece: OpenPiece, config: VisionConfig, pixels: NDArray[np.float32], grid: Grid
) -> dict[str, NDArray[Any]]:
    """What an encoder makes of one image's patches [P, patch_width], by the names of its
    contract."""
    (outputs,) = piece.run(piece.outputs, [{PIXELS: pixels, **encoder_inputs(config, grid)}])
    return dict(zip(piece.outputs, outputs, strict=True))
