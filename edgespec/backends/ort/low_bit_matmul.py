"""LowBitMatMul, our own kernel for weights of 4 and 8 bits: its node, and a proof of its weights.

A row has the same bits in every call. Knows one node; `weights` knows where its weights come from,
`native.layout` how they are packed. An engine's runner reads rows with it, so ONNX is imported
where a node is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.ort.native.layout import PANEL, USUAL_BLOCK_SIZES, WeightLayout
from edgespec.backends.ort.native.library import DOMAIN, kernels
from edgespec.errors import BuildError
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize_stored

if TYPE_CHECKING:
    import onnx_ir as ir

WIDEST = max(USUAL_BLOCK_SIZES)
PROBE_ROWS = 2
# Of the root mean square: rounding of activations gives 0.005 to 0.012, a wrong nibble, scale or
# order above 0.3.
PROBE_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True)
class RowRounding:
    """How rows become bytes: a scale per block of inputs, per row, or `scale` for all of them."""

    by_row: bool = False
    scale: np.float32 | None = None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the node."""
        if self.scale is not None:
            return {"activation_scale": float(self.scale)}
        return {"round_by_row": 1} if self.by_row else {}

    @property
    def in_blocks(self) -> bool:
        """Whether each block of a row has a scale of its own."""
        return not self.by_row and self.scale is None


IN_BLOCKS = RowRounding()


def block_for(block: int) -> int | None:
    """The block in which values that share a scale by `block` are packed; None where there is no
    kernel for it."""
    return next((size for size in reversed(USUAL_BLOCK_SIZES) if block % size == 0), None)


def attributes(layouts: Sequence[WeightLayout], rounding: RowRounding) -> dict[str, Any]:
    """The attributes of a LowBitMatMul with these weights."""
    first = layouts[0]
    form = first.attributes
    if "global_scales" in form:
        form["global_scales"] = [layout.global_scale for layout in layouts]
    return {
        "K": first.in_features,
        "N": [layout.out_features for layout in layouts],
        **form,
        **rounding.attributes,
    }


def replace_matmuls(
    nodes: Sequence[ir.Node],
    x: ir.Value,
    layouts: Sequence[WeightLayout],
    weights: Sequence[ir.Value],
    rounding: RowRounding,
) -> None:
    """Replace MatMuls that read the same rows `x` by one LowBitMatMul, with an output for each."""
    import onnx_ir as ir

    from edgespec.backends.rewriting import replace_value

    graph, names = nodes[0].graph, [str(node.name) for node in nodes]
    assert isinstance(graph, ir.Graph)
    name = "+".join((names[0], *(other.rpartition("/")[2] for other in names[1:])))
    fused = ir.node(
        "LowBitMatMul",
        [x, *weights],
        attributes(layouts, rounding),
        domain=DOMAIN,
        num_outputs=len(nodes),
        name=name,
    )
    graph.insert_before(next(node for node in graph if node in nodes), fused)
    for node, output in zip(nodes, fused.outputs, strict=True):
        replace_value(output, node.outputs[0])
    graph.remove(nodes, safe=True)


def pack(layout: WeightLayout, weight: QuantizedWeight, rounding: RowRounding) -> NDArray[np.uint8]:
    """The packed weight, proven by running the kernel on its last panel: BuildError where it
    computes something else."""
    packed = layout.pack(weight)
    prove(layout, packed, weight, rounding)
    return packed


def prove(
    layout: WeightLayout, packed: NDArray[np.uint8], weight: QuantizedWeight, rounding: RowRounding
) -> None:
    """Run the kernel on the weight's last panel. BuildError where it differs from the product of
    the dequantized rows."""
    low = (layout.num_panels - 1) * PANEL
    last = replace(layout, out_features=layout.out_features - low)
    x = np.random.default_rng(0).standard_normal((PROBE_ROWS, layout.in_features), np.float32)
    if rounding.scale is not None:
        x *= rounding.scale * np.float32(40)
    wanted = x @ dequantize_stored(weight, slice(low, layout.out_features)).T
    check_product(
        f"LowBitMatMul computes {weight.name}",
        run(last, packed[-1:], rounding, x),
        wanted,
        PROBE_TOLERANCE,
        "Build with `kernels` onnxruntime, and please report it.",
    )


def check_product(
    product: str,
    computed: NDArray[np.float32],
    wanted: NDArray[np.float32],
    tolerance: float,
    remedy: str,
) -> None:
    """BuildError where a product, such as "MatMulNBits computes lm_head", is farther from the
    wanted one than the tolerance: of the root mean square, relative to that of the wanted one."""
    size = float(np.sqrt(np.mean(np.square(wanted))))
    difference = float(np.sqrt(np.mean(np.square(computed - wanted))))
    difference /= max(size, float(np.finfo(np.float32).tiny))
    if not difference <= tolerance:  # a NaN is not within any tolerance
        message = f"{product} with an error of {difference:.1e}, allowed is {tolerance}"
        raise BuildError(message, remedy)


def run(
    layout: WeightLayout, packed: NDArray[np.uint8], rounding: RowRounding, x: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The product [rows, out] of x [rows, in], computed by the kernel."""
    kind = 2 if rounding.scale is not None else int(rounding.by_row)
    scale = 0.0 if rounding.scale is None else float(rounding.scale)
    return kernels().low_bit_matmul(layout, kind, scale, packed, x)


KEPT_BYTES = 4 * 2**20  # rows of an embedding that are kept dequantized
FEW_ROWS = 64  # of a step: what is read of prompts is not kept


class PackedTable:
    """The values of a tied lm_head, read as the embedding that they were made of; the file is
    mapped. Rows that steps read are kept: making one takes as long as a tenth of a small pass."""

    def __init__(self, path: Path, layout: WeightLayout, offset: int) -> None:
        self.layout = layout
        self.packed = np.memmap(path, np.uint8, "r", offset, layout.shape)
        places = max(1, KEPT_BYTES // (4 * layout.in_features))  # a token's is its id modulo these
        self.held = np.full(places, -1, np.int64)
        self.kept = np.empty((places, layout.in_features), np.float32)

    def rows(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """The embeddings [..., in] in float32 of token ids [...]."""
        if tokens.size > FEW_ROWS:
            return self.layout.rows(self.packed, tokens)
        places = tokens % len(self.held)
        missing = self.held[places] != tokens
        if missing.any():
            new = tokens[missing]
            rows = self.layout.rows(self.packed, new)
            for token, place, row in zip(new.tolist(), places[missing].tolist(), rows, strict=True):
                self.held[place], self.kept[place] = token, row
            if (self.held[places] != tokens).any():  # two of them have one place
                return self.layout.rows(self.packed, tokens)
        found: NDArray[np.float32] = self.kept.take(places, 0)
        return found
