"""What `edgespec inspect` found as aligned text: a title, and rows of a label and a value.

Knows words and columns. What is shown of it is decided in `edgespec.inspection` and the rooms that
it asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec import bundle
from edgespec.checkpoint.summary import (
    CheckpointSummary,
    DtypeSummary,
    FileSummary,
    QuantizationSummary,
    WeightsSummary,
)
from edgespec.component import ComponentConfig, PairConfig
from edgespec.config import DecoderConfig, DraftConfig, ModelConfig, RopeConfig
from edgespec.contract import canonical_contract
from edgespec.manifest import QuantizeManifest
from edgespec.methods import METHODS

if TYPE_CHECKING:
    from edgespec.inspection import Inspection

NUM_WORST = 3  # layers that are named without --layers
INDENT = 14
Rows = list[tuple[str, str]]


def text_of(found: Inspection, *, layers: bool, verify: bool) -> list[str]:
    """The lines that `edgespec inspect` prints; with `layers`, every Linear and tensor by name."""
    summary = found.summary
    if isinstance(summary, CheckpointSummary):
        title, rows = checkpoint_text(summary, layers)
        size = summary.weights.bytes if summary.weights else 0
    elif isinstance(summary, FileSummary):
        title, rows = file_text(summary, layers)
        size = summary.bytes
    else:
        title, rows = SHOWN[summary["kind"]](summary, layers)
        size = summary.get("bytes", 0)
    rows += [("note", note) for note in found.notes]
    if not found.problems:
        rows.append(("complete", completeness(summary, verify)))
    shown = f" ({megabytes(size)})" if size else ""
    return [f"{title}: {found.path}{shown}", *aligned(rows)]


def completeness(summary: CheckpointSummary | FileSummary | Mapping[str, Any], verify: bool) -> str:
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
    return [f"  {label:{INDENT - 2}}{text}".rstrip() for label, text in rows]


# Checkpoints


def checkpoint_text(summary: CheckpointSummary, layers: bool) -> tuple[str, Rows]:
    """The title and the rows of a checkpoint."""
    title = ", ".join(summary.architectures or []) or str(summary.model_type or "a checkpoint")
    rows: Rows = []
    found = summary.found
    if isinstance(found, DraftConfig):
        title = f"{METHODS[found.method].title} draft ({found.layout} layout)"
        rows += decoder_rows(found.decoder) + draft_rows(found)
    elif found is not None:
        rows += decoder_rows(found.decoder) + base_rows(found)
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
    """Sizes and rotary embeddings."""
    heads = f"{decoder.num_heads} heads ({decoder.num_kv_heads} KV) of {decoder.head_dim}"
    sizes = (
        f"{decoder.num_layers} layers, hidden {decoder.hidden_size}, MLP"
        f" {decoder.intermediate_size}"
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
        ("RoPE", f"{rope_text(decoder.rope)}{part}"),
    ]
    local = decoder.ropes[1:]
    return [*rows, *(("local RoPE", f"{rope_text(r)}, in layers with a window") for r in local)]


def rope_text(rope: RopeConfig) -> str:
    factor = "" if rope.kind == "default" else f", factor {rope.factor:g}"
    return f"{rope.kind}, theta {rope.theta:g}{factor}"


def base_rows(config: ModelConfig) -> Rows:
    """Vocabulary, positions, and the drafts that the checkpoint declares."""
    head = "lm_head tied to the embedding" if config.tied_head else "an lm_head of its own"
    ends = ", ".join(map(str, config.eos_token_ids))
    rows = [
        ("vocabulary", f"{config.vocab_size}, {head}, {f'ends at {ends}' if ends else 'no end'}"),
        ("positions", str(config.max_position)),
    ]
    return [*rows, *(row for method in METHODS.values() for row in method.base_rows(config))]


def draft_rows(config: DraftConfig) -> Rows:
    """Vocabulary and aux layers, and what only the method has."""
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
    kinds = [f"{kind} {count_text(count)}" for kind, count in parts.items() if kind != "total"]
    return "parameters", f"{count_text(parts['total'])}: {', '.join(kinds)}"


def tensor_row(weights: WeightsSummary) -> tuple[str, str]:
    files = weights.files[0] if len(weights.files) == 1 else f"{len(weights.files)} files"
    return "tensors", f"{weights.num_tensors} in {files}: {types_text(weights.types)}"


def types_text(types: Mapping[str, DtypeSummary]) -> str:
    return ", ".join(
        f"{name} {row.tensors} ({megabytes(row.bytes)})" for name, row in types.items()
    )


def quantization_rows(found: QuantizationSummary | None, layers: bool) -> Rows:
    """Which Linears are quantized how."""
    if found is None:
        return [("quantized", "no")]
    rows: Rows = [("layout", f"{found.layout}, by {found.source}")]
    for name, row in found.schemes.items():
        blocks = blocks_text(row.blocks)
        rows.append((name, f"{row.linears} Linears{blocks}, activations {row.activations}"))
        rows += [("", module) for module in row.modules if layers]
    if found.kept:
        rows.append(("kept", ", ".join(found.kept if layers else folded(found.kept))))
    if found.kv_cache:
        rows.append(("KV cache", f"{found.kv_cache.type}, {found.kv_cache.scales} scales"))
    return rows


def blocks_text(blocks: Sequence[int]) -> str:
    return f" in blocks of {', '.join(map(str, blocks))}" if blocks else ""


def quantized_rows(manifest: QuantizeManifest, layers: bool) -> Rows:
    """What edgespec quantize recorded: from what, with what, and what the check said."""
    check, packages, source = manifest.check, manifest.packages, manifest.request.source
    used = [
        f"{name} {packages[name]}"
        for name in ("nvidia-modelopt", "torch", "transformers")
        if packages.get(name)
    ]
    agreed = f"top-1 agreement {check.top1_agreement:.1%} of {check.num_tokens} tokens"
    rows = [
        ("made from", f"{source.name} ({str(source.identity)[:12]})"),
        ("made with", ", ".join([f"edgespec {manifest.edgespec}", *used])),
        ("calibration", calibration_text(manifest)),
        ("check", f"cosine {check.logits_cosine:.4f}, KL {check.logits_kl:.4f} nats, {agreed}"),
    ]
    before, after = check.perplexity_before, check.perplexity_after
    if before and after:
        rows.append(
            ("perplexity", f"{before:.3f} before, {after:.3f} after ({after / before - 1:+.2%})")
        )
    errors = sorted(check.weight_errors.items(), key=lambda item: -item[1])
    shown = errors if layers else errors[:NUM_WORST]
    worst = f"off by at most {check.max_weight_error:.4f} of their size; the worst:"
    rows.append(("weights", worst))
    return rows + [("", f"{error:.4f} {name}") for name, error in shown]


def calibration_text(manifest: QuantizeManifest) -> str:
    calibrated, name = manifest.calibrated, manifest.request.calib_data
    if not calibrated.needed:
        return "none needed"
    name = "the shipped text" if name == "shipped" else name
    return f"{calibrated.num_samples} samples, {calibrated.num_tokens} tokens of {name}"


# Exports and engines


def export_text(facts: Mapping[str, Any], layers: bool) -> tuple[str, Rows]:
    manifest = facts["manifest"]
    rows = component_rows(facts) if "config" in facts else []
    if "config" in facts:
        rows += exported_rows(facts["config"].get("quantization"))
    golden = (
        "golden inputs and outputs are there"
        if facts.get("golden")
        else "no golden outputs: build checks nothing"
    )
    rows += [("golden", golden), ("made from", source_text(manifest.get("source")))]
    rows.append(("made with", f"edgespec {manifest.get('edgespec')}"))
    if layers:
        rows += [("file", f"{name} ({megabytes(size)})") for name, size in facts["files"].items()]
    return f"export, {facts.get('role', 'role not told')}", rows


def component_rows(facts: Mapping[str, Any]) -> Rows:
    """What config.json says of a component."""
    config = ComponentConfig.from_dict(facts["config"], bundle.CONFIG)
    heads = f"{config.num_heads} heads ({config.num_kv_heads} KV) of {config.head_dim}"
    sizes = f"{config.num_layers} layers, hidden {config.hidden_size}, {heads}"
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
    return [*rows, ("KV cache", f"{facts['cache_bytes_per_token'] / 1024:.1f} KiB a token")]


def pair_rows(method: str, pair: PairConfig) -> Rows:
    """What a draft asks of its base."""
    ids, identity = pair.aux_layer_ids, pair.base_identity
    layers = ", ".join(map(str, ids)) if ids else METHODS[method].default_layers
    known = identity[:12] if identity else "not compared with a base"
    return [("aux layers", layers), ("made for", f"{pair.base_name or 'a base'} ({known})")]


def exported_rows(quantization: Mapping[str, Any] | None) -> Rows:
    if quantization is None:
        return [("quantized", "no")]
    rows = []
    for name, row in quantization["schemes"].items():
        rounded = "in the graph" if row["activations_in_graph"] else "by engines that can"
        where = "" if row["activations"] == "none" else f", rounded {rounded}"
        text = (
            f"{row['linears']} Linears{blocks_text(row['blocks'])}, activations"
            f" {row['activations']}{where}"
        )
        rows.append((name, text))
    if quantization["unquantised"]:
        rows.append(("kept", ", ".join(folded(quantization["unquantised"]))))
    if quantization["kv_cache"]:
        rows.append(
            (
                "scales",
                f"of a {quantization['kv_cache']['type']} cache are recorded, and not applied",
            )
        )
    return rows


def source_text(source: object) -> str:
    if not isinstance(source, dict):
        return "not recorded"
    return f"{source.get('name')} ({str(source.get('identity'))[:12]})"


def engines_text(facts: Mapping[str, Any], layers: bool) -> tuple[str, Rows]:
    rows: Rows = []
    for role, engine in facts["engines"].items():
        rows.append(
            (
                role,
                (
                    f"{engine['backend']}, {megabytes(engine['bytes'])}, from"
                    f" {source_text(engine['source'])}"
                ),
            )
        )
        rows += [("", text) for text in engine_lines(engine, speaks=role != "draft")]
        if layers:
            rows += [("", f"{name} ({megabytes(size)})") for name, size in engine["files"].items()]
    if pairing := facts["pairing"]:
        rows.append(("pairing", PAIRING[pairing["by"]]))
    return "engines", rows


PAIRING = {
    "identity": "base and draft belong together: the draft was exported for this base",
    "origin": "base and draft belong together: they stem from the same weights before quantizing",
    "shapes": "base and draft fit by their shapes; the draft was exported without its base",
    None: "base and draft do not belong together",
}


def engine_lines(engine: Mapping[str, Any], *, speaks: bool) -> list[str]:
    """`speaks`: its output is the answer, so that rounding matters."""
    lines = []
    if "config" in engine:
        lines += [weights_text(engine), *(losslessness(engine) if speaks else ())]
        limits = {
            name: n
            for name, n in engine["config"]["builder_config"].items()
            if name.startswith("max_")
        }
        lines.append(
            "at most "
            + ", ".join(f"{name[4:].replace('_', ' ')} {n}" for name, n in limits.items())
        )
    difference, cosine = engine["golden_difference"], engine["golden_cosine"]
    if difference is not None:
        close = f"{difference:.1e}" if cosine is None else f"cosine {cosine:.4f}"
        lines.append(f"golden outputs reproduced to {close}")
    here = engine["runs_here"]
    return [
        *lines,
        "runs on this machine" if here["answer"] else f"does not run here: {here['why']}",
    ]


def weights_text(engine: Mapping[str, Any]) -> str:
    weights = engine["weights"]
    parts = [
        (
            "weights"
            f" {weights['scheme']}{blocks_text([weights['block']] if 'block' in weights else [])}"
        )
    ]
    parts.append(f"computed in {weights['compute']}" if "compute" in weights else weights["method"])
    if weights.get("emulated"):
        parts.append(weights["emulated"])
    return "; ".join(parts)


def losslessness(engine: Mapping[str, Any]) -> list[str]:
    margin = (
        f" up to kernel rounding (margin {engine['rounding']:.2g} nats)"
        if engine["rounding"]
        else ""
    )
    exact = "--exact is possible" if engine["exact"] is None else f"no --exact: {engine['exact']}"
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


SHOWN = {"export": export_text, "engines": engines_text}


# Words


def folded(names: Iterable[str]) -> list[str]:
    """Names that differ in one number as one: layers.0.up_proj, layers.1.up_proj ->
    layers.0-1.up_proj."""
    groups: dict[str, list[int]] = {}
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        key = f"{name[: number.start()]}\0{name[number.end() :]}" if number else name
        groups.setdefault(key, []).extend([int(number[0])] if number else [])
    return [key.replace("\0", ranges(found)) for key, found in groups.items()]


def ranges(numbers: list[int]) -> str:
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ",".join("-".join(map(str, part)) for part in parts)


def megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def count_text(count: int) -> str:
    for factor, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return str(count)
