"""What every graph promises: names, dtypes and symbolic shapes of its inputs and outputs, per role.

Both wings meet here: the host writes graphs that keep a contract, the device runs engines by it. Knows no ONNX and
no engine.

Symbols: B batch, S tokens of this call, C slots of the KV cache, G rows that go through the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

OPSET = 24
MAX_BATCH_SIZE = 16
Dim = int | str

# Keys of a quantised MatMul's metadata: standard ONNX cannot say them, and backends need them (decision 0007)
SCHEME = "edgespec.scheme"
ACTIVATIONS = "edgespec.activations"  # only where the graph leaves the rounding of the activations to the backend
INPUT_SCALE = "edgespec.input_scale"  # nvfp4: the activations' global scale


class Role(StrEnum):
    """What an engine does: decode plainly, verify drafts, or make them."""

    LLM = "llm"
    BASE = "base"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output; dtype by numpy's name, symbolic dimensions as strings."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The sizes that a decoder's contract depends on. `features` is the width of the taps or of the recycled state."""

    role: Role
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int  # of the logits
    features: int = 0  # base: k*H, width of `hidden_states`; draft: Hd; llm: 0, no such output
    base_features: int = 0  # draft: k*H, width of `base_hidden`


@dataclass(frozen=True, slots=True)
class GraphContract:
    shape: GraphShape
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def past_names(layer: int) -> tuple[str, str]:
    return f"past_key_{layer}", f"past_value_{layer}"


def present_names(layer: int) -> tuple[str, str]:
    return f"present_key_{layer}", f"present_value_{layer}"


def canonical_contract(shape: GraphShape) -> GraphContract:
    """The contract of the exported graph.

    `attention_mask` is True where a row may attend; each row attends at least to itself. `write_indices` is the slot
    of this call's first KV row. `gather_idx` picks the rows that go through the head. A draft reads `base_hidden`
    where `use_base_hidden` is true and its own recycled `draft_hidden` where it is false; the other one is not read and
    may have no rows (S_base or S_draft is S or 0).
    """
    embeds = TensorSpec("inputs_embeds", "float32", ("B", "S", shape.hidden_size))
    rope: Dim = shape.rotary_dim // 2
    inputs = [
        embeds,
        TensorSpec("rope_cos", "float32", ("B", "S", rope)),
        TensorSpec("rope_sin", "float32", ("B", "S", rope)),
        TensorSpec("attention_mask", "bool", ("B", 1, "S", "C")),
        TensorSpec("write_indices", "int64", ("B",)),
        TensorSpec("gather_idx", "int64", ("B", "G")),
    ]
    if shape.role is Role.DRAFT:
        inputs += [
            TensorSpec("base_hidden", "float32", ("B", "S_base", shape.base_features)),
            TensorSpec("draft_hidden", "float32", ("B", "S_draft", shape.features)),
            TensorSpec("use_base_hidden", "bool", ()),
        ]
    outputs = [TensorSpec("logits", "float32", ("B", "G", shape.vocab_size))]
    if shape.features:
        outputs.append(TensorSpec("hidden_states", "float32", ("B", "S", shape.features)))
    return GraphContract(
        shape,
        (*inputs, *kv_specs(shape, past_names)),
        (*outputs, *kv_specs(shape, present_names)),
    )


def lowered_contract(canonical: GraphContract, batched: bool = False) -> GraphContract:
    """The contract after lowering to ONNX Runtime's CPU kernels; `batched` is the form for more than one sequence.

    For one sequence the mask is T = written slots wide instead of C, and this call's rows land in the last S of them,
    so that `write_indices` falls away. Batched, it is the canonical contract: the runner keeps C near T.
    """
    if batched:
        return canonical
    inputs = []
    for spec in canonical.inputs:
        if spec.name == "attention_mask":
            inputs.append(TensorSpec(spec.name, spec.dtype, (1, 1, "S", "T")))
        elif spec.name != "write_indices":
            inputs.append(spec)
    return GraphContract(canonical.shape, tuple(inputs), canonical.outputs)


def kv_specs(shape: GraphShape, names: Callable[[int], tuple[str, str]]) -> Iterable[TensorSpec]:
    dims: tuple[Dim, ...] = ("B", shape.num_kv_heads, "C", shape.head_dim)
    return [TensorSpec(name, "float32", dims) for i in range(shape.num_layers) for name in names(i)]


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine is built for, in tokens; the flags of `edgespec build` by their own names."""

    max_batch_size: int = 1
    max_input_len: int = 1024
    max_kv_cache_capacity: int = 4096
    max_verify_tree_size: int = 60
    max_draft_tree_size: int = 60


def tree_pool_size(top_k: int, steps: int) -> int:
    """Nodes that can exist in a dynamic tree, the root included: 1 + K + (S-1) * K**2."""
    return 1 + top_k + (steps - 1) * top_k**2
