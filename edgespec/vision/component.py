"""The config.json of an exported image encoder as one frozen value.

The keys are those of Hugging Face and TensorRT Edge-LLM where they have them. Knows the keys on
disk, and writes what it reads. Knows no graph and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast, get_args

from edgespec.artifacts import json_files
from edgespec.artifacts.graph_quantization import GraphQuantization
from edgespec.config import ImageTokens, VisionConfig
from edgespec.config.bounds import MAX_WINDOW_SIDE
from edgespec.config.fields import is_int
from edgespec.config.values import VisionActivation, VisionNorm
from edgespec.contract import Role
from edgespec.safe_read.fields import BundleFields


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


def vision_dict(config: VisionConfig) -> dict[str, Any]:
    """The `vision_config` of config.json."""
    return {
        "depth": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_heads": config.num_heads,
        "out_hidden_size": config.out_hidden_size,
        "patch_size": config.patch_size,
        "temporal_patch_size": config.temporal_patch_size,
        "in_channels": config.in_channels,
        "spatial_merge_size": config.merge_size,
        "hidden_act": config.activation,
        "norm": config.norm,
        "norm_eps": config.norm_eps,
        "gated_mlp": config.gated_mlp,
        "patch_bias": config.patch_bias,
        "rope_theta": config.rope_theta,
        "window_size": config.window_size,
        "fullatt_block_indexes": list(config.full_attention_layers),
        "num_position_embeddings": config.position_grid**2,
        "deepstack_visual_indexes": list(config.deepstack_layers),
    }


def read_vision(fields: BundleFields) -> VisionConfig:
    """The encoder of the keys that `vision_dict` writes. BundleError names a wrong key."""
    num_layers, positions = fields.size("depth"), fields.count("num_position_embeddings")
    config = VisionConfig(
        num_layers=num_layers,
        hidden_size=fields.size("hidden_size"),
        intermediate_size=fields.size("intermediate_size"),
        num_heads=fields.size("num_heads"),
        out_hidden_size=fields.size("out_hidden_size"),
        patch_size=fields.size("patch_size"),
        activation=cast(Any, one_of(fields, "hidden_act", get_args(VisionActivation))),
        norm=cast(Any, one_of(fields, "norm", get_args(VisionNorm))),
        norm_eps=fields.number("norm_eps"),
        gated_mlp=fields.required_flag("gated_mlp"),
        full_attention_layers=read_layers(fields, "fullatt_block_indexes", num_layers),
        temporal_patch_size=fields.size("temporal_patch_size"),
        in_channels=fields.size("in_channels"),
        merge_size=fields.size("spatial_merge_size"),
        rope_theta=fields.number("rope_theta"),
        window_size=fields.optional_size("window_size"),
        position_grid=round(positions**0.5),
        deepstack_layers=read_layers(fields, "deepstack_visual_indexes", num_layers),
        patch_bias=fields.required_flag("patch_bias"),
    )
    if config.position_grid**2 != positions:
        raise fields.wrong("num_position_embeddings", "a square number")
    if config.hidden_size % (4 * config.num_heads):
        raise fields.wrong("num_heads", "a divisor of hidden_size, into heads of 4 n elements")
    if config.has_windows and not 0 < config.window_side <= MAX_WINDOW_SIDE:
        raise fields.wrong("window_size", f"windows of up to {MAX_WINDOW_SIDE} patches a side")
    return config


def one_of(fields: BundleFields, key: str, words: tuple[str, ...]) -> str:
    """One of some words. BundleError for another value."""
    word = fields.required_text(key)
    if word not in words:
        raise fields.wrong(key, f"one of {', '.join(words)}")
    return word


def read_layers(fields: BundleFields, key: str, num_layers: int) -> tuple[int, ...]:
    """Indices of layers, ascending. BundleError for anything else."""
    layers = fields.counts(key)
    if sorted(set(layers)) != list(layers) or not all(is_int(i) and i < num_layers for i in layers):
        raise fields.wrong(key, f"a list of layers below {num_layers}, ascending")
    return layers
