"""What JSON and the headers of its weights say of a checkpoint: kind, sizes, quantization, and the
check that edgespec quantize recorded.

Knows what is shown. What cannot be read leaves a problem behind, and all else is shown all
the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgespec.artifacts import file_names, hashes
from edgespec.artifacts.manifest import QuantizeManifest
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import kv_scale_names, logical_shapes, read_quantization, rule_at
from edgespec.checkpoint.origin import origin_of
from edgespec.checkpoint.quantization import Quantization, SchemeRule
from edgespec.checkpoint.safetensors import read_header
from edgespec.checkpoint.source import TensorInfo
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


@dataclass(frozen=True, slots=True)
class DtypeSummary:
    """How much of a checkpoint is of one dtype."""

    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class WeightsSummary:
    """The files of the weights, and what is in them; sizes in bytes."""

    bytes: int
    files: tuple[str, ...]
    num_tensors: int
    types: Mapping[str, DtypeSummary]


@dataclass(frozen=True, slots=True)
class SchemeSummary:
    """The Linears of one scheme; `blocks` are the sizes that occur."""

    linears: int
    blocks: tuple[int, ...]
    activations: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """The scales of a quantized KV cache."""

    type: str
    scales: int


@dataclass(frozen=True, slots=True)
class QuantizationSummary:
    """Which Linears are quantized how. `source` is the file that says so, `kept` are those that are
    not quantized."""

    layout: str
    source: str
    schemes: Mapping[str, SchemeSummary]
    kept: tuple[str, ...]
    kv_cache: CacheSummary | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """What is known of a checkpoint. None: it could not be read, but for `quantization`, which is
    None where nothing is quantized, too; then `parameters` are there.

    `record` is what edgespec quantize recorded. `heads` are the drafts
    in a base's checkpoint: method -> why it cannot be used, None where it can. `pickled` names
    weights that were not looked into.
    """

    architectures: Any
    model_type: Any
    tokenizer: tuple[str, ...] | None = None
    weights: WeightsSummary | None = None
    config: ModelConfig | DraftConfig | None = None
    parameters: Mapping[str, int] | None = None
    quantization: QuantizationSummary | None = None
    has_record: bool = False
    record: QuantizeManifest | None = None
    heads: Mapping[str, str | None] = field(default_factory=dict)
    pickled: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The keys of `edgespec inspect --json`: those that are known."""
        keys: dict[str, Any] = {
            "kind": "checkpoint",
            "architectures": self.architectures,
            "model_type": self.model_type,
        }
        if self.pickled:
            return keys | {"pickled": self.pickled}
        keys["tokenizer"] = list(self.tokenizer or ())
        if self.weights is not None:
            keys |= asdict(self.weights) | {"files": list(self.weights.files)}
        if self.config is not None:
            role = "base" if isinstance(self.config, ModelConfig) else "draft"
            keys |= {"role": role, "config": config_dict(self.config)}
        if self.parameters is not None:
            quantization = self.quantization
            keys["parameters"] = dict(self.parameters)
            keys["quantization"] = None if quantization is None else asdict(quantization)
        if self.has_record:
            keys["quantized"] = None if self.record is None else self.record.without_files()
        return keys | {f"{method}_head": why for method, why in self.heads.items()}


@dataclass(frozen=True, slots=True)
class FileSummary:
    """One safetensors file: its tensors by name, in bytes."""

    bytes: int
    tensors: Mapping[str, TensorInfo]
    types: Mapping[str, DtypeSummary]

    def to_dict(self) -> dict[str, Any]:
        """The keys of `edgespec inspect --json`."""
        tensors = {
            name: {"dtype": info.dtype, "shape": list(info.shape), "bytes": info.num_bytes}
            for name, info in self.tensors.items()
        }
        types = {name: asdict(row) for name, row in self.types.items()}
        return {"kind": "safetensors", "bytes": self.bytes, "tensors": tensors, "types": types}


def summarize_file(path: Path) -> FileSummary:
    """One file's header. Raises CheckpointError where it is damaged."""
    infos = {info.name: info for info in read_header(path)}
    return FileSummary(path.stat().st_size, infos, types_of(infos.values()))


def summarize_checkpoint(
    checkpoint: Checkpoint, problems: list[EdgeSpecError], read_up_to: float
) -> CheckpointSummary:
    """What JSON and headers say. Hashes files of up to `read_up_to` bytes. What cannot be read is
    added to `problems`."""
    config = checkpoint.config
    tokenizer = [name for name in file_names.TOKENIZER_FILES if (checkpoint.path / name).is_file()]
    summary = CheckpointSummary(
        architectures=config.get("architectures"),
        model_type=config.get("model_type"),
        tokenizer=tuple(tokenizer),
    )
    with noted(problems):
        summary = replace(summary, weights=weights_of(checkpoint))
        with noted(problems):
            summary = replace(summary, config=detect(checkpoint))
        quantization = read_quantization(checkpoint)
        shapes = logical_shapes(checkpoint, quantization)
        scales = set(kv_scale_names(checkpoint))
        linears = summarize_quantization(checkpoint, quantization, shapes) if quantization else None
        summary = replace(summary, parameters=parameters_of(shapes, scales), quantization=linears)
        record = quantize_record(checkpoint, problems, read_up_to)
        summary = replace(summary, has_record=True, record=record)
    return summary


def config_dict(config: ModelConfig | DraftConfig) -> dict[str, Any]:
    """The configuration as JSON; of the layers, what they share and how they differ."""
    keys = {f.name: getattr(config, f.name) for f in fields(config)}
    return keys | {"decoder": decoder_dict(config.decoder)}


def decoder_dict(decoder: DecoderConfig) -> dict[str, Any]:
    """Sizes and forms that all layers share, then windows and rotary embeddings where they
    differ. A draft may be without layers."""
    if not decoder.layers:
        return {"hidden_size": decoder.hidden_size, "num_layers": 0}
    attention, linear = decoder.attention, decoder.linear
    keys: dict[str, Any] = {
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
    mixed = [i for i, layer in enumerate(decoder.layers) if layer.mlp.experts is not None]
    if mixed:
        mlp = decoder.layers[mixed[0]].mlp
        size = {"intermediate_size": mlp.intermediate_size, "layers": mixed}
        keys["experts"] = asdict(mlp.experts) | size if mlp.experts else None
    if len(decoder.windows) > 1:
        keys["layer_windows"] = [a.window for a in decoder.attentions]
    if len(decoder.ropes) > 1:
        keys["local_rope"] = rope_dict(decoder.ropes[1])
    return keys


def weights_of(checkpoint: Checkpoint) -> WeightsSummary:
    """Files, their bytes together, and the number and dtypes of the tensors in the headers."""
    infos = checkpoint.tensors.values()
    files = sorted({info.file for info in infos if info.file is not None})
    return WeightsSummary(
        bytes=sum(file.stat().st_size for file in files),
        files=tuple(file.name for file in files),
        num_tensors=len(infos),
        types=types_of(infos),
    )


def types_of(infos: Iterable[TensorInfo]) -> dict[str, DtypeSummary]:
    """dtype -> number of tensors and bytes; the largest share first."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for info in infos:
        counts[info.dtype] += 1
        sizes[info.dtype] += info.num_bytes
    return {name: DtypeSummary(counts[name], size) for name, size in sizes.most_common()}


# Parameters and quantized Linears


def parameters_of(shapes: Mapping[str, tuple[int, ...]], scales: set[str]) -> dict[str, int]:
    """Parameters by kind, a quantized weight as the one that it stands for."""
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


def summarize_quantization(
    checkpoint: Checkpoint, quantization: Quantization, shapes: Mapping[str, tuple[int, ...]]
) -> QuantizationSummary:
    """Which Linears are quantized how; `shapes` are those of the weights that they stand for."""
    rules: dict[str, list[tuple[str, SchemeRule]]] = {}
    kept = []
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) != 2 or module == name or "embed_tokens" in name:
            continue
        rule = rule_at(checkpoint, quantization, module)
        if rule is None:
            kept.append(module)
        else:
            rules.setdefault(rule.scheme.name, []).append((module, rule))
    cache = quantization.kv_cache
    return QuantizationSummary(
        layout=quantization.layout,
        source=Path(quantization.source.partition(" (")[0]).name,
        schemes={name: summarize_scheme(linears) for name, linears in rules.items()},
        kept=tuple(kept),
        kv_cache=CacheSummary(cache, len(kv_scale_names(checkpoint))) if cache else None,
    )


def summarize_scheme(linears: Sequence[tuple[str, SchemeRule]]) -> SchemeSummary:
    """One scheme's row: its Linears, the distinct block sizes, what becomes of activations."""
    blocks = [
        rule.group_size or rule.scheme.block
        for _, rule in linears
        if rule.scheme.scaling in ("block", "square")
    ]
    return SchemeSummary(
        linears=len(linears),
        blocks=tuple(dict.fromkeys(blocks)),
        activations=linears[0][1].scheme.activations,
        modules=tuple(module for module, _ in linears),
    )


# The manifest of edgespec quantize


def quantize_record(
    checkpoint: Checkpoint, problems: list[EdgeSpecError], read_up_to: float
) -> QuantizeManifest | None:
    """What edgespec quantize recorded; None where there is no such record, or one with a
    problem."""
    origin = origin_of(checkpoint, read_weights=False)
    before = len(problems)
    record = None
    if origin.recorded is not None:
        with noted(problems):
            files = origin.recorded.files
            problems += hashes.faults(checkpoint.path, files, read_up_to=read_up_to)
            record = QuantizeManifest.read(checkpoint.path)
    if origin.doubt and len(problems) == before:
        problems.append(BundleError(origin.doubt, "Quantize the original again."))
    return record if len(problems) == before else None
