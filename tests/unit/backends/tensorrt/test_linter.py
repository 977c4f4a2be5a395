"""Each rule finds the graph that breaks it, and nothing in the one that keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from onnx import ModelProto

from edgespec.backends.tensorrt.linter import lint, lint_file
from edgespec.backends.tensorrt.parser_operators import FIRST, OPERATORS
from edgespec.backends.tensorrt.rules import RULES, Level, Rtx
from edgespec.backends.tensorrt.target import Dialect
from edgespec.backends.tensorrt.versions import (
    RELEASES,
    ROWS,
    RTX,
    RTX_LINES,
    Capabilities,
    release_of,
)
from edgespec.errors import BundleError, OptionError
from tests.unit.backends.tensorrt.rule_graphs import PAIRS, Pair, unary, with_external_weight

NAMES = [f"{pair.rule}-{i}" for i, pair in enumerate(PAIRS)]
STEPS = {"parse": Rtx.PARSER, "build": Rtx.BUILDER, "": Rtx.NOBODY}
ROOT = Path(__file__).resolve().parents[4]
NEWEST = RELEASES["11.4"]


def refused(model: ModelProto, version: Capabilities) -> set[str]:
    findings = lint(model, version).findings
    return {finding.rule for finding in findings if finding.level is Level.REFUSED}


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_a_rule_finds_what_breaks_it_and_nothing_else(pair: Pair) -> None:
    version = RELEASES[pair.version]
    broken = lint(pair.model(broken=True), version)
    assert pair.rule in {finding.rule for finding in broken.findings}
    others = {finding.rule for finding in broken.findings if finding.level is Level.REFUSED}
    assert others <= {pair.rule}
    kept = lint(pair.model(broken=False), version)
    assert pair.rule not in {finding.rule for finding in kept.findings}
    assert kept.count(Level.REFUSED) == 0


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_a_rule_is_silent_in_releases_in_which_it_does_not_hold(pair: Pair) -> None:
    rule = RULES[pair.rule]
    for name in RELEASES:
        version = RELEASES[name]
        found = pair.rule in {f.rule for f in lint(pair.model(broken=True), version).findings}
        if not rule.holds_in(version):
            assert not found, name


def test_every_rule_has_a_graph_and_says_who_refuses_it() -> None:
    order = [Rtx.PARSER, Rtx.BUILDER, Rtx.NOBODY]
    seen: dict[str, Rtx] = {}
    for pair in PAIRS:
        seen[pair.rule] = min(seen.get(pair.rule, Rtx.NOBODY), STEPS[pair.rejects], key=order.index)
    of_files = {"external-data", "model-size"}  # which have tests of their own, below
    assert RULES.keys() - seen.keys() == of_files
    assert {name: RULES[name].rtx for name in seen} == seen


def test_the_page_of_the_rules_is_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import rules_page  # type: ignore[import-not-found]

    text = (ROOT / "docs" / "tensorrt.md").read_text(encoding="utf-8")
    assert text == rules_page.render()
    assert sum(f"| `{name}`" in text for name in RULES) == len(RULES)


def test_a_finding_names_the_node_the_rule_and_the_remedy() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]>'
        " g (float[N,N] x) => (float[N,N] y) { [identity] y = EyeLike(x) }"
    )
    (finding,) = lint(model, NEWEST).findings
    assert finding.node == "identity (EyeLike)"
    assert finding.rule == "eyelike-static"
    assert finding.what == "x has the shape [N, N]; EyeLike has an input of static shape"
    assert finding.remedy == "Compare two Ranges instead."


def test_operators_of_a_newer_release_are_refused_in_an_older_one() -> None:
    pair = next(pair for pair in PAIRS if pair.rule == "cache-length")
    kept = pair.model(broken=False)
    assert refused(kept, RELEASES["10.14"]) == {"operator"}
    assert refused(kept, RELEASES["10.15"]) == set()
    (finding, *_) = [f for f in lint(kept, RELEASES["10.13"]).findings if f.rule == "operator"]
    assert finding.what.startswith("TensorScatter is imported from 10.15 on")


def test_a_shared_bool_mask_is_refused_from_the_11_line_on() -> None:
    model = next(pair for pair in PAIRS if pair.rule == "attention-bool-mask").model(broken=True)
    assert refused(model, RELEASES["rtx-1.4"]) == set()
    for name in ("rtx-1.5", "rtx-1.7", "11.0", "11.4"):
        assert refused(model, RELEASES[name]) == {"attention-bool-mask"}


def test_rules_hold_in_subgraphs_too() -> None:
    text = (
        "g (float[N,8] x, bool c) => (float[M,K] y) { y = If (c) <then_branch = t () =>"
        " (float[N,N] a) { s = Shape(x) z = ConstantOfShape(s) a = EyeLike(z) },"
        " else_branch = e () => (float[N,8] b) { b = Identity(x) }> }"
    )
    assert refused(Pair("", text, text).model(broken=True), NEWEST) == {"eyelike-static"}


def test_constants_may_be_computed_of_constants() -> None:
    computed = (
        "g (float[2,8] x) => (float[R,S] y) <int64[1] a = {0}, int64[1] b = {1}>"
        " { axes = Add(a, b) y = ReduceSum(x, axes) }"
    )
    assert refused(Pair("", computed, computed).model(broken=True), NEWEST) == set()
    of_input = computed.replace("Add(a, b)", "Shape <start = 0, end = 1> (x)").replace("2,8", "N,8")
    assert refused(Pair("", of_input, of_input).model(broken=True), NEWEST) == {"constant-input"}


def test_a_deep_graph_is_looked_at_as_a_flat_one_is() -> None:
    """Whether activations are constants is known without going back through all layers."""
    deep = 3000
    steps = " ".join(f"x{i + 1} = Neg(x{i})" for i in range(deep))
    text = (
        "g (float[2,8] x0) => (int8[2,8] y) <float[8] s = {" + ", ".join(["1.0"] * 8) + "}>"
        f" {{ {steps} y = QuantizeLinear <axis = 1, output_dtype = 3> (x{deep}, s) }}"
    )
    assert refused(Pair("", text, text).model(broken=True), NEWEST) == {"activation-scale"}


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_nodes_that_lack_something_are_findings_and_no_crash(pair: Pair) -> None:
    """Each node of each graph with fewer inputs, with an attribute of another type, and without
    outputs."""
    for i, node in enumerate(pair.model(broken=False).graph.node):
        for count in range(len(node.input)):
            model = pair.model(broken=False)
            del model.graph.node[i].input[count:]
            lint(model, NEWEST)
        for j, attribute in enumerate(node.attribute):
            model = pair.model(broken=False)
            model.graph.node[i].attribute[j].CopyFrom(
                onnx.helper.make_attribute(attribute.name, [1.5, 2.5])
            )
            lint(model, NEWEST)
        model = pair.model(broken=False)
        del model.graph.node[i].output[:]
        assert "node-form" in refused(model, NEWEST) or node.domain == "com.microsoft"


def test_types_are_followed_through_operators_of_tensorrt() -> None:
    text = (
        "g (float[N,64] z, float16[N,64] x) => (float[N,64] y)"
        " { q, s = trt.TRT_MXFP8DynamicQuantize <axis = -1, block_size = 32, output_dtype = 17> (x)"
        " d = trt.TRT_MXFP8DequantizeLinear <axis = -1, block_size = 32, output_dtype = 10> (q, s)"
        " y = Mul(z, d) }"
    )
    (finding,) = lint(Pair("", text, text).model(broken=True), NEWEST).findings
    assert (finding.rule, finding.node) == ("mixed-types", "y (Mul)")
    assert finding.what.startswith("FLOAT and FLOAT16")


def test_an_attribute_of_another_type_is_found() -> None:
    model = Pair("", unary("Neg"), unary("Neg")).model(broken=True)
    model.graph.node[0].op_type = "Cast"
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("to", "FLOAT"))
    assert refused(model, NEWEST) == {"node-form"}


def test_types_that_are_none_are_findings_and_no_crash() -> None:
    model = Pair("", unary("Neg"), unary("Neg")).model(broken=True)
    model.graph.node[0].op_type = "Cast"
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("to", 0))
    assert refused(model, NEWEST) == {"cast-type"}


def test_scales_for_channels_may_be_shared() -> None:
    pair = next(pair for pair in PAIRS if pair.rule == "shared-scale")
    shared = pair.broken.replace("float s = {1.0}", f"float[8] s = {{{', '.join(['1.0'] * 8)}}}")
    assert shared != pair.broken
    assert refused(replace(pair, broken=shared).model(broken=True), NEWEST) == set()


@pytest.mark.parametrize("length", [0, 60])
def test_weights_that_are_missing_or_too_short_are_found(tmp_path: Path, length: int) -> None:
    path = with_external_weight(tmp_path / "short", length)
    (finding,) = lint_file(path, NEWEST).findings
    assert (finding.rule, finding.node) == ("external-data", "w")
    said = "model.onnx.data is missing" if not length else "which has 60 bytes"
    assert said in finding.what


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("location", "/etc/weights", "its location is"),
        ("location", "../weights", "its location is"),
        ("location", "", "its location is"),
        ("length", "60", "60 bytes in model.onnx.data, 64 needed"),
        ("offset", "8", "it ends behind model.onnx.data"),
        ("offset", "-8", "it ends behind model.onnx.data"),
        ("offset", "x", "not a whole number"),
    ],
)
def test_places_of_weights_are_checked(tmp_path: Path, key: str, value: str, said: str) -> None:
    path = with_external_weight(tmp_path / "whole", 64)
    assert lint_file(path, NEWEST).findings == ()
    model = onnx.load(path, load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key == key:
            entry.value = value
    path.write_bytes(model.SerializeToString())
    (finding,) = lint_file(path, NEWEST).findings
    assert said in finding.what


def test_bytes_that_do_not_fill_a_tensor_are_found() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["" : 24]> ' + unary("Relu").replace("Relu(x)", "Add(x, w)")
    )
    model.graph.initializer.add(name="w", data_type=1, dims=(2, 8), raw_data=bytes(60))
    (finding,) = lint(model, NEWEST).findings
    assert finding.what.startswith("60 bytes stored, 64 needed")


def test_a_model_beyond_2_gib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from edgespec.backends.tensorrt.checks import data

    pair = PAIRS[0]
    monkeypatch.setattr(data, "MAX_MODEL_BYTES", pair.model(broken=False).ByteSize())
    assert refused(pair.model(broken=False), NEWEST) == {"model-size"}


def test_a_file_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"rubbish")
    with pytest.raises(BundleError, match="not an ONNX model"):
        lint_file(path, NEWEST)


def test_every_release_that_is_built_for_has_rules() -> None:
    assert min(row.line for row in ROWS) == FIRST
    assert {row.version for row in ROWS if row.library is RTX} == RTX_LINES.keys()


@pytest.mark.parametrize("name", RELEASES)
def test_the_rules_and_the_table_of_capabilities_agree(name: str) -> None:
    row = RELEASES[name]
    imported = {op for op, each in OPERATORS.items() if FIRST < each.since <= row.line}
    assert row.has_attention == ("Attention" in imported)
    assert (row.dialect is Dialect.NATIVE) == ("TensorScatter" in imported)


@pytest.mark.parametrize(
    ("text", "name"),
    [("10.13", "10.13"), ("10.13.3.9", "10.13"), ("rtx-1.7.1.116", "rtx-1.7")],
)
def test_a_version_as_the_library_says_it_is_its_release(text: str, name: str) -> None:
    assert release_of(text) is RELEASES[name]


@pytest.mark.parametrize(
    "text", ["9.3", "10.130", "10.13.", "10.13rc1", "rtx-2.0", "rtx-10.13.3", ""]
)
def test_what_is_no_known_release_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"10\.13, .*rtx-1\.7"):
        release_of(text)
