"""What a row of the table of families says, and the parts of a layer that most families share.

Knows configurations as `Fields`. Knows no family by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.config.fields import Fields
from edgespec.config.layers import (
    DEFAULT_WINDOW,
    WindowRule,
    activation_of,
    heads_of,
    num_layers_of,
    windows_of,
)
from edgespec.config.ropes import MRope, one_rope
from edgespec.config.values import (
    AttentionSpec,
    DecoderConfig,
    ImageTokens,
    LayerSpec,
    MlpSpec,
    NormSpec,
    VisionConfig,
)


@dataclass(frozen=True, slots=True)
class GgufEncoder:
    """How llama.cpp's converter writes a family's image encoder (checkpoint/gguf/encoder.py)."""

    projector: str  # `clip.projector_type`
    processor: str  # `image_processor_type` of its preprocessor_config.json
    pixels: tuple[int, int]  # the fewest and the most of an image: no metadata say it
    # Key behind clip.vision. -> key of vision_config, beside those that all encoders have
    keys: Mapping[str, str]
    tensors: Mapping[str, str]  # tensor of a block -> own name within a layer
    more: Callable[[Mapping[str, Any]], Mapping[str, Any]]  # keys that follow from others
    inner_mergers: str = ""  # how the names of inner layers' mergers begin; "": it has none


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How llama.cpp's converter writes a family to GGUF files, beyond what it does with all
    (checkpoint/gguf)."""

    architecture: str  # `general.architecture`, and how the keys of its metadata begin
    # Key behind that beginning -> key of config.json; "": nothing depends on it
    keys: Mapping[str, str] = field(default_factory=dict)
    lists: tuple[str, ...] = ()  # of these keys, those of whole numbers or flags, taken as they are
    # Tensor of a block, without the end .weight -> name within a layer; or a whole name -> another
    tensors: Mapping[str, str] = field(default_factory=dict)
    behind: str = ""  # where layers behind the last one belong, a prediction head; "": left out
    permuted: bool = False  # rows of q and k: the two of a rotation are neighbours
    norms_plus_one: bool = False  # but for the norm of a delta net
    tiled_heads: bool = False  # value heads of delta nets: one of each key head, then the next
    # Keys that follow from others of config.json, or that no metadata says
    more: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: {}
    encoder: GgufEncoder | None = None  # None: its images are not read


def sections_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding of a model that reads images, with the pairs of each axis."""
    rope, sections = config.get("rope_scaling") or {"rope_type": "default"}, config.get(SECTIONS)
    if not isinstance(sections, list):
        return {}
    return {"rope_scaling": {**rope, "mrope_section": sections[:3]}}


SECTIONS = "gguf_rope_sections"  # of a config.json that is made of metadata alone


@dataclass(frozen=True, slots=True)
class Family:
    """One supported architecture, as transformers builds it: how its config.json becomes layers,
    and where its tensors stand."""

    name: str  # for messages: "Llama"
    model_type: str
    decoder: Callable[[Fields], DecoderConfig]  # from the fields of the text part
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that files leave out
    text_key: str = ""  # the key under which the text part stands; "": at the top
    text_at_top: bool = False  # files without `text_key` have the text part at the top
    # Where the decoder's tensors stand on disk, the first that is found; inside it is "model"
    stacks: tuple[str, ...] = ("model",)
    beside: tuple[str, ...] = ()  # beginnings of names of tensors that no decoder layer needs
    # Which layers slide; EAGLE-3 drafts whose config names this model_type read their window so too
    window_rule: WindowRule = "none"
    mtp_layers: Callable[[Fields], int] | None = None  # of an MTP head (names mtp.*); None: no head
    # Its image encoder, from the fields of `vision_config`; None: the family has none
    vision: Callable[[Fields], VisionConfig] | None = None
    image_tokens: ImageTokens | None = None  # of files that leave them out; None: none may
    gguf: GgufForm | None = None  # None: llama.cpp has it not, or as another family
    # Modules of its encoder on disk -> their own names (checkpoint/vision.py), where they differ
    vision_names: Mapping[str, str] = field(default_factory=dict)


def read_attention(
    fields: Fields,
    head_dim: int | None = None,
    *,
    needs_kv_heads: bool = True,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    mrope: MRope | None = None,
) -> AttentionSpec:
    """Returns attention without a window over whole heads that are rotated, scaled by
    1/sqrt(head_dim)."""
    num_heads, num_kv_heads, head_dim = heads_of(fields, head_dim, needs_kv_heads=needs_kv_heads)
    return AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        rope=one_rope(fields, head_dim, fields.size("max_position_embeddings"), mrope=mrope),
        scale=1 / math.sqrt(head_dim),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
    )


def read_layer(fields: Fields, attention: AttentionSpec, *, mlp_bias: bool = False) -> LayerSpec:
    """Returns a pre-norm layer with SwiGLU."""
    activation = activation_of(fields)
    mlp = MlpSpec(fields.size("intermediate_size"), activation, bias=mlp_bias)
    return LayerSpec(attention, mlp, NormSpec(fields.number("rms_norm_eps")))


def read_decoder(
    fields: Fields,
    layer: LayerSpec,
    rule: WindowRule = "none",
    default_window: int | None = DEFAULT_WINDOW,
) -> DecoderConfig:
    """A decoder of such layers, which differ in their windows alone; `rule` says which of them
    slide where the file does not, `default_window` how far."""
    assert isinstance(layer.mixer, AttentionSpec)
    attention = layer.mixer
    windows = windows_of(fields, rule, num_layers_of(fields), default_window)
    layers = tuple(replace(layer, mixer=replace(attention, window=w)) for w in windows)
    return DecoderConfig(fields.size("hidden_size"), layers, layer.norm)
