"""The supported model families: one file each, as pure values.

A family's file says what its config.json means (`decoder`, which gives one LayerSpec per layer),
what it leaves unsaid, and where its tensors stand. Knows no files, tensors or graphs.
"""

from __future__ import annotations

from edgespec.families.base import Family
from edgespec.families.parse import parse_eos, parse_model_config, with_eos
from edgespec.families.table import FAMILIES, family_names, family_of

__all__ = [
    "FAMILIES",
    "Family",
    "family_names",
    "family_of",
    "parse_eos",
    "parse_model_config",
    "with_eos",
]
