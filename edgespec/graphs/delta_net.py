"""The gated delta net (arXiv 2412.06464) over the rows of one call, whatever tree they form.

Token by token a head's state S [dk, dv] decays and learns what it did not know of a key:

    S <- exp(g) S;  u = beta (v - S'k);  S <- S + k u';  o = S'q

Here all rows of a call are done at once (the WY form of arXiv 2406.06484), with "ancestor" for
"earlier". With G the decay from the call's beginning down to a row, a row i knows of an ancestor j
by exp(G_i - G_j). So

    (I + A) U = beta (V - exp(G) K S)
    A_ij = beta_i (k_i'k_j) exp(G_i - G_j) for the ancestors j of i
    O = exp(G) Q S + ((Q K') exp(G_i - G_j), ancestors and self) U

S is the state before the call, and stays it: the rows' keys, updates and decays go out as they are,
and those that are accepted come back with the next call, which takes them in by one product. So
nothing has to be undone (decision 0011).

Knows the canonical operators. Knows no other part of a layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.config import LinearAttentionConfig, NormSpec
from edgespec.contract import RecurrentShape
from edgespec.graphs.builder import GraphBuilder
from edgespec.graphs.layers import norm
from edgespec.graphs.linear import float32_linear, fp32, linear
from edgespec.graphs.weights import WeightTable

MAX_LEVELS = 16  # of blocks that are merged: calls of up to 65536 rows
MAX_DECAY = -60.0  # exp of it is 9e-27
L2_EPS = 1e-6  # under the root of a key's squared length


@dataclass(frozen=True, slots=True)
class RowsOfCall:
    """What every recurrent layer of a call needs to know of its rows' tree."""

    path: ir.Value  # [B, S, S], 1 where the column is the row itself or an ancestor
    of_heads: ir.Value  # [B, 1, S, S], the same
    ancestors: ir.Value  # [B, 1, S, S], the same without the row itself
    itself: ir.Value  # [S, S], 1 on the diagonal
    window: tuple[
        ir.Value, ...
    ]  # each [B, S, 1]: the row itself, its parent, ..., as the convolution reads them
    merges: ir.Value  # [levels, S, S], see `solve`


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a layer brings from earlier calls."""

    conv: ir.Value  # [B, K-1, C]
    state: ir.Value  # [B, Hv, dk, dv]
    rows: ir.Value  # [B, P, row width]


def recurrent_shape(config: LinearAttentionConfig, layers: tuple[int, ...]) -> RecurrentShape:
    return RecurrentShape(
        layers,
        config.num_key_heads,
        config.num_value_heads,
        config.key_head_dim,
        config.value_head_dim,
        config.conv_kernel,
    )


def rows_of_call(b: GraphBuilder, tree_mask: ir.Value, kernel: int) -> RowsOfCall:
    """From `tree_mask` [B, S, S]; made once, and read by all layers."""
    if "rows_of_call" not in b.shared:
        path = b.op("Cast", tree_mask, name="rows/path", to=int(ir.DataType.FLOAT))
        square = b.op(
            "Gather", path, b.constant("first", np.array(0, np.int64)), name="rows/square", axis=0
        )
        itself = b.op("EyeLike", square, name="rows/itself")
        wide = b.op("Unsqueeze", path, b.shape(1), name="rows/path/heads")
        b.shared["rows_of_call"] = RowsOfCall(
            path,
            wide,
            b.op("Sub", wide, itself, name="rows/ancestors"),
            itself,
            convolution_window(b, path, kernel),
            block_merges(b, square),
        )
    rows: RowsOfCall = b.shared["rows_of_call"]
    return rows


def convolution_window(b: GraphBuilder, path: ir.Value, kernel: int) -> tuple[ir.Value, ...]:
    """K times [B, S, 1]: of the K-1 rows before the call and its own S ones, the last on each row's
    path, backwards.

    Parents stand before their children, so the last ones are those with the greatest index.
    """
    name = "rows/window"
    earlier = b.op(
        "Pad",
        path,
        b.shape(0, 0, kernel - 1, 0, 0, 0),
        b.constant("one", np.array(1, np.float32)),
        name=f"{name}/candidates",
    )
    count = b.op(
        "Squeeze",
        b.op("Shape", earlier, name=f"{name}/width", start=2, end=3),
        name=f"{name}/count",
    )
    first, step = (
        b.constant("first", np.array(0, np.int64)),
        b.constant("step", np.array(1, np.int64)),
    )
    order = b.op("Range", first, count, step, name=f"{name}/order")
    rank = b.op(
        "Cast", b.op("Add", order, step, name=f"{name}/from_one"), name=f"{name}/rank", to=1
    )
    node = ir.node(
        "TopK",
        [b.op("Mul", earlier, rank, name=f"{name}/ranked"), b.shape(kernel)],
        {"axis": -1},
        num_outputs=2,
        name=f"{name}/last",
    )
    _, found = b.parts(node)
    return b.split(found, (1,) * kernel, -1, name)


def block_merges(b: GraphBuilder, square: ir.Value) -> ir.Value:
    """[levels, S, S]: at level l, 1 where a row of one block of 2**l reads the block before it, of
    the same pair."""
    name = "rows/merges"
    rows = b.op("Shape", square, name=f"{name}/rows", start=0, end=1)
    sizes = b.constant(f"{name}/sizes", 2 ** np.arange(MAX_LEVELS, dtype=np.int64))
    needed = b.op(
        "Compress", sizes, b.op("Less", sizes, rows, name=f"{name}/smaller"), name=f"{name}/needed"
    )
    size = b.op("Unsqueeze", needed, b.shape(1), name=f"{name}/size")
    first, step = (
        b.constant("first", np.array(0, np.int64)),
        b.constant("step", np.array(1, np.int64)),
    )
    count = b.op("Squeeze", rows, name=f"{name}/count")
    index = b.op("Range", first, count, step, name=f"{name}/index")
    block = b.op("Div", index, size, name=f"{name}/block")
    pair = b.op("Div", block, b.constant("two", np.array(2, np.int64)), name=f"{name}/pair")

    def compared(op_type: str, x: ir.Value, label: str) -> ir.Value:
        one = b.op("Unsqueeze", x, b.shape(2), name=f"{name}/{label}/row")
        other = b.op("Unsqueeze", x, b.shape(1), name=f"{name}/{label}/column")
        return b.op(op_type, one, other, name=f"{name}/{label}")

    both = b.op(
        "And",
        compared("Equal", pair, "same"),
        compared("Greater", block, "later"),
        name=f"{name}/both",
    )
    return b.op("Cast", both, name=name, to=int(ir.DataType.FLOAT))


def delta_net(
    b: GraphBuilder,
    table: WeightTable,
    linear_attention: LinearAttentionConfig,
    eps: float,
    x: ir.Value,
    rows: RowsOfCall,
    memory: LayerState,
    weight: str,
    name: str,
) -> tuple[ir.Value, LayerState]:
    """The layer's mixer: x [B, S, H] -> [B, S, H], and what the call leaves: its rows, and the
    state before them."""
    sizes = recurrent_shape(linear_attention, ())
    keys, values, _ = sizes.row_parts
    mixed = linear(b, table, x, f"{weight}.in_proj_qkv", f"{name}/in_proj_qkv")
    z = linear(b, table, x, f"{weight}.in_proj_z", f"{name}/in_proj_z")
    decay_rate, rate = (
        rates(b, table, x, f"{weight}.in_proj_{part}", f"{name}/in_proj_{part}") for part in "ab"
    )
    convolved = convolution(b, table, mixed, rows, memory, weight, name)
    q, k, v = b.split(convolved, (keys, keys, values), -1, f"{name}/qkv")
    q = unit_heads(
        b, q, sizes, 1 / sizes.key_head_dim, f"{name}/q"
    )  # 1/sqrt(dk) for the length, and for the scale
    k = unit_heads(b, k, sizes, 1 / math.sqrt(sizes.key_head_dim), f"{name}/k")
    decays = path_decays(b, table, decay_rate, rows, weight, name)
    state = taken_in(b, sizes, memory, f"{name}/committed")
    out, updates = mixed_rows(b, sizes, q, k, v, rate, decays, state, rows, name)
    flat_k = b.op("Reshape", k, b.shape(0, 0, keys), name=f"{name}/k/row")
    left = b.op("Concat", flat_k, updates, decays, name=f"{name}/rows", axis=-1)
    normed = norm(b, table, NormSpec(eps), out, f"{weight}.norm", f"{name}/norm")
    gate = b.op("Mul", z, b.op("Sigmoid", z, name=f"{name}/gate/sigmoid"), name=f"{name}/gate")
    flat = b.op("Reshape", normed, b.shape(0, 0, values), name=f"{name}/norm/flat")
    gated = b.op("Mul", flat, gate, name=f"{name}/gated")
    return linear(b, table, gated, f"{weight}.out_proj", f"{name}/out_proj"), LayerState(
        mixed, state, left
    )


def rates(b: GraphBuilder, table: WeightTable, x: ir.Value, weight: str, name: str) -> ir.Value:
    """A number a head, [B, S, Hv]: a few rows of weights that act on all that a state remembers, so
    no build rounds them."""
    make = float32_linear if table.packing(weight) is None else linear
    return make(b, table, x, weight, name)


def convolution(
    b: GraphBuilder,
    table: WeightTable,
    mixed: ir.Value,
    rows: RowsOfCall,
    memory: LayerState,
    weight: str,
    name: str,
) -> ir.Value:
    """silu of the causal depthwise convolution along each row's path, [B, S, C]."""
    name = f"{name}/conv"
    series = b.op("Concat", memory.conv, mixed, name=f"{name}/series", axis=1)
    before = [
        b.op("GatherND", series, index, name=f"{name}/back.{i}", batch_dims=1)
        for i, index in enumerate(rows.window[1:], start=1)
    ]
    stored = fp32(b, table.value(b, f"{weight}.conv1d.weight"), f"{name}/weight")
    flat = b.op("Squeeze", stored, b.shape(1), name=f"{name}/weight/flat")
    taps = b.op("Transpose", flat, name=f"{name}/taps", perm=(1, 0))  # [K, C], itself last
    # One product a tap and a sum of them: ONNX Runtime is slow to reduce an axis that is not the
    # last
    each = reversed(b.split(taps, (1,) * len(rows.window), 0, f"{name}/tap"))
    products = [
        b.op("Mul", row, tap, name=f"{name}/product.{i}")
        for i, (row, tap) in enumerate(zip((mixed, *before), each, strict=True))
    ]
    total = b.op("Sum", *products, name=name)
    return b.op("Mul", total, b.op("Sigmoid", total, name=f"{name}/sigmoid"), name=f"{name}/silu")


def unit_heads(
    b: GraphBuilder, x: ir.Value, sizes: RecurrentShape, length: float, name: str
) -> ir.Value:
    """[B, S, Hk*dk] -> [B, S, Hk, dk], each head of length 1, times `length` * sqrt(dk)."""
    dim = sizes.key_head_dim
    split = b.op("Reshape", x, b.shape(0, 0, sizes.num_key_heads, dim), name=f"{name}/heads")
    scale = b.constant(f"unit/{length:.9g}", np.full(dim, length, np.float32))
    return b.op(
        "RMSNormalization",
        split,
        scale,
        name=f"{name}/unit",
        axis=-1,
        epsilon=L2_EPS / dim,
        stash_type=1,
    )


def path_decays(
    b: GraphBuilder, table: WeightTable, rate: ir.Value, rows: RowsOfCall, weight: str, name: str
) -> ir.Value:
    """[B, S, Hv]: the logarithm of what is left of the state at each row, all decays on its path
    summed."""
    name = f"{name}/decay"
    speed = b.op(
        "Exp", fp32(b, table.value(b, f"{weight}.A_log"), f"{name}/A_log"), name=f"{name}/speed"
    )
    bias = fp32(b, table.value(b, f"{weight}.dt_bias"), f"{name}/dt_bias")
    step = b.op("Softplus", b.op("Add", rate, bias, name=f"{name}/biased"), name=f"{name}/step")
    own = b.op("Mul", step, b.op("Neg", speed, name=f"{name}/speed/neg"), name=f"{name}/own")
    return b.op("MatMul", rows.path, own, name=name)


def remaining(b: GraphBuilder, decay: ir.Value, name: str) -> ir.Value:
    """What a decay leaves. No less than MAX_DECAY: what float32 cannot tell from nothing would
    become numbers so small that processors take many times as long for each."""
    limits = (
        b.constant("most_decay", np.array(MAX_DECAY, np.float32)),
        b.constant("zero", np.array(0, np.float32)),
    )
    return b.op("Exp", b.op("Clip", decay, *limits, name=f"{name}/log"), name=name)


def taken_in(b: GraphBuilder, sizes: RecurrentShape, memory: LayerState, name: str) -> ir.Value:
    """The state with the committed rows in it, [B, Hv, dk, dv]."""
    k, u, g = b.split(memory.rows, sizes.row_parts, -1, f"{name}/parts")
    whole = b.op(
        "ReduceMin", g, b.shape(1), name=f"{name}/decay", keepdims=1
    )  # decays only grow along a path
    left = remaining(b, b.op("Sub", whole, g, name=f"{name}/since"), f"{name}/left")
    u = b.op(
        "Mul",
        by_head(b, u, sizes, f"{name}/u"),
        columns(b, left, f"{name}/left"),
        name=f"{name}/u/left",
    )
    split = b.op(
        "Reshape", k, b.shape(0, 0, sizes.num_key_heads, sizes.key_head_dim), name=f"{name}/k/heads"
    )
    k = b.op("Transpose", split, name=f"{name}/k/t", perm=(0, 2, 3, 1))
    k = repeated(b, k, sizes, (sizes.key_head_dim, -1), f"{name}/k")
    learnt = b.op("MatMul", k, u, name=f"{name}/learnt")
    factor = columns(b, remaining(b, whole, f"{name}/factor"), f"{name}/factor")
    return b.op(
        "Add",
        b.op("Mul", memory.state, factor, name=f"{name}/decayed"),
        learnt,
        name=f"{name}/state",
    )


def mixed_rows(
    b: GraphBuilder,
    sizes: RecurrentShape,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    rate: ir.Value,
    decays: ir.Value,
    state: ir.Value,
    rows: RowsOfCall,
    name: str,
) -> tuple[ir.Value, ir.Value]:
    """What each row reads, [B, S, Hv, dv], and what it adds to the state, [B, S, Hv*dv]."""
    name = f"{name}/delta"
    transposed = [
        b.op("Transpose", x, name=f"{name}/{label}/t", perm=(0, 2, 1, 3))
        for x, label in ((k, "k"), (q, "q"))
    ]
    k, q = (
        repeated(b, x, sizes, (-1, sizes.key_head_dim), f"{name}/{part}")
        for x, part in zip(transposed, "kq", strict=True)
    )
    both = b.op("Concat", k, q, name=f"{name}/kq", axis=2)
    from_state = b.op("MatMul", both, state, name=f"{name}/from_state")
    alike = b.op(
        "MatMul",
        both,
        b.op("Transpose", k, name=f"{name}/k/columns", perm=(0, 1, 3, 2)),
        name=f"{name}/alike",
    )
    known, read = b.halves(from_state, 2, f"{name}/from_state/parts")
    keys_alike, queries_alike = b.halves(alike, 2, f"{name}/alike/parts")
    down = columns(b, decays, f"{name}/down")  # [B, Hv, S, 1]
    across = b.op("Transpose", down, name=f"{name}/across", perm=(0, 1, 3, 2))
    between = remaining(b, b.op("Sub", down, across, name=f"{name}/apart"), f"{name}/between")
    between = b.op("Mul", between, rows.of_heads, name=f"{name}/between/on_path")
    left = remaining(b, down, f"{name}/left")
    beta = columns(b, b.op("Sigmoid", rate, name=f"{name}/beta"), f"{name}/beta")
    known = b.op("Mul", known, left, name=f"{name}/known")
    new = b.op(
        "Mul",
        b.op("Sub", by_head(b, v, sizes, f"{name}/v"), known, name=f"{name}/new"),
        beta,
        name=f"{name}/learnt",
    )
    coupling = b.op(
        "Mul",
        b.op("Mul", keys_alike, between, name=f"{name}/coupled"),
        beta,
        name=f"{name}/coupled/beta",
    )
    coupling = b.op("Mul", coupling, rows.ancestors, name=f"{name}/coupling")
    updates = b.op("MatMul", solve(b, coupling, rows, f"{name}/solve"), new, name=f"{name}/updates")
    seen = b.op(
        "MatMul",
        b.op("Mul", queries_alike, between, name=f"{name}/seen"),
        updates,
        name=f"{name}/seen/updates",
    )
    out = b.op("Add", b.op("Mul", read, left, name=f"{name}/read"), seen, name=f"{name}/out")
    out = b.op("Transpose", out, name=f"{name}/out/t", perm=(0, 2, 1, 3))
    back = b.op("Transpose", updates, name=f"{name}/updates/t", perm=(0, 2, 1, 3))
    width = sizes.num_value_heads * sizes.value_head_dim
    return out, b.op("Reshape", back, b.shape(0, 0, width), name=f"{name}/updates/row")


def solve(b: GraphBuilder, coupling: ir.Value, rows: RowsOfCall, name: str) -> ir.Value:
    """The inverse of I + coupling, [B, Hv, S, S], by merging blocks that are inverse already into
    pairs: the inverse of [[P, 0], [C, R]] has -R' C P' below, P' and R' being those of P and R.

    As steady as substituting row by row, which a power series of the coupling is not where keys
    repeat.
    """
    start = b.op(
        "Expand", rows.itself, b.op("Shape", coupling, name=f"{name}/shape"), name=f"{name}/start"
    )
    levels = b.op(
        "Squeeze",
        b.op("Shape", rows.merges, name=f"{name}/depth", start=0, end=1),
        name=f"{name}/levels",
    )

    def merged(level: ir.Value, inverse: ir.Value) -> ir.Value:
        mask = b.op("Gather", rows.merges, level, name=f"{name}/merge", axis=0)
        below = b.op("Mul", coupling, mask, name=f"{name}/below")
        corner = b.op(
            "MatMul",
            inverse,
            b.op("MatMul", below, inverse, name=f"{name}/right"),
            name=f"{name}/corner",
        )
        return b.op("Sub", inverse, corner, name=f"{name}/merged")

    return b.loop(levels, start, merged, name)


def by_head(b: GraphBuilder, x: ir.Value, sizes: RecurrentShape, name: str) -> ir.Value:
    """[B, N, Hv*dv] -> [B, Hv, N, dv]."""
    split = b.op(
        "Reshape",
        x,
        b.shape(0, 0, sizes.num_value_heads, sizes.value_head_dim),
        name=f"{name}/heads",
    )
    return b.op("Transpose", split, name=f"{name}/by_head", perm=(0, 2, 1, 3))


def columns(b: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    """[B, N, Hv] -> [B, Hv, N, 1]."""
    transposed = b.op("Transpose", x, name=f"{name}/t", perm=(0, 2, 1))
    return b.op("Unsqueeze", transposed, b.shape(3), name=f"{name}/column")


def repeated(
    b: GraphBuilder, x: ir.Value, sizes: RecurrentShape, rest: tuple[int, int], name: str
) -> ir.Value:
    """[B, Hk, ., .] -> [B, Hv, ., .]: neighboring value heads share a key head; `rest` are the
    last two sizes."""
    times = sizes.num_value_heads // sizes.num_key_heads
    if times == 1:
        return x
    apart = b.op("Unsqueeze", x, b.shape(2), name=f"{name}/apart")
    wide = b.op("Expand", apart, b.shape(1, 1, times, 1, 1), name=f"{name}/repeated")
    return b.op("Reshape", wide, b.shape(0, sizes.num_value_heads, *rest), name=f"{name}/joined")
