"""The facts of `edgespec inspect` as aligned text: a head, and rows of a label and a value.

Knows words and columns. What the facts are stands in `edgespec.inspection` and the rooms that it
asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from edgespec.contract import GraphShape, canonical_contract

if TYPE_CHECKING:
    from edgespec.inspection import Inspection

NUM_WORST = 3  # layers that are named without --layers
INDENT = 14
Rows = list[tuple[str, str]]
_METHODS = {"eagle3": "EAGLE-3", "dflash": "DFlash"}


def text_of(found: Inspection, *, layers: bool, verify: bool) -> list[str]:
    head, rows = SHOWN[found.facts["kind"]](found.facts, layers)
    rows += [("note", note) for note in found.notes]
    if not found.problems:
        rows.append(("whole", wholeness(found.facts, verify)))
    return [f"{head}: {found.path}{size_of(found.facts)}", *aligned(rows)]


def wholeness(facts: Mapping[str, Any], verify: bool) -> str:
    if facts["kind"] == "safetensors" or (
        facts["kind"] == "checkpoint" and not facts.get("quantized")
    ):
        return "not looked into" if facts.get("pickled") else "as far as its headers tell"
    return (
        "sizes and hashes are as recorded"
        if verify
        else "sizes are as recorded; --verify compares hashes"
    )


def size_of(facts: Mapping[str, Any]) -> str:
    return f" ({megabytes(facts['bytes'])})" if facts.get("bytes") else ""


def aligned(rows: Rows) -> list[str]:
    return [f"  {label:{INDENT - 2}}{text}".rstrip() for label, text in rows]


# Checkpoints


def checkpoint_text(facts: Mapping[str, Any], layers: bool) -> tuple[str, Rows]:
    name = ", ".join(facts["architectures"] or []) or str(facts["model_type"] or "a checkpoint")
    rows: Rows = []
    config = facts.get("config")
    if config and facts["role"] == "draft":
        name = f"{_METHODS[config['method']]} draft ({config['layout']} layout)"
        rows += decoder_rows(config["decoder"]) + draft_rows(config)
        rows += block_rows(config) if config["method"] == "dflash" else []
    elif config:
        rows += decoder_rows(config["decoder"]) + base_rows(config)
    if "types" in facts:
        rows += tensor_rows(facts)
    if "quantization" in facts:
        rows += quantization_rows(facts["quantization"], layers)
    if facts.get("quantized"):
        rows += quantized_rows(facts["quantized"], layers)
    if facts.get("tokenizer"):
        rows.append(("texts", ", ".join(facts["tokenizer"])))
    return name, rows


def decoder_rows(decoder: Mapping[str, Any]) -> Rows:
    heads = f"{decoder['num_heads']} heads ({decoder['num_kv_heads']} KV) of {decoder['head_dim']}"
    sizes = (
        f"{decoder['num_layers']} layers, hidden {decoder['hidden_size']}, MLP"
        f" {decoder['intermediate_size']}"
    )
    window = f", window {decoder['sliding_window']}" if decoder["sliding_window"] else ""
    if windows := decoder.get("layer_windows"):
        window += f" in {len(windows) - windows.count(None)} of {len(windows)} layers"
    recurrent = list(decoder["layer_kinds"]).count("linear_attention")
    kinds = f", {recurrent} layers are gated delta nets" if recurrent else ""
    rotated = decoder["rope"]["rotary_dim"]
    part = f", {rotated} of {decoder['head_dim']} elements" if rotated < decoder["head_dim"] else ""
    rows = [
        ("sizes", f"{sizes}, {heads}{window}{kinds}"),
        ("RoPE", f"{rope_text(decoder['rope'])}{part}"),
    ]
    local = decoder.get("local_rope")
    return (
        [*rows, ("local RoPE", f"{rope_text(local)}, in layers with a window")] if local else rows
    )


def rope_text(rope: Mapping[str, Any]) -> str:
    factor = "" if rope["kind"] == "default" else f", factor {rope['factor']:g}"
    return f"{rope['kind']}, theta {rope['theta']:g}{factor}"


def base_rows(config: Mapping[str, Any]) -> Rows:
    head = "head tied to the embedding" if config["tied_head"] else "a head of its own"
    ends = (
        f"ends at {', '.join(map(str, config['eos_token_ids']))}"
        if config["eos_token_ids"]
        else "names no end"
    )
    rows = [
        ("vocabulary", f"{config['vocab_size']}, {head}, {ends}"),
        ("positions", str(config["max_position"])),
    ]
    layers = config["mtp_layers"]
    told = f"{layers} layer{'s' if layers > 1 else ''}, by config.json"
    return [*rows, ("MTP head", told)] if layers else rows


def draft_rows(config: Mapping[str, Any]) -> Rows:
    aux_layers = (
        ", ".join(map(str, config["aux_layer_ids"]))
        if config["aux_layer_ids"]
        else "EAGLE-3's default for the base's depth"
    )
    if config["aux_layer_ids"] and config.get("aux_layer_convention", "hs") != "hs":
        aux_layers += " (a numbering that the base's depth settles)"
    own = {"embedding": config["own_embedding"], "head": config["own_head"]}
    whose = [f"{name} {'of its own' if its else 'of the base'}" for name, its in own.items()]
    return [
        (
            "vocabulary",
            f"{config['draft_vocab_size']} of {config['vocab_size']}; {', '.join(whose)}",
        ),
        (
            "taps",
            (
                f"{config.get('num_aux_layers') or len(config['aux_layer_ids'])} of width"
                f" {config['target_hidden_size']}: {aux_layers}"
            ),
        ),
        ("made for", config["base_name"] or "it does not say"),
    ]


def block_rows(config: Mapping[str, Any]) -> Rows:
    rows: Rows = [
        (
            "block",
            (
                f"{config['block_size']} tokens, the anchor included; mask token"
                f" {config['mask_token_id']}"
            ),
        )
    ]
    layers = zip(config["windows"], config["causal"], strict=True)
    kinds = [attention_text(window, causal) for window, causal in layers]
    return [
        *rows,
        (
            "attention",
            "; ".join(
                f"{kinds.count(kind)} of {len(kinds)} layers: {kind}"
                for kind in dict.fromkeys(kinds)
            ),
        ),
    ]


def attention_text(window: int | None, causal: bool) -> str:
    seen = f"a window of {window}" if window else "all of the context"
    return f"{seen}, {'causal' if causal else 'both ways'} inside the block"


def tensor_rows(facts: Mapping[str, Any]) -> Rows:
    rows: Rows = []
    if parts := facts.get("parameters"):
        shares = ", ".join(
            f"{kind} {count_text(count)}" for kind, count in parts.items() if kind != "total"
        )
        rows.append(("parameters", f"{count_text(parts['total'])}: {shares}"))
    files = f"{len(facts['files'])} files" if len(facts["files"]) != 1 else facts["files"][0]
    return [*rows, ("tensors", f"{facts['num_tensors']} in {files}: {types_text(facts['types'])}")]


def types_text(types: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(
        f"{name} {row['tensors']} ({megabytes(row['bytes'])})" for name, row in types.items()
    )


def quantization_rows(found: Mapping[str, Any] | None, layers: bool) -> Rows:
    if found is None:
        return [("quantised", "no")]
    rows: Rows = [("layout", f"{found['layout']}, by {found['source']}")]
    for name, row in found["schemes"].items():
        rows.append(
            (
                name,
                (
                    f"{row['linears']} Linears{blocks_text(row['blocks'])}, activations"
                    f" {row['activations']}"
                ),
            )
        )
        rows += [("", module) for module in row["modules"] if layers]
    if found["kept"]:
        rows.append(("kept", ", ".join(found["kept"] if layers else folded(found["kept"]))))
    if found["kv_cache"]:
        rows.append(
            ("KV cache", f"{found['kv_cache']['type']}, {found['kv_cache']['scales']} scales")
        )
    return rows


def blocks_text(blocks: list[int]) -> str:
    return f" in blocks of {', '.join(map(str, blocks))}" if blocks else ""


def quantized_rows(manifest: Mapping[str, Any], layers: bool) -> Rows:
    """What edgespec quantize recorded: from what, with what, and what the check said."""
    check, packages = manifest["check"], manifest["packages"]
    used = [
        f"{name} {packages[name]}"
        for name in ("nvidia-modelopt", "torch", "transformers")
        if packages.get(name)
    ]
    agreed = f"top-1 agreement {check['top1_agreement']:.1%} of {check['num_tokens']} tokens"
    rows = [
        (
            "made from",
            f"{manifest['source'].get('name')} ({str(manifest['source'].get('identity'))[:12]})",
        ),
        ("made with", ", ".join([f"edgespec {manifest.get('edgespec')}", *used])),
        ("calibration", calibration_text(manifest)),
        (
            "check",
            f"cosine {check['logits_cosine']:.4f}, KL {check['logits_kl']:.4f} nats, {agreed}",
        ),
    ]
    before, after = check.get("perplexity_before"), check.get("perplexity_after")
    if before and after:
        rows.append(
            ("perplexity", f"{before:.3f} before, {after:.3f} after ({after / before - 1:+.2%})")
        )
    errors = sorted(check["weight_errors"].items(), key=lambda item: -item[1])
    shown = errors if layers else errors[:NUM_WORST]
    rows.append(
        ("weights", f"off by at most {check['max_weight_error']:.4f} of their size; the worst:")
    )
    return rows + [("", f"{error:.4f} {name}") for name, error in shown]


def calibration_text(manifest: Mapping[str, Any]) -> str:
    calibrated = manifest["calibrated"]
    if not calibrated.get("needed"):
        return "none needed"
    data = manifest["options"].get("calib_data")
    name = data.get("name") if isinstance(data, dict) else data
    name = "the shipped text" if name == "shipped" else name
    return (
        f"{calibrated.get('num_samples')} samples, {calibrated.get('num_tokens')} tokens of {name}"
    )


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
    config = facts["config"]
    heads = (
        f"{config['num_attention_heads']} heads ({config['num_key_value_heads']} KV) of"
        f" {config['head_dim']}"
    )
    sizes = f"{config['num_hidden_layers']} layers, hidden {config['hidden_size']}, {heads}"
    rows = [("model", f"{config['model']}, {sizes}"), ("vocabulary", str(config["vocab_size"]))]
    if facts["role"] == "draft":
        pair = config["pair"]
        default = (
            "the state after the last norm"
            if config["spec_decode_type"] == "mtp"
            else "EAGLE-3's default"
        )
        aux_layers = ", ".join(map(str, pair["tap_ids"])) if pair["tap_ids"] else default
        known = pair["base_identity"]
        rows = [
            rows[0],
            ("vocabulary", f"{config['draft_vocab_size']} of {config['vocab_size']}"),
            ("taps", aux_layers),
            (
                "made for",
                (
                    f"{pair['base_name'] or 'a base'}"
                    f" ({known[:12] if known else 'not compared with a base'})"
                ),
            ),
        ]
    else:
        rows.append(("positions", f"at most {config['max_position_embeddings']}"))
    if aux_layers := config.get("eagle_hidden_state_layers"):
        rows.append(("taps", ", ".join(map(str, aux_layers))))
    if block := config.get("dflash_config"):
        layers = ", ".join(map(str, block["target_layer_ids"]))
        told = (
            f"{block['block_size']} tokens, mask token {block['mask_token_id']}, behind the outputs"
            f" of layers {layers}"
        )
        rows.append(("block", told))
    origin = config.get("quantized_from")
    rows.append(
        (
            "identity",
            config["identity"][:12] + (f", quantised from {origin[:12]}" if origin else ""),
        )
    )
    contract = canonical_contract(GraphShape.from_dict(config["graph"]))
    if recurrent := contract.shape.recurrent:
        count = f"{len(recurrent.layers)} of {config['num_hidden_layers']} layers"
        rows.append(("state", f"{megabytes(contract.state_bytes)} a sequence, in {count}"))
    return [*rows, ("KV cache", f"{facts['cache_bytes_per_token'] / 1024:.1f} KiB a token")]


def exported_rows(quantization: Mapping[str, Any] | None) -> Rows:
    if quantization is None:
        return [("quantised", "no")]
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
    "origin": "base and draft belong together: they stem from the same weights before quantising",
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


def file_text(facts: Mapping[str, Any], layers: bool) -> tuple[str, Rows]:
    tensors: Mapping[str, Any] = facts["tensors"]
    alike: dict[tuple[str, str], list[str]] = {}
    for name, info in tensors.items():
        alike.setdefault((info["dtype"], str(info["shape"])), []).append(name)
    rows = [("tensors", f"{len(tensors)}: {types_text(facts['types'])}")]
    for (dtype, shape), names in alike.items():
        rows += [("", f"{dtype} {shape} {name}") for name in (names if layers else folded(names))]
    return "safetensors", rows


SHOWN = {
    "checkpoint": checkpoint_text,
    "export": export_text,
    "engines": engines_text,
    "safetensors": file_text,
}


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
