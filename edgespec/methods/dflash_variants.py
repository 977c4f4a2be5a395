"""Drafts that are called DFlash, or grew out of it, and have another graph or another order of
their tokens.

Knows the signs of each: words, keys and names of tensors. Each is refused by its
name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgespec.config.fields import shortened
from edgespec.config.values import Shapes
from edgespec.errors import UnsupportedModel

SECTION = "dflash_config"
# Words in names of classes and types by which DFlash and its variants are known
VARIANT_NAMES = ("dflash", "dspark", "dflare", "domino", "jetspec")


def refuse_variants(raw: Mapping[str, Any], shapes: Shapes, source: str) -> None:
    """Raises UnsupportedModel with the name and the first sign; `shapes` are under our own
    names."""
    inner = raw.get(SECTION)
    places: list[Mapping[str, Any]] = [raw, inner] if isinstance(inner, Mapping) else [raw]
    said = [place[key] for place in places for key in _TYPES if isinstance(place.get(key), str)]
    architectures = raw.get("architectures")
    said += (
        [name for name in architectures if isinstance(name, str)]
        if isinstance(architectures, list)
        else []
    )
    for name, (words, keys, tensors) in _VARIANTS.items():
        signs = [text for text in said if any(word in text.lower() for word in words)]
        signs += [key for place in places for key in keys if place.get(key)]
        signs += [tensor for tensor in shapes if re.search(tensors, tensor)] if tensors else []
        if signs:
            raise UnsupportedModel(
                f"{source}: {name} ({shortened(signs[0])}), which this version does not do.", _GIVE
            )
    kind = next(
        (text for place in places if isinstance(text := place.get("projector_type"), str)), "dflash"
    )
    if kind != "dflash":
        raise UnsupportedModel(
            f"{source}: projector_type {kind!r}; this version knows plain DFlash.", _GIVE
        )


_GIVE = "Give a plain DFlash draft, such as z-lab's."
_TYPES = ("projector_type", "speculators_model_type")
# What it is called -> words in names of classes and types, keys that only it has, names of its
# tensors
_VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "a Domino draft": (("domino", "causal_v5"), ("gru_hidden_dim",), r"^(prefix_gru|embed_proj)\."),
    "a DSpark draft": (
        ("dspark",),
        (
            "dspark_config",
            "markov_rank",
            "dspark_markov_rank",
            "markov_head_type",
            "sample_from_anchor",
        ),
        r"(^|\.)markov_(w\d|head)\b|^confidence_(proj|head)\.",
    ),
    "a JetSpec draft": (("jetspec",), ("jetspec_config", "causal_head"), r"^jetspec"),
    "a DFlash2 draft": (
        ("dflash2",),
        ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
        r"(^|\.)(selector|conv)\w*\.",
    ),
    "a DFlare draft": (
        ("dflare",),
        ("dflare_config", "use_heterogeneous_kv"),
        r"^(layer_)?fusion_(weights|norms)|\.target_[kv]_proj\.",
    ),
    "a draft whose labels are shifted by one token": ((), ("shift_label",), ""),
    "a draft with attention sinks": (
        (),
        ("attention_sink_bias",),
        r"\.attention_sink_bias$|\.sinks$",
    ),
    "a draft with gated attention": ((), (), r"\.self_attn\.g_proj\."),
    "a draft with a norm per aux layer": ((), (), r"^aux_hidden_norms\."),
}
