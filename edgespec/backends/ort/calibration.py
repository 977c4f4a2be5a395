"""Rounds the weights of a canonical graph to 4 bits by GPTQ, layer by layer: each on what the
layers before it give with their rounded weights.

Finished layers are kept in a directory, from which a later run goes on. Knows windows of tokens and
no text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts import atomic, file_names
from edgespec.artifacts.component_files import embedding_tensor
from edgespec.backends.base import Listeners
from edgespec.backends.onnx_dir import OnnxDir
from edgespec.backends.ort.layerwise import (
    Floats,
    LayerwiseGraph,
    StoredLinear,
    causal_feeds,
)
from edgespec.quantization.block_forms import FOUR_BITS
from edgespec.quantization.gptq import InputStatistics, quantize_gptq
from edgespec.quantization.quantized_weight import QuantizedWeight, dequantize
from edgespec.safe_read.tensors import numpy_dtype

VERSION = 2  # of the method: other figures of it are not taken over
STREAM = "stream.npz"
KEPT_S = 7 * 24 * 3600.0
LONG_S = 20.0  # work of which it is said before how long it will take
# Tokens of all experts, in parts of the inputs' number, that count with an expert's own. Measured
# on an MLP of SmolLM2, whose tokens were sent to 16 clusters, by other tokens of a cluster: by a
# sixteenth as many of its own as there are inputs the error is 1.25 times that by all tokens (gate,
# up) and 2.3 times (down), by a fourth 1.05 and 1.02; with these beside them, 0.95 to 1.00.
OTHERS = 0.25
ARRAYS = ("scales", "minimums", "super_scales", "super_minimums")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CalibratedWeights:
    """The rounded weights of a graph in a directory, a file each."""

    directory: Path

    def file(self, name: str) -> Path:
        """Where the weight of this name stands."""
        return self.directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.npz"

    def keep(self, weight: QuantizedWeight) -> None:
        """Write a weight whole or not at all. Raises OSError."""
        flat = weight.values.astype(np.uint8).reshape(-1)
        pairs = np.append(flat, np.uint8(0)) if flat.size % 2 else flat
        packed, shape = pairs[0::2] | pairs[1::2] << np.uint8(4), np.array(weight.shape)
        arrays = {name: getattr(weight, name) for name in ARRAYS}
        put_whole(self.file(weight.name), values=packed, shape=shape, **arrays)

    def read(self, name: str) -> QuantizedWeight:
        """The weight of this name, which is there."""
        with np.load(self.file(name)) as stored:
            arrays = {part: stored[part] for part in ARRAYS}
            packed, shape = stored["values"], stored["shape"]
        pairs = np.stack([packed & np.uint8(0xF), packed >> np.uint8(4)], -1).reshape(-1)
        values = pairs[: shape.prod()].reshape(shape).astype(ml_dtypes.uint4)
        return QuantizedWeight(
            name,
            FOUR_BITS.scheme,
            values,
            block=(1, FOUR_BITS.block),
            super_block=FOUR_BITS.super_block,
            **arrays,
        )


def calibrated(
    onnx: OnnxDir,
    windows: NDArray[np.int64],
    capacity: int,
    names: Set[str],
    parent: Path,
    progress: Listeners,
) -> CalibratedWeights:
    """Round the weights `names` of an export for the tokens `windows` [count, rows], and keep them
    in a directory below `parent`, where an earlier run of the same may have left some. `capacity`
    is the engine's.

    Work that will take long is announced once two pieces are done. Raises OSError where the disk is
    full, and CheckpointError for weights that are no numbers.
    """
    directory = working_directory(parent, key_of(onnx, windows, capacity, names))
    weights = CalibratedWeights(directory)
    graph = LayerwiseGraph.open(onnx)
    count, rows = windows.shape
    feeds = causal_feeds(onnx.config, count, rows, capacity)
    done, x = resumed(weights, onnx, windows)
    progress.start(graph.num_weights)
    progress.advance(sum(piece.num_weights for piece in graph.pieces[:done]))
    began = time.monotonic()
    atomic.keep(directory, weights)
    with noted_on_stop(directory):
        for number, piece in enumerate(graph.pieces[done:], done):
            rounded: dict[str, Floats] = {}
            linears = [linear for linear in piece.linears if linear.name in names]
            for some, statistics in in_turn(linears, piece.inputs(x, feeds)):
                for linear in some:
                    rounded[linear.name] = dequantize(rounded_by(weights, linear, statistics))
            x = piece.run(x, feeds, rounded)
            put_whole(directory / STREAM, done=np.array(number + 1), x=x)
            if number == done + 1:
                share = sum(one.num_weights for one in graph.pieces[done : number + 1])
                seconds = (time.monotonic() - began) * (graph.num_weights / max(share, 1))
                if seconds > LONG_S:
                    progress.warn(f"GPTQ on {windows.size} tokens: about {seconds:.0f} s")
            progress.advance(piece.num_weights)
        head = graph.head.linear
        if head.name in names and not weights.file(head.name).exists():
            rows = graph.head.rows(x, feeds)
            rounded_by(weights, head, InputStatistics.of(rows.T @ rows, head.name))
    return weights


@contextmanager
def noted_on_stop(directory: Path) -> Iterator[None]:
    """Adds to what stops the block a note on how to go on."""
    try:
        yield
    except BaseException as stop:
        stop.add_note(
            f"finished layers are kept in {directory}: the same command goes on from there"
        )
        raise


def in_turn(
    linears: list[StoredLinear], inputs: dict[str, Floats]
) -> Iterator[tuple[list[StoredLinear], InputStatistics]]:
    """Yields the products that the same tokens go through with the same inputs, and what rounding
    needs of these."""
    groups: dict[str, dict[str | None, list[StoredLinear]]] = {}
    for linear in linears:
        groups.setdefault(linear.x, {}).setdefault(linear.share, []).append(linear)
    for read, by_share in groups.items():
        rows = inputs[read]
        hessian = rows.T @ rows
        for share, some in by_share.items():
            own = hessian if share is None else of_expert(rows, inputs[share], hessian)
            yield some, InputStatistics.of(own, some[0].name)


def of_expert(rows: Floats, share: Floats, hessian: Floats) -> Floats:
    """X^T X of the rows [N, in] that a router sent to an expert, and a little of that of all: some
    experts see few."""
    own = rows[share[:, 0] != 0]
    few = OTHERS * rows.shape[1] / len(rows)
    return np.asarray(own.T @ own + hessian * np.float32(few))


def rounded_by(
    weights: CalibratedWeights, linear: StoredLinear, inputs: InputStatistics
) -> QuantizedWeight:
    """The rounded weight of a product, which is kept."""
    weight = quantize_gptq(linear.read(), inputs, name=linear.name)
    weights.keep(weight)
    return weight


def working_directory(parent: Path, key: str) -> Path:
    """The directory of this key below `parent`. What other runs left there goes after a week."""
    directory = parent / key
    directory.mkdir(parents=True, exist_ok=True)
    for other in parent.iterdir():
        if other != directory and time.time() - other.stat().st_mtime > KEPT_S:
            atomic.remove_whole(other)
    return directory


def resumed(
    weights: CalibratedWeights, onnx: OnnxDir, windows: NDArray[np.int64]
) -> tuple[int, Floats]:
    """How many pieces an earlier run finished, and the residual stream [count, rows, H] behind
    them: the embeddings at first."""
    if (weights.directory / STREAM).exists():
        with np.load(weights.directory / STREAM) as stored:
            return int(stored["done"]), stored["x"]
    return 0, embedded(onnx, windows)


def embedded(onnx: OnnxDir, windows: NDArray[np.int64]) -> Floats:
    """The embeddings [count, rows, H] of tokens [count, rows]."""
    path = onnx.path / file_names.EMBEDDING
    stored = embedding_tensor(path, onnx.config)
    table = np.memmap(path, numpy_dtype(stored.dtype), "r", stored.offset, stored.shape)
    return np.ascontiguousarray(table[windows], np.float32)


def key_of(onnx: OnnxDir, windows: NDArray[np.int64], capacity: int, names: Set[str]) -> str:
    """What the rounded weights depend on."""
    digest = hashlib.sha256(str((VERSION, windows.shape, capacity, sorted(names))).encode())
    digest.update(windows.tobytes())
    digest.update(json.dumps(onnx.manifest.files, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:32]


def put_whole(path: Path, **arrays: NDArray[np.generic]) -> None:
    """Write arrays to a file, whole or not at all. Raises OSError."""
    part = path.with_name(f".{path.name}.tmp.npz")
    try:
        np.savez(part, allow_pickle=False, **arrays)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
