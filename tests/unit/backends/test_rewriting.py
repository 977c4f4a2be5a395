"""Constants that rewrites put into a graph."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgespec.backends.rewriting import Constants


def test_a_number_and_a_vector_of_it_are_two_constants() -> None:
    constant = Constants(ir.Graph([], [], nodes=[], name="g"))
    made = [constant.number(1, np.int64), constant.int64(1), constant.number(1.0)]
    assert [value.const_value.shape.numpy() for value in made] == [(), (1,), ()]
    assert [value.dtype for value in made] == [
        *2 * [ir.DataType.INT64],
        ir.DataType.FLOAT,
    ]
    assert constant.int64(1) is made[1]
