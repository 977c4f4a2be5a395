"""What a model is, as frozen values. Knows no dictionaries, files or tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh"]
VisionActivation = Literal["silu", "gelu", "gelu_tanh"]
VisionNorm = Literal["rms", "layer"]
LayerKind = Literal["full_attention", "linear_attention"]
AuxLayerConvention = Literal["hs", "output", "unknown"]
Shapes = Mapping[str, tuple[int, ...]]  # tensor name -> shape, as on disk
NOT_STATED = 0  # the vocabulary of a draft that shares its base's lm_head and does not say its size


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
    attention_factor: float = 1.0  # yarn, longrope: multiplies cos and sin, resolved when parsed
    # longrope: divide the inverse frequencies, one per pair; which, the engine's capacity says
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    # M-RoPE: the pairs that turn by each axis of a position (time, height, width); () is one axis
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False  # the axes take turns pair by pair, not section by section


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
class AttentionSpec:
    """Grouped-query attention of one layer. Sizes are in elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    scale: float  # multiplies the products of queries and keys
    window: int | None = None  # tokens seen, the own one included; None: all
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # an RMSNorm over each head of the queries and of the keys
    gated: bool = False  # q_proj holds, per head, the query and then the gate of the output
    fused_qkv: bool = False  # one qkv_proj: the rows of q, of k and of v


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts (arXiv 2101.03961): a router chooses `per_token` of `count` MLPs for
    each row; what they give is added, weighted by the router's softmax."""

    count: int
    per_token: int
    normalized: bool = True  # the weights of a row's experts are divided by their sum
    shared_size: int = 0  # width of one more MLP, for all rows and behind a gate; 0: none


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """The feed-forward part of one layer: down(activation(gate(x)) * up(x))."""

    intermediate_size: int  # with experts: of each of them
    activation: Activation = "silu"
    bias: bool = False
    fused_gate_up: bool = False  # one gate_up_proj: the rows of gate and of up
    experts: ExpertsSpec | None = None  # None: dense


@dataclass(frozen=True, slots=True)
class NormSpec:
    """An RMSNorm: x / rms(x) * w."""

    eps: float
    unit_offset: bool = False  # weights are stored around 0: x / rms(x) * (1 + w)


@dataclass(frozen=True, slots=True)
class NormNames:
    """Where a layer has norms, by the names of their tensors. None: there is no norm at that
    place."""

    before_mixer: str | None = "input_layernorm"
    before_mlp: str | None = "post_attention_layernorm"
    after_mixer: str | None = None  # of what attention gives, before it is added to the stream
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x + mixer(x), then x + mlp(x), with norms where `norm_names` says."""

    mixer: AttentionSpec | LinearAttentionConfig
    mlp: MlpSpec
    norm: NormSpec
    norm_names: NormNames = NormNames()


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder: its layers, each described by itself, and what is around them."""

    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec  # the last one, before the head
    embedding_scale: float = 1.0  # multiplies the embedding's rows; rounded to the weights' dtype

    @property
    def num_layers(self) -> int:
        """How many decoder layers there are."""
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has one, in order; at least one layer has."""
        return tuple(s.mixer for s in self.layers if isinstance(s.mixer, AttentionSpec))

    @property
    def attention(self) -> AttentionSpec:
        """What attention layers share: heads, biases and norms. Window and RoPE may differ."""
        return next((a for a in self.attentions if a.window is None), self.attentions[0])

    @property
    def linear(self) -> LinearAttentionConfig | None:
        """The sizes of the layers with linear attention, which are all the same."""
        mixers = (s.mixer for s in self.layers if isinstance(s.mixer, LinearAttentionConfig))
        return next(mixers, None)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What mixes tokens in each layer."""
        return tuple(
            "linear_attention"
            if isinstance(layer.mixer, LinearAttentionConfig)
            else "full_attention"
            for layer in self.layers
        )

    @property
    def num_heads(self) -> int:
        """Query heads of an attention layer."""
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of an attention layer."""
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """Width inside the MLP of the first layer."""
        return self.layers[0].mlp.intermediate_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention layers' windows, each once: none at all first, then ascending."""
        windows = {attention.window for attention in self.attentions}
        return tuple(sorted(windows, key=lambda window: (window is not None, window or 0)))

    @property
    def sliding_window(self) -> int | None:
        """The smallest window of the layers that have one; None: all see everything."""
        return next((window for window in self.windows if window is not None), None)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The attention layers' rotary embeddings, each once, that of full attention first; none
        without layers."""
        if not self.layers:
            return ()
        return tuple(dict.fromkeys((self.rope, *(a.rope for a in self.attentions))))

    @property
    def rope(self) -> RopeConfig:
        """The rotary embedding of layers with full attention; of all layers where it is one."""
        return self.attention.rope


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """An image encoder of the Qwen-VL line: a transformer over patches, whose last states are
    merged, `merge_size` by `merge_size` patches to one row of the language model.

    Sizes are in elements, `patch_size` and `window_size` in pixels. Layers that are not in
    `full_attention_layers` see their own window alone. `position_grid` is the side of the learned
    position embeddings, which are interpolated to an image's own grid; 0: there are none.
    `deepstack_layers` are those behind which the states are merged as well, for the first layers
    of the language model.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int  # of the language model
    patch_size: int
    activation: VisionActivation
    norm: VisionNorm
    norm_eps: float
    gated_mlp: bool  # down(activation(gate(x)) * up(x)); else fc2(activation(fc1(x)))
    full_attention_layers: tuple[int, ...]
    temporal_patch_size: int = 2
    in_channels: int = 3
    merge_size: int = 2
    rope_theta: float = 10000.0
    window_size: int | None = None
    position_grid: int = 0
    deepstack_layers: tuple[int, ...] = ()
    patch_bias: bool = False  # of the product that embeds a patch

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Elements of the patches that are merged to one row, side by side."""
        return self.hidden_size * self.merge_size**2

    @property
    def inner_mergers(self) -> dict[int, str]:
        """Layer -> the module that merges its states for the language model, beside the last."""
        modules = (f"deepstack_merger_list.{i}" for i in range(len(self.deepstack_layers)))
        return dict(zip(self.deepstack_layers, modules, strict=True))

    @property
    def window_side(self) -> int:
        """The side of a window in patches: whole rows of the language model; 0: no windows."""
        if self.window_size is None:
            return 0
        return self.window_size // (self.merge_size * self.patch_size) * self.merge_size

    @property
    def has_windows(self) -> bool:
        """Whether some layers see a window alone."""
        return len(self.full_attention_layers) < self.num_layers

    @property
    def patch_width(self) -> int:
        """Values of a patch: all channels of its pixels, `temporal_patch_size` times over."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The token ids around and inside an image in a prompt."""

    image: int  # stands once for each row of an image
    video: int
    vision_start: int
    vision_end: int


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
    mtp_layers: int = 0  # of the multi-token prediction head that the config declares; 0: none
    vision: VisionConfig | None = None  # its image encoder; None: it reads text alone
    image_tokens: ImageTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """What every draft with a checkpoint of its own declares; each method adds its own fields.

    `decoder` describes the draft's own layers, of width `decoder.hidden_size`.
    """

    method: str  # a key of edgespec.methods.METHODS
    layout: str  # who wrote it, for messages: "modelopt", "speculators", "z-lab", ...
    decoder: DecoderConfig
    vocab_size: int  # of the base; NOT_STATED: the draft does not say
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
