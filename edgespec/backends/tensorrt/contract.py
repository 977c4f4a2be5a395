"""What a graph that is lowered for TensorRT takes and gives.

Knows names, types and shapes. Imports no ONNX: running an engine needs none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from edgespec.backends.tensorrt.target import Dialect, Target
from edgespec.contract import (
    Contract,
    Dim,
    GraphContract,
    GraphShape,
    Kind,
    TensorSpec,
    conv_names,
    delta_names,
    inputs_named,
    past_names,
    present_names,
    state_names,
)

AnyContract = TypeVar("AnyContract", bound=Contract)


def lowered_contract(canonical: AnyContract, target: Target) -> AnyContract:
    """The contract of the graph that `lower` or `lower_vision` makes for `target`; names and order
    stay.

    - C is the number `target.capacity`: TensorRT writes only into caches of static length.
    - Embeddings, hidden states, keys and values are of type `target.compute`. Rotations, logits and
      what recurrent layers keep stay float32: a state that is rounded at each call drifts.
    - `base_hidden` and `draft_hidden` have S rows both. `use_base_hidden` says which of them
      counts; the other one may hold any numbers, zeros for example.
    - PORTABLE: `present_key_i` and `present_value_i` are this call's rows [B, Hkv, S, D] alone. A
      draft that makes blocks gives R = L + S rows, those of the context first.
    """
    # Rotations are computed on the host, logits are compared and sampled there: both in float32
    kept = {*inputs_named(Kind.COS, Kind.SIN), "position_weight", "logits"}
    rows: dict[str, tuple[Dim, ...]] = {}
    if isinstance(canonical, GraphContract):
        kept |= recurrent_names(canonical.shape)
        rows = new_rows(canonical.shape) if target.dialect is Dialect.PORTABLE else {}

    def lowered(spec: TensorSpec) -> TensorSpec:
        dtype = target.compute if spec.dtype == "float32" else spec.dtype
        if spec.name in kept:
            dtype = spec.dtype
        dims = rows.get(spec.name, spec.shape)
        return TensorSpec(spec.name, dtype, tuple(fixed(dim, target) for dim in dims))

    return replace(
        canonical,
        inputs=tuple(map(lowered, canonical.inputs)),
        outputs=tuple(map(lowered, canonical.outputs)),
    )


def fixed(dim: Dim, target: Target) -> Dim:
    """The dimension in a lowered graph."""
    if dim == "C":
        return target.capacity
    return "S" if dim in ("S_base", "S_draft") else dim


def recurrent_names(shape: GraphShape) -> frozenset[str]:
    """Inputs and outputs of recurrent layers."""
    pairs = (conv_names, state_names, delta_names)
    return frozenset(name for i in shape.recurrent_layers for pair in pairs for name in pair(i))


def memory_names(shape: GraphShape) -> frozenset[str]:
    """Inputs and outputs in which layers keep what they know of a sequence, but for the keys and
    values that a call gives."""
    past = {name for i in shape.attention_layers for name in past_names(i)}
    return recurrent_names(shape) | past


def new_rows(shape: GraphShape) -> dict[str, tuple[Dim, ...]]:
    """Name -> shape of the keys and values of this call's rows alone."""
    dims = ("B", shape.num_kv_heads, "R" if shape.block else "S", shape.head_dim)
    return {name: dims for i in shape.attention_layers for name in present_names(i)}
