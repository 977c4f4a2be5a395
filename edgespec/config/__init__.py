"""What a model is, as pure values: read from the dictionaries of Hugging Face, ModelOpt,
speculators and others.

Knows the spellings that published configurations use, and turns them into one. Knows no files,
tensors or graphs. Aux layer indices are normalized here: everywhere inside they are Hugging Face
`hidden_states` indices.
"""

from __future__ import annotations

from edgespec.config.tensors import layer_tensors
from edgespec.config.values import (
    AttentionSpec,
    AuxLayerConvention,
    DecoderConfig,
    DraftConfig,
    ExpertsSpec,
    ImageTokens,
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
    VisionConfig,
)

__all__ = [
    "AttentionSpec",
    "AuxLayerConvention",
    "DecoderConfig",
    "DraftConfig",
    "ExpertsSpec",
    "ImageTokens",
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
    "VisionConfig",
    "layer_tensors",
]
