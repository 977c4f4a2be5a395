"""What a model is, as pure values: read from the dictionaries of Hugging Face, ModelOpt,
speculators and EAGLE.

Knows the spellings that published configurations use, and turns them into one. Knows no files,
tensors or graphs. Aux layer indices are normalized here: everywhere inside they are Hugging Face
`hidden_states` indices.
"""

from __future__ import annotations

from edgespec.config.aux_layers import default_aux_layers, normalize_aux_layers, resolve_aux_layers
from edgespec.config.dflash import parse_dflash_config
from edgespec.config.eagle import parse_draft_config
from edgespec.config.tensors import layer_tensors
from edgespec.config.values import (
    AttentionSpec,
    AuxLayerConvention,
    DecoderConfig,
    DFlashConfig,
    DraftConfig,
    DraftKind,
    LayerKind,
    LayerSpec,
    LinearAttentionConfig,
    MlpSpec,
    ModelConfig,
    NormNames,
    NormSpec,
    RopeConfig,
    RopeKind,
    Shapes,
)

__all__ = [
    "AttentionSpec",
    "AuxLayerConvention",
    "DFlashConfig",
    "DecoderConfig",
    "DraftConfig",
    "DraftKind",
    "LayerKind",
    "LayerSpec",
    "LinearAttentionConfig",
    "MlpSpec",
    "ModelConfig",
    "NormNames",
    "NormSpec",
    "RopeConfig",
    "RopeKind",
    "Shapes",
    "default_aux_layers",
    "layer_tensors",
    "normalize_aux_layers",
    "parse_dflash_config",
    "parse_draft_config",
    "resolve_aux_layers",
]
