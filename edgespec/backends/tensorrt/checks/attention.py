"""Rules of Attention, TensorScatter (the cache) and RotaryEmbedding."""

from __future__ import annotations

from onnx import NodeProto

from edgespec.backends.tensorrt.checks.graph import View, attribute_of, integer, name_of
from edgespec.backends.tensorrt.checks.operators import Problems, shown, static
from edgespec.backends.tensorrt.parser_operators import FLOAT_TYPES

INPUTS = ("query", "key", "value", "mask", "past_key", "past_value", "nonpad_kv_seqlen")
MASK, TAKEN = 3, 4  # inputs of Attention: where the mask is, how many are imported
NO_ATTRIBUTES = ("softmax_precision", "qk_matmul_output_mode")


def attention_inputs(view: View) -> Problems:
    """A past or lengths as inputs."""
    for _, node in view.nodes("Attention"):
        given = [INPUTS[i] for i, name in enumerate(node.input) if name and i >= TAKEN]
        if given:
            yield name_of(node), ", ".join(given)


def attention_outputs(view: View) -> Problems:
    """More than one output."""
    for _, node in view.nodes("Attention"):
        if len(node.output) > 1:
            yield name_of(node), f"{len(node.output)} outputs"


def attention_attribute(view: View) -> Problems:
    """softcap, the softmax's precision, products as output."""
    for _, node in view.nodes("Attention"):
        if attribute_of(node, "softcap") not in (None, 0.0):
            yield name_of(node), f"softcap {attribute_of(node, 'softcap'):g}"
        for name in NO_ATTRIBUTES:
            if attribute_of(node, name) is not None:
                yield name_of(node), name


def attention_rank(view: View) -> Problems:
    """Queries, keys, values or masks of another rank."""
    for scope, node in view.nodes("Attention"):
        for name in [n for n in node.input[:TAKEN] if n]:
            dims = scope.tensor(name).dims
            if dims is not None and len(dims) != 4:
                yield name_of(node), f"{name} has the shape {shown(dims)}"


def attention_heads(view: View) -> Problems:
    """Heads of queries that keys and values do not divide."""
    for scope, node in view.nodes("Attention"):
        if len(node.input) < 3 or len(scope.tensor(node.input[0]).dims or ()) != 4:
            continue
        queries, keys = static(scope, node.input[0], 1), static(scope, node.input[1], 1)
        if queries and keys and queries % keys:
            yield name_of(node), f"{queries} heads of queries, {keys} of keys"


def attention_lengths(view: View) -> Problems:
    """Keys and values of different sizes, of which one may be unknown."""
    for scope, node in view.nodes("Attention"):
        keys, values = (scope.tensor(name).dims for name in node.input[1:3])
        if keys is None or values is None or len(keys) != 4 or len(values) != 4:
            continue
        if any(differ(*pair) for pair in zip(keys[:3], values[:3], strict=True)):
            yield name_of(node), f"keys of {shown(keys)}, values of {shown(values)}"


def differ(one: int | str | None, other: int | str | None) -> bool:
    """Whether two sizes are known to differ: two numbers, or a number and one that the caller
    chooses."""
    if isinstance(one, int) and isinstance(other, int):
        return one != other
    return isinstance(one, int) != isinstance(other, int) and chosen(one) != chosen(other)


def chosen(size: int | str | None) -> bool:
    """Whether a size is a symbol of an input; those that inference makes have names of its own."""
    return isinstance(size, str) and not size.startswith("unk__")


def mask_of(node: NodeProto) -> str:
    """The name of a node's mask; empty where it has none."""
    return node.input[MASK] if len(node.input) > MASK else ""


def attention_causal(view: View) -> Problems:
    """Causal attention with a mask."""
    for _, node in view.nodes("Attention"):
        if integer(node, "is_causal", 0) and mask_of(node):
            yield name_of(node), "is_causal and a mask"


def attention_mask_type(view: View) -> Problems:
    """Additive masks of another type than the queries."""
    for scope, node in view.nodes("Attention"):
        mask, queries = scope.tensor(mask_of(node)).dtype, scope.tensor(node.input[0]).dtype
        if mask in FLOAT_TYPES and queries in FLOAT_TYPES and mask != queries:
            yield name_of(node), f"a mask of {mask}, queries of {queries}"


def attention_bool_mask(view: View) -> Problems:
    """Masks of BOOL."""
    for scope, node in view.nodes("Attention"):
        if scope.tensor(mask_of(node)).dtype == "BOOL":
            yield name_of(node), f"{mask_of(node)} is BOOL"


def attention_scale(view: View) -> Problems:
    """Scales that the parser multiplies queries and keys by."""
    for _, node in view.nodes("Attention"):
        scale = attribute_of(node, "scale")
        if scale != 1.0:
            said = "no scale: 1/sqrt(head size)" if scale is None else f"scale {scale:g}"
            yield name_of(node), said


def attention_float32(view: View) -> Problems:
    """Attention in float32 that its node does not let be decomposed."""
    for scope, node in view.nodes("Attention"):
        allowed = integer(node, "TRT_decomposable", 0)
        if scope.tensor(node.input[0]).dtype == "FLOAT" and not allowed:
            yield name_of(node), "queries of FLOAT"


# ---- the cache


def cache_rank(view: View) -> Problems:
    """Caches and updates of another rank."""
    for scope, node in view.nodes("TensorScatter"):
        for name in node.input[:2]:
            dims = scope.tensor(name).dims
            if dims is not None and len(dims) != 4:
                yield name_of(node), f"{name} has the shape {shown(dims)}"


def cache_axis(view: View) -> Problems:
    """Another axis than the slots, or a circular cache."""
    for _, node in view.nodes("TensorScatter"):
        if (axis := integer(node, "axis", -2)) != -2:
            yield name_of(node), f"axis {axis}"
        mode = attribute_of(node, "mode")
        if isinstance(mode, bytes) and mode != b"linear":
            yield name_of(node), f"mode {mode.decode()}"


def cache_length(view: View) -> Problems:
    """Caches whose length is not a number."""
    for scope, node in view.nodes("TensorScatter"):
        dims = scope.tensor(node.input[0]).dims
        if dims is None or (len(dims) == 4 and not isinstance(dims[2], int)):
            yield name_of(node), f"{node.input[0]} has the shape {shown(dims)}"


def cache_type(view: View) -> Problems:
    """Caches of another type than a float."""
    for scope, node in view.nodes("TensorScatter"):
        dtype = scope.tensor(node.input[0]).dtype
        if dtype is not None and dtype not in FLOAT_TYPES:
            yield name_of(node), f"{node.input[0]} is {dtype}"


def cache_input(view: View) -> Problems:
    """Caches that are computed."""
    inputs = {value.name for value in view.main.graph.input}
    for _, node in view.nodes("TensorScatter"):
        if node.input[0] not in inputs:
            yield name_of(node), f"{node.input[0]} is not an input"


def cache_output(view: View) -> Problems:
    """Written caches that are no output."""
    outputs = {value.name for value in view.main.graph.output}
    for _, node in view.nodes("TensorScatter"):
        if node.output[0] not in outputs:
            yield name_of(node), f"{node.output[0]} is not an output"


def rotary_rows(view: View) -> Problems:
    """Rows of cos and sin that are not those of what is rotated."""
    for scope, node in view.nodes("RotaryEmbedding"):
        data = scope.tensor(node.input[0]).dims
        if data is None or len(data) != 4 or (len(node.input) > 3 and node.input[3]):
            continue
        for name in node.input[1:3]:
            rows = scope.tensor(name).dims
            if rows is not None and len(rows) == 3 and any(map(differ, data[::2], rows[:2])):
                yield name_of(node), f"{name} of {shown(rows)} for {shown(data)}"


def rotary_position(view: View) -> Problems:
    """Positions of another type than INT64."""
    for scope, node in view.nodes("RotaryEmbedding"):
        dtype = scope.tensor(node.input[3]).dtype if len(node.input) > 3 else None
        if dtype not in (None, "INT64"):
            yield name_of(node), f"{node.input[3]} is {dtype}"
