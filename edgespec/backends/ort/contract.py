"""What a lowered graph takes and gives, for whoever lowers it, and for whoever runs it.

Knows names and shapes. Imports no ONNX: running an engine needs none.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

from edgespec.contract import (
    Dim,
    GraphContract,
    Kind,
    TensorSpec,
    inputs_named,
    past_names,
    present_names,
)

CacheType = Literal["float32", "float16", "int8"]
# Types of a KV cache by the names that users know
CACHE_TYPES: dict[str, CacheType] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}
SCALE_BYTES = 4  # behind the codes of a row of an int8 cache


def lowered_contract(
    canonical: GraphContract,
    batched: bool = False,
    tree_cache: CacheType | None = None,
    head_width: int = 0,
) -> GraphContract:
    """The contract of a lowered graph; `batched` is the form for more than one sequence. With
    `head_width` its lm_head is a LowBitHead of rows of that width.

    With `tree_cache` it is that of our own kernel over a cache of that type, which has one form for
    all of them. Otherwise, for one sequence, masks are T = written slots wide instead of C, and
    this call's rows land in the last S of them, so that `write_indices` falls away. Batched, it is
    the canonical contract: the runner keeps C near T. So it is for drafts that make blocks: the
    other form's kernel lets no row see a later slot. Heads have no cache, and one form.
    """
    if head_width:
        return head_contract(lowered_contract(canonical, batched, tree_cache), head_width)
    if canonical.shape.heads:
        return canonical
    if tree_cache is not None:
        return tree_contract(canonical, tree_cache)
    if batched or canonical.shape.block:
        return canonical
    inputs, masks = [], inputs_named(Kind.MASK)
    for spec in canonical.inputs:
        if spec.name in masks:
            inputs.append(TensorSpec(spec.name, spec.dtype, (1, 1, "S", "T")))
        elif spec.name != "write_indices":
            inputs.append(spec)
    return replace(canonical, inputs=tuple(inputs))


def tree_contract(canonical: GraphContract, cache: CacheType) -> GraphContract:
    """The contract of a graph with TreeAttention: instead of each mask the length of what all rows
    of a lane see, what each sees of the V slots behind, and the first position that it sees."""
    inputs: list[TensorSpec] = []
    for spec in canonical.inputs:
        if spec.name in inputs_named(Kind.MASK):
            inputs += attention_inputs(spec.name)
        else:
            inputs.append(spec)
    kept = {
        name for i in canonical.shape.attention_layers for name in past_names(i) + present_names(i)
    }
    extra = SCALE_BYTES if cache == "int8" else 0

    def typed(spec: TensorSpec) -> TensorSpec:
        if spec.name not in kept:
            return spec
        *dims, dim = spec.shape
        assert isinstance(dim, int)
        shape: tuple[Dim, ...] = (*dims, dim + extra)
        return replace(spec, dtype=cache, shape=shape)

    outputs = tuple(map(typed, canonical.outputs))
    return replace(canonical, inputs=tuple(map(typed, inputs)), outputs=outputs)


@cache
def attention_inputs(mask: str) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    """The three inputs of TreeAttention that stand for a mask."""
    name = mask.removesuffix("_mask")
    return (
        TensorSpec(f"{name}_lengths", "int64", ("B",)),
        TensorSpec(f"{name}_visible", "bool", ("B", "S", "V")),
        TensorSpec(f"{name}_first", "int64", ("B", "S")),
    )


# What a LowBitHead reads beside rows and weight, and what it gives beside logits
WRITTEN = TensorSpec("logits_written", "bool", ("B",))
SEARCH = TensorSpec("logits_search", "int64", (3,))
FOUND = (
    TensorSpec("top_ids", "int64", ("B", "G", "K")),
    TensorSpec("top_values", "float32", ("B", "G", "K")),
    TensorSpec("logsumexp", "float32", ("B", "G")),
    TensorSpec("logits_finite", "bool", ("B", "G")),
)
HEAD_ROWS = "head_rows"  # what it multiplies: by it logits can be had later


def head_rows(width: int) -> TensorSpec:
    """The rows of a width that a LowBitHead multiplies, which the graph gives as well."""
    return TensorSpec(HEAD_ROWS, "float32", ("B", "G", width))


def head_contract(contract: GraphContract, width: int) -> GraphContract:
    """The contract of a graph whose lm_head is a LowBitHead of rows of a width. Logits are written
    of those lanes alone that `logits_written` says; of all lanes it gives what a search of three
    sizes finds: how many of the largest, of the first so many ids, and whether it sums up
    exponentials."""
    return replace(
        contract,
        inputs=(*contract.inputs, WRITTEN, SEARCH),
        outputs=(*contract.outputs, *FOUND, head_rows(width)),
    )
