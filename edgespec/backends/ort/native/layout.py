"""Packed weights of LowBitMatMul: their layout (matmul.h has the same in C++), and its way back.

Knows arrays and quantized weights. Knows no graph and no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgespec.quantization.block_forms import BlockForm
from edgespec.quantization.quantized_weight import QuantizedWeight, block_scales

Bits = Literal[4, 6, 8]
LINE = 64  # bytes
TILE = 16  # outputs of a line
TILES = 4  # of a panel
PANEL = TILE * TILES
STEP = 16  # inputs whose lines stand together
LINES: dict[Bits, int] = {4: 2, 6: 3, 8: 4}  # of a step and a tile, by bits
SHIFTS = np.array([[0], [2], [4], [6]], np.uint8)  # of the upper bits of 6, by the quad of a step
BLOCK_SIZES = (16, 32, 64, 128)
# Rows have a scale per block: of blocks of 16 that is too dear where longer ones do
USUAL_BLOCK_SIZES = BLOCK_SIZES[1:]

Scales = Literal["float32", "float16", "float16_min", "super", "super_min"]
Codebook = Literal["", "iq4_nl", "fp4"]
# What a block has of each output: its scale, and the minimum that is subtracted
PARTS: dict[Scales, tuple[str, ...]] = {
    "float32": ("<f4",),
    "float16": ("<f2",),
    "float16_min": ("<f2", "<f2"),
    "super": ("i1",),
    "super_min": ("u1", "u1"),
}
# What some blocks share, and what these parts are multiplied by
FACTORS: dict[Scales, tuple[str, ...]] = {"super": ("<f2",), "super_min": ("<f2", "<f2")}
# fp4: twice the numbers of e2m1
CODEBOOKS: dict[Codebook, NDArray[np.int8]] = {
    "iq4_nl": np.array(
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
    ),
    "fp4": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8),
}
CODED: dict[str, Codebook] = {
    "iq4_nl": "iq4_nl",
    "iq4_xs": "iq4_nl",
}  # schemes whose values are of a codebook


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """A weight [out, in] of values of some bits, with scales per output and `block` inputs.

    Values are signed, or unsigned with minimums; of a codebook they are indices.
    """

    bits: Bits
    block: int
    in_features: int
    out_features: int
    scales: Scales = "float32"
    super_block: int = 1  # blocks that share factors of their parts
    codebook: Codebook = ""
    global_scale: float = 1.0  # multiplies factors; without these scales and minimums

    def __post_init__(self) -> None:
        assert self.block in BLOCK_SIZES
        assert self.scales in FACTORS or self.super_block == 1
        assert not self.codebook or (self.bits == 4 and not self.has_minimums)

    @property
    def version(self) -> int:
        """The version of the layout that has this form: 1 is what older kernels read too."""
        plain = (self.scales, self.codebook, self.global_scale) == ("float32", "", 1.0)
        return 1 if plain and self.block in USUAL_BLOCK_SIZES and self.bits != 6 else 2

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of a node that say the form of its weights."""
        form: dict[str, Any] = {
            "bits": self.bits,
            "block_size": self.block,
            "layout_version": self.version,
        }
        if self.version == 1:
            return form
        form |= {"scales": self.scales, "super_block": self.super_block}
        return form | {"codebook": self.codebook, "global_scales": [self.global_scale]}

    @property
    def has_minimums(self) -> bool:
        """Whether a minimum is subtracted; values are unsigned then."""
        return len(PARTS[self.scales]) == 2

    @property
    def num_blocks(self) -> int:
        """The number of blocks in a row; the last one is filled up."""
        return -(-self.in_features // self.block)

    @property
    def num_super_blocks(self) -> int:
        """The number of blocks that have factors; the last one may be of fewer blocks."""
        return -(-self.num_blocks // self.super_block)

    @property
    def num_panels(self) -> int:
        """The number of panels of outputs; the last one is filled up."""
        return -(-self.out_features // PANEL)

    @property
    def middle(self) -> int:
        """The unsigned value that stands for zero."""
        if self.has_minimums:
            return 0
        return 128 if self.codebook else 1 << self.bits - 1

    @property
    def values_bytes(self) -> int:
        """The size of the values of a block of a panel."""
        size: int = PANEL * self.block * self.bits // 8
        return size

    @property
    def block_bytes(self) -> int:
        """The size of a block of a panel: its values, then its scales, then its minimums."""
        return self.values_bytes + PANEL * sum(np.dtype(one).itemsize for one in PARTS[self.scales])

    @property
    def factor_bytes(self) -> int:
        """The size of what stands in front of the blocks that share it."""
        return PANEL * sum(np.dtype(one).itemsize for one in FACTORS.get(self.scales, ()))

    @property
    def panel_bytes(self) -> int:
        """The size of a panel."""
        return self.num_blocks * self.block_bytes + self.num_super_blocks * self.factor_bytes

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of a packed weight in bytes: [panels, blocks, bytes of a block]; of panels with
        factors [panels, 1, bytes of a panel]."""
        if self.factor_bytes:
            return self.num_panels, 1, self.panel_bytes
        return self.num_panels, self.num_blocks, self.block_bytes

    @property
    def num_bytes(self) -> int:
        """The size of a packed weight in bytes."""
        return self.num_panels * self.panel_bytes

    def pack(self, weight: QuantizedWeight) -> NDArray[np.uint8]:
        """The packed panels of a weight that has this form."""
        assert weight.shape == (self.out_features, self.in_features)
        packed = np.empty((self.num_panels, self.panel_bytes), np.uint8)
        many = max(1, 2**22 // (PANEL * self.in_features))  # panels at a time
        for first in range(0, self.num_panels, many):
            some = np.arange(first * PANEL, min((first + many) * PANEL, self.out_features))
            packed[first : first + many] = self.panels(weight, some)
        return packed.reshape(self.shape)

    def panels(self, weight: QuantizedWeight, rows: NDArray[np.intp]) -> NDArray[np.uint8]:
        """The panels [panels, bytes] of neighbouring rows."""
        parts, factors = self.parts(weight, rows)
        codes = self.codes(weight.values[rows[0] : rows[-1] + 1])
        blocks = np.concatenate([self.lines(codes), *map(of_panels, parts)], -1)
        if not factors:
            return blocks.reshape(len(blocks), -1)
        shared = np.concatenate([*map(of_panels, factors)], -1)
        missing = self.num_super_blocks * self.super_block - self.num_blocks
        whole = np.pad(blocks, ((0, 0), (0, missing), (0, 0)))
        whole = whole.reshape(len(blocks), self.num_super_blocks, -1)
        joined = np.concatenate([shared, whole], -1).reshape(len(blocks), -1)
        return joined[:, : self.panel_bytes]

    def parts(
        self, weight: QuantizedWeight, rows: NDArray[np.intp]
    ) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """What each block has of some rows [rows, blocks], and what blocks share [rows, super
        blocks]; repeated where a weight has one for more than that."""
        in_features = weight.shape[1]
        width = min(weight.block[1], in_features)
        assert width == in_features or width % self.block == 0
        power = np.float32(self.global_scale) / np.float32(unit_of(weight, self.codebook))
        own = np.minimum(rows // weight.block[0], len(weight.scales) - 1)[:, None]

        def stored(stated: NDArray[Any], dtype: str, inputs: int, width: int) -> NDArray[Any]:
            first = np.arange(-(-in_features // inputs)) * inputs // width
            found = stated[own, np.minimum(first, stated.shape[1] - 1)].astype(np.float32)
            if dtype == "<f2":
                found /= power
            as_stored: NDArray[Any] = found.astype(dtype)
            assert np.array_equal(as_stored, found)
            return as_stored

        parts, factors = stated_of(weight, self.scales, self.codebook)
        longer = self.block * self.super_block, width * weight.super_block
        of_blocks = zip(parts, PARTS[self.scales], strict=True)
        shared = zip(factors, FACTORS.get(self.scales, ()), strict=True)
        return (
            [stored(part, dtype, self.block, width) for part, dtype in of_blocks],
            [stored(factor, dtype, *longer) for factor, dtype in shared],
        )

    def codes(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        """The unsigned values [out, in] of a weight's values, or their places in the codebook."""
        if self.codebook == "fp4":
            return values.view(np.uint8)
        if self.codebook:
            table = CODEBOOKS[self.codebook]
            places = np.minimum(np.searchsorted(table, values), len(table) - 1)
            assert np.array_equal(table[places], values)
            return places.astype(np.uint8)
        unsigned = values.astype(np.int16) + self.middle
        assert not unsigned.size or 0 <= unsigned.min() <= unsigned.max() < 1 << self.bits
        return unsigned.astype(np.uint8)

    def lines(self, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The lines [panels, blocks, bytes] of codes [out, in]."""
        panels = -(-len(codes) // PANEL)
        fill = 0 if self.codebook else self.middle
        whole = np.full((panels * PANEL, self.num_blocks * self.block), fill, np.uint8)
        whole[: len(codes), : self.in_features] = codes
        quads = whole.reshape(panels, PANEL, self.num_blocks, -1, 4, 4)  # steps, quads, inputs
        if self.bits != 8:
            low = quads & np.uint8(0xF)
            own = low[..., 0::2, :] | (low[..., 1::2, :] << np.uint8(4))
            if self.bits == 6:
                high = np.bitwise_or.reduce(quads >> np.uint8(4) << SHIFTS, axis=-2, keepdims=True)
                own = np.concatenate([own, high], axis=-2)
            quads = own
        return quads.transpose(0, 2, 3, 4, 1, 5).reshape(panels, self.num_blocks, -1)

    def rows(self, packed: NDArray[np.uint8], rows: NDArray[np.int64]) -> NDArray[np.float32]:
        """The dequantized rows [..., in] of the weight at `rows` [...]; of a mapped file only what
        they need is read."""
        flat = rows.reshape(-1)
        panel, output = flat // PANEL, flat % PANEL
        data = np.asarray(packed).reshape(self.num_panels, self.panel_bytes)  # a mapped one is slow

        def read(starts: NDArray[np.intp], dtype: str) -> NDArray[Any]:
            size = np.dtype(dtype).itemsize
            found: NDArray[Any] = data.view(dtype)[panel[:, None], starts // size + output[:, None]]
            return found

        def numbers(starts: NDArray[np.intp], dtypes: tuple[str, ...]) -> list[NDArray[Any]]:
            found = []
            for dtype in dtypes:
                found.append(read(starts, dtype).astype(np.float32))
                starts = starts + PANEL * np.dtype(dtype).itemsize
            return found

        block = np.arange(self.num_blocks)
        starts = block * self.block_bytes + (block // self.super_block + 1) * self.factor_bytes
        lines = np.arange(self.values_bytes // (PANEL * 4)) * PANEL * 4
        values = self.values(read((starts[:, None] + lines).reshape(-1), "<u4").view(np.uint8))
        parts = numbers(starts + self.values_bytes, PARTS[self.scales])
        first = np.arange(self.num_super_blocks)
        first = first * (self.super_block * self.block_bytes + self.factor_bytes)
        for i, factor in enumerate(numbers(first, FACTORS.get(self.scales, ()))):
            parts[i] *= factor[:, block // self.super_block] * np.float32(self.global_scale)
        if self.scales not in FACTORS:
            parts = [part * np.float32(self.global_scale) for part in parts]
        values *= parts[0][..., None]
        if self.has_minimums:
            values -= parts[1][..., None]
        dequantized = values.reshape(len(flat), -1)[:, : self.in_features]
        return np.ascontiguousarray(dequantized).reshape(*rows.shape, self.in_features)

    def values(self, lines: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The values [rows, blocks, block] around zero of the lines [rows, bytes] of some rows."""
        quads = lines.reshape(len(lines), self.num_blocks, -1, LINES[self.bits], 4)
        if self.bits != 8:
            low = quads[..., :2, None, :]
            codes = np.concatenate([low & np.uint8(0xF), low >> np.uint8(4)], axis=-2)
            codes = codes.reshape(*quads.shape[:3], 4, 4)
            if self.bits == 6:
                codes = codes | (quads[..., 2:, :] >> SHIFTS & np.uint8(3)) << np.uint8(4)
            quads = codes
        codes = quads.reshape(len(lines), self.num_blocks, self.block)
        if self.codebook:
            return CODEBOOKS[self.codebook].astype(np.float32)[codes]
        return codes.astype(np.float32) - np.float32(self.middle)


def of_panels(part: NDArray[Any]) -> NDArray[np.uint8]:
    """What outputs have [out, n], as it stands in panels [panels, n, bytes]."""
    panels = -(-len(part) // PANEL)
    padded = np.zeros((panels * PANEL, part.shape[1]), part.dtype)
    padded[: len(part)] = part
    grouped = padded.reshape(panels, PANEL, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(grouped).view(np.uint8)


def layout_of(weight: QuantizedWeight) -> WeightLayout | None:
    """The smallest layout that holds a weight exactly; None where there is none.

    It follows from the weight's form. Of scales in another type than float16 it looks at the
    numbers: whether float16 times a power of two has them all.
    """
    (out_features, in_features), width = weight.shape, min(weight.block[1], weight.shape[1])
    sizes = BLOCK_SIZES if width < in_features else USUAL_BLOCK_SIZES
    fitting = [size for size in sizes if width % size == 0 or width == in_features]
    values, form = values_of(weight), scales_of(weight)
    if not fitting or values is None or form is None:
        return None
    bits, codebook = values
    plain = WeightLayout(bits, fitting[-1], in_features, out_features, codebook=codebook)
    power = power_of_two(halves_of(weight, form))
    if form == "float32" or power is None:
        return plain if weight.symmetric else None
    shared = -(-width // plain.block) * weight.super_block if form in FACTORS else 1
    factor = unit_of(weight, codebook) * power
    return replace(plain, scales=form, super_block=shared, global_scale=factor)


def layout_of_form(form: BlockForm, in_features: int, out_features: int) -> WeightLayout:
    """The layout of weights that are rounded to a form."""
    scales: Scales = "super_min" if form.has_minimums else "super"
    bits = next(bits for bits in LINES if bits == form.bits)
    return WeightLayout(
        bits, form.block, in_features, out_features, scales, super_block=form.super_block
    )


def values_of(weight: QuantizedWeight) -> tuple[Bits, Codebook] | None:
    """The bits of a weight's values, and their codebook; None where no kernel has them."""
    dtype = weight.values.dtype.name
    if weight.scheme.name in CODED:
        return 4, CODED[weight.scheme.name]
    if dtype == "float4_e2m1fn":
        return 4, "fp4"
    if dtype in ("int4", "uint4"):
        return 4, ""
    fitting: tuple[Bits, ...] = (4, 6, 8)
    bits = next((bits for bits in fitting if weight.scheme.bits <= bits), None)
    return (bits, "") if bits and dtype in ("int8", "uint8") else None


def scales_of(weight: QuantizedWeight) -> Scales | None:
    """The form of a weight's scales; None where no kernel has it."""
    unsigned = weight.values.dtype.name in ("uint4", "uint8")
    if unsigned == weight.symmetric or (unsigned and weight.global_scale is not None):
        return None
    if weight.zero_points is not None:
        plain = weight.minimums is None and weight.super_scales is None
        return "super_min" if plain else None
    if weight.super_scales is None:
        return "float16_min" if unsigned else "float16"
    if not unsigned:
        plain = weight.scales.dtype == np.int8 and weight.global_scale is None
        return "super" if plain else "float32"
    return "super_min" if weight.super_minimums is not None else None


def stated_of(
    weight: QuantizedWeight, form: Scales, codebook: Codebook
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """What a weight states of its blocks [out, blocks], and of what some of them share, in the
    order of PARTS and FACTORS."""
    if form == "float32":
        return [block_scales(weight) * np.float32(0.5 if codebook == "fp4" else 1)], []
    own, shared = [weight.scales, weight.minimums], [weight.super_scales, weight.super_minimums]
    if weight.zero_points is not None:
        own = [np.ones(weight.scales.shape, np.uint8), weight.zero_points]
        shared = [weight.scales, weight.scales]
    return [one for one in own if one is not None], [one for one in shared if one is not None]


def halves_of(weight: QuantizedWeight, form: Scales) -> list[NDArray[Any]]:
    """What a form has of a weight in float16."""
    return stated_of(weight, form, "")[form in FACTORS]


def unit_of(weight: QuantizedWeight, codebook: Codebook) -> float:
    """What all scales are multiplied by, for values as a codebook has them."""
    own = 1.0 if weight.global_scale is None else float(np.float32(weight.global_scale))
    return own / 2 if codebook == "fp4" else own


def power_of_two(arrays: list[NDArray[Any]]) -> float | None:
    """The power of two that times numbers of float16 gives all these numbers, 1 if possible; None
    where none does."""
    if all(array.dtype == np.float16 for array in arrays):
        return 1.0
    numbers = np.concatenate([array.astype(np.float32).reshape(-1) for array in arrays])
    largest = float(np.abs(numbers).max(initial=0))
    if not np.isfinite(largest):
        return None
    for power in (1.0, 2.0 ** (int(np.frexp(largest)[1]) - 16)):  # the largest is below 2^16
        with np.errstate(over="ignore", under="ignore"):
            scaled = numbers / np.float32(power)
            if np.array_equal(scaled.astype(np.float16).astype(np.float32), scaled):
                return power
    return None
