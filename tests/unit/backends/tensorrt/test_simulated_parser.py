"""What the simulated parser and builder refuse: graphs that break a rule, each of which NVIDIA's
TensorRT-RTX refuses too, or a document does."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from edgespec.backends.tensorrt.rules import RULES, Level, Rtx
from edgespec.backends.tensorrt.versions import RTX, TENSORRT
from tests.tensorrt_simulator import building
from tests.tensorrt_simulator.library import Simulator
from tests.unit.backends.tensorrt.rule_graphs import PAIRS, Pair


class Log(building.ILogger):
    def log(self, severity: building.Severity, msg: str) -> None:
        """Nobody reads it here."""


@pytest.mark.parametrize("pair", PAIRS, ids=[f"{pair.rule}-{i}" for i, pair in enumerate(PAIRS)])
def test_it_refuses_what_tensorrt_rtx_refuses_and_what_documents_refuse(
    tmp_path: Path, pair: Pair
) -> None:
    """In the step in which the real one does (`tests/tensorrt/test_parser_rules.py`), or before."""
    rule = RULES[pair.rule]
    expected = "parse" if rule.level is Level.REFUSED and rule.rtx is not Rtx.BUILDER else ""
    expected = expected or pair.rejects
    if {node.op_type for node in pair.model(broken=True).graph.node} & {*building.NEVER}:
        expected = "parse"
    assert refusing_step(tmp_path, pair, broken=True) == expected
    kept = refusing_step(tmp_path, pair, broken=False)
    never = {node.op_type for node in pair.model(broken=False).graph.node} & {*building.NEVER}
    assert kept == ("parse" if never else "")


def refusing_step(tmp_path: Path, pair: Pair, *, broken: bool) -> str:
    """What refuses a graph: parse, build or nothing."""
    version = pair.version.removeprefix("rtx-")
    trt = Simulator(version, TENSORRT if version == pair.version else RTX)
    onnx.save(pair.model(broken=broken), tmp_path / "model.onnx")
    builder = trt.Builder(Log())
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    assert network is not None
    if not trt.OnnxParser(network, builder.logger).parse_from_file(str(tmp_path / "model.onnx")):
        return "parse"
    config, made = builder.create_builder_config(), builder.create_optimization_profile()
    for tensor in network.inputs:
        sizes = [tuple(n if dim == -1 else dim for dim in tensor.shape) for n in (1, 8, 64)]
        made.set_shape(tensor.name, *sizes)
    config.add_optimization_profile(made)
    return "" if builder.build_serialized_network(network, config) is not None else "build"
