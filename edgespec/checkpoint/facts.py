"""What can be told of a checkpoint from its JSON and the headers of its weights: kind, sizes,
quantisation, its check.

Knows what is worth telling. What cannot be told leaves a problem behind, and all else is told all
the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, TensorInfo, read_header
from edgespec.checkpoint.layouts import kv_scale_names, logical_shapes, read_quantization, rule_at
from edgespec.checkpoint.origin import origin_of
from edgespec.checkpoint.quantization import Quantization
from edgespec.config import DecoderConfig, DraftConfig, ModelConfig
from edgespec.errors import BundleError, EdgeSpecError, noted
from edgespec.rope import rope_dict

_NO_PARAMETERS = re.compile(r"(^|\.)(d2t|t2d)$|inv_freq$")
# The first that is found in a tensor's name says what it is
_PARTS = (
    ("norms", re.compile(r"norm")),
    ("embedding", re.compile(r"embed_tokens")),
    ("lm_head", re.compile(r"lm_head")),
    ("attention", re.compile(r"\.self_attn\.|linear_attn")),
    ("mlp", re.compile(r"\.mlp\.")),
    ("fc", re.compile(r"(^|\.)fc\.")),
)
_FIGURES = ("logits_cosine", "logits_kl", "top1_agreement", "num_tokens", "max_weight_error")


def safetensors_facts(path: Path) -> dict[str, Any]:
    """One file's header. Raises CheckpointError where it is damaged."""
    infos = read_header(path)
    return {
        "kind": "safetensors",
        "bytes": path.stat().st_size,
        "tensors": listed(infos),
        "types": types_of(infos),
    }


def checkpoint_facts(
    checkpoint: Checkpoint, problems: list[EdgeSpecError], read_up_to: float
) -> tuple[dict[str, Any], ModelConfig | DraftConfig | None]:
    """The facts, and what the checkpoint was detected as. Hashes files of up to `read_up_to`
    bytes."""
    facts: dict[str, Any] = {
        "kind": "checkpoint",
        "architectures": checkpoint.config.get("architectures"),
        "model_type": checkpoint.config.get("model_type"),
        "tokenizer": [
            name for name in bundle.TOKENIZER_FILES if (checkpoint.path / name).is_file()
        ],
    }
    found = None
    with noted(problems):
        facts |= weight_facts(checkpoint)
        with noted(problems):
            found = detect(checkpoint)
            facts |= {
                "role": "base" if isinstance(found, ModelConfig) else "draft",
                "config": config_facts(found),
            }
        facts |= layer_facts(checkpoint)
        facts |= manifest_facts(checkpoint, problems, read_up_to)
    return facts, found


def config_facts(config: ModelConfig | DraftConfig) -> dict[str, Any]:
    """The configuration as JSON; of the layers, what they share and how they differ."""
    facts = {f.name: getattr(config, f.name) for f in fields(config)}
    return facts | {"decoder": decoder_facts(config.decoder)}


def decoder_facts(decoder: DecoderConfig) -> dict[str, Any]:
    """Sizes and forms that all layers share, then windows and rotary embeddings where they
    differ."""
    attention, linear = decoder.attention, decoder.linear
    facts: dict[str, Any] = {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_layers": decoder.num_layers,
        "num_heads": attention.num_heads,
        "num_kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": decoder.norm.eps,
        "rope": rope_dict(attention.rope),
        "qkv_bias": attention.qkv_bias,
        "o_bias": attention.o_bias,
        "mlp_bias": decoder.layers[0].mlp.bias,
        "qk_norm": attention.qk_norm,
        "sliding_window": decoder.sliding_window,
        "gated_attention": attention.gated,
        "unit_offset_norms": decoder.norm.unit_offset,
        "layer_kinds": decoder.layer_kinds if linear else (),
        "linear": asdict(linear) if linear else None,
    }
    if len(decoder.windows) > 1:
        facts["layer_windows"] = [a.window for a in decoder.attentions]
    if len(decoder.ropes) > 1:
        facts["local_rope"] = rope_dict(decoder.ropes[1])
    return facts


def weight_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    infos = checkpoint.tensors.values()
    files = sorted({info.file for info in infos if info.file is not None})
    return {
        "bytes": sum(file.stat().st_size for file in files),
        "files": [file.name for file in files],
        "num_tensors": len(infos),
        "types": types_of(infos),
    }


def listed(infos: Iterable[TensorInfo]) -> dict[str, dict[str, Any]]:
    return {
        info.name: {"dtype": info.dtype, "shape": list(info.shape), "bytes": info.num_bytes}
        for info in infos
    }


def types_of(infos: Iterable[TensorInfo]) -> dict[str, dict[str, int]]:
    """dtype -> how many tensors, how many bytes; the largest share first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for info in infos:
        counts[info.dtype] += 1
        sizes[info.dtype] += info.num_bytes
    return {name: {"tensors": counts[name], "bytes": size} for name, size in sizes.most_common()}


# Parameters and quantised Linears


def layer_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Parameters by kind, a quantised weight as what it stands for; and which Linears are quantised
    how."""
    quantization = read_quantization(checkpoint)
    shapes = logical_shapes(checkpoint, quantization)
    facts: dict[str, Any] = {"parameters": parameters_of(shapes, set(kv_scale_names(checkpoint)))}
    return facts | {
        "quantization": quantization_facts(checkpoint, quantization, shapes)
        if quantization
        else None
    }


def parameters_of(shapes: Mapping[str, tuple[int, ...]], scales: set[str]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, shape in shapes.items():
        if name in scales or _NO_PARAMETERS.search(name):
            continue
        kind = next((kind for kind, pattern in _PARTS if pattern.search(name)), "other")
        count = 1
        for size in shape:
            count *= size
        counts[kind] += count
    return {"total": counts.total(), **dict(counts.most_common())}


def quantization_facts(
    checkpoint: Checkpoint, quantization: Quantization, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    schemes: dict[str, dict[str, Any]] = {}
    kept = []
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name or "embed_tokens" in name:
            continue
        rule = rule_at(checkpoint, quantization, module)
        if rule is None:
            kept.append(module)
            continue
        row = schemes.setdefault(
            rule.scheme.name,
            {"linears": 0, "blocks": [], "activations": rule.scheme.activations, "modules": []},
        )
        row["linears"] += 1
        row["modules"].append(module)
        block = rule.group_size or rule.scheme.block
        if rule.scheme.scaling in ("block", "square") and block not in row["blocks"]:
            row["blocks"].append(block)
    scales = len(kv_scale_names(checkpoint))
    return {
        "layout": quantization.layout,
        "source": Path(quantization.source.partition(" (")[0]).name,
        "schemes": schemes,
        "kept": kept,
        "kv_cache": {"type": quantization.kv_cache, "scales": scales}
        if quantization.kv_cache
        else None,
    }


# The manifest of edgespec quantize


def manifest_facts(
    checkpoint: Checkpoint, problems: list[EdgeSpecError], read_up_to: float
) -> dict[str, Any]:
    """`quantized`: what edgespec quantize recorded, without the list of files; None where there is
    no such record."""
    origin = origin_of(checkpoint, hashes=False)
    before = len(problems)
    if origin.manifest is not None:
        with noted(problems):
            problems += bundle.faults(
                checkpoint.path, origin.manifest.get("files"), read_up_to=read_up_to
            )
            refuse_unreadable(checkpoint.path / bundle.MANIFEST, origin.manifest)
    if origin.doubt and len(problems) == before:
        problems.append(BundleError(origin.doubt, "Quantise the original again."))
    if origin.manifest is None or len(problems) > before:
        return {"quantized": None}
    return {"quantized": {key: value for key, value in origin.manifest.items() if key != "files"}}


def refuse_unreadable(path: Path, manifest: Mapping[str, Any]) -> None:
    """Whether the record has the form that edgespec quantize writes."""
    sections = {
        name: manifest.get(name)
        for name in ("source", "options", "calibrated", "check", "packages")
    }
    strange = [name for name, section in sections.items() if not isinstance(section, dict)]
    check = manifest.get("check")
    if isinstance(check, dict):
        errors = check.get("weight_errors")
        numbers = [check.get(name) for name in _FIGURES] + list(
            errors.values() if isinstance(errors, dict) else [None]
        )
        told = [check.get(name) for name in ("perplexity_before", "perplexity_after")]
        if not all(
            isinstance(number, int | float)
            for number in [*numbers, *(n for n in told if n is not None)]
        ):
            strange.append("check")
    if strange:
        raise BundleError(
            f"{path} has no readable {strange[0]!r}", "It was edited or damaged: quantise again."
        )
