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
from edgespec.backends.tensorrt.rules import RULES, Level, rules_of
from edgespec.backends.tensorrt.versions import Capabilities

FOLLOWS = "types-and-shapes"  # mostly follows from what other rules find: said where they find none

MODULES = (data, operators, control_flow, attention, quantization)
FUNCTIONS = {name: item for module in MODULES for name, item in vars(module).items()}
# A rule's function has the rule's name
CHECKS: Mapping[str, Callable[[View], Problems]] = {
    name: FUNCTIONS[name.replace("-", "_")] for name in RULES
}


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

    version: Capabilities
    operators: Mapping[str, int]  # how many nodes of each type
    rules: int  # how many were looked at
    findings: tuple[LintFinding, ...]

    def count(self, level: Level) -> int:
        """How many findings have this level."""
        return sum(finding.level is level for finding in self.findings)


def lint_file(path: Path, version: Capabilities) -> LintReport:
    """Look at a model.onnx and at its weights beside it. BundleError where it is no ONNX model."""
    return lint(read_model(path), version, path.parent)


def lint(model: ModelProto, version: Capabilities, directory: Path | None = None) -> LintReport:
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
