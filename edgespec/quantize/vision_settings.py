"""The settings of a checkpoint whose image encoder is quantized, in ModelOpt's keys: of the encoder
alone, or joined to those of its text decoder.

Knows hf_quant_config.json and the section quantization_config of config.json. Knows no weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from edgespec.checkpoint.names import beside_roots
from edgespec.quantize.base import EMBEDDING, HEAD, Base
from edgespec.quantize.modelopt import Settings
from edgespec.quantize.plan import QuantizationPlan
from edgespec.quantize.stream import PRODUCER
from edgespec.quantize.vision import VisionPlan

FP8, MIXED = "FP8", "MIXED_PRECISION"
_OF_A_LAYER = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")
_FP8_VALUES = {"dynamic": False, "num_bits": 8, "type": "float"}


def of_vision(base: Base, vision: VisionPlan) -> Settings:
    """The settings of a checkpoint with nothing else quantized."""
    roots = (root.removesuffix(".") for root in other_roots(base, vision))
    others = [HEAD, base.stored(EMBEDDING), f"{base.stack}.layers*", *(f"{r}*" for r in roots)]
    excluded = [*others, *vision.kept]
    quantization = {"quant_algo": FP8, "kv_cache_quant_algo": None, "exclude_modules": excluded}
    groups = {
        "group_0": {
            "input_activations": dict(_FP8_VALUES),
            "weights": dict(_FP8_VALUES),
            "targets": ["Linear"],
        }
    }
    inside = {
        "config_groups": groups,
        "ignore": list(excluded),
        "quant_algo": FP8,
        "producer": PRODUCER,
        "quant_method": "modelopt",
    }
    return {"producer": PRODUCER, "quantization": quantization}, inside


def joined(settings: Settings, plan: QuantizationPlan, vision: VisionPlan) -> Settings:
    """The settings of a quantized text decoder and of the vision. One algorithm for both stays one;
    otherwise each layer has its own."""
    beside, inside = copy.deepcopy(settings)
    quantization = beside["quantization"]
    for section, key in ((quantization, "exclude_modules"), (inside, "ignore")):
        section[key] = [*without_vision(section.get(key) or (), vision), *vision.kept]
    if quantization["quant_algo"] != FP8:
        layers = quantized_layers(quantization, plan.layers)
        layers |= {module: {"quant_algo": FP8} for module in vision.layers.values()}
        for section in (quantization, inside):
            section |= {"quant_algo": MIXED, "quantized_layers": layers}
        for key in ("group_size", "has_zero_point", "pre_quant_scale"):
            quantization.pop(key, None)
        inside.pop("config_groups", None)
    return beside, inside


def quantized_layers(
    quantization: Mapping[str, Any], names: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """The algorithm of each layer, of settings with one for all or with one for each."""
    if quantization["quant_algo"] == MIXED:
        return dict(quantization["quantized_layers"])
    row = {key: quantization[key] for key in _OF_A_LAYER if key in quantization}
    return {name: dict(row) for name in names}


def without_vision(excluded: Iterable[str], vision: VisionPlan) -> list[str]:
    """The excluded modules but those of the vision."""
    root = vision.prefix.removesuffix(".")
    return [name for name in excluded if not name.startswith(root)]


def other_roots(base: Base, vision: VisionPlan) -> list[str]:
    """What stands beside decoder and image encoder, such as heads of multi-token prediction."""
    names = base.checkpoint.tensors
    return [
        root
        for root in beside_roots()
        if not root.startswith(vision.prefix) and any(name.startswith(root) for name in names)
    ]
