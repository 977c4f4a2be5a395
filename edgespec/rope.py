"""Rotary position embedding (arXiv 2104.09864): the rows of cos and sin that graphs take as inputs.

Knows frequencies, their scaling types and positions. A row depends only on its position, so that a
token has the same row in prefill, decoding and verification. Where transformers makes longrope
depend on the sequence length, the engine's capacity decides (decision 0012). Follows
`modeling_rope_utils` of transformers; dynamic NTK scaling is evaluated at each token's own length,
as in token-by-token decoding there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol, cast, get_args

import numpy as np
from numpy.typing import NDArray

from edgespec.config import RopeConfig, RopeKind
from edgespec.config.ropes import ATTENTION_FACTOR, AXES, MAX_ATTENTION_FACTOR
from edgespec.contract import GraphInput, Kind
from edgespec.safe_read.fields import BundleFields

Rows = NDArray[np.float32]
NUMBERS = (  # of a RopeConfig
    *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    "attention_factor",
)


def rope_dict(config: RopeConfig) -> dict[str, Any]:
    """The keys of config.json; longrope's factors are there for longrope alone, those of M-RoPE
    for positions with several axes."""
    out = asdict(config)
    if config.kind != "longrope":
        del out["short_factor"], out["long_factor"]
    if not config.mrope_section:
        del out["mrope_section"], out["mrope_interleaved"]
    return out


def read_rope(rope: BundleFields, head_dim: int) -> RopeConfig:
    """The config of the keys that `rope_dict` writes; exports of earlier versions lack some.

    Raises BundleError with the key.
    """
    rope.refuse_unknown([field.name for field in fields(RopeConfig)])
    kind = rope.text("kind") or "default"
    if kind not in get_args(RopeKind):
        raise rope.wrong("kind", f"one of {', '.join(get_args(RopeKind))}")
    theta, rotary_dim = rope.number("theta"), rope.size("rotary_dim")
    if theta <= 1:
        raise rope.wrong("theta", "a base greater than 1")
    if rotary_dim % 2 or not (4 if kind == "dynamic" else 2) <= rotary_dim <= head_dim:
        raise rope.wrong("rotary_dim", f"an even part of the {head_dim} elements of a head")
    pairs = rotary_dim // 2 if kind == "longrope" else 0
    default = RopeConfig(theta, rotary_dim)
    numbers = {name: rope.number(name, getattr(default, name)) for name in NUMBERS}
    config = RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        kind=cast(RopeKind, kind),
        **numbers,
        original_max_position=rope.count("original_max_position"),
        truncate=rope.flag("truncate", default.truncate),
        short_factor=_factors(rope, "short_factor", pairs),
        long_factor=_factors(rope, "long_factor", pairs),
        mrope_section=_sections(rope, rotary_dim // 2),
        mrope_interleaved=rope.flag("mrope_interleaved", False),
    )
    if kind in ("dynamic", "llama3", "yarn") and not config.original_max_position:
        raise rope.wrong("original_max_position", "the length before scaling")
    if not 1 / MAX_ATTENTION_FACTOR <= config.attention_factor <= MAX_ATTENTION_FACTOR:
        raise rope.wrong("attention_factor", ATTENTION_FACTOR)
    if kind == "llama3" and config.high_freq_factor <= config.low_freq_factor:
        raise rope.wrong("high_freq_factor", "greater than low_freq_factor")
    return config


def _factors(rope: BundleFields, key: str, count: int) -> tuple[float, ...]:
    """A positive number for each pair of rotated elements; none but for longrope."""
    raw = rope.get(key) or ()
    if not isinstance(raw, list | tuple) or len(raw) != count:
        raise rope.wrong(key, f"a list of {count} numbers")
    return tuple(type(rope)({key: value}, rope.source).number(key) for value in raw)


def _sections(rope: BundleFields, pairs: int) -> tuple[int, ...]:
    """The pairs of each axis of M-RoPE; none where positions have one axis."""
    raw = rope.get("mrope_section") or ()
    if not raw:
        return ()
    whole = isinstance(raw, list | tuple) and all(type(part) is int and part >= 0 for part in raw)
    if not whole or len(raw) != AXES or sum(raw) != pairs:
        raise rope.wrong("mrope_section", f"{AXES} numbers of pairs, {pairs} in all")
    return tuple(raw)


@dataclass(frozen=True)
class RopeTable:
    """cos and sin of positions 0 .. capacity-1, each [capacity, rotary/2]. `axes` says by which
    axis of a position each pair turns; None: all by the first."""

    cos: Rows
    sin: Rows
    axes: NDArray[np.int64] | None = None  # [rotary/2]

    @classmethod
    def of(cls, config: RopeConfig, capacity: int) -> RopeTable:
        """Returns the table of an engine with that capacity, which selects longrope's factors."""
        return cls._made(config, capacity, capacity > config.original_max_position)

    @classmethod
    def golden(cls, config: RopeConfig, capacity: int) -> RopeTable:
        """Returns the table with longrope's short factors: golden outputs know no capacity."""
        return cls._made(config, capacity, long=False)

    @classmethod
    def _made(cls, config: RopeConfig, capacity: int, long: bool) -> RopeTable:
        positions = np.arange(capacity, dtype=np.int64)
        angles = positions[:, None].astype(np.float32) * frequencies(config, positions, long=long)
        scale = np.float32(config.attention_factor)
        return cls(np.cos(angles) * scale, np.sin(angles) * scale, axes_of(config))

    def rows(self, positions: NDArray[np.int64]) -> tuple[Rows, Rows]:
        """Returns cos and sin, each [B, S, rotary/2], of positions [B, S], or of [B, S, 3] with an
        axis each for time, height and width. Where the three are equal the rows are those of the
        one number."""
        if positions.ndim == 3:
            if self.axes is not None:
                places = positions[..., self.axes], np.arange(len(self.axes))
                return self.cos[places], self.sin[places]
            positions = positions[..., 0]
        return self.cos.take(positions, 0), self.sin.take(positions, 0)


class Rotary(Protocol):
    """Whatever has cosines and sines of positions, as a RopeTable has."""

    def rows(self, positions: NDArray[np.int64]) -> tuple[Rows, Rows]:
        """cos and sin, each [B, S, rotary/2], of positions [B, S] or [B, S, 3]."""


def rotations(
    inputs: Iterable[GraphInput],
    tables: Sequence[Rotary],
    positions: Mapping[str, NDArray[np.int64]],
) -> dict[str, Rows]:
    """What graphs with these inputs read of their rotary tables. `positions` are those of the rows
    of a call, by the symbol of the dimension: S, and L where there is context."""
    turned: dict[tuple[int, Any], tuple[Rows, Rows]] = {}
    read: dict[str, Rows] = {}
    for row in inputs:
        if row.kind not in (Kind.COS, Kind.SIN):
            continue
        rows = row.dims[1]
        if rows not in positions or row.table >= len(tables):
            continue
        if (row.table, rows) not in turned:
            turned[row.table, rows] = tables[row.table].rows(positions[str(rows)])
        read[row.name] = turned[row.table, rows][row.kind is Kind.SIN]
    return read


def axes_of(config: RopeConfig) -> NDArray[np.int64] | None:
    """Returns the axis by which each pair turns [rotary/2]: 0 time, 1 height, 2 width. None where
    positions have one axis.

    Sections stand one behind the other (Qwen2.5-VL), or the axes take turns and what is left over
    is time's (Qwen3-VL).
    """
    if not config.mrope_section:
        return None
    axes = np.repeat(np.arange(AXES), config.mrope_section)
    if config.mrope_interleaved:
        axes = np.zeros(config.rotary_dim // 2, np.int64)
        for axis in range(1, AXES):
            axes[axis : AXES * config.mrope_section[axis] : AXES] = axis
    return axes


def frequencies(config: RopeConfig, positions: NDArray[np.int64], *, long: bool = False) -> Rows:
    """Returns the inverse frequencies [rotary/2].

    Those of dynamic scaling depend on the position: [len(positions), rotary/2]. `long` selects
    longrope's factors for sequences beyond the original length.
    """
    if config.kind == "dynamic":
        return dynamic(config, positions)
    plain = inverse_powers(np.float32(config.theta), config.rotary_dim)
    if config.kind == "linear":
        return plain / np.float32(config.factor)
    if config.kind == "llama3":
        return llama3(config, plain)
    if config.kind == "yarn":
        return yarn(config, plain)
    if config.kind == "longrope":
        return longrope(config, long)
    return plain


def inverse_powers(theta: np.float32 | Rows, rotary_dim: int) -> Rows:
    """Returns theta ** (-2i / rotary_dim) for i in 0 .. rotary_dim/2 - 1."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    powers: Rows = np.power(theta, exponents)
    return np.float32(1.0) / powers


def dynamic(config: RopeConfig, positions: NDArray[np.int64]) -> Rows:
    """Returns frequencies [positions, rotary/2] of dynamic NTK-aware scaling.

    theta grows with the length beyond `original_max_position`.
    """
    length = np.maximum(positions + 1, config.original_max_position).astype(np.float64)
    stretch = config.factor * length / config.original_max_position - (config.factor - 1)
    theta = config.theta * stretch ** (config.rotary_dim / (config.rotary_dim - 2))
    return inverse_powers(theta.astype(np.float32)[:, None], config.rotary_dim)


def llama3(config: RopeConfig, plain: Rows) -> Rows:
    """Returns the frequencies [rotary/2] of Llama 3.1.

    Low frequencies are divided by the factor, high ones are unchanged, with a linear transition.
    """
    wavelength = 2 * math.pi / plain
    low = config.original_max_position / config.low_freq_factor
    high = config.original_max_position / config.high_freq_factor
    smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    divided = plain / config.factor
    between = (1 - smooth) * divided + smooth * plain
    out = np.where(wavelength > low, divided, np.where(wavelength < high, plain, between))
    return out.astype(np.float32)


def longrope(config: RopeConfig, long: bool) -> Rows:
    """Returns the frequencies [rotary/2] of LongRoPE (arXiv 2402.13753), one factor for each."""
    factors = np.array(config.long_factor if long else config.short_factor, np.float32)
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    powers: Rows = factors * np.power(np.float32(config.theta), exponents)
    return np.float32(1.0) / powers


def yarn(config: RopeConfig, plain: Rows) -> Rows:
    """Returns the frequencies [rotary/2] of YaRN: NTK by parts (arXiv 2309.00071, section 3.2)."""

    def dimension_of(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = np.clip((np.arange(config.rotary_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    mixed: Rows = (plain / config.factor * ramp + plain * (1 - ramp)).astype(np.float32)
    return mixed
