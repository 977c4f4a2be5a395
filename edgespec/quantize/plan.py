"""Which Linears are quantized to which scheme, and the checks before any work is done.

Knows names, shapes and bytes of a checkpoint's tensors. Knows no ModelOpt and no torch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.source import TensorInfo
from edgespec.errors import CheckpointError, OutputError, UnsupportedModel
from edgespec.quantization.schemes import Scheme, check_shape, scheme_to_make
from edgespec.quantize.base import HEAD, Base

HEAD_SCHEMES = ("fp8", "int4_awq", "nvfp4", "mxfp8")
# Schemes of lm_head that a body allows (missing: all). AWQ smooths an FP8 lm_head too and runs
# quantized forward passes, for which NVFP4 and MXFP8 need CUDA. SmoothQuant gives an FP8 lm_head a
# scale per input, which no layout can store. MXFP8 needs no data.
_ALLOWED_HEADS: dict[str, tuple[str, ...]] = {
    "int4_awq": ("int4_awq",),
    "int8_sq": (),
    "mxfp8": ("mxfp8",),
}
_DISK_FACTOR = 1.2  # required free space, as a multiple of the bytes to write


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """The scheme of each quantized Linear by name, lm_head included."""

    layers: Mapping[str, Scheme]
    left_out: tuple[str, ...]  # Linears that --exclude names
    body: Scheme
    head: Scheme | None
    fp8_cache: bool = False

    @property
    def streamed(self) -> bool:
        """Whether each weight is converted alone, without calibration data and model."""
        return not self.fp8_cache and {scheme.name for scheme in self.layers.values()} == {"mxfp8"}


def plan_base(
    base: Base,
    quantization: str,
    head: str | None,
    exclude: tuple[str, ...],
    fp8_cache: bool,
    beside: Iterable[str] = (),
) -> QuantizationPlan:
    """Returns the plan for every Linear of the decoder and, with `head`, lm_head.

    Names are those on disk. `exclude` may name Linears `beside` the decoder as well. Raises
    UnsupportedModel that names the layer, and CheckpointError for layers beyond the number in
    config.json.
    """
    tensors = base.checkpoint.tensors
    refuse_surplus_layers(base)
    refuse_experts(base)
    linear = re.compile(
        rf"({re.escape(base.stack)}\.layers\.\d+\..+(?:_proj|\.in_proj_qkv|\.in_proj_z))\.weight"
    )
    shapes = {
        match[1]: matrix(info)
        for name, info in tensors.items()
        if (match := linear.fullmatch(name)) and len(info.shape) == 2
    }
    if head is not None and (table := tensors.get(f"{base.source_of(HEAD)}.weight")) is not None:
        shapes[HEAD] = matrix(table)
    return make_plan(shapes, quantization, head, exclude, fp8_cache, beside)


def refuse_surplus_layers(base: Base) -> None:
    """Raises CheckpointError for layers that config.json does not count: nothing would run them."""
    layer = re.compile(rf"{re.escape(base.stack)}\.layers\.(\d+)\.")
    numbers = {int(match[1]) for name in base.checkpoint.tensors if (match := layer.match(name))}
    if surplus := sorted(number for number in numbers if number >= base.num_layers):
        raise CheckpointError(
            f"{base.checkpoint.place} has tensors of layer {surplus[0]}, but its config.json has"
            f" {base.num_layers} layers (from 0).",
            "Correct num_hidden_layers in config.json, or download the checkpoint again.",
        )


def refuse_experts(base: Base) -> None:
    """Raises UnsupportedModel for layers of experts: calibration data reach few of them."""
    if any(".experts." in name for name in base.checkpoint.tensors):
        raise UnsupportedModel(
            f"{base.checkpoint.place} has layers of experts, which this version does not quantize.",
            "Export it as it is and build with `weights` int4, or export a checkpoint that was"
            " quantized elsewhere.",
        )


def make_plan(
    shapes: Mapping[str, tuple[int, int]],
    quantization: str,
    head: str | None,
    exclude: tuple[str, ...],
    fp8_cache: bool = False,
    beside: Iterable[str] = (),
) -> QuantizationPlan:
    """Returns the plan for Linears of `shapes` (name -> [out, in]).

    Raises UnsupportedModel for an unknown scheme, a pair of schemes that cannot be calibrated
    together, a shape that the scheme does not allow, and a plan without Linears.
    """
    body = scheme_to_make(quantization)
    head_scheme = scheme_to_make(head) if head else None
    if head_scheme is not None and head_scheme.name not in HEAD_SCHEMES:
        raise UnsupportedModel(
            f"lm_head cannot be {head_scheme.name}.",
            f"Use one of {', '.join(HEAD_SCHEMES)}, or omit `lm_head_quantization`.",
        )
    refuse_mixture(body, head_scheme)
    left_out = matching([*shapes, *beside], exclude)
    layers = {}
    for name in shapes:
        if name in left_out:
            continue
        scheme = body if name.rpartition(".")[2] != HEAD else head_scheme
        if scheme is None:
            continue
        check_layer(scheme, shapes[name], name)
        layers[name] = scheme
    if not layers:
        raise UnsupportedModel("no Linear is left to quantize.", "Omit some `exclude` flags.")
    return QuantizationPlan(layers, left_out, body, head_scheme, fp8_cache)


def matching(names: Iterable[str], patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names that match any pattern. Raises UnsupportedModel for a pattern without."""
    names = list(names)
    matches: dict[str, None] = {}
    for pattern in patterns:
        hits = [name for name in names if fnmatchcase(name, pattern)]
        if not hits:
            kinds = sorted({name.rpartition(".")[2] for name in names})
            raise UnsupportedModel(
                f"`exclude` {pattern!r} names no Linear of this checkpoint.",
                f"Give a name such as {names[0]!r}, or a glob such as '*.{kinds[0]}'; kinds:"
                f" {', '.join(kinds)}.",
            )
        matches |= dict.fromkeys(hits)
    return tuple(matches)


def check_layer(scheme: Scheme, shape: tuple[int, int], name: str) -> None:
    """Raises UnsupportedModel if a Linear [out, in] cannot have the scheme."""
    try:
        check_shape(scheme, shape, name)
    except UnsupportedModel as error:
        kind = name.rpartition(".")[2]
        raise UnsupportedModel(
            error.what,
            f"Exclude such layers with `exclude` '*{kind}', or use another scheme.",
        ) from error


def refuse_mixture(body: Scheme, head: Scheme | None) -> None:
    """Raises UnsupportedModel for schemes that ModelOpt cannot calibrate together without CUDA."""
    if head is None or head is body:
        return
    allowed = _ALLOWED_HEADS.get(body.name)
    if allowed is not None and head.name not in allowed:
        remedy = (
            f"use `lm_head_quantization` {' or '.join(allowed)}"
            if allowed
            else "omit `lm_head_quantization`"
        )
        raise UnsupportedModel(
            f"lm_head as {head.name} with {body.name}: ModelOpt cannot calibrate both in one run.",
            f"With `quantization` {body.name} {remedy}.",
        )


def matrix(info: TensorInfo) -> tuple[int, int]:
    """Returns the shape [out, in] of a Linear's weight."""
    out_features, in_features = info.shape
    return out_features, in_features


def size_bytes(
    checkpoint: Checkpoint, plan: QuantizationPlan, stored: Callable[[str], str] = str
) -> int:
    """Returns an estimate of the bytes to write: quantized Linears, and the other tensors as is.

    `stored` maps a Linear to the module on disk that holds its weight.
    """
    sources = {name: checkpoint.tensors[f"{stored(name)}.weight"] for name in plan.layers}
    replaced = sum(
        info.num_bytes for info in sources.values() if not info.name.endswith("embed_tokens.weight")
    )
    total = sum(info.num_bytes for info in checkpoint.tensors.values())
    shapes = {name: matrix(info) for name, info in sources.items()}
    return total - replaced + quantized_bytes(plan, shapes)


def quantized_bytes(plan: QuantizationPlan, shapes: Mapping[str, tuple[int, int]]) -> int:
    """Returns an estimate of the bytes of the plan's Linears [out, in] with their scales."""
    total = 0
    for name, scheme in plan.layers.items():
        shape = shapes[name]
        count = shape[0] * shape[1]
        scale_bytes = 4
        if scheme.block > 1:
            scale_bytes = count // scheme.block * (1 if scheme.weight.startswith("float") else 4)
        total += count * scheme.bits // 8 + scale_bytes + 4 * sum(shape)
    return total


def refuse_full_disk(target: Path, needed_bytes: int) -> None:
    """Raises OutputError if less than 1.2 times `needed_bytes` is free at `target`."""
    directory = next(parent for parent in (target, *target.absolute().parents) if parent.exists())
    free = shutil.disk_usage(directory).free
    if free < needed_bytes * _DISK_FACTOR:
        wanted = round(needed_bytes * _DISK_FACTOR)
        raise OutputError(
            f"{directory} has {size_text(free)} free; about {size_text(wanted)} are needed,"
            f" {size_text(wanted - free)} more",
            "Free some space, or choose another directory.",
        )


def size_text(num_bytes: float) -> str:
    """A size in GB, or in MB where it is less than one."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
