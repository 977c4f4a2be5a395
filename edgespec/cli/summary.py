"""What `edgespec inspect` found as aligned text: a title, and rows of a label and a value.

Knows words and columns. What is shown of it is decided in `edgespec.pipeline.inspection` and the packages that
it asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.artifacts.component import ComponentConfig, PairConfig
from edgespec.artifacts.graph_quantization import GraphQuantization
from edgespec.artifacts.manifest import QuantizeCheck, QuantizeManifest
from edgespec.backends.engine_config import EngineConfig, EngineWeights
from edgespec.backends.summary import EnginesSummary, EngineSummary, ExportSummary
from edgespec.checkpoint.summary import (
    CheckpointSummary,
    DtypeSummary,
    FileSummary,
    QuantizationSummary,
    WeightsSummary,
)
from edgespec.config import DecoderConfig, DraftConfig, ModelConfig, RopeConfig, VisionConfig
from edgespec.contract import Role, canonical_contract
from edgespec.errors import counted
from edgespec.methods import METHODS
from edgespec.runtime.costs.cost_profile import CostProfile
from edgespec.runtime.measuring import cost_description
from edgespec.vision.component import VisionComponentConfig

if TYPE_CHECKING:
    from edgespec.pipeline.inspection import Inspection

NUM_WORST = 3  # layers that are named without --layers
INDENT = 14
Rows = list[tuple[str, str]]


def text_of(inspection: Inspection, *, layers: bool, verify: bool) -> list[str]:
    """The lines that `edgespec inspect` prints; with `layers`, every Linear and tensor by name."""
    summary = inspection.summary
    if isinstance(summary, CheckpointSummary):
        title, rows = checkpoint_text(summary, layers)
        size = summary.weights.bytes if summary.weights else 0
    elif isinstance(summary, FileSummary):
        title, rows = file_text(summary, layers)
        size = summary.bytes
    elif isinstance(summary, ExportSummary):
        title, rows = export_text(summary, layers)
        size = summary.bytes
    else:
        title, rows = engines_text(summary, layers)
        rows += [row for profile in inspection.costs for row in cost_rows(profile)]
        size = summary.bytes
    rows += [("note", note) for note in inspection.notes]
    if not inspection.problems:
        rows.append(("complete", completeness(summary, verify)))
    shown = f" ({megabytes(size)})" if size else ""
    return [f"{title}: {inspection.path}{shown}", *aligned(rows)]


def completeness(
    summary: CheckpointSummary | FileSummary | ExportSummary | EnginesSummary, verify: bool
) -> str:
    """How far the files were compared with what is recorded of them."""
    if isinstance(summary, CheckpointSummary) and summary.pickled:
        return "not looked into"
    recorded = not isinstance(summary, CheckpointSummary | FileSummary)
    if not recorded and not (isinstance(summary, CheckpointSummary) and summary.record):
        return "as far as its headers say"
    return (
        "sizes and hashes are as recorded"
        if verify
        else "sizes are as recorded; --verify compares hashes"
    )


def aligned(rows: Rows) -> list[str]:
    """The lines of rows: each label padded to one width, then its text."""
    return [f"  {label:{INDENT - 2}}{text}".rstrip() for label, text in rows]


# Checkpoints


def checkpoint_text(summary: CheckpointSummary, layers: bool) -> tuple[str, Rows]:
    """The title and the rows of a checkpoint."""
    title = ", ".join(summary.architectures or []) or str(summary.model_type or "a checkpoint")
    rows: Rows = []
    config = summary.config
    if isinstance(config, DraftConfig):
        title = f"{METHODS[config.method].title} draft ({config.layout} layout)"
        rows += decoder_rows(config.decoder) + draft_rows(config)
    elif config is not None:
        rows += decoder_rows(config.decoder) + base_rows(config)
    if summary.parameters is not None:
        rows.append(parameter_row(summary.parameters))
    if summary.weights is not None:
        rows.append(tensor_row(summary.weights))
    if summary.parameters is not None:
        rows += quantization_rows(summary.quantization, layers)
    if summary.record:
        rows += quantized_rows(summary.record, layers)
    if summary.tokenizer:
        rows.append(("texts", ", ".join(summary.tokenizer)))
    return title, rows


def decoder_rows(decoder: DecoderConfig) -> Rows:
    """The rows of sizes and rotary embeddings; a draft may be without layers."""
    if not decoder.layers:
        return [("sizes", f"no layers, hidden {decoder.hidden_size}")]
    heads = f"{decoder.num_heads} heads ({decoder.num_kv_heads} KV) of {decoder.head_dim}"
    sizes = (
        f"{counted(decoder.num_layers, 'layer')}, hidden {decoder.hidden_size}, MLP"
        f" {decoder.intermediate_size}{experts_text(decoder)}"
    )
    window = f", window {decoder.sliding_window}" if decoder.sliding_window else ""
    if len(decoder.windows) > 1:
        windows = [attention.window for attention in decoder.attentions]
        window += f" in {len(windows) - windows.count(None)} of {len(windows)} layers"
    recurrent = decoder.layer_kinds.count("linear_attention")
    kinds = f", {recurrent} layers are gated delta nets" if recurrent else ""
    rotated = decoder.rope.rotary_dim
    part = f", {rotated} of {decoder.head_dim} elements" if rotated < decoder.head_dim else ""
    rows = [
        ("sizes", f"{sizes}, {heads}{window}{kinds}"),
        ("RoPE", f"{rope_text(decoder.rope)}{part}{axes_text(decoder.rope)}"),
    ]
    local = decoder.ropes[1:]
    return [*rows, *(("local RoPE", f"{rope_text(r)}, in layers with a window") for r in local)]


def experts_text(decoder: DecoderConfig) -> str:
    """How many experts layers have, and how many layers are so; empty without experts."""
    having = [layer.mlp for layer in decoder.layers if layer.mlp.experts is not None]
    if not having or having[0].experts is None:
        return ""
    experts = having[0].experts
    text = (
        f", {experts.count} experts of {having[0].intermediate_size}, {experts.per_token} a token"
    )
    return text + ("" if len(having) == decoder.num_layers else f", in {len(having)} layers")


def rope_text(rope: RopeConfig) -> str:
    """Kind, theta and, but for the default kind, the scaling factor."""
    factor = "" if rope.kind == "default" else f", factor {rope.factor:g}"
    return f"{rope.kind}, theta {rope.theta:g}{factor}"


def axes_text(rope: RopeConfig) -> str:
    """The pairs of each axis; empty where positions have one."""
    if not rope.mrope_section:
        return ""
    how = "interleaved " if rope.mrope_interleaved else ""
    return f", {how}M-RoPE of {'+'.join(map(str, rope.mrope_section))} pairs"


def base_rows(config: ModelConfig) -> Rows:
    """The rows of vocabulary, positions, and the drafts that the checkpoint declares."""
    head = "lm_head tied to the embedding" if config.tied_head else "an lm_head of its own"
    ends = ", ".join(map(str, config.eos_token_ids))
    rows = [
        ("vocabulary", f"{config.vocab_size}, {head}, {f'ends at {ends}' if ends else 'no end'}"),
        ("positions", str(config.max_position)),
    ]
    if config.vision is not None:
        rows += vision_rows(config.vision)
    return [*rows, *(row for method in METHODS.values() for row in method.base_rows(config))]


def draft_rows(config: DraftConfig) -> Rows:
    """The rows of vocabulary and aux layers, and what only the method has."""
    method = METHODS[config.method]
    layers = f"{method.default_layers} for the base's depth"
    if config.aux_layer_ids:
        layers = ", ".join(map(str, config.aux_layer_ids))
        if config.aux_layer_convention != "hs":
            layers += " (a numbering that the base's depth settles)"
    own = {"embedding": config.own_embedding, "lm_head": config.own_head}
    whose = [f"{name} {'of its own' if its else 'of the base'}" for name, its in own.items()]
    vocabulary = f"{config.draft_vocab_size} of {config.vocab_size}; {', '.join(whose)}"
    width = f"{config.num_aux_layers} of width {config.target_hidden_size}"
    return [
        ("vocabulary", vocabulary),
        ("aux layers", f"{width}: {layers}"),
        ("made for", config.base_name or "it does not say"),
        *method.config_rows(config),
    ]


def parameter_row(parts: Mapping[str, int]) -> tuple[str, str]:
    """The row of parameter counts: the total and each kind."""
    kinds = [f"{kind} {count_text(count)}" for kind, count in parts.items() if kind != "total"]
    return "parameters", f"{count_text(parts['total'])}: {', '.join(kinds)}"


def tensor_row(weights: WeightsSummary) -> tuple[str, str]:
    """The row of the tensors: how many, in which files, of which dtypes."""
    files = weights.files[0] if len(weights.files) == 1 else f"{len(weights.files)} files"
    return "tensors", f"{weights.num_tensors} in {files}: {types_text(weights.types)}"


def types_text(types: Mapping[str, DtypeSummary]) -> str:
    """Each dtype with its number of tensors and their bytes."""
    return ", ".join(
        f"{name} {row.tensors} ({megabytes(row.bytes)})" for name, row in types.items()
    )


def quantization_rows(quantization: QuantizationSummary | None, layers: bool) -> Rows:
    """The rows of a checkpoint's quantization: which Linears have which scheme."""
    if quantization is None:
        return [("quantized", "no")]
    rows: Rows = [("layout", f"{quantization.layout}, by {quantization.source}")]
    for name, row in quantization.schemes.items():
        blocks = blocks_text(row.blocks)
        rows.append((name, f"{row.linears} Linears{blocks}, activations {row.activations}"))
        rows += [("", module) for module in row.modules if layers]
    if quantization.kept:
        rows.append(("kept", ", ".join(quantization.kept if layers else folded(quantization.kept))))
    if quantization.kv_cache:
        rows.append(
            ("KV cache", f"{quantization.kv_cache.type}, {quantization.kv_cache.scales} scales")
        )
    return rows


def blocks_text(blocks: Sequence[int]) -> str:
    """Block sizes along the input dimension; empty without blocks."""
    return f" in blocks of {', '.join(map(str, blocks))}" if blocks else ""


def quantized_rows(manifest: QuantizeManifest, layers: bool) -> Rows:
    """The rows of what edgespec quantize recorded: sources, packages, and the checks' numbers."""
    packages, source = manifest.packages, manifest.request.source
    used = [
        f"{name} {packages[name]}"
        for name in ("nvidia-modelopt", "torch", "transformers")
        if packages.get(name)
    ]
    rows = [
        ("made from", f"{source.name} ({str(source.identity)[:12]})"),
        ("made with", ", ".join([f"edgespec {manifest.edgespec}", *used])),
    ]
    if manifest.check is not None:
        rows.append(("calibration", calibration_text(manifest)))
    if (visual := manifest.visual) is not None:
        close = f"cosine {visual.rows_cosine:.4f} of the encoder's rows"
        images = counted(visual.num_images, "image")
        rows.append(("images", f"{images} calibrated it: {close}"))
        rows += error_rows(visual.weight_errors, layers)
    return rows + (check_rows(manifest.check, layers) if manifest.check is not None else [])


def check_rows(check: QuantizeCheck, layers: bool) -> Rows:
    """The rows of a text decoder's check."""
    agreed = f"top-1 agreement {check.top1_agreement:.1%} of {check.num_tokens} tokens"
    rows = [("check", f"cosine {check.logits_cosine:.4f}, KL {check.logits_kl:.4f} nats, {agreed}")]
    before, after = check.perplexity_before, check.perplexity_after
    if before and after:
        rows.append(
            ("perplexity", f"{before:.3f} before, {after:.3f} after ({after / before - 1:+.2%})")
        )
    return rows + error_rows(check.weight_errors, layers)


def error_rows(weight_errors: Mapping[str, float], layers: bool) -> Rows:
    """The rows of the errors of weights: the worst ones, or with `layers` all."""
    errors = sorted(weight_errors.items(), key=lambda item: -item[1])
    shown = errors if layers else errors[:NUM_WORST]
    most = max(weight_errors.values(), default=0.0)
    worst = f"off by at most {most:.4f} of their size; the worst:"
    return [("weights", worst), *(("", f"{error:.4f} {name}") for name, error in shown)]


def calibration_text(manifest: QuantizeManifest) -> str:
    """How many samples and tokens of which data calibrated it."""
    calibrated, name = manifest.calibrated, manifest.request.calib_data
    if not calibrated.needed:
        return "none needed"
    name = "the shipped text" if name == "shipped" else name
    return f"{calibrated.num_samples} samples, {calibrated.num_tokens} tokens of {name}"


# Image encoders


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
    if config.inner_mergers:
        layers = ", ".join(map(str, config.inner_mergers))
        parts.append(f"features of layers {layers} as well")
    return [("encoder", sizes), ("images", ", ".join(parts))]


def encoder_rows(config: VisionComponentConfig) -> Rows:
    """The rows of config.json."""
    origin = f", quantized from {config.quantized_from[:12]}" if config.quantized_from else ""
    return [
        ("model", config.model),
        *vision_rows(config.vision),
        ("identity", f"{config.identity[:12]}{origin}"),
    ]


# Exports and engines


def export_text(summary: ExportSummary, layers: bool) -> tuple[str, Rows]:
    """The title and the rows of an exported component."""
    config, manifest = summary.config, summary.manifest
    rows: Rows = []
    if isinstance(config, ComponentConfig):
        rows += component_rows(config, summary.cache_bytes_per_token or 0)
    elif config is not None:
        rows += encoder_rows(config)
    if config is not None:
        rows += exported_rows(config.quantization)
    golden = (
        "golden inputs and outputs are there"
        if summary.golden
        else "no golden outputs: build checks nothing"
    )
    rows.append(("golden", golden))
    if manifest is not None:
        rows.append(("made from", source_text(manifest.source.to_dict())))
        rows.append(("made with", f"edgespec {manifest.edgespec}"))
    if layers:
        rows += [("file", f"{name} ({megabytes(size)})") for name, size in summary.files.items()]
    return f"export, {config.role.value if config else 'unknown role'}", rows


def component_rows(config: ComponentConfig, cache_bytes_per_token: int) -> Rows:
    """The rows of a component's config.json."""
    heads = f"{config.num_heads} heads ({config.num_kv_heads} KV) of {config.head_dim}"
    sizes = f"{counted(config.num_layers, 'layer')}, hidden {config.hidden_size}, {heads}"
    if not config.num_layers:
        sizes = f"no layers, hidden {config.hidden_size}"
    rows = [("model", f"{config.model}, {sizes}")]
    if config.pair is None:
        rows.append(("vocabulary", str(config.vocab_size)))
        rows.append(("positions", f"at most {config.max_position}"))
    else:
        rows.append(("vocabulary", f"{config.draft_vocab_size} of {config.vocab_size}"))
        rows += pair_rows(config.method or "", config.pair)
    if config.method:
        rows += METHODS[config.method].spec_rows(config.spec)
    origin = f", quantized from {config.quantized_from[:12]}" if config.quantized_from else ""
    rows.append(("identity", f"{config.identity[:12]}{origin}"))
    if recurrent := config.graph.recurrent:
        count = f"{len(recurrent.layers)} of {config.num_layers} layers"
        rows.append(
            (
                "state",
                f"{megabytes(canonical_contract(config.graph).state_bytes)} a sequence, in {count}",
            )
        )
    if not config.num_layers:
        return rows
    return [*rows, ("KV cache", f"{cache_bytes_per_token / 1024:.1f} KiB a token")]


def pair_rows(method: str, pair: PairConfig) -> Rows:
    """The rows of what a draft asks of its base."""
    ids, identity = pair.aux_layer_ids, pair.base_identity
    layers = ", ".join(map(str, ids)) if ids else METHODS[method].default_layers
    known = identity[:12] if identity else "not compared with a base"
    made_for = ("made for", f"{pair.base_name or 'a base'} ({known})")
    return [("aux layers", layers), made_for] if METHODS[method].reads_base else [made_for]


def exported_rows(quantization: GraphQuantization | None) -> Rows:
    """The rows of an export's quantization; `kept` are the Linears in float."""
    if quantization is None:
        return [("quantized", "no")]
    rows = []
    for name, use in quantization.schemes.items():
        rounded = "in the graph" if use.activations_in_graph else "by engines that can"
        where = "" if use.activations == "none" else f", rounded {rounded}"
        text = (
            f"{use.linears} Linears{blocks_text(use.blocks)}, activations {use.activations}{where}"
        )
        rows.append((name, text))
    if quantization.unquantized:
        rows.append(("kept", ", ".join(folded(quantization.unquantized))))
    if quantization.kv_cache:
        rows.append(
            ("scales", f"of a {quantization.kv_cache.type} cache are recorded, and not applied")
        )
    return rows


def source_text(source: Mapping[str, Any] | None) -> str:
    """The checkpoint's name and the first 12 digits of its identity."""
    if source is None:
        return "not recorded"
    return f"{source.get('name')} ({str(source.get('identity'))[:12]})"


def engines_text(summary: EnginesSummary, layers: bool) -> tuple[str, Rows]:
    """The title and the rows of a directory of engines, with how base and draft are paired."""
    rows: Rows = []
    for role, engine in summary.engines.items():
        entry = engine.entry
        source = source_text(entry.source)
        rows.append((role.value, f"{entry.backend}, {megabytes(entry.size_bytes)}, from {source}"))
        rows += [("", text) for text in engine_lines(engine)]
        if layers:
            files = entry.files.items()
            rows += [("", f"{name} ({megabytes(file.size_bytes)})") for name, file in files]
    if summary.pairing is not None:
        rows.append(("pairing", PAIRING[summary.pairing.by]))
    return "engines", rows


def cost_rows(profile: CostProfile) -> Rows:
    """The rows of what steps cost here: that of a plain one in milliseconds, others beside it."""
    method = METHODS.get(profile.method or "")
    of = "" if method is None else f" with {method.title}"
    title = f"{profile.role.value}{of}, measured here; rows and drafts in plain steps"
    lines = [*cost_description.table(profile), *filter(None, [profile.busy])]
    return [("costs", title), *(("", line) for line in lines)]


PAIRING = {
    "identity": "base and draft belong together: the draft was exported for this base",
    "origin": "base and draft belong together: they stem from the same weights before quantizing",
    "shapes": "base and draft fit by their shapes; the draft was exported without its base",
    None: "base and draft do not belong together",
}


def engine_lines(engine: EngineSummary) -> list[str]:
    """The lines of one engine. Rounding matters where its output is the answer."""
    lines = list[str]()
    config, entry, here = engine.config, engine.entry, engine.runs_here
    if config is not None:
        lines.append(weights_text(config.weights))
        if isinstance(config, EngineConfig) and config.role is not Role.DRAFT:
            lines += losslessness(config)
        for prefix, bound in (("max_", "at most"), ("min_", "at least")):
            sizes = [
                f"{name.removeprefix(prefix).replace('_', ' ')} {size}"
                for name, size in config.limits.to_dict(config.role).items()
                if name.startswith(prefix)
            ]
            lines += [f"{bound} {', '.join(sizes)}"] if sizes else []
        if isinstance(config, EngineConfig) and config.variants:
            capacities = ", ".join(map(str, config.limits.capacities))
            lines.append(f"an engine for each kv cache capacity: {capacities}")
    difference, cosine = entry.golden_difference, entry.golden_cosine
    if difference is not None:
        close = f"{difference:.1e}" if cosine is None else f"cosine {cosine:.4f}"
        lines.append(f"golden outputs reproduced to {close}")
    if entry.divergence is not None:
        lines.append(entry.divergence.text(entry.weights.scheme))
    runs = "runs on this machine" if here.answer else f"does not run here: {here.why}"
    return [*lines, runs]


def weights_text(weights: EngineWeights) -> str:
    """How an engine keeps its weights, and the type that it computes in."""
    block = blocks_text([] if weights.block is None else [weights.block])
    computed = weights.method if weights.compute is None else f"computed in {weights.compute}"
    parts = [f"weights {weights.scheme}{block}", computed, *filter(None, [weights.mix])]
    if weights.emulated:
        parts.append(weights.emulated)
    return "; ".join(parts)


def losslessness(config: EngineConfig) -> list[str]:
    """What drafts leave unchanged: up to which margin in nats, and whether --exact is possible."""
    if config.weights.is_bitwise:
        return ["lossless, bitwise: a row has the same bits in every pass"]
    rounding, why = config.weights.rounding, config.why_not_exact
    margin = f" up to kernel rounding (margin {rounding:.2g} nats)" if rounding else ""
    exact = "--exact is possible" if why is None else f"no --exact: {why}"
    return [f"lossless{margin}; {exact}"]


# One file


def file_text(summary: FileSummary, layers: bool) -> tuple[str, Rows]:
    """The title and the rows of a safetensors file."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, info in summary.tensors.items():
        alike.setdefault((info.dtype, str(list(info.shape))), []).append(name)
    rows = [("tensors", f"{len(summary.tensors)}: {types_text(summary.types)}")]
    for (dtype, shape), names in alike.items():
        rows += [("", f"{dtype} {shape} {name}") for name in (names if layers else folded(names))]
    return "safetensors", rows


# Words


def folded(names: Iterable[str]) -> list[str]:
    """Names that differ in one number as one: layers.0.up_proj, layers.1.up_proj ->
    layers.0-1.up_proj."""
    groups: dict[str, list[int]] = {}
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        key = f"{name[: number.start()]}\0{name[number.end() :]}" if number else name
        groups.setdefault(key, []).extend([int(number[0])] if number else [])
    return [key.replace("\0", ranges(numbers)) for key, numbers in groups.items()]


def ranges(numbers: list[int]) -> str:
    """Numbers in ascending order, successive ones joined: `0-2,5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def megabytes(size: int) -> str:
    """Bytes in MB (1e6), or in kB (1e3) below 0.1 MB."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def count_text(count: int) -> str:
    """A count in B (1e9), M (1e6) or k (1e3), with two decimals."""
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return str(count)
