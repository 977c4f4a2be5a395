"""The project's own CUDA: compiled for the devices of today by NVIDIA's compiler, which needs none
of them, and run on the device that is here."""

from __future__ import annotations

import re

import numpy as np
import pytest

from edgespec.backends.cuda import kernels
from edgespec.backends.cuda.caches import KvCache
from edgespec.backends.cuda.device import nvrtc
from edgespec.backends.cuda.device.base import Device
from edgespec.backends.cuda.logits import DeviceLogits, Wanted
from edgespec.backends.cuda.workspace import Workspace
from edgespec.backends.host import HostLogits
from edgespec.errors import InternalError, MissingDependency
from tests.cuda_stand_in.built import TOO_LARGE, driver_here
from tests.tensorrt.cuda import device, down, up

__all__ = ["device"]

ORIN, RTX_50, THOR = 87, 120, 110
TYPES = {
    "move_rows": "MoveRows",
    "copy_rows": "CopyRows",
    "attention_mask": "AttentionMask",
    "not_finite": "NotFinite",
    "convert": "Convert",
    "top_parts": "TopParts",
    "top_rows": "TopRows",
}
SMALL = "NVRTC is not installed: pip install nvidia-cuda-nvrtc"


@pytest.fixture
def compiler() -> None:
    try:
        nvrtc.load()
    except MissingDependency:
        pytest.skip(SMALL)


@pytest.mark.tensorrt
@pytest.mark.parametrize("sm", [ORIN, THOR, RTX_50])
def test_kernels_compile(compiler: None, sm: int) -> None:
    image = nvrtc.compiled(kernels.source(), sm)
    assert image.startswith(b"\x7fELF")
    assert all(name.encode() in image for name in kernels.STRUCTURES)


@pytest.mark.tensorrt
def test_structures_have_the_size_of_the_source(compiler: None) -> None:
    sizes = {TYPES[name]: dtype.itemsize for name, dtype in kernels.STRUCTURES.items()}
    claims = [f"static_assert(sizeof({name}) == {size});" for name, size in sizes.items()]
    nvrtc.compiled("\n".join([kernels.source(), *claims]), THOR)
    with pytest.raises(InternalError, match="static assertion failed"):
        nvrtc.compiled("\n".join([kernels.source(), "static_assert(sizeof(MoveRows) == 1);"]), THOR)


@pytest.mark.parametrize("kernel", kernels.STRUCTURES)
def test_structures_have_the_fields_of_the_source(kernel: str) -> None:
    """In their order: both sides align a field to its own size."""
    found = re.search(rf"struct {TYPES[kernel]} {{(.*?)}};", kernels.source(), re.DOTALL)
    assert found is not None
    lines = re.sub(r"//.*", "", found[1]).split(";")
    names = [
        name for line in lines for name in re.findall(r"(\w+)(?:\[\d+\])?(?:,|$)", line.strip())
    ]
    assert names == list(kernels.STRUCTURES[kernel].names or ())


# ---- on a device


@pytest.mark.gpu
def test_accepted_rows_move_on_the_device(device: Device) -> None:
    workspace = Workspace(device)
    workspace.join()
    tensors, lanes, heads, slots, dim = 6, 1, 2, 512, 128
    cache = KvCache(workspace, tensors, lanes, heads, slots, dim * 2)
    assert not down(workspace, cache.memory, 4096).any()
    rows = np.random.default_rng(0).standard_normal((tensors, lanes, heads, slots, dim))
    rows = rows.astype(np.float16)
    up(workspace, cache.memory, rows)
    places = np.sort(np.random.default_rng(1).choice(np.arange(20, 400), 200, replace=False))
    cache.keep(0, places, 20)
    found = down(workspace, cache.memory, rows.nbytes).view(np.float16).reshape(rows.shape)
    expected = rows.copy()
    expected[:, 0, :, 20:220] = rows[:, 0][:, :, places]
    assert (found == expected).all()
    cache.copy_lane(0, 0, 0)
    cache.free()
    workspace.leave()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "vocab", "count"), [(1, 5, 5), (3, 15001, 10), (2, 4097, 64), (60, 151936, 10)]
)
def test_the_largest_logits_are_found_on_the_device(
    device: Device, rows: int, vocab: int, count: int
) -> None:
    if driver_here() and rows * vocab > 1 << 20:
        pytest.skip(TOO_LARGE)
    workspace = Workspace(device)
    workspace.join()
    array = np.random.default_rng(vocab).standard_normal((rows, vocab)).astype(np.float16)
    array = array.astype(np.float32)  # with ties
    address = workspace.alloc(array.nbytes)
    workspace.put(address, array)
    logits = DeviceLogits(workspace, address, rows, vocab, vocab, Wanted(1, vocab))
    found, expected = logits.top(count), HostLogits(array).top(count)
    assert (found.ids == expected.ids).all()
    assert (found.values == expected.values).all()
    assert np.allclose(found.logsumexp, expected.logsumexp, rtol=1e-6, atol=1e-6)
    assert logits.finite()
    array[-1, vocab // 2] = np.nan
    workspace.put(address, array)
    again = DeviceLogits(workspace, address, rows, vocab, vocab, Wanted(1, vocab))
    assert not again.finite()
    assert again.best(rows - 1)[0] == vocab // 2
    workspace.leave()
