"""Runs a lowered engine on ONNX Runtime, with its KV cache in one slab of host memory.

Knows bindings and addresses: past and present of a layer are the same memory, so that a call writes only its own
rows. Knows nothing of tokens or trees.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgespec.backends.base import Call, Result
from edgespec.backends.engine_dir import STEMS, shape_of
from edgespec.backends.ort import fingerprint
from edgespec.contract import (
    GraphContract,
    Role,
    canonical_contract,
    lowered_contract,
    past_names,
    present_names,
)
from edgespec.errors import ContractError, EnvironmentProblem

PROVIDERS = ["CPUExecutionProvider"]
EMPTY = np.empty(0, np.float32)


class OrtRunner:
    """An engine of this backend."""

    def __init__(self, path: Path, contract: GraphContract, capacity: int) -> None:
        self.contract, self.capacity = contract, capacity
        shape = contract.shape
        self.session = open_session(path, spinning=shape.role is not Role.DRAFT)
        check_signature(self.session, contract, path)
        try:
            # Zeroes, not empty memory: a NaN in an unwritten row would poison kernels that multiply before masking.
            self.slab = np.zeros((2 * shape.num_layers, 1, shape.num_kv_heads, capacity, shape.head_dim), np.float32)
        except MemoryError:
            raise cache_too_large(contract, capacity) from None
        self.buffers: dict[str, NDArray[np.float32]] = {}
        self.binding = self.session.io_binding()
        self.bind_cache()
        self.no_rows = {n: np.zeros((1, 0, w), np.float32) for n, w in unused_widths(contract).items()}

    def bind_cache(self) -> None:
        dims = list(self.slab.shape[1:])
        for layer in range(self.contract.shape.num_layers):
            for half, (past, present) in enumerate(zip(past_names(layer), present_names(layer), strict=True)):
                address = self.slab[2 * layer + half].ctypes.data
                self.binding.bind_input(past, "cpu", 0, np.float32, dims, address)
                self.binding.bind_output(present, "cpu", 0, np.float32, dims, address)

    def run(self, call: Call) -> Result:
        """Run one call; its KV rows are in the cache afterwards."""
        rows, gathered = call.inputs_embeds.shape[1], call.gather_idx.shape[1]
        assert call.attention_mask.shape[2] == rows <= call.attention_mask.shape[3] <= self.capacity
        shape = self.contract.shape
        logits = self.buffer("logits", gathered, shape.vocab_size)
        hidden = self.buffer("hidden_states", rows, shape.features) if shape.features else None
        feeds = self.feeds(call)
        for name, array in feeds.items():
            assert array.flags.c_contiguous
            self.binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)
        self.bind_output("logits", logits)
        if hidden is not None:
            self.bind_output("hidden_states", hidden)
        try:
            self.session.run_with_iobinding(self.binding)
        except RuntimeError as error:
            remedy = "If memory ran out, close other programs or build with a smaller --max-kv-cache-capacity."
            raise EnvironmentProblem(f"ONNX Runtime failed in a call of {rows} rows: {error}", remedy) from error
        return Result(logits, hidden)

    def feeds(self, call: Call) -> dict[str, NDArray[Any]]:
        feeds: dict[str, NDArray[Any]] = {
            "inputs_embeds": call.inputs_embeds,
            "rope_cos": call.rope_cos,
            "rope_sin": call.rope_sin,
            "attention_mask": call.attention_mask,
            "gather_idx": call.gather_idx,
        }
        if self.contract.shape.role is Role.DRAFT:
            assert (call.base_hidden is None) != (call.draft_hidden is None)
            base, own = call.base_hidden, call.draft_hidden
            feeds["base_hidden"] = self.no_rows["base_hidden"] if base is None else base
            feeds["draft_hidden"] = self.no_rows["draft_hidden"] if own is None else own
            feeds["use_base_hidden"] = np.array(base is not None)
        return feeds

    def buffer(self, name: str, rows: int, width: int) -> NDArray[np.float32]:
        """[1, rows, width] in memory that is kept from call to call."""
        if self.buffers.get(name, EMPTY).size < rows * width:
            self.buffers[name] = np.empty(rows * width, np.float32)
        return self.buffers[name][: rows * width].reshape(1, rows, width)

    def bind_output(self, name: str, array: NDArray[np.float32]) -> None:
        self.binding.bind_output(name, "cpu", 0, array.dtype, list(array.shape), array.ctypes.data)

    def move_rows(self, slots: NDArray[np.int64], start: int) -> None:
        """Copy KV rows to `start`, `start`+1, ...; rows that stand right already are left alone."""
        targets = np.arange(start, start + len(slots))
        moving = slots != targets
        if moving.any():
            self.slab[:, :, :, targets[moving]] = self.slab[:, :, :, slots[moving]]

    def close(self) -> None:
        """Let go of the engine; nothing can be run afterwards, and closing twice is harmless."""
        self.__dict__.pop("binding", None)
        self.__dict__.pop("session", None)


def open_engine(engine_dir: Path, role: Role, config: dict[str, Any], entry: dict[str, Any]) -> OrtRunner:
    """The runner of a finished engine; EngineMismatch if another ONNX Runtime or CPU built it."""
    fingerprint.check(entry["fingerprint"], f"the {role.value} engine in {engine_dir}")
    contract = lowered_contract(canonical_contract(shape_of(config)))
    capacity = config["builder_config"]["max_kv_cache_capacity"]
    return OrtRunner(engine_dir / f"{STEMS[role]}.onnx", contract, capacity)


def open_session(path: Path, *, spinning: bool = True) -> ort.InferenceSession:
    """Threads that spin between calls start the next one sooner, and take the cores from the other engine of a pair:
    base and draft alternate, so only one of them may."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
    try:
        session = ort.InferenceSession(str(path), options, providers=PROVIDERS)
    except MemoryError as error:
        remedy = "Close other programs, or use a smaller model or machine with more memory."
        raise EnvironmentProblem(f"not enough memory to load {path}", remedy) from error
    except Exception as error:  # ONNX Runtime raises its own untyped family; the cause is kept
        if "alloc" in str(error).lower():
            remedy = "Close other programs, or use a smaller model or machine with more memory."
            raise EnvironmentProblem(f"not enough memory to load {path}: {error}", remedy) from error
        raise EnvironmentProblem(
            f"ONNX Runtime cannot load {path}: {error}", "Build the engine again on this machine."
        ) from error
    if session.get_providers() != PROVIDERS:
        raise EnvironmentProblem(
            f"ONNX Runtime chose {session.get_providers()} where {PROVIDERS} was asked for",
            "Reinstall onnxruntime for this machine.",
        )
    return session


def check_signature(session: ort.InferenceSession, contract: GraphContract, path: Path) -> None:
    """The engine's inputs and outputs by name against its contract."""
    for kind, found, wanted in (
        ("inputs", session.get_inputs(), contract.inputs),
        ("outputs", session.get_outputs(), contract.outputs),
    ):
        differing = {v.name for v in found} ^ {spec.name for spec in wanted}
        if differing:
            what = f"{path}: {kind} that differ from the contract: {', '.join(sorted(differing))}"
            raise ContractError(what, "Build the engine again with this version of edgespec.")


def unused_widths(contract: GraphContract) -> dict[str, int]:
    shape = contract.shape
    return {"base_hidden": shape.base_features, "draft_hidden": shape.features}


def cache_too_large(contract: GraphContract, capacity: int) -> EnvironmentProblem:
    shape = contract.shape
    size = 8 * shape.num_layers * shape.num_kv_heads * capacity * shape.head_dim
    return EnvironmentProblem(
        f"no memory for a KV cache of {size / 1e9:.1f} GB ({capacity} tokens)",
        "Build the engine with a smaller --max-kv-cache-capacity.",
    )
