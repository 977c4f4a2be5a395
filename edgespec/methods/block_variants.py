"""Block drafts that grew out of DFlash and have another graph, another order of their tokens, or
heads of their own.

Knows the signs of each: words, keys and names of tensors. What a parser does not read is refused by
its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.config.fields import shortened
from edgespec.config.values import Shapes
from edgespec.errors import UnsupportedModel

# Sections in which drafts keep keys of their own
SECTIONS = ("dflash_config", "jetspec_config", "dspark_config")
# Words in names of classes and types by which DFlash and its variants are known
VARIANT_NAMES = ("dflash", "dspark", "dflare", "domino", "jetspec")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftVariant:
    """How a variant is known: `words` in names of classes and types, `keys` that only it has,
    `tensors` by their names in here. `why` follows "is refused: "."""

    words: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    tensors: str = ""
    why: str = "this version builds no such graph"


JETSPEC, DSPARK, SHIFTED = "a JetSpec draft", "a DSpark draft", "a draft of shifted labels"
VARIANTS: dict[str, DraftVariant] = {
    "a Domino draft": DraftVariant(
        words=("domino", "causal_v5"),
        keys=("gru_hidden_dim",),
        tensors=r"^(prefix_gru|embed_proj)\.",
        why="a GRU corrects its drafts one by one, which this version does not build",
    ),
    DSPARK: DraftVariant(
        words=("dspark",),
        keys=(
            "dspark_config",
            "markov_rank",
            "dspark_markov_rank",
            "markov_head_type",
            "sample_from_anchor",
        ),
        tensors=r"(^|\.)markov_(w\d|head)\b|^confidence_(proj|head)\.",
        why="its config.json does not say so as published DSpark drafts do",
    ),
    JETSPEC: DraftVariant(
        words=("jetspec",),
        keys=("jetspec_config", "causal_head"),
        tensors=r"^jetspec",
        why="its config.json does not say so as published JetSpec drafts do",
    ),
    "a DFlash2 draft": DraftVariant(
        words=("dflash2",),
        keys=("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
        tensors=r"(^|\.)(selector|conv)\w*\.|(attention|mlp)_conv\.",
        why="its layers have convolutions and a selector walks through its candidates, which this"
        " version does not build",
    ),
    "a DFlare draft": DraftVariant(
        words=("dflare",),
        keys=("dflare_config", "use_heterogeneous_kv"),
        tensors=r"^(layer_)?fusion_(weights|norms)|\.target_[kv]_proj\.",
        why="each of its layers mixes the aux hidden states by itself, which this version does not"
        " build",
    ),
    SHIFTED: DraftVariant(
        keys=("shift_label",), why="its slots draft the token behind them, one further than here"
    ),
    "a draft with attention sinks": DraftVariant(
        keys=("attention_sink_bias",), tensors=r"\.attention_sink_bias$|\.sinks$"
    ),
    "a draft with gated attention": DraftVariant(tensors=r"\.self_attn\.g_proj\."),
    "a draft with a norm per aux layer": DraftVariant(tensors=r"^aux_hidden_norms\."),
    "a draft with a hidden_dim_adapter": DraftVariant(
        tensors=r"^hidden_dim_adapter\.",
        why="its authors initialise the adapter at random, and publish none that is trained",
    ),
}
_TYPES = ("projector_type", "speculators_model_type")
_GIVE = "Give a plain draft: DFlash, JetSpec or DSpark, as their authors publish it."


def refuse_variants(
    raw: Mapping[str, Any], shapes: Shapes, source: str, *, read: Collection[str] = ()
) -> None:
    """Raises UnsupportedModel with the name, the first sign and the reason, unless the parser has
    `read` it; `shapes` are under the names in here."""
    for name, variant in VARIANTS.items():
        if name in read:
            continue
        matches = [*signs(name, raw), *(t for t in shapes if _has(variant.tensors, t))]
        if matches:
            raise UnsupportedModel(
                f"{source}: {name} ({shortened(matches[0])}) is refused: {variant.why}.", _GIVE
            )
    for place in _places(raw):
        kind = place.get("projector_type")
        if isinstance(kind, str) and kind.lower() not in ("dflash", *(_kinds(read))):
            raise UnsupportedModel(
                f"{source}: projector_type {shortened(kind)} is none that this version knows.",
                _GIVE,
            )


def is_read_elsewhere(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a variant that has a parser of its own."""
    return any(next(signs(name, raw), None) is not None for name in (JETSPEC, DSPARK))


def is_variant(name: str, kind: str, raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of the variant `name`; speculators names the kinds of its
    drafts, where it begins with `kind`."""
    stated = raw.get("speculators_model_type")
    if stated is not None:
        return isinstance(stated, str) and stated.startswith(kind)
    return next(signs(name, raw), None) is not None


def signs(name: str, raw: Mapping[str, Any]) -> Iterator[str]:
    """The words and keys of a config.json by which the variant `name` is known."""
    variant = VARIANTS[name]
    places = _places(raw)
    said = [place[key] for place in places for key in _TYPES if isinstance(place.get(key), str)]
    architectures = raw.get("architectures")
    if isinstance(architectures, list):
        said += [name for name in architectures if isinstance(name, str)]
    yield from (text for text in said if any(word in text.lower() for word in variant.words))
    yield from (key for place in places for key in variant.keys if place.get(key))


def _places(raw: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The object itself, and the sections in it."""
    return [raw, *(raw[key] for key in SECTIONS if isinstance(raw.get(key), Mapping))]


def _kinds(read: Collection[str]) -> Iterator[str]:
    return (word for name in read for word in VARIANTS[name].words)


def _has(pattern: str, tensor: str) -> bool:
    return bool(pattern) and re.search(pattern, tensor) is not None
