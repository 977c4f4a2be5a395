"""Pickled weights of PyTorch, behind `allow_pickle`: loaded with weights_only, which executes no
code. torch maps them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgespec.checkpoint.digests import Digests
from edgespec.checkpoint.shards import check_complete, read_weight_map, shards
from edgespec.checkpoint.source import (
    DOWNLOAD_AGAIN,
    StoredTensors,
    TensorInfo,
    reading,
)
from edgespec.errors import CheckpointError, MissingDependency, UnsupportedModel
from edgespec.safe_read.regular import open_regular
from edgespec.safe_read.tensors import (
    DTYPES,
    numpy_dtype,
)

# The names under which they are published; the first may have an index of shards
PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")


def find(path: Path, *, allow_pickle: bool) -> StoredTensors | None:
    """Returns the tensors of a directory's pickled weights; None where it has none.

    Raises CheckpointError without `allow_pickle`, and for damaged files.
    """
    single, index = path / PICKLED[0], path / f"{PICKLED[0]}.index.json"
    if not single.exists() and not index.exists():
        single = path / PICKLED[1]
    if not single.exists() and not index.exists():
        return None
    if not allow_pickle:
        raise CheckpointError(
            f"{path} has only pickled weights ({single.name if single.exists() else index.name}).",
            "Pass `allow_pickle` (they are loaded with weights_only, which executes no code),"
            " or convert them to safetensors.",
        )
    if single.exists():
        files: tuple[Path, ...] = (single,)
        weight_map: dict[str, str] = {}
    else:
        weight_map = read_weight_map(index)
        files = shards(index, weight_map)
    arrays = {name: array for file in files for name, array in _unpickle(file).items()}
    check_complete(index, weight_map, arrays)
    tensors = {
        name: TensorInfo(name, str(a.dtype), a.shape, None, 0, a.nbytes)
        for name, a in arrays.items()
    }
    return StoredTensors(tensors, arrays, Digests(()))


def _unpickle(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the tensors of one file as arrays that share the memory mapped by torch."""
    import pickle

    try:
        import torch
    except ImportError as error:
        raise MissingDependency(
            f"reading {path.name} needs torch, which is not installed.",
            "pip install edgespec[torch]",
        ) from error
    try:
        state = torch.load(path, weights_only=True, map_location="cpu", mmap=_is_zip(path))
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} could not be unpickled: {reason}", DOWNLOAD_AGAIN) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, not a dictionary of tensors."
        )
    return {name: _to_array(path, name, tensor) for name, tensor in state.items()}


def _is_zip(path: Path) -> bool:
    """The format before torch 1.6 is not a zip archive and cannot be mapped."""
    with reading(path), open_regular(path) as file:
        return file.read(4) == b"PK\x03\x04"


def _to_array(path: Path, name: object, tensor: object) -> np.ndarray[Any, Any]:
    import torch

    if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
        raise CheckpointError(
            f"{path}: entry {name!r} is a {type(tensor).__name__}, not a named tensor."
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES.values() or tensor.layout != torch.strided:
        raise UnsupportedModel(
            f"{path}: tensor {name!r} is {tensor.layout} of {dtype}, which this version cannot"
            " read."
        )
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(numpy_dtype(dtype)).reshape(tuple(tensor.shape))
