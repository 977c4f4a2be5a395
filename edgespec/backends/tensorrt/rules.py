"""The rules of TensorRT's ONNX parser and of its builder: a table, one row a rule.

Each row says what a graph keeps, in which releases the rule holds, where the fact comes from, and
what NVIDIA's own TensorRT-RTX says to a graph that breaks it. `linter` looks; `checks` has one
function a rule. Knows no ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from edgespec.backends.tensorrt.parser_operators import FIRST, Line
from edgespec.backends.tensorrt.versions import Capabilities

MAX_TOPK = 3840
MAX_DIMS = 8
OPSETS = (9, 24)
MAX_MODEL_BYTES = 2**31  # of model.onnx itself: a protobuf holds less
LAST: Line = (99, 0)


class Level(StrEnum):
    """What a finding means: a graph that is refused, or one that runs and costs more."""

    REFUSED = "refused"
    WARNING = "warning"


class Rtx(StrEnum):
    """Who in TensorRT-RTX refuses a graph that breaks a rule: parser, builder, or nobody. A graph
    of 2 GiB was not tried."""

    PARSER = "parser"
    BUILDER = "builder"
    NOBODY = "nobody"
    NOT_TRIED = "not tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserRule:
    """What a graph keeps. `since` and `until` are the first and the last release line in which the
    rule holds; `rtx`: who refuses a graph that breaks it in TensorRT-RTX (where nobody does, the
    rule stands on documents alone)."""

    text: str
    remedy: str
    source: str
    rtx: Rtx = Rtx.PARSER
    level: Level = Level.REFUSED
    since: Line = FIRST
    until: Line = LAST

    def holds_in(self, version: Capabilities) -> bool:
        """Whether the rule is one of this release."""
        return self.since <= version.line <= self.until


OPERATORS_MD = "onnx-tensorrt, docs/operators.md"
CHECKERS = "onnx-tensorrt, onnxOpCheckers.cpp"
IMPORTERS = "onnx-tensorrt, onnxOpImporters.cpp"
HELPERS = "onnx-tensorrt, AttentionHelpers.cpp"
QUANTIZED = "TensorRT documentation, quantized types"
KV_CACHE = "TensorRT documentation, KV cache"
TRIED = "tried on TensorRT-RTX"
EDGE_LLM = "TensorRT Edge-LLM, its exporter"
FORMAT = "the ONNX format"

_LOWER = "Lower the graph again with this version of edgespec."
_EXPORT = "Export the checkpoint again."
_FIXED = "Give the graph fixed sizes there: lower it again with a capacity."

RULES: Mapping[str, ParserRule] = MappingProxyType(
    {
        # ---- the file
        "model-size": ParserRule(
            text="model.onnx is smaller than 2 GiB; weights are external data",
            remedy=_EXPORT,
            source=FORMAT,
            rtx=Rtx.NOT_TRIED,
        ),
        "external-data": ParserRule(
            text="external data lies beside model.onnx, and data has the size of its tensor",
            remedy="Copy the whole directory, or export the checkpoint again.",
            source=FORMAT,
        ),
        "initializer-type": ParserRule(
            text="initializers have a type that the parser reads; not E8M0, E5M2 or UINT4",
            remedy="Store scales of mxfp8 as UINT8 and read them with TRT_MXFP8DequantizeLinear.",
            source=TRIED,
        ),
        "four-bit-count": ParserRule(
            text="tensors of four bits have an even number of elements",
            remedy="Keep this layer in a wider format.",
            source=IMPORTERS,
            rtx=Rtx.NOBODY,
        ),
        "rank": ParserRule(
            text=f"tensors have at most {MAX_DIMS} dimensions",
            remedy=_LOWER,
            source="TensorRT, Dims.MAX_DIMS",
        ),
        "int64-io": ParserRule(
            text="INT64 inputs and outputs take 8 bytes an element; the parser says so",
            remedy="Bind buffers of 8 bytes an element.",
            source=TRIED,
            rtx=Rtx.NOBODY,
            level=Level.WARNING,
        ),
        "bool-io": ParserRule(
            text="BOOL inputs and outputs take one byte an element",
            remedy="Bind buffers of one byte an element.",
            source=TRIED,
            rtx=Rtx.NOBODY,
            level=Level.WARNING,
        ),
        # ---- operators
        "opset": ParserRule(
            text=f"the opset of the default domain is {OPSETS[0]} to {OPSETS[1]}",
            remedy="Export the checkpoint with this version of edgespec.",
            source=OPERATORS_MD,
            rtx=Rtx.NOBODY,
        ),
        "domain": ParserRule(
            text="operators are of the default domain or TensorRT's own",
            remedy="Give the canonical or the lowered graph, not one for another runtime.",
            source=CHECKERS,
        ),
        "node-form": ParserRule(
            text="nodes have the inputs, the outputs and the types of attributes of their operator",
            remedy=_EXPORT,
            source="the operators of ONNX",
        ),
        "operator": ParserRule(
            text="the release imports the operator",
            remedy="Lower the graph for this release, or use a newer TensorRT.",
            source=OPERATORS_MD,
        ),
        "operator-type": ParserRule(
            text="the operator takes the type of its data",
            remedy=_LOWER,
            source=OPERATORS_MD,
        ),
        "mixed-types": ParserRule(
            text="inputs that share a type have the same one: the network is strongly typed",
            remedy="Cast one of them.",
            source="TensorRT documentation, strongly typed networks",
        ),
        "cast-type": ParserRule(
            text="Cast makes no quantized type; QuantizeLinear does",
            remedy="Use QuantizeLinear.",
            source=IMPORTERS,
            rtx=Rtx.BUILDER,
        ),
        "attribute": ParserRule(
            text="nodes have the attributes of their operator and no others",
            remedy="Take the attribute away, or keep it in the node's metadata.",
            source=EDGE_LLM,
            rtx=Rtx.NOBODY,
        ),
        "output-count": ParserRule(
            text="normalizations and MaxPool have one output",
            remedy=_LOWER,
            source=CHECKERS,
        ),
        "constant-input": ParserRule(
            text="axes and depths are known when the engine is built",
            remedy="Make the input an initializer.",
            source=OPERATORS_MD,
        ),
        "axis": ParserRule(
            text="axes are those of the data",
            remedy=_LOWER,
            source=IMPORTERS,
        ),
        "eyelike-static": ParserRule(
            text="EyeLike has an input of static shape",
            remedy="Compare two Ranges instead.",
            source=OPERATORS_MD,
        ),
        "layer-name": ParserRule(
            text="a Quantize- or DequantizeLinear has the name of no node or constant before it",
            remedy="Give the node another name, or none.",
            source=TRIED,
        ),
        "topk-count": ParserRule(
            text=f"K of TopK is smaller than {MAX_TOPK}",
            remedy="Ask for fewer elements, or cut the input in pieces.",
            source=OPERATORS_MD,
            rtx=Rtx.NOBODY,
        ),
        "topk-sorted": ParserRule(
            text="TopK is sorted",
            remedy="Leave the attribute away.",
            source=OPERATORS_MD,
            rtx=Rtx.NOBODY,
        ),
        "scatter-reduction": ParserRule(
            text="ScatterND has no reduction",
            remedy="Add before the scatter.",
            source=OPERATORS_MD,
        ),
        # ---- control flow
        "control-flow": ParserRule(
            text="If, Loop and Scan may keep an engine out of CUDA graphs",
            remedy="Lower the graph: edgespec makes Where of If and unrolls loops.",
            source=TRIED,
            rtx=Rtx.NOBODY,
            level=Level.WARNING,
        ),
        "loop-condition": ParserRule(
            text="Loop has a condition, a constant one at least",
            remedy="Give the Loop a constant condition, or unroll it.",
            source=TRIED,
        ),
        "loop-shape": ParserRule(
            text="what a Loop carries keeps its shape",
            remedy="Unroll the loop.",
            source=OPERATORS_MD,
            rtx=Rtx.BUILDER,
        ),
        "if-rank": ParserRule(
            text="the branches of If have outputs of the same rank",
            remedy="Use Where over both.",
            source=OPERATORS_MD,
            rtx=Rtx.BUILDER,
        ),
        "attention-in-if": ParserRule(
            text="no Attention stands in a branch of If",
            remedy="Compute the Attention before the If.",
            source="NVIDIA/TensorRT, issues 4739 and 4757",
            rtx=Rtx.BUILDER,
            since=(10, 14),
        ),
        # ---- attention
        "attention-inputs": ParserRule(
            text="Attention reads query, key, value and mask: no past, no lengths",
            remedy="Write the cache with TensorScatter and say the lengths in the mask.",
            source=OPERATORS_MD,
            since=(10, 14),
        ),
        "attention-outputs": ParserRule(
            text="Attention has one output",
            remedy="Take the other outputs away.",
            source="NVIDIA/TensorRT, issue 4738",
            since=(10, 14),
        ),
        "attention-attribute": ParserRule(
            text="Attention has no softcap and no precision of its softmax",
            remedy="A model with softcap needs the portable dialect.",
            source=CHECKERS,
            since=(10, 14),
        ),
        "attention-rank": ParserRule(
            text="queries, keys, values and masks of Attention have four dimensions",
            remedy="Split the heads before the Attention.",
            source=OPERATORS_MD,
            rtx=Rtx.NOBODY,
            since=(10, 14),
        ),
        "attention-heads": ParserRule(
            text="the heads of the queries are a multiple of those of keys and values",
            remedy=_LOWER,
            source=TRIED,
            since=(10, 14),
        ),
        "attention-lengths": ParserRule(
            text="keys and values have the same sizes",
            remedy=_LOWER,
            source=TRIED,
            since=(10, 14),
        ),
        "attention-causal": ParserRule(
            text="Attention has a mask or is causal, not both",
            remedy="Say causality in the mask.",
            source="TensorRT, INetworkDefinition.add_attention",
            since=(10, 14),
        ),
        "attention-mask-type": ParserRule(
            text="an additive mask has the type of the queries",
            remedy="Cast the mask once, for all layers.",
            source=TRIED,
            rtx=Rtx.BUILDER,
            since=(10, 14),
        ),
        "attention-bool-mask": ParserRule(
            text="the mask of Attention is additive: builders from 11.0 on fail at a bool one",
            remedy="Make one additive mask of it by Where, for all layers.",
            source=TRIED,
            rtx=Rtx.BUILDER,
            since=(11, 0),
        ),
        "attention-scale": ParserRule(
            text="the scale of Attention is 1.0: queries and keys are multiplied by its root, the "
            "whole cache with them",
            remedy="Scale the queries before the Attention.",
            source=HELPERS,
            rtx=Rtx.NOBODY,
            level=Level.WARNING,
            since=(10, 14),
        ),
        "attention-float32": ParserRule(
            text="Attention in float32 has no fused kernel: it is built decomposed",
            remedy="Lower to float16 or bfloat16, or allow the builder to decompose it.",
            source=TRIED,
            rtx=Rtx.BUILDER,
            level=Level.WARNING,
            since=(10, 14),
        ),
        # ---- the cache
        "cache-rank": ParserRule(
            text="caches and their updates have four dimensions",
            remedy=_LOWER,
            source=OPERATORS_MD,
            since=(10, 15),
        ),
        "cache-axis": ParserRule(
            text="TensorScatter writes along axis -2 and in linear mode",
            remedy=_LOWER,
            source=OPERATORS_MD,
            since=(10, 15),
        ),
        "cache-length": ParserRule(
            text="the length of a cache is static",
            remedy=_FIXED,
            source=KV_CACHE,
            since=(10, 15),
        ),
        "cache-type": ParserRule(
            text="a cache that is written in place is float32, float16 or bfloat16; not FP8",
            remedy="Keep the cache in the compute type, or use the portable dialect.",
            source=KV_CACHE,
            since=(10, 15),
        ),
        "cache-input": ParserRule(
            text="the cache that TensorScatter writes is an input of the graph",
            remedy=_LOWER,
            source=KV_CACHE,
            rtx=Rtx.BUILDER,
            since=(10, 15),
        ),
        "cache-output": ParserRule(
            text="what TensorScatter makes is an output of the graph",
            remedy=_LOWER,
            source=KV_CACHE,
            rtx=Rtx.BUILDER,
            since=(10, 15),
        ),
        "rotary-rows": ParserRule(
            text="cos and sin have a row for each position that is rotated",
            remedy=_LOWER,
            source=TRIED,
            since=(10, 15),
        ),
        "rotary-position": ParserRule(
            text="the positions of RotaryEmbedding are INT64",
            remedy="Cast them, or give the rows of cos and sin.",
            source=OPERATORS_MD,
            rtx=Rtx.NOBODY,
            since=(10, 15),
        ),
        # ---- quantization
        "zero-point": ParserRule(
            text="zero points are zero: only symmetric quantization is taken",
            remedy="Quantize symmetrically: edgespec quantize does.",
            source=OPERATORS_MD,
        ),
        "quantized-type": ParserRule(
            text="quantized values are INT8, INT4, FP8 (E4M3) or FP4",
            remedy="Quantize with a scheme of edgespec.",
            source=OPERATORS_MD,
        ),
        "scale-positive": ParserRule(
            text="scales are positive",
            remedy="Quantize the checkpoint again.",
            source=IMPORTERS,
        ),
        "scale-type": ParserRule(
            text="a QuantizeLinear's scale has the type of its input",
            remedy="Cast the scale.",
            source="TensorRT, IQuantizeLayer",
            rtx=Rtx.NOBODY,
        ),
        "scale-shape": ParserRule(
            text="a scale is one number, one for each channel of the axis, or one for each block",
            remedy=_EXPORT,
            source=IMPORTERS,
        ),
        "block-size": ParserRule(
            text="the block size divides the axis and is that of the scales",
            remedy=_EXPORT,
            source=FORMAT,
            rtx=Rtx.NOBODY,
        ),
        "block-axis": ParserRule(
            text="blocks lie along the last axis or the one before",
            remedy="Flatten the axes behind it.",
            source=QUANTIZED,
        ),
        "activation-scale": ParserRule(
            text="activations are quantized by one scale; scales for channels are for weights",
            remedy="Quantize activations by one scale.",
            source=QUANTIZED,
            rtx=Rtx.NOBODY,
        ),
        "shared-scale": ParserRule(
            text="no scalar scale is shared by several DequantizeLinear: some builders crash on it",
            remedy="Give each its own copy.",
            source=EDGE_LLM,
            rtx=Rtx.NOBODY,
        ),
        "dynamic-quantize": ParserRule(
            text="dynamic quantization has blocks of 16 (FP4, by a constant scale) or 32 (MXFP8)",
            remedy=_LOWER,
            source=IMPORTERS,
        ),
        # ---- the whole
        "types-and-shapes": ParserRule(
            text="types and shapes agree with each other and with the operators, by ONNX",
            remedy=_LOWER,
            source="the operators of ONNX",
        ),
    }
)


def rules_of(version: Capabilities) -> dict[str, ParserRule]:
    """The rules that hold in a release, by id."""
    return {name: rule for name, rule in RULES.items() if rule.holds_in(version)}
