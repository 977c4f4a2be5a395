"""Every lowered graph keeps the rules of the releases that its dialect is for, and every canonical
one breaks some."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import onnx
import onnx_ir as ir
import pytest

from edgespec.backends.tensorrt.linter import LintReport, lint
from edgespec.backends.tensorrt.rules import Level
from edgespec.backends.tensorrt.target import Compute, Dialect
from edgespec.backends.tensorrt.versions import RELEASES, Capabilities
from tests.parity.tensorrt_graphs import KINDS, ROWS, canonical
from tests.quantized_products import WEIGHTS, Product

# The first and the last of each set of rules
NAMES = ("10.13", "10.14", "10.15", "10.16", "11.0", "11.4", "rtx-1.4", "rtx-1.7")
# Inputs are what they are: the contract says their types
KNOWN_WARNINGS = {"int64-io", "bool-io"}


PER_COMMIT = {*product(KINDS, ["float16"]), ("eagle3", "bfloat16"), ("qwen3_5", "float32")}


def linted(model: ir.Model, directory: Path, *versions: Capabilities) -> Iterator[LintReport]:
    proto = ir.to_proto(model)
    return (lint(proto, version, directory) for version in versions)


def unexpected(report: LintReport, *known: str) -> list[str]:
    return [
        f"{f.rule}: {f.node}: {f.what}"
        for f in report.findings
        if f.rule not in {*KNOWN_WARNINGS, *known}
    ]


def releases(*dialects: Dialect) -> list[Capabilities]:
    return [RELEASES[name] for name in NAMES if RELEASES[name].dialect in dialects]


def test_the_releases_have_all_sets_of_rules() -> None:
    assert set(NAMES) <= RELEASES.keys()
    assert {RELEASES[name].dialect for name in NAMES} == set(Dialect)


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        pytest.param(*row, marks=() if row in PER_COMMIT else pytest.mark.deep)
        for row in product(ROWS, get_args(Compute))
    ],
)
def test_a_lowered_graph_keeps_every_rule(name: str, compute: Compute) -> None:
    """But that float32 attention has no fused kernel."""
    row = canonical(name)
    slow = ("attention-float32",) if compute == "float32" else ()
    for dialect in Dialect:
        model = row.lowered(dialect, compute)
        assert any(True for _ in model.graph)
        for report in linted(model, row.onnx_dir, *releases(dialect)):
            assert unexpected(report, *slow) == [], (dialect, report)


@pytest.mark.parametrize("name", KINDS)
def test_the_portable_dialect_runs_on_newer_releases_too(name: str) -> None:
    row = canonical(name)
    model = row.lowered(Dialect.PORTABLE, "float16")
    for report in linted(model, row.onnx_dir, *releases(Dialect.NATIVE)):
        assert unexpected(report) == []


@pytest.mark.parametrize("name", ["qwen2", "eagle3", "dflash", "qwen3_5"])
def test_a_canonical_graph_breaks_rules(name: str) -> None:
    """What the linter finds in it is why it is lowered."""
    row = canonical(name)
    for release, rules in (("10.13", {"operator"}), ("11.4", {"cache-length"})):
        (report,) = linted(row.model(), row.onnx_dir, RELEASES[release])
        found = {f.rule for f in report.findings if f.level is Level.REFUSED}
        assert rules <= found, release


@pytest.mark.parametrize("compute", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_lowered_quantized_product_keeps_every_rule(
    name: str, compute: Compute, tmp_path: Path
) -> None:
    for dialect in Dialect:
        model = Product.of(WEIGHTS[name], tmp_path).lower(compute, dialect).model
        for report in linted(model, tmp_path, *releases(dialect)):
            assert report.findings == ()


def test_a_product_of_mxfp8_as_it_is_exported_breaks_a_rule(tmp_path: Path) -> None:
    model = Product.of(WEIGHTS["mxfp8"], tmp_path).model
    (report,) = linted(model, tmp_path, RELEASES["11.4"])
    assert {f.rule for f in report.findings if f.level is Level.REFUSED} == {"initializer-type"}


def test_what_a_pass_leaves_out_is_found() -> None:
    """A lowered graph in which one rule is broken again is refused by that rule alone."""
    row = canonical("eagle3")
    model = ir.to_proto(row.lowered(Dialect.NATIVE, "float16"))
    for node in model.graph.node:
        if node.op_type == "Attention":
            node.attribute.append(onnx.helper.make_attribute("softcap", 30.0))
    report = lint(model, RELEASES["11.4"], row.onnx_dir)
    assert {f.rule for f in report.findings} - KNOWN_WARNINGS == {"attention-attribute"}
