"""Inputs that come in float32 are rounded on the device as numpy rounds them: to the nearest, ties
to even."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.states import DTYPES, KINDS
from edgespec.backends.cuda.workspace import Workspace
from tests.tensorrt_simulator.cpu_kernels import made_device


@pytest.mark.parametrize("kernels_of", ["simulated", "source"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_are_rounded_as_numpy_rounds_them(kernels_of: str, dtype: str) -> None:
    workspace = Workspace(made_device(kernels_of))
    workspace.join()
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20000, np.uint32)
    bits[:5000] &= np.uint32(0xFFFF8000)  # ties of bfloat16
    bits[5000:10000] &= np.uint32(0xFFFFF000)  # ties of float16
    array = np.concatenate([bits.view(np.float32), np.float32([0, -0.0, np.inf, -np.inf, np.nan])])
    array[10000:15000] = rng.standard_normal(5000)
    source, target = workspace.alloc(array.nbytes), workspace.alloc(array.nbytes // 2)
    workspace.put(source, array)
    ends = {"source": source, "target": target, "count": len(array), "kind": KINDS[dtype]}
    workspace.launch("convert", (3, 1, 1), kernels.THREADS, **ends)
    found = workspace.down(target, array.nbytes // 2).view(DTYPES[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = array.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    number = ~np.isnan(array)
    assert (found[number].view(np.uint16) == expected[number].view(np.uint16)).all()
    assert np.isnan(found[~number].astype(np.float32)).all()
    workspace.leave()
