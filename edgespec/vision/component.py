"""The config.json of an exported image encoder as one frozen value.

The keys are those of Hugging Face and TensorRT Edge-LLM where they have them. Knows the keys on
disk, and writes what it reads. Knows no graph and no engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, get_args

from edgespec.artifacts import json_files
from edgespec.artifacts.graph_quantization import GraphQuantization
from edgespec.config import ImageTokens, VisionConfig
from edgespec.config.bounds import MAX_WINDOW_SIDE
from edgespec.config.values import VisionActivation, VisionNorm
from edgespec.contract import Role
from edgespec.safe_read.fields import BundleFields
from edgespec.safe_read.records import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionComponentConfig:
    """An exported image encoder of the model `model`, whose rows stand for `tokens.image`.

    `identity` is that of the checkpoint, the same as that of the exported language model;
    `quantized_from` that of the checkpoint's original. `quantization` are its quantized weights.
    """

    model: str  # the architecture
    vision: VisionConfig
    tokens: ImageTokens
    identity: str
    quantized_from: str | None = None
    quantization: GraphQuantization | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a config.json; BundleError that names the key that is wrong."""
        return cls.from_dict(json_files.read_json(path), str(path))

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        source: str,
        fields_of: Callable[[Mapping[str, Any], str], BundleFields] = BundleFields,
    ) -> Self:
        """From the keys of config.json; BundleError names a wrong key of `source`."""
        fields = fields_of(raw, source)
        if fields.get("engine_role") != Role.VISUAL:
            raise fields.wrong("engine_role", f"{Role.VISUAL.value!r}")
        quantization = fields.optional_section("quantization")
        return cls(
            model=fields.required_text("model"),
            vision=read_vision(fields.section("vision_config")),
            tokens=read_tokens(fields),
            identity=fields.required_text("identity"),
            quantized_from=fields.text("quantized_from"),
            quantization=GraphQuantization.read(quantization) if quantization.raw else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The keys of config.json, in the order in which they are written."""
        keys: dict[str, Any] = {
            "model": self.model,
            "engine_role": Role.VISUAL.value,
            "vision_config": vision_dict(self.vision),
            "image_token_id": self.tokens.image,
            "video_token_id": self.tokens.video,
            "vision_start_token_id": self.tokens.vision_start,
            "vision_end_token_id": self.tokens.vision_end,
            "identity": self.identity,
        }
        if self.quantized_from:
            keys["quantized_from"] = self.quantized_from
        return keys | ({"quantization": self.quantization.to_dict()} if self.quantization else {})

    @property
    def role(self) -> Role:
        """The role of its engine."""
        return Role.VISUAL

    @property
    def origin(self) -> str:
        """The identity of the weights that these stem from: their own unless quantized."""
        return self.quantized_from or self.identity


def is_visual(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an image encoder."""
    return raw.get("engine_role") == Role.VISUAL


def read_tokens(fields: BundleFields) -> ImageTokens:
    """The token ids around and inside an image. BundleError names a wrong key."""
    names = ("image", "video", "vision_start", "vision_end")
    for name in names:
        if fields.get(f"{name}_token_id") is None:
            raise fields.missing(f"{name}_token_id")
    return ImageTokens(**{name: fields.count(f"{name}_token_id") for name in names})


def one_of(words: tuple[str, ...]) -> Reader:
    """A reader of one of some words."""

    def read(fields: BundleFields, key: str) -> str:
        word = fields.required_text(key)
        if word not in words:
            raise fields.wrong(key, f"one of {', '.join(words)}")
        return word

    return read


# Key of `vision_config` -> what it is of a VisionConfig, and how it is read
ROWS: Mapping[str, tuple[str, Reader]] = {
    "depth": ("num_layers", BundleFields.size),
    "hidden_size": ("hidden_size", BundleFields.size),
    "intermediate_size": ("intermediate_size", BundleFields.size),
    "num_heads": ("num_heads", BundleFields.size),
    "out_hidden_size": ("out_hidden_size", BundleFields.size),
    "patch_size": ("patch_size", BundleFields.size),
    "temporal_patch_size": ("temporal_patch_size", BundleFields.size),
    "in_channels": ("in_channels", BundleFields.size),
    "spatial_merge_size": ("merge_size", BundleFields.size),
    "hidden_act": ("activation", one_of(get_args(VisionActivation))),
    "norm": ("norm", one_of(get_args(VisionNorm))),
    "norm_eps": ("norm_eps", BundleFields.number),
    "gated_mlp": ("gated_mlp", BundleFields.required_flag),
    "patch_bias": ("patch_bias", BundleFields.required_flag),
    "rope_theta": ("rope_theta", BundleFields.number),
    "window_size": ("window_size", BundleFields.optional_size),
    "fullatt_block_indexes": ("full_attention_layers", BundleFields.counts),
    "num_position_embeddings": ("position_grid", BundleFields.count),
    "deepstack_visual_indexes": ("deepstack_layers", BundleFields.counts),
}
POSITIONS = "num_position_embeddings"  # the square of the grid's side


def vision_dict(config: VisionConfig) -> dict[str, Any]:
    """The `vision_config` of config.json."""
    values = {key: getattr(config, name) for key, (name, _) in ROWS.items()}
    lists = {key: list(value) for key, value in values.items() if isinstance(value, tuple)}
    return values | lists | {POSITIONS: config.position_grid**2}


def read_vision(fields: BundleFields) -> VisionConfig:
    """The encoder of the keys that `vision_dict` writes. BundleError names a wrong key."""
    values = {name: read(fields, key) for key, (name, read) in ROWS.items()}
    positions, num_layers = values["position_grid"], values["num_layers"]
    config = VisionConfig(**values | {"position_grid": math.isqrt(positions)})
    for key in ("fullatt_block_indexes", "deepstack_visual_indexes"):
        layers = values[ROWS[key][0]]
        if sorted(set(layers)) != list(layers) or not all(i < num_layers for i in layers):
            raise fields.wrong(key, f"a list of layers below {num_layers}, ascending")
    if config.position_grid**2 != positions:
        raise fields.wrong(POSITIONS, "a square number")
    if config.hidden_size % (4 * config.num_heads):
        raise fields.wrong("num_heads", "a divisor of hidden_size, into heads of 4 n elements")
    if config.has_windows and not 0 < config.window_side <= MAX_WINDOW_SIDE:
        raise fields.wrong("window_size", f"windows of up to {MAX_WINDOW_SIDE} patches a side")
    return config
