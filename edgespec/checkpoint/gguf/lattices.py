"""ggml's types of three bits and fewer, as numbers: bit fields times scales, and for the IQ types
points of lattices, which stand in `lattices.bin`.

Knows raw blocks [rows, blocks, bytes]; each function returns float32 numbers, 256 a block, computed
in ggml's order, so that they are its own to the bit.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_SHIFTS = np.arange(8, dtype=np.uint8)
# Bits of each code in the file, and what the codes stand for
_TWO, _TERNARY = (8, 25, 43), (-1, 0, 1)
_LATTICES: dict[str, tuple[int, int, tuple[int, ...]]] = {  # points, numbers of each, values
    "iq2_xxs": (256, 8, _TWO),
    "iq2_xs": (512, 8, _TWO),
    "iq2_s": (1024, 8, _TWO),
    "iq3_xxs": (256, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
    "iq3_s": (512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
    "iq1": (2048, 8, _TERNARY),
}


@cache
def lattice(name: str) -> NDArray[np.float32]:
    """The points of a lattice: [points, numbers]. A byte of the file has two codes of 4 bits or
    four of 2."""
    stored = np.fromfile(Path(__file__).with_suffix(".bin"), np.uint8)
    start = 0
    for known, (points, width, values) in _LATTICES.items():
        bits = 2 if len(values) == 3 else 4
        size = points * width * bits // 8
        if known == name:
            shifts = np.arange(0, 8, bits, dtype=np.uint8)
            codes = stored[start : start + size, None] >> shifts & (2**bits - 1)
            numbers: NDArray[np.float32] = np.array(values, np.float32)[codes]
            return numbers.reshape(points, width)
        start += size
    raise KeyError(name)


def bits_of(packed: Array) -> Array:
    """The bits of bytes [..., n], the lowest first: [..., 8 n]."""
    return (packed[..., None] >> _SHIFTS & 1).reshape(*packed.shape[:-1], -1)


def crumbs(packed: Array, width: int) -> Array:
    """Two bits a value: of each `width` bytes the lowest, then the next: [rows, blocks, 4 n]."""
    parts = packed.reshape(*packed.shape[:2], -1, 1, width)
    return (parts >> _SHIFTS[:7:2, None] & 3).reshape(*packed.shape[:2], -1)


def _words(raw: Array, low: int, high: int, dtype: str) -> Array:
    return np.ascontiguousarray(raw[..., low:high]).view(dtype)


def _half(raw: Array, at: int) -> Array:
    return _words(raw, at, at + 2, "<f2").astype(np.float32)  # [rows, blocks, 1]


def _low_high(packed: Array) -> Array:
    """The halves of bytes, one after the other: [rows, blocks, 2 n]."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:2], -1)


def _by_scale(scales: Array, values: Array) -> Array:
    """Scales [rows, blocks, n] times values, of which each n-th part shares one."""
    return scales[..., None] * values.reshape(*scales.shape, -1)


def _signs(bits: Array) -> Array:
    """1 for a bit that is 0, -1 for 1."""
    return 1 - 2 * bits.astype(np.float32)


def _signs_of_seven(codes: Array) -> Array:
    """Signs of seven bits; the eighth makes their number even."""
    codes = codes.astype(np.uint8)
    odd = np.bitwise_xor.reduce(bits_of(codes[..., None]), -1)
    return _signs(bits_of((codes | odd << 7)[..., None]))


def q2_k(raw: Array) -> Array:
    """Two bits, a scale and a minimum of four bits for 16."""
    scales = _half(raw, 80) * (raw[..., :16] & 15).astype(np.float32)
    minimums = _half(raw, 82) * (raw[..., :16] >> 4).astype(np.float32)
    values = crumbs(raw[..., 16:80], 32).astype(np.float32)
    numbers: Array = _by_scale(scales, values) - minimums[..., None]
    return numbers


def q3_k(raw: Array) -> Array:
    """Three bits, the highest apart, a signed scale of six bits for 16."""
    low, high = raw[..., 96:104], raw[..., 104:108]
    scales = np.concatenate([low & 15, low >> 4], -1) | crumbs(high, 4) << 4
    parts = raw[..., None, :32] >> _SHIFTS[:, None] & 1
    values = crumbs(raw[..., 32:96], 32) | parts.reshape(*raw.shape[:2], -1) << 2
    signed = values.astype(np.float32) - 4
    return _by_scale(_half(raw, 108) * (scales.astype(np.float32) - 32), signed)


def _iq2(raw: Array, name: str, points: Array, scales: Array, signs: Array) -> Array:
    """Points of a lattice with signs; scales of four bits, for so many numbers as they divide."""
    scale = _half(raw, 0) * (np.float32(0.5) + scales.astype(np.float32)) * np.float32(0.25)
    return _by_scale(scale, lattice(name)[points]) * signs.reshape(*scale.shape, -1)


def _seven_of_words(words: Array) -> Array:
    """The four codes of seven bits in each word of 32."""
    return words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127


def iq2_xxs(raw: Array) -> Array:
    """Points by bytes; signs and a scale of 32 numbers in the word behind four of them."""
    words = _words(raw, 2, 66, "<u4")
    points = np.ascontiguousarray(words[..., ::2]).view(np.uint8)
    signs = _signs_of_seven(_seven_of_words(words[..., 1::2]))
    return _iq2(raw, "iq2_xxs", points, words[..., 1::2] >> 28, signs)


def iq2_xs(raw: Array) -> Array:
    """Points of nine bits with seven of signs, scales of 16 numbers."""
    words = _words(raw, 2, 66, "<u2")
    signs = _signs_of_seven(words >> 9)
    return _iq2(raw, "iq2_xs", words & 511, _low_high(raw[..., 66:74]), signs)


def iq2_s(raw: Array) -> Array:
    """Points of ten bits, a bit for each sign, scales of 16 numbers."""
    high = raw[..., 66:74, None] >> _SHIFTS[:7:2] & 3
    points = raw[..., 2:34] | high.reshape(*raw.shape[:2], -1).astype(np.uint16) << 8
    return _iq2(raw, "iq2_s", points, _low_high(raw[..., 74:82]), _signs(bits_of(raw[..., 34:66])))


def iq3_xxs(raw: Array) -> Array:
    """Points of four numbers by bytes; signs and a scale of 32 numbers in a word."""
    words = _words(raw, 66, 98, "<u4")
    scales = (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    signs = _signs_of_seven(_seven_of_words(words))
    values = _by_scale(_half(raw, 0) * scales, lattice("iq3_xxs")[raw[..., 2:66]])
    return values * signs.reshape(values.shape)


def iq3_s(raw: Array) -> Array:
    """Points of nine bits, a bit for each sign, odd scales of 32 numbers."""
    points = raw[..., 2:66] | bits_of(raw[..., 66:74]).astype(np.uint16) << 8
    scales = _half(raw, 0) * (1 + 2 * _low_high(raw[..., 106:110]).astype(np.float32))
    values = _by_scale(scales, lattice("iq3_s")[points])
    return values * _signs(bits_of(raw[..., 74:106])).reshape(values.shape)


def _iq1(scales: Array, points: Array, deltas: Array) -> Array:
    """Ternary points, moved by an eighth up or down; `deltas` are bits, one for so many points as
    they divide."""
    numbers = lattice("iq1")[points].reshape(*deltas.shape, -1)
    moved = numbers + (_signs(deltas) * np.float32(0.125))[..., None]
    return _by_scale(scales, moved)


def iq1_s(raw: Array) -> Array:
    """Points of eleven bits; three bits of scale and the delta's sign for 32 numbers."""
    high = _words(raw, 34, 50, "<u2")
    more = high[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    points = raw[..., 2:34] | more.reshape(*raw.shape[:2], -1) << 8
    scales = _half(raw, 0) * (2 * (high >> 12 & 7) + 1).astype(np.float32)
    return _iq1(scales, points, high >> 15)


def iq1_m(raw: Array) -> Array:
    """Points of eleven bits; a delta's sign for 8 numbers, three bits of scale for 16, and the
    factor of a block in the high nibbles of its four words of scales."""
    high, words = _low_high(raw[..., 32:48]), _words(raw, 48, 56, "<u2")
    points = raw[..., :32] | (high & 7).astype(np.uint16) << 8
    shifts = np.arange(0, 16, 4, dtype=np.uint16)
    factor = np.bitwise_or.reduce((words >> 12) << shifts, -1).astype("<u2").view("<f2")
    small = words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    odd = (2 * small + 1).reshape(*raw.shape[:2], -1).astype(np.float32)
    return _iq1(factor.astype(np.float32)[..., None] * odd, points, high >> 3)


def _trits(packed: Array, count: int) -> Array:
    """The first `count` digits to the base 3 of bytes [rows, blocks, n], each as n numbers."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    digits = (packed[..., None, :] * powers).astype(np.uint16) * 3 >> 8
    return digits.reshape(*packed.shape[:2], -1)


def tq1_0(raw: Array) -> Array:
    """Ternary numbers, five in a byte, or four in the last ones."""
    parts = (raw[..., :32], 5), (raw[..., 32:48], 5), (raw[..., 48:52], 4)
    trits = np.concatenate([_trits(packed, count) for packed, count in parts], -1)
    return _half(raw, 52) * (trits.astype(np.float32) - 1)


def tq2_0(raw: Array) -> Array:
    """Ternary numbers, two bits each."""
    return _half(raw, 64) * (crumbs(raw[..., :64], 32).astype(np.float32) - 1)
