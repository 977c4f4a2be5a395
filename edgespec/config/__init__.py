"""What a model is, as pure values: read from the dictionaries of Hugging Face, ModelOpt,
speculators and EAGLE.

Knows the spellings that published configurations use, and turns them into one. Knows no files,
tensors or graphs. Tap indices are normalised here: everywhere inside they are Hugging Face
`hidden_states` indices.
"""

from __future__ import annotations

from edgespec.config.bases import parse_eos, parse_model_config, with_eos
from edgespec.config.values import (
    AuxLayerConvention,
    DecoderConfig,
    DraftConfig,
    LayerKind,
    LinearAttentionConfig,
    ModelConfig,
    RopeConfig,
    RopeKind,
    Shapes,
)

__all__ = [
    "AuxLayerConvention",
    "DecoderConfig",
    "DraftConfig",
    "LayerKind",
    "LinearAttentionConfig",
    "ModelConfig",
    "RopeConfig",
    "RopeKind",
    "Shapes",
    "parse_eos",
    "parse_model_config",
    "with_eos",
]
