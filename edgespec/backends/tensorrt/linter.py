"""Looks whether a graph keeps the rules of TensorRT's parser and builder, without TensorRT.

`RULES` says what holds in which release; here each rule has the function that looks. Knows
files and reports. A graph without findings keeps the rules that are known: only NVIDIA's parser
says that it takes a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from onnx import ModelProto

from edgespec.backends.canonical_graph import read_model
from edgespec.backends.tensorrt.checks import (
    attention,
    control_flow,
    data,
    operators,
    quantization,
)
from edgespec.backends.tensorrt.checks.graph import View
from edgespec.backends.tensorrt.checks.operators import Problems
from edgespec.backends.tensorrt.parser_version import ParserVersion
from edgespec.backends.tensorrt.rules import Level, rules_of

FOLLOWS = "types-and-shapes"  # mostly follows from what other rules find: said where they find none

CHECKS: Mapping[str, Callable[[View], Problems]] = MappingProxyType(
    {
        "model-size": data.model_size,
        "external-data": data.external_data,
        "initializer-type": data.initializer_type,
        "four-bit-count": data.four_bit_count,
        "rank": data.rank,
        "int64-io": data.int64_io,
        "bool-io": data.bool_io,
        "opset": operators.opset,
        "domain": operators.domain,
        "node-form": operators.node_form,
        "operator": operators.operator,
        "operator-type": operators.operator_type,
        "mixed-types": operators.mixed_types,
        "types-and-shapes": operators.types_and_shapes,
        "cast-type": operators.cast_type,
        "attribute": operators.attributes,
        "output-count": operators.output_count,
        "constant-input": operators.constant_input,
        "axis": operators.axis,
        "eyelike-static": operators.eyelike_static,
        "layer-name": operators.layer_name,
        "topk-count": operators.topk_count,
        "topk-sorted": operators.topk_sorted,
        "scatter-reduction": operators.scatter_reduction,
        "control-flow": control_flow.control_flow,
        "loop-condition": control_flow.loop_condition,
        "loop-shape": control_flow.loop_shape,
        "if-rank": control_flow.if_rank,
        "attention-in-if": control_flow.attention_in_if,
        "attention-inputs": attention.attention_inputs,
        "attention-outputs": attention.attention_outputs,
        "attention-attribute": attention.attention_attribute,
        "attention-rank": attention.attention_rank,
        "attention-heads": attention.attention_heads,
        "attention-lengths": attention.attention_lengths,
        "attention-causal": attention.attention_causal,
        "attention-mask-type": attention.attention_mask_type,
        "attention-bool-mask": attention.attention_bool_mask,
        "attention-scale": attention.attention_scale,
        "attention-float32": attention.attention_float32,
        "cache-rank": attention.cache_rank,
        "cache-axis": attention.cache_axis,
        "cache-length": attention.cache_length,
        "cache-type": attention.cache_type,
        "cache-input": attention.cache_input,
        "cache-output": attention.cache_output,
        "rotary-rows": attention.rotary_rows,
        "rotary-position": attention.rotary_position,
        "zero-point": quantization.zero_point,
        "quantized-type": quantization.quantized_type,
        "scale-positive": quantization.scale_positive,
        "scale-type": quantization.scale_type,
        "scale-shape": quantization.scale_shape,
        "block-size": quantization.block_size,
        "block-axis": quantization.block_axis,
        "activation-scale": quantization.activation_scale,
        "shared-scale": quantization.shared_scale,
        "dynamic-quantize": quantization.dynamic_quantize,
    }
)


@dataclass(frozen=True, slots=True)
class LintFinding:
    """A place at which a graph breaks a rule. `node` names a node, a value or a weight."""

    level: Level
    rule: str
    node: str
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class LintReport:
    """What was found in a graph, for one release."""

    version: ParserVersion
    operators: Mapping[str, int]  # how many nodes of each type
    rules: int  # how many were looked at
    findings: tuple[LintFinding, ...]

    def count(self, level: Level) -> int:
        """How many findings have this level."""
        return sum(finding.level is level for finding in self.findings)


def lint_file(path: Path, version: ParserVersion) -> LintReport:
    """Look at a model.onnx and at its weights beside it. BundleError where it is no ONNX model."""
    return lint(read_model(path), version, path.parent)


def lint(model: ModelProto, version: ParserVersion, directory: Path | None = None) -> LintReport:
    """Look at a model, whose external data lies in `directory`; None: that is not looked at."""
    view = View(model, version, directory)
    findings: list[LintFinding] = []
    rules = rules_of(version)
    for name, rule in rules.items():
        if name == FOLLOWS and any(finding.level is Level.REFUSED for finding in findings):
            continue
        for node, said in CHECKS[name](view):
            findings.append(
                LintFinding(rule.level, name, node, f"{said}; {rule.text}", rule.remedy)
            )
    counts = Counter(node.op_type for _, node in view.nodes())
    return LintReport(version, dict(sorted(counts.items())), len(rules), tuple(findings))
