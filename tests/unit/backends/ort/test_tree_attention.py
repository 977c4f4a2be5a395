"""Which norms of heads the kernel of attention computes."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from edgespec.backends.ort.tree_attention import head_norms


@pytest.mark.parametrize(("epsilons", "num_norms"), [((1e-6, 1e-6), 2), ((1e-6, 1e-5), 0)])
def test_it_computes_norms_of_one_epsilon(epsilons: tuple[float, float], num_norms: int) -> None:
    norms = [ir.node("RMSNormalization", [ir.Value()] * 2, {"epsilon": e}) for e in epsilons]
    transposes = [ir.node("Transpose", norm.outputs) for norm in norms]
    assert len(head_norms(*transposes)) == num_norms
