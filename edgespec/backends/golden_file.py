"""golden.safetensors as `build` reads it: each array by its name, checked for type and shape.

Knows what export writes for a graph of given sizes. What the arrays stand for is known in `golden`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.contract import Dim, GraphShape, Kind, canonical_contract, graph_inputs
from edgespec.errors import BundleError
from edgespec.safe_read.fields import EXPORT_AGAIN
from edgespec.safe_read.tensors import StoredTensor, read_array, read_tensors

Golden = dict[str, NDArray[Any]]
LABELS = ("prompt", "tree")
MAX_ROWS = 1024  # tokens of a golden call, and slots of its cache


def read_golden(path: Path, shape: GraphShape, vocab_size: int) -> Golden:
    """The arrays of a golden file, by name. `vocab_size` is that of the base.

    Raises BundleError where one is missing or unknown, of another type or shape than the graph's,
    or holds NaN or Inf.
    """

    def check(tensors: Mapping[str, StoredTensor]) -> None:
        check_names(path, tensors, shape)
        for tensor in tensors.values():
            check_shape(path, tensor, tensors, shape)

    golden = read_arrays(path, check)
    check_places(path, golden, shape, vocab_size)
    return golden


def read_arrays(path: Path, check: Callable[[Mapping[str, StoredTensor]], None]) -> Golden:
    """The arrays of a golden file, whose names, types and shapes `check` refuses. BundleError for a
    file that is none, and for NaN and Inf."""
    try:
        tensors = read_tensors(path, lambda how: refused(path, f"not valid safetensors: {how}"))
        check(tensors)
        golden = {name: read_array(path, tensor) for name, tensor in tensors.items()}
    except OSError as error:
        raise refused(path, f"it cannot be read ({error.strerror or error})") from error
    for name, array in golden.items():
        if array.dtype == np.float32 and not np.isfinite(array).all():
            raise refused(path, f"{name!r} holds NaN or Inf")
    return golden


def refused(path: Path, problem: str) -> BundleError:
    """The error for a golden file."""
    return BundleError(f"{path}: {problem}.", EXPORT_AGAIN)


def arrays_of(shape: GraphShape) -> dict[str, tuple[str, tuple[Dim, ...]]]:
    """Name -> dtype and dimensions of what each call stores: the inputs of one sequence that do not
    follow from positions, and the outputs."""
    contract = canonical_contract(shape)
    names = {row.name for row in graph_inputs(shape) if row.is_stored} | {"logits", "hidden_states"}
    arrays: dict[str, tuple[str, tuple[Dim, ...]]] = {
        spec.name: (spec.dtype, (1, *spec.shape[1:]))
        for spec in (*contract.inputs, *contract.outputs)
        if spec.name in names
    }
    if not shape.heads:
        arrays |= {"ids": ("int64", ("S",)), "positions": ("int64", ("S",))}
    return arrays | ({"context_positions": ("int64", ("L",))} if shape.block else {})


def slots_of(golden: Golden) -> int:
    """Slots of the KV cache that the calls need; without a cache, rows of the longest call."""
    mask = golden.get("tree_attention_mask")
    if mask is not None:
        return int(mask.shape[-1])
    return max(int(golden[f"{label}_logits"].shape[1]) for label in LABELS)


def check_names(path: Path, tensors: Mapping[str, StoredTensor], shape: GraphShape) -> None:
    """BundleError where an array is missing or unknown."""
    wanted = {f"{label}_{name}" for label in LABELS for name in arrays_of(shape)}
    for name in sorted(wanted - tensors.keys()):
        raise refused(path, f"{name!r} is missing")
    for name in sorted(tensors.keys() - wanted):
        raise refused(path, f"it holds {name!r:.80}, which a graph of this kind does not have")


def check_shape(
    path: Path, tensor: StoredTensor, tensors: Mapping[str, StoredTensor], shape: GraphShape
) -> None:
    """BundleError where an array is of another type or shape than its call's."""
    label, _, name = tensor.name.partition("_")
    dtype, dims = arrays_of(shape)[name]
    if shape.heads:
        rows = slots = tensors[f"{label}_base_hidden"].shape[1:2]
    else:
        rows, slots = tensors[f"{label}_ids"].shape, tensors["tree_attention_mask"].shape
    sizes = dict.fromkeys(("S", "G"), rows[0] if rows else 0) | {"C": slots[-1] if slots else 0}
    context = tensors.get(f"{label}_context_positions")
    sizes["L"] = context.shape[0] if context is not None and context.shape else 0
    sizes |= {"S_base": sizes["S"] * (label == "prompt"), "S_draft": sizes["S"] * (label == "tree")}
    wanted = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)
    check_form(path, tensor, dtype, wanted)
    if not all(1 <= sizes[dim] <= MAX_ROWS for dim in ("S", "C")) or sizes["L"] > MAX_ROWS:
        raise refused(path, f"{tensor.name!r} has {list(tensor.shape)}: too many rows, or none")


def check_form(path: Path, tensor: StoredTensor, dtype: str, shape: tuple[int, ...]) -> None:
    """BundleError where an array is of another type or shape."""
    if (tensor.dtype, tensor.shape) != (dtype, shape):
        is_ = f"{tensor.dtype} {list(tensor.shape)}"
        raise refused(path, f"{tensor.name!r} is {is_}, not {dtype} {list(shape)}")


def check_places(path: Path, golden: Golden, shape: GraphShape, vocab_size: int) -> None:
    """BundleError where tokens, positions or slots are none that the calls can have."""
    if shape.heads:
        return
    slots = golden["tree_attention_mask"].shape[-1]
    for label in LABELS:
        for name, most in (("ids", vocab_size), ("positions", slots)):
            values = golden[f"{label}_{name}"]
            if values.min() < 0 or values.max() >= most:
                raise refused(path, f"'{label}_{name}' has values beyond 0 to {most - 1}")
        masks = graph_inputs(shape, Kind.MASK)
        if not all(golden[f"{label}_{mask.name}"].any(-1).all() for mask in masks):
            raise refused(path, f"'{label}_attention_mask' has rows that attend to nothing")
    rows = {label: len(golden[f"{label}_ids"]) for label in LABELS}
    if not shape.block:
        if slots != rows["prompt"] + rows["tree"]:
            raise refused(path, f"'tree_attention_mask' has {slots} slots for {rows} rows")
        return
    start = 0
    for label in LABELS:
        context = golden[f"{label}_context_positions"]
        if not len(context) or not np.array_equal(context, start + np.arange(len(context))):
            raise refused(path, f"'{label}_context_positions' do not follow each other")
        start += len(context)
        if start + rows[label] > slots:
            raise refused(path, f"'{label}_attention_mask' has too few slots")
