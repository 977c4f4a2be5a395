"""What a model is, as pure values: read from the dictionaries of Hugging Face, ModelOpt, speculators and EAGLE.

Knows the spellings that published configurations use, and turns them into one. Knows no files, tensors or graphs.
Tap indices are normalised here: everywhere inside they are Hugging Face `hidden_states` indices.
"""

from __future__ import annotations

from edgespec.config.bases import parse_eos, parse_model_config, with_eos
from edgespec.config.dflash import parse_dflash_config
from edgespec.config.eagle import parse_draft_config
from edgespec.config.taps import default_tap_ids, normalise_taps, resolve_taps
from edgespec.config.values import (
    DecoderConfig,
    DFlashConfig,
    DraftConfig,
    DraftKind,
    LayerKind,
    LinearAttentionConfig,
    ModelConfig,
    RopeConfig,
    RopeKind,
    Shapes,
    TapConvention,
)

__all__ = [
    "DFlashConfig",
    "DecoderConfig",
    "DraftConfig",
    "DraftKind",
    "LayerKind",
    "LinearAttentionConfig",
    "ModelConfig",
    "RopeConfig",
    "RopeKind",
    "Shapes",
    "TapConvention",
    "default_tap_ids",
    "normalise_taps",
    "parse_dflash_config",
    "parse_draft_config",
    "parse_eos",
    "parse_model_config",
    "resolve_taps",
    "with_eos",
]
