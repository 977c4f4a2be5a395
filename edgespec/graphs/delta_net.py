"""The gated delta net (arXiv 2412.06464) over the rows of one call, which may form any tree.

Token by token, a head's state S [dk, dv] decays and is corrected by the error for a key:

    S <- exp(g) S;  u = beta (v - S'k);  S <- S + k u';  o = S'q

The graph computes all rows of a call at once (the WY form of arXiv 2406.06484), with "ancestor"
instead of "earlier". G is the sum of the decays on the path from the start of the call to a row; an
ancestor j contributes to a row i with the factor exp(G_i - G_j):

    (I + A) U = beta (V - exp(G) K S),
        A_ij = beta_i (k_i'k_j) exp(G_i - G_j) for the ancestors j of i
    O = exp(G) Q S + B U,
        B_ij = (q_i'k_j) exp(G_i - G_j) for the ancestors j of i and i itself

S is the state before the call, and the call does not change it. It returns the rows' keys, updates
and decays; the accepted ones are inputs of the next call, which adds them to S with one product. So
rejected rows need no rollback (decision 0011).

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

MAX_LEVELS = 16  # of merged blocks: calls of up to 65536 rows
MIN_LOG_DECAY = -60.0  # exp(-60) is 9e-27
L2_EPS = 1e-6  # added to the squared norm of a key


@dataclass(frozen=True, slots=True)
class RowsOfCall:
    """The tree of a call's rows, as all recurrent layers read it."""

    path: ir.Value  # [B, S, S], 1 where the column is the row itself or an ancestor
    of_heads: ir.Value  # [B, 1, S, S], the same
    ancestors: ir.Value  # [B, 1, S, S], the same without the row itself
    itself: ir.Value  # [S, S], 1 on the diagonal
    # Each [B, S, 1]: the indices of the row itself, its parent, ... as the convolution reads them
    window: tuple[ir.Value, ...]
    merges: ir.Value  # [levels, S, S], see `solve`


@dataclass(frozen=True, slots=True)
class DeltaNetState:
    """The state of a layer between calls."""

    conv: ir.Value  # [B, K-1, C], the last inputs of the convolution
    state: ir.Value  # [B, Hv, dk, dv], without the pending rows
    rows: ir.Value  # [B, P, row width], the pending rows: keys, updates, decays


def recurrent_shape(config: LinearAttentionConfig, layers: tuple[int, ...]) -> RecurrentShape:
    """Returns the sizes of the recurrent layers with the indices `layers`."""
    return RecurrentShape(
        layers,
        config.num_key_heads,
        config.num_value_heads,
        config.key_head_dim,
        config.value_head_dim,
        config.conv_kernel,
    )


def rows_of_call(b: GraphBuilder, tree_mask: ir.Value, kernel: int) -> RowsOfCall:
    """Returns the tree of `tree_mask` [B, S, S]; all layers of a graph share one."""
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
    """Returns K index tensors [B, S, 1]: the last K rows on each row's path, the row itself first.

    Indices count the K-1 rows before the call and then its S rows. Parents precede their children,
    so that the last rows are those with the largest index.
    """
    name = "rows/window"
    earlier = b.op(
        "Pad",
        path,
        b.shape(0, 0, kernel - 1, 0, 0, 0),
        b.constant("one", np.array(1, np.float32)),
        name=f"{name}/candidates",
    )
    width = b.op("Shape", earlier, name=f"{name}/width", start=2, end=3)
    count = b.op("Squeeze", width, name=f"{name}/count")
    first = b.constant("first", np.array(0, np.int64))
    step = b.constant("step", np.array(1, np.int64))
    order = b.op("Range", first, count, step, name=f"{name}/order")
    from_one = b.op("Add", order, step, name=f"{name}/from_one")
    rank = b.op("Cast", from_one, name=f"{name}/rank", to=1)
    ranked = b.op("Mul", earlier, rank, name=f"{name}/ranked")
    inputs = [ranked, b.shape(kernel)]
    node = ir.node("TopK", inputs, {"axis": -1}, num_outputs=2, name=f"{name}/last")
    _, indices = b.parts(node)
    return b.split(indices, (1,) * kernel, -1, name)


def block_merges(b: GraphBuilder, square: ir.Value) -> ir.Value:
    """Returns masks [levels, S, S] for `solve`.

    At level l the mask is 1 where the row is in the second and the column in the first block of a
    pair of blocks of 2**l rows.
    """
    name = "rows/merges"
    rows = b.op("Shape", square, name=f"{name}/rows", start=0, end=1)
    sizes = b.constant(f"{name}/sizes", 2 ** np.arange(MAX_LEVELS, dtype=np.int64))
    smaller = b.op("Less", sizes, rows, name=f"{name}/smaller")
    needed = b.op("Compress", sizes, smaller, name=f"{name}/needed")
    size = b.op("Unsqueeze", needed, b.shape(1), name=f"{name}/size")
    first = b.constant("first", np.array(0, np.int64))
    step = b.constant("step", np.array(1, np.int64))
    count = b.op("Squeeze", rows, name=f"{name}/count")
    index = b.op("Range", first, count, step, name=f"{name}/index")
    block = b.op("Div", index, size, name=f"{name}/block")
    pair = b.op("Div", block, b.constant("two", np.array(2, np.int64)), name=f"{name}/pair")

    def compared(op_type: str, x: ir.Value, label: str) -> ir.Value:
        row = b.op("Unsqueeze", x, b.shape(2), name=f"{name}/{label}/row")
        column = b.op("Unsqueeze", x, b.shape(1), name=f"{name}/{label}/column")
        return b.op(op_type, row, column, name=f"{name}/{label}")

    same_pair = compared("Equal", pair, "same")
    later_block = compared("Greater", block, "later")
    both = b.op("And", same_pair, later_block, name=f"{name}/both")
    return b.op("Cast", both, name=name, to=int(ir.DataType.FLOAT))


def delta_net(
    b: GraphBuilder,
    table: WeightTable,
    linear_attention: LinearAttentionConfig,
    eps: float,
    x: ir.Value,
    rows: RowsOfCall,
    before: DeltaNetState,
    weight: str,
    name: str,
) -> tuple[ir.Value, DeltaNetState]:
    """Returns the mixer's output [B, S, H] for x [B, S, H], and the layer state after the call.

    `before` holds the pending rows of earlier calls; they are part of the returned `state`. The
    returned `rows` [B, S, row width] and `conv` [B, S, C] are those of this call, accepted or not.
    """
    sizes = recurrent_shape(linear_attention, ())
    keys, values, _ = sizes.row_parts
    mixed = linear(b, table, x, f"{weight}.in_proj_qkv", f"{name}/in_proj_qkv")
    z = linear(b, table, x, f"{weight}.in_proj_z", f"{name}/in_proj_z")
    decay_rate, rate = (
        rates(b, table, x, f"{weight}.in_proj_{part}", f"{name}/in_proj_{part}") for part in "ab"
    )
    convolved = convolution(b, table, mixed, rows, before, weight, name)
    q, k, v = b.split(convolved, (keys, keys, values), -1, f"{name}/qkv")
    # 1/sqrt(dk) for the norm, and once more for the attention scale
    q = unit_heads(b, q, sizes, 1 / sizes.key_head_dim, f"{name}/q")
    k = unit_heads(b, k, sizes, 1 / math.sqrt(sizes.key_head_dim), f"{name}/k")
    decays = path_decays(b, table, decay_rate, rows, weight, name)
    state = committed_state(b, sizes, before, f"{name}/committed")
    out, updates = mixed_rows(b, sizes, q, k, v, rate, decays, state, rows, name)
    flat_k = b.op("Reshape", k, b.shape(0, 0, keys), name=f"{name}/k/row")
    new_rows = b.op("Concat", flat_k, updates, decays, name=f"{name}/rows", axis=-1)
    normed = norm(b, table, NormSpec(eps), out, f"{weight}.norm", f"{name}/norm")
    gate = b.op("Mul", z, b.op("Sigmoid", z, name=f"{name}/gate/sigmoid"), name=f"{name}/gate")
    flat = b.op("Reshape", normed, b.shape(0, 0, values), name=f"{name}/norm/flat")
    gated = b.op("Mul", flat, gate, name=f"{name}/gated")
    out = linear(b, table, gated, f"{weight}.out_proj", f"{name}/out_proj")
    return out, DeltaNetState(mixed, state, new_rows)


def rates(b: GraphBuilder, table: WeightTable, x: ir.Value, weight: str, name: str) -> ir.Value:
    """Returns one value per head, [B, S, Hv].

    Its small weight scales the complete state, so that no build quantizes it.
    """
    make = float32_linear if table.packing(weight) is None else linear
    return make(b, table, x, weight, name)


def convolution(
    b: GraphBuilder,
    table: WeightTable,
    mixed: ir.Value,
    rows: RowsOfCall,
    before: DeltaNetState,
    weight: str,
    name: str,
) -> ir.Value:
    """Returns SiLU of the causal depthwise convolution along each row's path, [B, S, C]."""
    name = f"{name}/conv"
    series = b.op("Concat", before.conv, mixed, name=f"{name}/series", axis=1)
    earlier = [
        b.op("GatherND", series, index, name=f"{name}/back.{i}", batch_dims=1)
        for i, index in enumerate(rows.window[1:], start=1)
    ]
    stored = fp32(b, table.value(b, f"{weight}.conv1d.weight"), f"{name}/weight")
    flat = b.op("Squeeze", stored, b.shape(1), name=f"{name}/weight/flat")
    taps = b.op("Transpose", flat, name=f"{name}/taps", perm=(1, 0))  # [K, C], itself last
    # One product per tap and their sum: ONNX Runtime is slow at reducing an axis before the last
    each = reversed(b.split(taps, (1,) * len(rows.window), 0, f"{name}/tap"))
    products = [
        b.op("Mul", row, tap, name=f"{name}/product.{i}")
        for i, (row, tap) in enumerate(zip((mixed, *earlier), each, strict=True))
    ]
    total = b.op("Sum", *products, name=name)
    return b.op("Mul", total, b.op("Sigmoid", total, name=f"{name}/sigmoid"), name=f"{name}/silu")


def unit_heads(
    b: GraphBuilder, x: ir.Value, sizes: RecurrentShape, length: float, name: str
) -> ir.Value:
    """Returns heads [B, S, Hk, dk] of x [B, S, Hk*dk] with the L2 norm `length` * sqrt(dk)."""
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
    """Returns G [B, S, Hv]: the sum of the log decays on each row's path."""
    name = f"{name}/decay"
    a_log = fp32(b, table.value(b, f"{weight}.A_log"), f"{name}/A_log")
    speed = b.op("Exp", a_log, name=f"{name}/speed")
    bias = fp32(b, table.value(b, f"{weight}.dt_bias"), f"{name}/dt_bias")
    step = b.op("Softplus", b.op("Add", rate, bias, name=f"{name}/biased"), name=f"{name}/step")
    own = b.op("Mul", step, b.op("Neg", speed, name=f"{name}/speed/neg"), name=f"{name}/own")
    return b.op("MatMul", rows.path, own, name=name)


def remaining(b: GraphBuilder, decay: ir.Value, name: str) -> ir.Value:
    """Returns exp of a log decay, clipped at MIN_LOG_DECAY.

    Smaller values have no effect in float32, but denormal numbers slow processors down.
    """
    limits = (
        b.constant("most_decay", np.array(MIN_LOG_DECAY, np.float32)),
        b.constant("zero", np.array(0, np.float32)),
    )
    return b.op("Exp", b.op("Clip", decay, *limits, name=f"{name}/log"), name=name)


def committed_state(
    b: GraphBuilder, sizes: RecurrentShape, before: DeltaNetState, name: str
) -> ir.Value:
    """Returns the state with the pending rows added, [B, Hv, dk, dv]."""
    k, u, g = b.split(before.rows, sizes.row_parts, -1, f"{name}/parts")
    # the log decay of the complete path: the sums only decrease along it
    total = b.op("ReduceMin", g, b.shape(1), name=f"{name}/decay", keepdims=1)
    left = remaining(b, b.op("Sub", total, g, name=f"{name}/since"), f"{name}/left")
    u_heads = by_head(b, u, sizes, f"{name}/u")
    u = b.op("Mul", u_heads, columns(b, left, f"{name}/left"), name=f"{name}/u/left")
    head_shape = b.shape(0, 0, sizes.num_key_heads, sizes.key_head_dim)
    split = b.op("Reshape", k, head_shape, name=f"{name}/k/heads")
    k = b.op("Transpose", split, name=f"{name}/k/t", perm=(0, 2, 3, 1))
    k = repeated(b, k, sizes, (sizes.key_head_dim, -1), f"{name}/k")
    learnt = b.op("MatMul", k, u, name=f"{name}/learnt")
    factor = columns(b, remaining(b, total, f"{name}/factor"), f"{name}/factor")
    decayed = b.op("Mul", before.state, factor, name=f"{name}/decayed")
    return b.op("Add", decayed, learnt, name=f"{name}/state")


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
    """Returns the outputs O [B, S, Hv, dv] and the updates U [B, S, Hv*dv] of all rows."""
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
    k_columns = b.op("Transpose", k, name=f"{name}/k/columns", perm=(0, 1, 3, 2))
    alike = b.op("MatMul", both, k_columns, name=f"{name}/alike")
    known, read = b.halves(from_state, 2, f"{name}/from_state/parts")
    keys_alike, queries_alike = b.halves(alike, 2, f"{name}/alike/parts")
    down = columns(b, decays, f"{name}/down")  # [B, Hv, S, 1]
    across = b.op("Transpose", down, name=f"{name}/across", perm=(0, 1, 3, 2))
    between = remaining(b, b.op("Sub", down, across, name=f"{name}/apart"), f"{name}/between")
    between = b.op("Mul", between, rows.of_heads, name=f"{name}/between/on_path")
    left = remaining(b, down, f"{name}/left")
    beta = columns(b, b.op("Sigmoid", rate, name=f"{name}/beta"), f"{name}/beta")
    known = b.op("Mul", known, left, name=f"{name}/known")
    error = b.op("Sub", by_head(b, v, sizes, f"{name}/v"), known, name=f"{name}/new")
    error = b.op("Mul", error, beta, name=f"{name}/learnt")
    coupling = b.op("Mul", keys_alike, between, name=f"{name}/coupled")
    coupling = b.op("Mul", coupling, beta, name=f"{name}/coupled/beta")
    coupling = b.op("Mul", coupling, rows.ancestors, name=f"{name}/coupling")
    inverse = solve(b, coupling, rows, f"{name}/solve")
    updates = b.op("MatMul", inverse, error, name=f"{name}/updates")
    attention = b.op("Mul", queries_alike, between, name=f"{name}/seen")
    seen = b.op("MatMul", attention, updates, name=f"{name}/seen/updates")
    out = b.op("Add", b.op("Mul", read, left, name=f"{name}/read"), seen, name=f"{name}/out")
    out = b.op("Transpose", out, name=f"{name}/out/t", perm=(0, 2, 1, 3))
    back = b.op("Transpose", updates, name=f"{name}/updates/t", perm=(0, 2, 1, 3))
    width = sizes.num_value_heads * sizes.value_head_dim
    return out, b.op("Reshape", back, b.shape(0, 0, width), name=f"{name}/updates/row")


def solve(b: GraphBuilder, coupling: ir.Value, rows: RowsOfCall, name: str) -> ir.Value:
    """Returns the inverse of I + coupling, [B, Hv, S, S].

    Merges pairs of inverted diagonal blocks: the lower left block of the inverse of
    [[P, 0], [C, R]] is -inv(R) C inv(P). This is as numerically stable as forward substitution; a
    power series of the coupling is not if keys repeat.
    """
    shape = b.op("Shape", coupling, name=f"{name}/shape")
    start = b.op("Expand", rows.itself, shape, name=f"{name}/start")
    depth = b.op("Shape", rows.merges, name=f"{name}/depth", start=0, end=1)
    levels = b.op("Squeeze", depth, name=f"{name}/levels")

    def merged(level: ir.Value, inverse: ir.Value) -> ir.Value:
        mask = b.op("Gather", rows.merges, level, name=f"{name}/merge", axis=0)
        below = b.op("Mul", coupling, mask, name=f"{name}/below")
        right = b.op("MatMul", below, inverse, name=f"{name}/right")
        corner = b.op("MatMul", inverse, right, name=f"{name}/corner")
        return b.op("Sub", inverse, corner, name=f"{name}/merged")

    return b.loop(levels, start, merged, name)


def by_head(b: GraphBuilder, x: ir.Value, sizes: RecurrentShape, name: str) -> ir.Value:
    """[B, N, Hv*dv] -> [B, Hv, N, dv]."""
    head_shape = b.shape(0, 0, sizes.num_value_heads, sizes.value_head_dim)
    split = b.op("Reshape", x, head_shape, name=f"{name}/heads")
    return b.op("Transpose", split, name=f"{name}/by_head", perm=(0, 2, 1, 3))


def columns(b: GraphBuilder, x: ir.Value, name: str) -> ir.Value:
    """[B, N, Hv] -> [B, Hv, N, 1]."""
    transposed = b.op("Transpose", x, name=f"{name}/t", perm=(0, 2, 1))
    return b.op("Unsqueeze", transposed, b.shape(3), name=f"{name}/column")


def repeated(
    b: GraphBuilder, x: ir.Value, sizes: RecurrentShape, rest: tuple[int, int], name: str
) -> ir.Value:
    """[B, Hk, ., .] -> [B, Hv, ., .]: consecutive value heads share a key head.

    `rest` are the last two sizes.
    """
    times = sizes.num_value_heads // sizes.num_key_heads
    if times == 1:
        return x
    apart = b.op("Unsqueeze", x, b.shape(2), name=f"{name}/apart")
    wide = b.op("Expand", apart, b.shape(1, 1, times, 1, 1), name=f"{name}/repeated")
    return b.op("Reshape", wide, b.shape(0, sizes.num_value_heads, *rest), name=f"{name}/joined")
