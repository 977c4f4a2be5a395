"""What rewrites of a graph share."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgespec.backends.rewriting import Constants


def test_a_number_and_a_vector_of_one_are_two_constants() -> None:
    constant = Constants(ir.Graph([], [], nodes=[], name="graph"))
    scalar, vector = constant.number(1, np.int64), constant.int64(1)
    assert [list(value.shape or ()) for value in (scalar, vector)] == [[], [1]]
    assert constant.number(1, np.int64) is scalar
    assert constant.int64(1) is vector
