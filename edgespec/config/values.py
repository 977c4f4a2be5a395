"""What a model is, as frozen values. Knows no dictionaries, files or tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
LayerKind = Literal["full_attention", "linear_attention"]
AuxLayerConvention = Literal["hs", "output", "unknown"]
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape, as on disk


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model; positions are token indices.

    `rotary_dim` counts both halves, and is less than the head_dim where only the first elements of
    a head are rotated.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0  # length before scaling; dynamic: where the scaling sets in
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    attention_factor: float = (
        1.0  # yarn: multiplies cos and sin, resolved from mscale at parse time
    )


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """A gated delta net (arXiv 2412.06464): num_value_heads / num_key_heads value heads share one
    key head."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int  # tokens seen by the causal convolution, the own one included


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder: what its layers look like. Sizes are in elements."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None  # tokens seen, the own one included; the same for all layers
    gated_attention: bool = (
        False  # q_proj holds, per head, the query and then the gate of the output
    )
    unit_offset_norms: bool = False  # norm weights are stored around 0: x * (1 + w)
    layer_kinds: tuple[LayerKind, ...] = ()  # empty: full attention in all layers
    linear: LinearAttentionConfig | None = None  # of the layers with linear attention


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A base model: its decoder and its vocabulary."""

    architecture: str
    decoder: DecoderConfig
    vocab_size: int
    tied_head: bool
    max_position: int
    dtype: str  # the checkpoint's own: float32, float16, bfloat16
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    mtp_layers: int = (
        0  # of the head for multi-token prediction that the config tells of; 0: no head
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """What every draft with a checkpoint of its own declares; each method adds its own fields.

    `decoder` describes the draft's own layers, of width `decoder.hidden_size`.
    """

    method: str  # a key of edgespec.methods.METHODS
    layout: str  # who wrote it, for messages: "eagle", "modelopt", "speculators", "z-lab"
    decoder: DecoderConfig
    vocab_size: int  # of the base
    draft_vocab_size: int
    target_hidden_size: int  # width of one aux hidden state
    num_aux_layers: int
    # hidden_states indices, but see aux_layer_convention; None: the method's default
    aux_layer_ids: tuple[int, ...] | None
    own_embedding: bool
    own_head: bool
    base_name: str | None = None  # the base that the draft's config names
    num_target_layers: int | None = None  # of the base, where the draft's config declares it
    mask_token_id: int | None = None  # of a draft that fills masks
    # How the file counts its layers. hs: for certain, or converted; output: converted as the format
    # suggests, to be looked at again with the base's depth; unknown: raw. resolve_aux_layers
    # settles all three.
    aux_layer_convention: AuxLayerConvention = "hs"
