"""What a checkpoint is: a base model, a draft of one of the methods, or something that this version
refuses by name.

Knows the order in which kinds are asked for, and compares tensors with what a graph expects. How a
draft is detected stands in its method's row. Knows no graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import (
    is_quantized,
    kv_scale_names,
    logical_shapes,
    read_quantization,
    rule_at,
    stored_shape,
    tensor_names,
)
from edgespec.checkpoint.quantization import Quantization
from edgespec.checkpoint.source import some_of
from edgespec.checkpoint.unsupported import OTHERS, SPECULATORS, Unsupported, bare_shapes
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import family_names, parse_eos, parse_model_config, with_eos
from edgespec.methods import METHODS, DraftFormat

_FLOATS = ("float32", "float16", "bfloat16")


def detect(checkpoint: Checkpoint) -> ModelConfig | DraftConfig:
    """The checkpoint's configuration; the base's dtype is that of its tensors, its ends those of
    both configs.

    Raises UnsupportedModel for kinds that are detected and not supported, CheckpointError for
    broken ones.
    """
    draft_format = _draft_format(checkpoint)
    if draft_format is None:
        _refuse(checkpoint, OTHERS)
        return _base(checkpoint)
    source = checkpoint.config_source
    shapes = logical_shapes(checkpoint, read_quantization(checkpoint))
    return draft_format.parse(checkpoint.config, shapes, source)


def detect_base(checkpoint: Checkpoint, remedy: str) -> ModelConfig:
    """The configuration of a base model. Raises UnsupportedModel with a remedy for a draft."""
    config = detect(checkpoint)
    if isinstance(config, ModelConfig):
        return config
    title = METHODS[config.method].draft_title
    raise UnsupportedModel(f"{checkpoint.place} is {title}, not a base model.", remedy)


def text_section(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """config.json of the text model."""
    section = checkpoint.config.get("text_config")
    return section if isinstance(section, dict) else checkpoint.config


def draft_beside(checkpoint: Checkpoint, model: ModelConfig, method: str) -> DraftConfig | None:
    """The configuration of a method's draft that stands beside its base's own tensors; None where
    there is none. Raises CheckpointError for a damaged one."""
    row, names = METHODS[method], checkpoint.tensors
    if row.format is None or not row.tensors_in_base:
        return None
    if not any(name.removeprefix("model.").startswith(row.tensors_in_base) for name in names):
        return None
    source, shapes = (
        checkpoint.config_source,
        logical_shapes(checkpoint, read_quantization(checkpoint)),
    )
    return row.format.parse(checkpoint.config | {"vocab_size": model.vocab_size}, shapes, source)


def _draft_format(checkpoint: Checkpoint) -> DraftFormat | None:
    """The first that claims the checkpoint: by config.json alone, and then by tensors."""
    config = checkpoint.config
    by_config = next((f for f in _formats() if f.matches_config(config)), None)
    if by_config is not None:
        return by_config
    if (kind := config.get("speculators_model_type")) is not None:
        why = SPECULATORS.get(kind, "") if isinstance(kind, str) else ""
        message = f"{checkpoint.config_source}: a speculators draft of the type {kind!r}{why}."
        raise UnsupportedModel(message, _supported())
    tensors = (f for f in _formats() if f.matches_tensors(config, lambda: bare_shapes(checkpoint)))
    return next(tensors, None)


def _formats() -> Iterator[DraftFormat]:
    return (method.format for method in METHODS.values() if method.format is not None)


def _refuse(checkpoint: Checkpoint, kinds: Iterable[Unsupported]) -> None:
    for kind in kinds:
        if kind.matches(checkpoint.config, checkpoint):
            message = f"{checkpoint.place} is {kind.name}, which this version does not do."
            raise UnsupportedModel(message, _supported())


def _supported() -> str:
    drafts = [method.title for method in METHODS.values() if method.format is not None]
    named = f"{', '.join(drafts[:-1])} and {drafts[-1]}" if len(drafts) > 1 else drafts[0]
    return f"This version takes {family_names()} base models, and drafts of {named}."


def _base(checkpoint: Checkpoint) -> ModelConfig:
    read_quantization(checkpoint)
    model = parse_model_config(checkpoint.config, checkpoint.config_source)
    # ModelOpt leaves the flag of the source as it was
    if model.tied_head and is_quantized(checkpoint, "lm_head"):
        model = replace(model, tied_head=False)
    generation = checkpoint.generation_config or {}
    ends = (*model.eos_token_ids, *parse_eos(generation, "generation_config.json"))
    return replace(with_eos(model, ends), dtype=_stored_dtype(checkpoint) or model.dtype)


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    ignorable: Collection[str] = (),
    quantization: Quantization | None = None,
    *,
    never_quantized: Collection[str] = (),
) -> None:
    """Compare the checkpoint's tensors with `expected` (name -> shape, floating point); `ignorable`
    may be there too. Tensors of `never_quantized` are no Linears, whatever their shape.

    A Linear that is quantized is expected by its `weight`, and has instead the tensors of its
    layout. Raises one CheckpointError that names all that is missing, unknown, misshapen or of
    another type (five of each).
    """
    tensors = checkpoint.tensors
    asked = {name: shape for name, shape in expected.items() if name not in never_quantized}
    linears = _quantized_linears(asked, checkpoint, quantization)
    plain = {name: shape for name, shape in expected.items() if name not in linears}
    parts = {part for name in linears for part in tensor_names(checkpoint, _module(name))}
    scales = (
        kv_scale_names(checkpoint) if quantization is not None and quantization.kv_cache else ()
    )
    known = {*plain, *parts, *scales, *ignorable}
    both = [tensors[name] for name in plain if name in tensors]
    complaints = {
        "missing": [name for name in plain if name not in tensors],
        "not part of this model": [name for name in tensors if name not in known],
        "of another shape": [
            *(
                _misshapen(info.name, info.shape, plain)
                for info in both
                if info.shape != tuple(plain[info.name])
            ),
            *(
                _misshapen(name, shape, expected)
                for name, shape in linears.items()
                if shape != expected[name]
            ),
        ],
        "of another type than float32, float16 or bfloat16": [
            f"{info.name} {info.dtype}" for info in both if info.dtype not in _FLOATS
        ],
    }
    lines = [
        f"{kind} ({len(names)}): {some_of(names)}" for kind, names in complaints.items() if names
    ]
    if lines:
        raise CheckpointError(
            f"the tensors of {checkpoint.place} are not those that {checkpoint.config_source}"
            f" declares. {'; '.join(lines)}.",
            "Check that config.json and weights belong together, or download the checkpoint again.",
        )


def _quantized_linears(
    expected: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    quantization: Quantization | None,
) -> dict[str, tuple[int, int]]:
    """Weight -> [out, in] of the Linears that are quantized; embeddings are read row by row and
    never are."""
    if quantization is None:
        return {}
    modules = [
        _module(name)
        for name, shape in expected.items()
        if len(shape) == 2 and "embed_tokens" not in name
    ]
    quantized = [
        module for module in modules if rule_at(checkpoint, quantization, module) is not None
    ]
    if quantization.groups and not quantized and not _has_quantized(checkpoint):
        raise CheckpointError(
            f"{quantization.source} says that the weights are quantized ({quantization.layout});"
            f" none of {checkpoint.place} is.",
            "Download settings and weights again, or give the original checkpoint.",
        )
    return {
        f"{module}.weight": stored_shape(checkpoint, quantization, module) for module in quantized
    }


def _has_quantized(checkpoint: Checkpoint) -> bool:
    """Whether any Linear is quantized: an image encoder may be, with its text decoder as it was."""
    modules = {name.rpartition(".")[0] for name in checkpoint.tensors}
    return any(is_quantized(checkpoint, module) for module in modules)


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _misshapen(name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]) -> str:
    return f"{name} {list(shape)} instead of {list(expected[name])}"


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The floating type that holds most bytes: what the weights are, whatever config.json says.
    Scales are none."""
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in _FLOATS and info.name.endswith((".weight", ".bias")):
            sizes[info.dtype] += info.num_bytes
    return max(sizes, key=sizes.__getitem__, default=None)
