"""The contract of graphs: names, dtypes and symbolic shapes of inputs and outputs, per role.

Host and device meet here: the host writes graphs that keep a contract, the device runs engines
by it.
Knows no ONNX and no engine.

Symbols: B batch, S tokens of this call, C slots of the KV cache, G rows that go through the head, P
rows of earlier calls that a recurrent layer has still to take into its state, L rows of new context
that a block draft reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from operator import attrgetter
from typing import Any

OPSET = 24
MAX_BATCH_SIZE = 16
# rows of a prompt in a call where layers are recurrent: their work grows with the rows' square
RECURRENT_CHUNK = 64
Dim = int | str
COMPUTE = "float32"  # the canonical graph's type; backends lower it to theirs
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int64": 8, "bool": 1}

# Keys of a quantized MatMul's metadata: standard ONNX cannot say them, and backends need them
# (decision 0007)
SCHEME = "edgespec.scheme"
# only where the graph leaves the rounding of the activations to the backend
ACTIVATIONS = "edgespec.activations"
KEEP_PRECISION = "edgespec.float32_only"  # a MatMul whose weight no build may round
INPUT_SCALE = "edgespec.input_scale"  # nvfp4: the activations' global scale


class Role(StrEnum):
    """What an engine does: decode plainly, verify drafts, make them, or encode images."""

    LLM = "llm"
    BASE = "base"
    DRAFT = "draft"
    VISUAL = "visual"


DECODERS = (Role.LLM, Role.BASE, Role.DRAFT)  # their engines share a directory


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output; dtype by numpy's name, symbolic dimensions as strings."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def dims(self, **sizes: int) -> tuple[int, ...]:
        """The shape, of which `sizes` gives the symbolic dimensions by name."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.shape)

    def num_bytes(self, **sizes: int) -> int:
        """Bytes of the tensor; `sizes` gives the symbolic dimensions by name."""
        return math.prod(self.dims(**sizes)) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The sizes of gated delta net layers, the layers `layers` of a decoder."""

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return (
            2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim
        )

    @property
    def row_parts(self) -> tuple[int, int, int]:
        """What a row leaves behind for the state: its key, its update and its decay."""
        values = self.num_value_heads * self.value_head_dim
        return self.num_key_heads * self.key_head_dim, values, self.num_value_heads

    @property
    def row_width(self) -> int:
        """Elements that a row leaves behind for the state."""
        return sum(self.row_parts)

    @property
    def state_dims(self) -> tuple[int, int, int]:
        """Value heads, and the two sides of a head's state."""
        return self.num_value_heads, self.key_head_dim, self.value_head_dim


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The sizes that a decoder's contract depends on. `features` is the width of the aux hidden
    states or of the recycled state."""

    role: Role
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    vocab_size: int  # of the logits
    features: int = 0  # base: k*H, width of `hidden_states`; draft: Hd; llm: 0, no such output
    # draft: k*H, width of `base_hidden`, or of `target_hidden`; 0: it reads no hidden states
    base_features: int = 0
    block: bool = False  # a draft that makes a whole block in one call
    sliding: bool = False  # a second mask, for the layers with a window beside layers without
    # where some layers keep a state instead of keys and values
    recurrent: RecurrentShape | None = None
    # rows of a second rotary table, for the layers that rotate otherwise; 0: there is one table
    local_rotary_dim: int = 0
    # draft heads side by side over one hidden state: no layers and no memory; 0: a decoder
    heads: int = 0
    # of optional inputs, by the keys of their rows in INPUTS; 0, or missing: the graph has none
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def reads_hidden_states(self) -> bool:
        """Whether it is a draft that goes on with hidden states, the base's or its own; a whole
        model that drafts reads tokens alone."""
        return self.role is Role.DRAFT and not self.block and self.base_features > 0

    def as_dict(self) -> dict[str, Any]:
        """As config.json has it; the second rotary table, heads and the sizes of optional inputs
        are there only where there are some."""
        out = asdict(self)
        sizes = {name: out.pop(name) for name in ("local_rotary_dim", "heads")} | out.pop("sizes")
        if self.recurrent is not None:
            out["recurrent"]["layers"] = list(self.recurrent.layers)
        return out | {name: size for name, size in sizes.items() if size}

    @property
    def logits_width(self) -> int:
        """Width of `logits`: of several heads the logits stand side by side."""
        return self.vocab_size * max(self.heads, 1)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """The layers with a state; empty where all have keys and values."""
        return self.recurrent.layers if self.recurrent else ()

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with keys and values of their own."""
        return tuple(i for i in range(self.num_layers) if i not in self.recurrent_layers)


@dataclass(frozen=True, slots=True)
class Contract:
    """What a graph reads and gives, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class GraphContract(Contract):
    """That of a decoder of this shape."""

    shape: GraphShape

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        layers = self.shape.attention_layers
        return self._bytes_of({name for i in layers for name in past_names(i)})

    @property
    def state_bytes(self) -> int:
        """Bytes that a sequence takes in recurrent layers, whatever its length: states, and the
        rows before the convolution. 0 without such layers."""
        layers = self.shape.recurrent_layers
        return self._bytes_of({pair[0] for i in layers for pair in (conv_names(i), state_names(i))})

    def _bytes_of(self, names: set[str]) -> int:
        """Of these inputs, for one sequence and one slot of the KV cache."""
        return sum(spec.num_bytes(B=1, C=1) for spec in self.inputs if spec.name in names)


def past_names(layer: int) -> tuple[str, str]:
    """Inputs: the keys and values before this call."""
    return f"past_key_{layer}", f"past_value_{layer}"


def present_names(layer: int) -> tuple[str, str]:
    """Outputs: the keys and values with this call's rows."""
    return f"present_key_{layer}", f"present_value_{layer}"


def conv_names(layer: int) -> tuple[str, str]:
    """The convolution's rows before this call, and this call's own."""
    return f"conv_state_{layer}", f"conv_rows_{layer}"


def state_names(layer: int) -> tuple[str, str]:
    """The recurrent state before and after taking in the committed rows."""
    return f"recurrent_state_{layer}", f"present_recurrent_state_{layer}"


def delta_names(layer: int) -> tuple[str, str]:
    """The committed rows that the state does not hold yet, and this call's rows."""
    return f"committed_rows_{layer}", f"delta_rows_{layer}"


# ---- inputs, a row each


class Kind(StrEnum):
    """How a call gives an input, and so how it is made, stored, cut and fed."""

    ROWS = "rows"  # an array with a row for each row of the call
    COS = "cos"  # the same, of the rows' positions: cosines of a rotary table
    SIN = "sin"
    MASK = "mask"  # what each row attends to in some of the layers
    STATES = "states"  # hidden states, sequence by sequence
    FLAG = "flag"  # which of two inputs is read
    DERIVED = "derived"  # follows from the rest of the call


class Part(StrEnum):
    """The part of a graph that reads an input."""

    STEM = "stem"
    LAYERS = "layers"
    HEAD = "head"


Width = Callable[[GraphShape], Dim]


def decodes(shape: GraphShape) -> bool:
    """Whether it is a decoder's graph, and no heads over a hidden state."""
    return not shape.heads


@dataclass(frozen=True, slots=True)
class GraphInput:
    """A row: an input that graphs have of which `when` is true, beside what layers remember.

    With `size`, the graph has it where that key of `GraphShape.sizes` (and of config.json) is
    positive; `max_size` bounds the key, by the role and the number of layers.
    """

    name: str
    kind: Kind
    dims: tuple[Dim | Width, ...]
    when: Callable[[GraphShape], object] = decodes
    dtype: str = COMPUTE
    parts: tuple[Part, ...] = (Part.LAYERS,)  # that read it
    default: float | None = None  # where a call does not give it; None: each call does
    table: int = 0  # of cosines and sines: the rotary table, in the order of a component's `ropes`
    instead_of: str = ""  # the input in whose place a call gives this one
    of_images: bool = False  # what images have beside their embeddings
    size: str = ""
    max_size: Callable[[Role, int], int] = lambda role, num_layers: num_layers

    @property
    def is_stored(self) -> bool:
        """Whether golden files have it: it does not follow from positions and slots."""
        return self.kind not in (Kind.COS, Kind.SIN, Kind.DERIVED)

    def applies(self, shape: GraphShape) -> bool:
        """Whether graphs of this shape have it."""
        return bool(self.when(shape)) and (not self.size or shape.sizes.get(self.size, 0) > 0)

    def spec(self, shape: GraphShape) -> TensorSpec:
        """Name, type and dimensions in a graph of this shape."""
        dims = tuple(dim(shape) if callable(dim) else dim for dim in self.dims)
        return TensorSpec(self.name, self.dtype, dims)


def pairs(shape: GraphShape) -> Dim:
    """The pairs of a head that the first rotary table turns."""
    return shape.rotary_dim // 2


def local_pairs(shape: GraphShape) -> Dim:
    """The same of the second table."""
    return shape.local_rotary_dim // 2


def recycles(shape: GraphShape) -> bool:
    """Whether a draft reads the base's hidden states or its own."""
    return shape.reads_hidden_states and not shape.heads


HIDDEN, READ, FEATURES = map(attrgetter, ("hidden_size", "base_features", "features"))
BLOCK, LOCAL = attrgetter("block"), attrgetter("local_rotary_dim")
SEEN: tuple[Dim, ...] = ("B", 1, "S", "C")
STEM = (Part.STEM,)
# By name, in the order of a graph's inputs. `canonical_contract` says what each means.
INPUTS: dict[str, GraphInput] = {
    row.name: row
    for row in (
        GraphInput("inputs_embeds", Kind.ROWS, ("B", "S", HIDDEN), parts=(*STEM, Part.LAYERS)),
        GraphInput("rope_cos", Kind.COS, ("B", "S", pairs)),
        GraphInput("rope_sin", Kind.SIN, ("B", "S", pairs)),
        GraphInput("attention_mask", Kind.MASK, SEEN, dtype="bool"),
        GraphInput("write_indices", Kind.DERIVED, ("B",), dtype="int64"),
        GraphInput("gather_idx", Kind.DERIVED, ("B", "G"), dtype="int64", parts=(Part.HEAD,)),
        GraphInput("target_hidden", Kind.STATES, ("B", "L", READ), BLOCK),
        GraphInput("context_cos", Kind.COS, ("B", "L", pairs), BLOCK),
        GraphInput("context_sin", Kind.SIN, ("B", "L", pairs), BLOCK),
        GraphInput(
            "base_hidden",
            Kind.STATES,
            ("B", lambda shape: "S" if shape.heads else "S_base", READ),
            attrgetter("reads_hidden_states"),
            parts=STEM,
        ),
        GraphInput(
            "draft_hidden",
            Kind.STATES,
            ("B", "S_draft", FEATURES),
            recycles,
            parts=STEM,
            instead_of="base_hidden",
        ),
        GraphInput("use_base_hidden", Kind.FLAG, (), recycles, "bool", STEM),
        GraphInput("sliding_attention_mask", Kind.MASK, SEEN, attrgetter("sliding"), "bool"),
        GraphInput("local_rope_cos", Kind.COS, ("B", "S", local_pairs), LOCAL, table=1),
        GraphInput("local_rope_sin", Kind.SIN, ("B", "S", local_pairs), LOCAL, table=1),
        GraphInput(
            "deepstack_embeds",
            Kind.ROWS,
            ("B", "S", lambda shape: shape.sizes["deepstack"] * shape.hidden_size),
            default=0.0,
            of_images=True,
            size="deepstack",
            max_size=lambda role, num_layers: 0 if role is Role.DRAFT else num_layers,
        ),
        GraphInput("tree_mask", Kind.DERIVED, ("B", "S", "S"), attrgetter("recurrent"), "bool"),
    )
}


def graph_inputs(shape: GraphShape, *kinds: Kind) -> tuple[GraphInput, ...]:
    """The inputs of a graph of this shape, without memory; with `kinds`, those of these kinds."""
    return tuple(
        row for row in INPUTS.values() if row.applies(shape) and (not kinds or row.kind in kinds)
    )


def inputs_named(*kinds: Kind) -> tuple[str, ...]:
    """The names of all inputs of these kinds, whatever the graph."""
    return tuple(row.name for row in INPUTS.values() if row.kind in kinds)


def image_widths(shape: GraphShape) -> dict[str, int]:
    """Input -> width of what a base reads of images beside their embeddings."""
    rows = (row.spec(shape) for row in graph_inputs(shape) if row.of_images)
    return {spec.name: spec.dims(B=1, S=1)[-1] for spec in rows}


def canonical_contract(shape: GraphShape) -> GraphContract:
    """The contract of the exported graph.

    `attention_mask` is True where a row may attend; each row attends at least to itself. Where some
    layers have a window and others have none, those with one read `sliding_attention_mask` instead;
    where some rotate otherwise, those read `local_rope_cos` and `local_rope_sin`. Where images join
    the stream behind each of the first layers, `deepstack_embeds` has their rows, side by side, and
    zeros for text.
    `write_indices` is the slot of this call's first KV row. `gather_idx` picks the rows that go
    through the head. A draft reads `base_hidden` where `use_base_hidden` is true and its own
    recycled `draft_hidden` where it is false; the other one is not read and may have no rows
    (S_base or S_draft is S or 0). A draft that is a whole model has neither, and the
    contract of a plain decoder.

    A draft that makes blocks reads two kinds of rows: `target_hidden`, the base's aux hidden states
    at L new context positions, which only leave keys and values, and the S rows of a block.
    `write_indices` is where the L go; the S go behind them. Masks say what the rows of the block
    see of both; the next call writes over the block.

    Recurrent layers cannot forget a row. So a call leaves its rows outside the state, as
    `conv_rows` and `delta_rows`, and the next one is given those that were accepted, on one path
    and in its order, as `committed_rows` (rows of zeroes change nothing) and as the last
    conv_kernel-1 rows of `conv_state`; it takes them in before its own rows begin, and
    `present_recurrent_state` is the state at that place. `tree_mask` says which rows of the call
    each row follows, itself included: all of one path, and those before what comes after.

    Heads over a hidden state read `base_hidden` alone, and keep nothing: each of its rows has one
    row of `logits`, those of the first head first.
    """
    rows: Dim = "S" if shape.heads else "G"
    outputs = [TensorSpec("logits", COMPUTE, ("B", rows, shape.logits_width))]
    if shape.features:
        outputs.append(TensorSpec("hidden_states", COMPUTE, ("B", "S", shape.features)))
    inputs, layers = [row.spec(shape) for row in graph_inputs(shape)], range(shape.num_layers)
    return GraphContract(
        (*inputs, *(spec for i in layers for spec in memory_inputs(shape, i))),
        (*outputs, *(spec for i in layers for spec in memory_outputs(shape, i))),
        shape,
    )


def memory_inputs(shape: GraphShape, layer: int) -> tuple[TensorSpec, ...]:
    """What a layer reads of earlier calls."""
    return tuple(before for before, _ in memory_specs(shape, layer))


def memory_outputs(shape: GraphShape, layer: int) -> tuple[TensorSpec, ...]:
    """What a layer leaves for later calls."""
    return tuple(after for _, after in memory_specs(shape, layer))


def memory_specs(shape: GraphShape, layer: int) -> Iterator[tuple[TensorSpec, TensorSpec]]:
    """What a layer reads of earlier calls, each with what it leaves for later ones."""
    sizes, dims = shape.recurrent, ("B", shape.num_kv_heads, "C", shape.head_dim)
    names = tuple(zip(past_names(layer), present_names(layer), strict=True))
    before: tuple[tuple[Dim, ...], ...] = (dims, dims)
    after = before
    if sizes is not None and layer in sizes.layers:
        names = conv_names(layer), state_names(layer), delta_names(layer)
        conv, state, row = sizes.conv_width, ("B", *sizes.state_dims), sizes.row_width
        before = ("B", sizes.conv_kernel - 1, conv), state, ("B", "P", row)
        after = ("B", "S", conv), state, ("B", "S", row)
    for (read, left), old, new in zip(names, before, after, strict=True):
        yield TensorSpec(read, COMPUTE, old), TensorSpec(left, COMPUTE, new)


MAX_BLOCK_NODES = 128  # of a block draft's tree that a pass verifies


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine is built for, in tokens; the flags of `edgespec build` by their own names.

    With `smaller_kv_cache_capacities`, in ascending order, there is an engine for each of them
    beside that of the largest capacity. An image encoder has the last three: `max_image_tokens` is
    for all images of a request together.
    """

    max_batch_size: int = 1
    max_input_len: int = 1024
    max_kv_cache_capacity: int = 4096
    max_verify_tree_size: int = 64  # holds the default trees of TensorRT-LLM: 63 nodes and the root
    max_draft_tree_size: int = 60
    smaller_kv_cache_capacities: tuple[int, ...] = ()
    min_image_tokens: int = 4
    max_image_tokens: int = 1024
    max_image_tokens_per_image: int = 512

    @property
    def capacities(self) -> tuple[int, ...]:
        """The capacities of all engines, the largest last."""
        return (*self.smaller_kv_cache_capacities, self.max_kv_cache_capacity)

    def at(self, capacity: int) -> Limits:
        """Those of the engine of one capacity."""
        return replace(
            self,
            max_kv_cache_capacity=capacity,
            max_input_len=min(self.max_input_len, capacity),
            smaller_kv_cache_capacities=(),
        )


def tree_pool_size(top_k: int, steps: int) -> int:
    """Nodes that can exist in a dynamic tree, the root included: 1 + K + (S-1) * K**2."""
    return 1 + top_k + (steps - 1) * top_k**2
