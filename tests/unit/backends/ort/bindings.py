"""A session of ONNX Runtime without an engine: it remembers what is bound, and reads and writes
that memory as an engine would.

Its recurrent layers add up: the state of a layer is the sum of the rows that it took in, and a row
is the first number of its embedding.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.backends.ort.runner import ORT_TYPES
from edgespec.contract import GraphContract, TensorSpec, conv_names, delta_names, state_names

Floats = NDArray[np.float32]


@dataclass
class Bound:
    """What a name was bound to."""

    dims: tuple[int, ...]
    address: int
    dtype: type = np.float32

    def array(self) -> NDArray[np.generic]:
        """The memory itself."""
        count = int(np.prod(self.dims)) * np.dtype(self.dtype).itemsize
        raw = (ctypes.c_uint8 * count).from_address(self.address)
        return np.frombuffer(raw, self.dtype).reshape(self.dims)


@dataclass
class Binding:
    """Stands for an IOBinding."""

    inputs: dict[str, Bound] = field(default_factory=dict)
    outputs: dict[str, Bound] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # in the order in which they were bound

    def bind_input(
        self, name: str, device: str, number: int, dtype: type, dims: list[int], address: int
    ) -> None:
        self.names.append(name)
        self.inputs[name] = Bound(tuple(dims), address, dtype)

    def bind_output(
        self, name: str, device: str, number: int, dtype: type, dims: list[int], address: int
    ) -> None:
        self.names.append(name)
        self.outputs[name] = Bound(tuple(dims), address, dtype)

    def bind_ortvalue_input(self, name: str, value: ort.OrtValue) -> None:
        self.names.append(name)
        self.inputs[name] = bound_by(value)

    def bind_ortvalue_output(self, name: str, value: ort.OrtValue) -> None:
        self.names.append(name)
        self.outputs[name] = bound_by(value)


def bound_by(value: ort.OrtValue) -> Bound:
    """The memory of a value."""
    dtype = next(np.dtype(name).type for name in ORT_TYPES if ORT_TYPES[name] == value.data_type())
    return Bound(tuple(value.shape()), value.data_ptr(), dtype)


def run_recurrent(binding: Binding, layers: tuple[int, ...], values: Floats) -> None:
    """A call with rows `values` [B, S]: states take in the committed rows, and the call's rows are
    left behind. Layer i's rows are i + 1 times the values."""
    for index, layer in enumerate(layers):
        (_, conv_out), (state_in, state_out), (taken, left) = (
            names(layer) for names in (conv_names, state_names, delta_names)
        )
        state = binding.inputs[state_in].array()
        rows = binding.inputs[taken].array()
        total = state + rows[..., 0].sum(1)[:, None, None, None]
        binding.outputs[state_out].array()[:] = total
        mine = (index + 1) * values[..., None]
        binding.outputs[left].array()[:] = mine
        binding.outputs[conv_out].array()[:] = mine


def described(spec: TensorSpec) -> SimpleNamespace:
    """An input or output as ONNX Runtime describes it."""
    return SimpleNamespace(name=spec.name, type=ORT_TYPES[spec.dtype], shape=list(spec.shape))


@dataclass
class Session:
    """Stands for an InferenceSession of a contract. `feeds` are copies of the last call's inputs
    that are no cache."""

    contract: GraphContract
    binding: Binding = field(default_factory=Binding)
    feeds: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    def io_binding(self) -> Binding:
        return self.binding

    def get_inputs(self) -> list[SimpleNamespace]:
        return [described(spec) for spec in self.contract.inputs]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [described(spec) for spec in self.contract.outputs]

    def run_with_iobinding(self, binding: Binding, options: None) -> None:
        assert {spec.name for spec in self.contract.inputs} == set(binding.inputs)
        assert {spec.name for spec in self.contract.outputs} == set(binding.outputs)
        self.feeds = {
            name: bound.array().copy()
            for name, bound in binding.inputs.items()
            if not name.startswith("past_")
        }
        values = self.feeds["inputs_embeds"][..., 0].astype(np.float32)
        run_recurrent(binding, self.contract.shape.recurrent_layers, values)
