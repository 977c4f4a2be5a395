"""What a session reads and writes: arrays in buffers that are kept from call to call, bound again
only where their shape is another.

Binding an address costs microseconds for each of some ten arrays, half of a small draft's call. So
inputs are copied into buffers, and a buffer is bound in each shape as one value, which is kept. The
invariant: whatever is bound, or kept to be bound, holds the memory that it stands for, and is a
view of its name's present buffer. Knows names, shapes and memory; knows no graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray

MOST_SHAPES = 64  # of a name, whose values are kept
GROWTH = 8  # a buffer that grows does so by an eighth at least: masks may grow in every call


class Bound(NamedTuple):
    """A view of a buffer as a session takes it."""

    shape: tuple[int, ...]
    array: NDArray[Any]
    value: Any  # an OrtValue over the array, which it holds


class Bindings:
    """The inputs and outputs of a session beside its caches, one array a name. A name is always of
    one type, and either an input or an output."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self.binding = session.io_binding()
        self.buffers: dict[str, NDArray[Any]] = {}
        self.known: dict[str, dict[tuple[int, ...], Bound]] = {}
        self.bound: dict[str, Bound] = {}

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Let the next runs read a copy of this array."""
        bound = self.bound.get(name)
        if bound is None or bound.shape != array.shape:
            self.input(name, array.shape, array.dtype)
            bound = self.bound[name]
        if bound.array is not array:
            bound.array[...] = array

    def input(self, name: str, shape: Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """The array that the next runs read; what is in it is left."""
        bound = self.bound.get(name)
        if bound is None or bound.shape != shape:
            bound = self.bound[name] = self.view(name, tuple(shape), dtype)
            self.binding.bind_ortvalue_input(name, bound.value)
        return bound.array

    def output(
        self, name: str, shape: Sequence[int], dtype: DTypeLike = np.float32
    ) -> NDArray[Any]:
        """The array that the next runs write."""
        bound = self.bound.get(name)
        if bound is None or bound.shape != shape:
            bound = self.bound[name] = self.view(name, tuple(shape), dtype)
            self.binding.bind_ortvalue_output(name, bound.value)
        return bound.array

    def view(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> Bound:
        """A name's buffer in a shape. Where it must grow, what was kept of the old one is
        dropped."""
        known, size = self.known.setdefault(name, {}), math.prod(shape)
        if shape in known:
            return known[shape]
        buffer = self.buffers.get(name)
        if buffer is None or buffer.size < size:
            room = size if buffer is None else max(size, buffer.size + buffer.size // GROWTH)
            buffer = self.buffers[name] = np.empty(room, dtype)
            known.clear()
        elif len(known) == MOST_SHAPES:
            known.clear()
        array = buffer[:size].reshape(shape)
        known[shape] = Bound(shape, array, ort.OrtValue.ortvalue_from_numpy(array))
        return known[shape]
