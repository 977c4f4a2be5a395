"""The largest sizes that a configuration may declare. Published models stay far below; what is
larger is refused before a loop or an allocation depends on it. Knows the keys alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MAX_LAYERS = 4096  # published decoders have up to about 130
MAX_VOCABULARY = 2**24
MAX_WINDOW_SIDE = 64  # of an image encoder's window, in patches; published ones have 8
MAX_EXPERTS = 1024  # of a layer; published ones have up to 512
_MAX_HEADS = 2**14
_MAX_HEAD_DIM = 2**14
_MAX_WIDTH = 2**20

# Key of a config.json (Hugging Face's, a draft's, or that of an export) -> its largest value
MAX_SIZES: Mapping[str, int] = MappingProxyType(
    {
        "num_hidden_layers": MAX_LAYERS,
        "num_layers": MAX_LAYERS,
        "num_target_layers": MAX_LAYERS,
        "num_taps": MAX_LAYERS,
        "vocab_size": MAX_VOCABULARY,
        "draft_vocab_size": MAX_VOCABULARY,
        "num_attention_heads": _MAX_HEADS,
        "num_key_value_heads": _MAX_HEADS,
        "num_kv_heads": _MAX_HEADS,
        "num_key_heads": _MAX_HEADS,
        "num_value_heads": _MAX_HEADS,
        "linear_num_key_heads": _MAX_HEADS,
        "linear_num_value_heads": _MAX_HEADS,
        "head_dim": _MAX_HEAD_DIM,
        "rotary_dim": _MAX_HEAD_DIM,
        "local_rotary_dim": _MAX_HEAD_DIM,
        "key_head_dim": _MAX_HEAD_DIM,
        "value_head_dim": _MAX_HEAD_DIM,
        "linear_key_head_dim": _MAX_HEAD_DIM,
        "linear_value_head_dim": _MAX_HEAD_DIM,
        "hidden_size": _MAX_WIDTH,
        "target_hidden_size": _MAX_WIDTH,
        "intermediate_size": 4 * _MAX_WIDTH,
        "moe_intermediate_size": 4 * _MAX_WIDTH,
        "shared_expert_intermediate_size": 4 * _MAX_WIDTH,
        "num_experts": MAX_EXPERTS,
        "num_local_experts": MAX_EXPERTS,
        "num_experts_per_tok": MAX_EXPERTS,
        "features": MAX_LAYERS * _MAX_WIDTH,
        "base_features": MAX_LAYERS * _MAX_WIDTH,
        "conv_kernel": 1024,
        "linear_conv_kernel_dim": 1024,
        "block_size": 2**16,
        # of image encoders
        "depth": MAX_LAYERS,
        "num_heads": _MAX_HEADS,
        "out_hidden_size": _MAX_WIDTH,
        "patch_size": 256,
        "temporal_patch_size": 64,
        "in_channels": 64,
        "spatial_merge_size": 16,
        "window_size": 2**14,
        "num_position_embeddings": 2**20,
    }
)
