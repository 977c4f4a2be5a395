"""Rotary embeddings as configurations declare them: the semantics of transformers 5.14,
modeling_rope_utils.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import cast, get_args

from edgespec.config.fields import Fields, is_int
from edgespec.config.values import RopeConfig, RopeKind
from edgespec.errors import CheckpointError, UnsupportedModel

AXES = 3  # of a position in an image: time, height, width
MAX_ATTENTION_FACTOR = 100.0  # published ones are 0.7 to 1.6
ATTENTION_FACTOR = f"a number from {1 / MAX_ATTENTION_FACTOR} to {MAX_ATTENTION_FACTOR:.0f}"


@dataclass(frozen=True, slots=True)
class MRope:
    """How a family reads `mrope_section`: the pairs of each axis of a position. `interleaved` None:
    `mrope_interleaved` says it, and without that key the axes have a section each. `section` is
    that of files that do not say it; (): their positions have one axis. With `copied` the key may
    be left over from another model's file: sections that do not fit mean one axis then, unless the
    rope is of the type "mrope".
    """

    interleaved: bool | None = None
    section: tuple[int, ...] = ()
    copied: bool = False


DRAFT_MROPE = MRope(copied=True)  # drafts take what they know of positions from their base's file


def one_rope(
    fields: Fields,
    head_dim: int,
    max_position: int | None,
    *,
    mrope: MRope | None = None,
    partial: float | None = None,
    aliases: Mapping[str, RopeKind] = MappingProxyType({}),
) -> RopeConfig:
    """The one rotary embedding of a config: `rope_theta` with `rope_scaling`, or `rope_parameters`.

    With `mrope` positions may have three axes, and "mrope" is another name of the default: on text
    the axes are equal.
    `partial` is the part of a head that is rotated where the key is missing; None: the family
    rotates whole heads. `aliases` are further names of kinds. Raises CheckpointError or, for other
    kinds and several embeddings, UnsupportedModel.
    """
    entries = _rope_entries(fields)
    if mrope is not None:
        aliases = {**aliases, "mrope": "default"}
    ropes = {
        name: with_axes(
            parse_rope(
                entry, fields, _rotary_dim(entry, fields, head_dim, partial), max_position, aliases
            ),
            entry,
            mrope,
        )
        for name, entry in entries.items()
    }
    if len(set(ropes.values())) > 1:
        raise UnsupportedModel(
            f"{fields.source}: more than one rotary embedding ({', '.join(ropes)} differ); this"
            " version needs the same in all layers."
        )
    return next(iter(ropes.values()))


def _rope_entries(fields: Fields) -> dict[str, Fields]:
    """What describes a rotary embedding, by name; one entry per layer type where the file nests
    them."""
    entries: dict[str, Fields] = {}
    for key in ("rope_scaling", "rope_parameters"):
        if not fields.get(key):
            continue
        raw = fields.section(key).raw
        nested = {name: value for name, value in raw.items() if isinstance(value, Mapping)}
        shared = {name: value for name, value in raw.items() if name not in nested}
        for name, entry in nested.items() or [("", {})]:
            label = f"{key}.{name}" if name else key
            entries[label] = Fields({**shared, **entry}, f"{fields.source} ({label})")
    return entries or {"rope_theta": Fields({}, fields.source)}


def parse_rope(
    entry: Fields,
    fields: Fields,
    rotary_dim: int,
    max_position: int | None,
    aliases: Mapping[str, RopeKind] = MappingProxyType({}),
) -> RopeConfig:
    """One rotary embedding from its own entry and, for what that leaves out, the top level. Raises
    CheckpointError, or UnsupportedModel for other kinds of scaling."""
    named = entry.text("rope_type") or entry.text("type") or "default"
    kind = aliases.get(named, named)
    if kind not in get_args(RopeKind):
        raise UnsupportedModel(
            f"{entry.source}: rotary embedding of type {kind!r}; this version knows"
            f" {', '.join(get_args(RopeKind))}."
        )
    theta = entry.number("rope_theta", fields.number("rope_theta", 10000.0))
    if theta <= 1:
        raise fields.wrong("rope_theta", "a base greater than 1")
    rope = RopeConfig(theta=theta, rotary_dim=rotary_dim, kind=cast(RopeKind, kind))
    match rope.kind:
        case "default":
            return rope
        case "linear":
            return replace(rope, factor=entry.number("factor"))
        # It sets in at max_position_embeddings, whatever original_max_position_embeddings says
        case "dynamic":
            original = max_position or fields.size("max_position_embeddings")
            return replace(rope, factor=entry.number("factor"), original_max_position=original)
        case "llama3":
            return _llama3(rope, entry, _original_max_position(entry, fields, max_position))
        case "yarn":
            return _yarn(
                rope, entry, _original_max_position(entry, fields, max_position), max_position
            )
        case "longrope":
            return _longrope(
                rope, entry, _original_max_position(entry, fields, max_position), max_position
            )


def with_axes(rope: RopeConfig, entry: Fields, mrope: MRope | None) -> RopeConfig:
    """The embedding with the pairs of each axis (arXiv 2409.12191, section 2.1), as its entry says
    or the family does. Raises CheckpointError where sections do not cover the pairs."""
    section = entry.get("mrope_section")
    if section is None:
        section = list(mrope.section) if mrope is not None else []
    if mrope is None or not section:
        return rope
    whole = isinstance(section, list) and all(is_int(part) and part >= 0 for part in section)
    if not whole or len(section) != AXES:
        raise entry.wrong("mrope_section", f"a list of {AXES} numbers of pairs")
    interleaved, pairs = mrope.interleaved, rope.rotary_dim // 2
    if interleaved is None:
        interleaved = entry.flag("mrope_interleaved", False)
    if interleaved:
        section = _taken_in_turn(section, pairs)
    if sum(section) != pairs:
        if mrope.copied and (entry.text("rope_type") or entry.text("type")) != "mrope":
            return rope
        raise entry.wrong("mrope_section", f"{AXES} numbers of pairs, {pairs} in all")
    return replace(rope, mrope_section=tuple(section), mrope_interleaved=interleaved)


def _taken_in_turn(section: list[int], pairs: int) -> list[int]:
    """The pairs that each axis has where they take turns: height and width theirs as far as there
    are some, time the others."""
    _, height, width = (
        len(range(axis, min(AXES * count, pairs), AXES)) for axis, count in enumerate(section)
    )
    return [pairs - height - width, height, width]


def _rotary_dim(entry: Fields, fields: Fields, head_dim: int, partial: float | None) -> int:
    """How much of a head is rotated; as in transformers, the rope's own entry wins over the top
    level.

    Families of whole heads refuse the factor: transformers ignores it there and vLLM applies it, so
    that no reading of it is safe.
    """
    key = "partial_rotary_factor"
    if partial is None:
        for place in (entry, fields):
            if place.number(key, 1.0) != 1.0:
                raise UnsupportedModel(
                    f"{place.source}: {key} {place.get(key)}; this version rotates whole heads only"
                    " in this family."
                )
        return head_dim
    factor = entry.number(key, fields.number(key, partial))
    rotary_dim = int(head_dim * factor)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise CheckpointError(
            f"{entry.source}: {key} {factor} rotates {rotary_dim} of {head_dim} elements of a head,"
            " not an even part."
        )
    return rotary_dim


def _original_max_position(entry: Fields, fields: Fields, max_position: int | None) -> int:
    """The length before scaling; transformers lets the top level win over the rope's own entry."""
    for place in (fields, entry):
        if place.get("original_max_position_embeddings") is not None:
            return place.size("original_max_position_embeddings")
    return max_position or fields.size("max_position_embeddings")


def _llama3(rope: RopeConfig, entry: Fields, original: int) -> RopeConfig:
    low, high = entry.number("low_freq_factor"), entry.number("high_freq_factor")
    if high <= low:
        raise entry.wrong("high_freq_factor", f"greater than low_freq_factor {low}")
    return replace(
        rope,
        factor=entry.number("factor"),
        original_max_position=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: RopeConfig, entry: Fields, original: int, max_position: int | None) -> RopeConfig:
    """arXiv 2309.00071; without a factor, the ratio of the two lengths."""
    ratio = max_position / original if max_position else None
    factor = entry.number("factor", ratio)
    return replace(
        rope,
        factor=factor,
        original_max_position=original,
        beta_fast=entry.number("beta_fast") if entry.get("beta_fast") else 32.0,
        beta_slow=entry.number("beta_slow") if entry.get("beta_slow") else 1.0,
        truncate=entry.flag("truncate", True),
        attention_factor=attention_factor(entry, _yarn_attention_factor(entry, factor)),
    )


def _longrope(
    rope: RopeConfig, entry: Fields, original: int, max_position: int | None
) -> RopeConfig:
    """arXiv 2402.13753; without a factor, the ratio of the two lengths."""
    ratio = (max_position or original) / original
    factor = entry.number("factor", ratio)
    grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return replace(
        rope,
        factor=factor,
        original_max_position=original,
        attention_factor=attention_factor(entry, grown),
        short_factor=_factors(entry, "short_factor", rope.rotary_dim // 2),
        long_factor=_factors(entry, "long_factor", rope.rotary_dim // 2),
    )


def attention_factor(entry: Fields, default: float) -> float:
    """What multiplies cos and sin. CheckpointError for one that no scaling of positions has, which
    would make attention all or nothing."""
    factor = entry.number("attention_factor", default)
    if not 1 / MAX_ATTENTION_FACTOR <= factor <= MAX_ATTENTION_FACTOR:
        raise entry.wrong("attention_factor", ATTENTION_FACTOR)
    return factor


def _factors(entry: Fields, key: str, count: int) -> tuple[float, ...]:
    """A positive number for each pair of rotated elements."""
    raw = entry.get(key)
    if not isinstance(raw, list) or len(raw) != count:
        raise entry.wrong(key, f"a list of {count} numbers")
    return tuple(Fields({key: value}, entry.source).number(key) for value in raw)


def _yarn_attention_factor(entry: Fields, factor: float) -> float:
    if entry.get("mscale") and entry.get("mscale_all_dim"):
        return _mscale(factor, entry.number("mscale")) / _mscale(
            factor, entry.number("mscale_all_dim")
        )
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
