"""One component as a value, and the one function that writes its files.

Knows the order in which files are made. What stands in them is decided where the value is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from edgespec.artifacts import file_names, hashes, json_files
from edgespec.artifacts.component import ComponentConfig
from edgespec.artifacts.graph_quantization import GraphQuantization
from edgespec.artifacts.manifest import ExportManifest
from edgespec.checkpoint.files import Checkpoint
from edgespec.config import RopeConfig
from edgespec.errors import ContractError
from edgespec.export import sidecars, writer
from edgespec.export.golden import make_golden
from edgespec.export.request import ExportRequest
from edgespec.graphs import builder
from edgespec.graphs.assembly import DecoderGraph, build_graph
from edgespec.graphs.builder import Weight, WeightPlan, save
from edgespec.graphs.linear import products
from edgespec.graphs.weights import WeightTable
from edgespec.progress import Progress
from edgespec.vision.component import VisionComponentConfig

EmbeddingRows = Callable[[NDArray[Any]], NDArray[Any]]  # ids [S] -> float32 rows [S, H]
Heads = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What an export directory will hold.

    `config` has no identities yet. `embedding` is the table to write: checkpoint and stored name.
    `golden_rows` are the embedding rows of the golden inputs, `ropes` the rotary embeddings of the
    layers. `d2t` are offsets [draft_vocab_size], `heads` the arrays of small heads by
    name. `tokenizer` is the checkpoint whose tokenizer is
    copied.
    """

    directory: str  # below OUT
    graph: DecoderGraph
    config: ComponentConfig
    golden_rows: EmbeddingRows
    ropes: tuple[RopeConfig, ...]
    embedding: tuple[Checkpoint, str] | None = None
    tied_head: bool = False
    d2t: NDArray[np.int32] | None = None
    heads: Heads = field(default_factory=dict)
    tokenizer: Checkpoint | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the component's directory and role, notes for the user, and what was
    written beside it."""

    directory: Path
    role: str
    files: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    beside: tuple[Exported, ...] = ()


def write_component(
    component: Component,
    staging: Path,
    request: ExportRequest,
    recorded: Mapping[str, Any],
    progress: Progress,
) -> Exported:
    """Write the files of a component to `staging`; `recorded` are the options of its manifest."""
    plan = WeightPlan(file_names.MODEL_DATA)
    if component.tokenizer is not None:
        sidecars.copy_tokenizer(component.tokenizer, staging)
    if component.tied_head:
        plan.point("lm_head.weight", tied_weight(component))
    config, digests = write_graph(component, plan, staging, request, progress)
    if component.d2t is not None:
        writer.write_small({"d2t": component.d2t}, staging / file_names.D2T)
    if component.heads:
        writer.write_small(dict(component.heads), staging / file_names.HEADS)
    if request.options.golden:
        write_golden(component, plan, staging, progress)
    return finished(config, staging, request, recorded, progress, digests, component.notes)


def finished(
    config: ComponentConfig | VisionComponentConfig,
    staging: Path,
    request: ExportRequest,
    recorded: Mapping[str, Any],
    progress: Progress,
    digests: Mapping[str, str],
    notes: tuple[str, ...],
) -> Exported:
    """Write the manifest, of all files that are there; `digests` are those made on the way."""
    schemes = config.quantization.schemes if config.quantization else None
    files = hashes.file_entries(staging, digests)
    manifest = ExportManifest.make(config.role, request.source(progress), recorded, files, schemes)
    json_files.write_json(staging / file_names.MANIFEST, manifest.to_dict())
    notes = (*notes, *sidecars.quantization_notes(config.quantization))
    return Exported(staging, config.role.value, files, notes)


def tied_weight(component: Component) -> Weight:
    """The embedding as the lm_head: the graph points into the file that the runtime maps."""
    assert component.embedding is not None
    checkpoint, name = component.embedding
    info = checkpoint.tensors[name]
    return Weight(checkpoint, info, file_names.EMBEDDING, builder.ALIGN_BYTES)


def write_graph(
    component: Component,
    plan: WeightPlan,
    staging: Path,
    request: ExportRequest,
    progress: Progress,
) -> tuple[ComponentConfig, dict[str, str]]:
    """Write graph, weights, embedding and config.json; returns the configuration as written, with
    what only the graph knows of its quantized weights, and the hashes made on the way."""
    model, _ = build_graph(component.graph, plan)
    config = replace(component.config, quantization=quantization_of(model, component.graph.table))
    embedding = component.embedding
    info = embedding[0].tensors[embedding[1]] if embedding else None
    progress.start("weights", plan.size_bytes + (info.num_bytes if info else 0))
    digests = {}
    if embedding and info:
        path = staging / file_names.EMBEDDING
        digests[path.name], _ = writer.write_embedding(embedding[0], info, path, progress.advance)
    digests |= write_model(model, plan, staging, progress)
    config = identified(config, request, progress)
    json_files.write_json(staging / file_names.CONFIG, config.to_dict())
    return config, digests


def identified(
    config: ComponentConfig, request: ExportRequest, progress: Progress
) -> ComponentConfig:
    """The config with the identities of its checkpoints, which are known once their weights are
    read. A draft in its base's checkpoint has the base's."""
    source = request.source(progress)
    config = replace(config, identity=source.identity)
    if config.pair is None:
        return config
    base = source.identity if request.writes_base else source.base_identity
    return replace(config, pair=replace(config.pair, base_identity=base))


def write_golden(component: Component, plan: WeightPlan, staging: Path, progress: Progress) -> None:
    """Write golden inputs and outputs, computed a layer at a time."""
    graph, config = component.graph, component.config
    progress.start("golden", graph.shape.num_layers + 2)
    arrays = make_golden(
        graph,
        plan,
        staging,
        component.golden_rows,
        component.ropes,
        config.vocab_size,
        lambda: progress.advance(1),
    )
    writer.write_small(arrays, staging / file_names.GOLDEN)


def quantization_of(model: ir.Model, table: WeightTable) -> GraphQuantization | None:
    """What config.json says of the quantized weights of a graph."""
    return sidecars.graph_quantization(products(model), table.checkpoint, table.quantization)


def write_model(
    model: ir.Model, plan: WeightPlan, staging: Path, progress: Progress
) -> dict[str, str]:
    """Write the weights and the graph, and run ONNX's checker with full shape inference. Returns
    the hash of the weights' file. ContractError for a graph that fails: a bug."""
    data, path = staging / file_names.MODEL_DATA, staging / file_names.MODEL
    digest = writer.write_weights(plan, data, progress.advance)
    save(model, path)
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ContractError(
            f"the graph written is not valid ONNX: {error}", "Please report this."
        ) from error
    return {data.name: digest}


def rows_of(checkpoint: Checkpoint, name: str) -> EmbeddingRows:
    """A function that reads the rows of a stored table."""

    def rows(ids: NDArray[Any]) -> NDArray[Any]:
        read = [checkpoint.read_rows(name, int(i), int(i) + 1) for i in ids]
        return np.concatenate(read).astype(np.float32)

    return rows
