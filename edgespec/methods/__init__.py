"""Drafting methods: a table with one row each, and what each is read from.

Knows what a method is, how its checkpoint is detected and parsed, what config.json keeps of it, and
when base and draft fit. How its graph looks and how it searches stand in other packages, in tables
keyed by the row's name.
"""

from __future__ import annotations

from edgespec.methods.aux_layers import (
    default_aux_layers,
    normalize_aux_layers,
    resolve_aux_layers,
)
from edgespec.methods.base import DraftFormat, Method, SpecConfig
from edgespec.methods.pair_rules import mismatches
from edgespec.methods.sides import PLAIN_METHOD, BaseSide, DraftSide, Mismatch
from edgespec.methods.table import METHODS, as_draft, find_method, whole_model_method

__all__ = [
    "METHODS",
    "PLAIN_METHOD",
    "BaseSide",
    "DraftFormat",
    "DraftSide",
    "Method",
    "Mismatch",
    "SpecConfig",
    "as_draft",
    "default_aux_layers",
    "find_method",
    "mismatches",
    "normalize_aux_layers",
    "resolve_aux_layers",
    "whole_model_method",
]
