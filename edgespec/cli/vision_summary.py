"""What `edgespec inspect` says of an image encoder: of a checkpoint's, of an exported one and of a
built one. Knows words."""

from __future__ import annotations

from edgespec.artifacts.graph_quantization import GraphQuantization
from edgespec.backends.vision.summary import VisionSummary
from edgespec.config import VisionConfig
from edgespec.errors import counted
from edgespec.vision.component import VisionComponentConfig

Rows = list[tuple[str, str]]


def vision_rows(config: VisionConfig) -> Rows:
    """The rows of an encoder's sizes."""
    heads = f"{config.num_heads} heads of {config.head_dim}"
    sizes = (
        f"{counted(config.num_layers, 'layer')}, hidden {config.hidden_size}, MLP"
        f" {config.intermediate_size}, {heads}"
    )
    side = config.patch_size * config.merge_size
    parts = [f"a token for {side} x {side} pixels"]
    if config.has_windows:
        full = len(config.full_attention_layers)
        parts.append(f"windows of {config.window_side} x {config.window_side} patches")
        parts.append(f"{counted(full, 'layer')} without")
    if config.position_grid:
        parts.append(f"learned positions, {config.position_grid} x {config.position_grid}")
    if config.deepstack_layers:
        layers = ", ".join(map(str, config.deepstack_layers))
        parts.append(f"features of layers {layers} as well")
    return [("encoder", sizes), ("images", ", ".join(parts))]


def visual_text(summary: VisionSummary, layers: bool) -> tuple[str, Rows]:
    """The title and the rows of an exported or a built image encoder."""
    rows: Rows = []
    if summary.config is not None:
        rows += component_rows(summary.config)
    rows += exported_rows(summary) if summary.entry is None else engine_rows(summary)
    if layers:
        rows += [("file", f"{name} ({size / 1e6:.1f} MB)") for name, size in summary.files.items()]
    return ("export" if summary.entry is None else "engine") + ", visual", rows


def component_rows(config: VisionComponentConfig) -> Rows:
    """The rows of config.json."""
    origin = f", quantized from {config.quantized_from[:12]}" if config.quantized_from else ""
    return [
        ("model", config.model),
        *vision_rows(config.vision),
        ("identity", f"{config.identity[:12]}{origin}"),
        *quantized_rows(config.quantization),
    ]


def quantized_rows(found: GraphQuantization | None) -> Rows:
    """The rows of quantized Linears: none where all are in float."""
    schemes = found.schemes if found is not None else {}
    return [
        (name, f"{counted(use.linears, 'Linear')}, activations {use.activations}")
        for name, use in schemes.items()
    ]


def exported_rows(summary: VisionSummary) -> Rows:
    """The rows of an export alone."""
    there = "golden inputs and outputs are there"
    rows = [("golden", there if summary.golden else "no golden outputs: build checks nothing")]
    if (manifest := summary.manifest) is not None:
        rows.append(("made from", f"{manifest.source.name} ({manifest.source.identity[:12]})"))
        rows.append(("made with", f"edgespec {manifest.edgespec}"))
    return rows


def engine_rows(summary: VisionSummary) -> Rows:
    """The rows of an engine alone."""
    entry, here, engine = summary.entry, summary.runs_here, summary.engine
    assert entry is not None
    assert here is not None
    emulated = f", {entry.weights.emulated}" if entry.weights.emulated else ""
    rows = [("engine", f"{entry.backend}, weights {entry.weights.scheme}{emulated}")]
    if engine is not None:
        limits = engine.limits
        one = f"{limits.min_image_tokens} to {limits.max_image_tokens_per_image}"
        rows.append(("limits", f"{one} tokens an image, {limits.max_image_tokens} a request"))
    difference, cosine = entry.golden_difference, entry.golden_cosine
    if difference is not None:
        close = f"{difference:.1e}" if cosine is None else f"cosine {cosine:.4f}"
        rows.append(("golden", f"golden outputs reproduced to {close}"))
    runs = "runs on this machine" if here.answer else f"does not run here: {here.why}"
    return [*rows, ("here", runs)]
