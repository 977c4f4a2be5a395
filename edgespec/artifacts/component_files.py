"""The arrays beside an exported component or an engine: the embedding, and of a draft the
vocabulary map and small heads.

Each is checked against the component's config.json before it is used. Knows no graph and no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts import file_names
from edgespec.artifacts.component import ComponentConfig
from edgespec.contract import Role
from edgespec.errors import BundleError
from edgespec.methods import METHODS
from edgespec.methods.base import HeadSizes
from edgespec.safe_read.fields import EXPORT_AGAIN
from edgespec.safe_read.tensors import StoredTensor, read_array, read_tensors

EMBEDDING_NAME = "embedding"
EMBEDDING_DTYPES = ("float32", "float16", "bfloat16")
D2T_NAME = "d2t"


def required_arrays(config: ComponentConfig) -> tuple[str, ...]:
    """The arrays that a component's config.json says there are, by their names in an export."""
    pair, reduced = config.pair, config.draft_vocab_size not in (None, config.vocab_size)
    own_embedding = pair is None or pair.own_embedding
    arrays = {
        file_names.EMBEDDING: own_embedding,
        file_names.D2T: reduced,
        file_names.HEADS: bool(head_shapes(config)),
    }
    return tuple(name for name, there in arrays.items() if there)


def embedding_tensor(
    path: Path, config: ComponentConfig, remedy: str = EXPORT_AGAIN
) -> StoredTensor:
    """Where the embedding [vocab_size, hidden_size] of a component stands in its file.

    Raises BundleError where the file is missing or damaged, or holds another table.
    """
    tensor = only_tensor(path, EMBEDDING_NAME, remedy)
    refuse_other_shape(path, tensor, (config.vocab_size, config.hidden_size), remedy)
    return tensor


def d2t_offsets(
    path: Path, config: ComponentConfig, remedy: str = EXPORT_AGAIN
) -> NDArray[np.int64]:
    """Offsets [draft_vocab_size] of a draft: base id = draft id + offset.

    Raises BundleError where the file is missing or damaged, or a token leads outside the base's
    vocabulary or to the same token as another.
    """
    tensor, size = only_tensor(path, D2T_NAME, remedy), config.draft_vocab_size
    assert size is not None
    refuse_other_shape(path, tensor, (size,), remedy, ("int32", "int64"))
    offsets: NDArray[np.int64] = read_array(path, tensor).astype(np.int64)
    # An offset beyond the vocabulary is wrong whatever it is added to, and the sum cannot overflow
    ids = np.arange(size) + np.clip(offsets, -(2**32), 2**32)
    outside = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if outside.size:
        first = outside[0]
        message = f"{path}: 'd2t' leads draft token {first} to {ids[first]}, outside the vocabulary"
        raise BundleError(f"{message} of {config.vocab_size} tokens.", remedy)
    led_to = np.zeros(config.vocab_size, bool)
    led_to[ids] = True
    if np.count_nonzero(led_to) < size:
        raise BundleError(f"{path}: 'd2t' leads two draft tokens to the same token.", remedy)
    return offsets


def head_shapes(config: ComponentConfig) -> Mapping[str, tuple[int, ...]]:
    """Name -> shape of the arrays of a draft's small heads; empty where its method has none."""
    if config.method is None or config.role is not Role.DRAFT:
        return {}
    assert config.draft_vocab_size is not None
    sizes = HeadSizes(config.vocab_size, config.draft_vocab_size, config.hidden_size)
    return METHODS[config.method].head_shapes(config.spec, sizes)


def head_tensors(
    path: Path, config: ComponentConfig, remedy: str = EXPORT_AGAIN
) -> dict[str, StoredTensor]:
    """Where the arrays of a draft's small heads stand in their file, by name.

    Raises BundleError where the file is missing or damaged, or holds other arrays.
    """
    tensors, wanted = tensors_of(path, remedy), head_shapes(config)
    for name in (*(wanted.keys() - tensors.keys()), *(tensors.keys() - wanted.keys())):
        how = "is missing" if name in wanted else "is not one that config.json declares"
        raise BundleError(f"{path}: {name!r:.80} {how}.", remedy)
    for name, shape in wanted.items():
        refuse_other_shape(path, tensors[name], shape, remedy)
    return tensors


def head_arrays(
    path: Path, config: ComponentConfig, remedy: str = EXPORT_AGAIN
) -> dict[str, NDArray[np.float32]]:
    """The arrays of a draft's small heads in float32, by name. Raises as `head_tensors` does, and
    BundleError for NaN or Inf."""
    arrays = {}
    for name, tensor in head_tensors(path, config, remedy).items():
        arrays[name] = read_array(path, tensor).astype(np.float32)
        if not np.isfinite(arrays[name]).all():
            raise BundleError(f"{path}: {name!r} holds NaN or Inf.", remedy)
    return arrays


def refuse_other_shape(
    path: Path,
    tensor: StoredTensor,
    shape: tuple[int, ...],
    remedy: str,
    dtypes: tuple[str, ...] = EMBEDDING_DTYPES,
) -> None:
    """BundleError for a tensor that is not what config.json declares."""
    if tensor.dtype not in dtypes or tensor.shape != shape:
        raise BundleError(
            f"{path}: {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, not {dtypes[0]}"
            f" {list(shape)}, as config.json declares.",
            remedy,
        )


def only_tensor(path: Path, name: str, remedy: str) -> StoredTensor:
    """The one tensor of a file that has this name. BundleError for other files."""
    tensors = tensors_of(path, remedy)
    if list(tensors) != [name]:
        shown = ", ".join(repr(other)[:40] for other in list(tensors)[:5]) or "nothing"
        raise BundleError(f"{path}: it holds {shown}, not {name!r} alone.", remedy)
    return tensors[name]


def tensors_of(path: Path, remedy: str) -> dict[str, StoredTensor]:
    """The tensors of a file by name. BundleError where it cannot be read or is damaged."""

    def refuse(how: str) -> BundleError:
        return BundleError(f"{path} is not a valid safetensors file: {how}.", remedy)

    try:
        return read_tensors(path, refuse)
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror or error}.", remedy) from error
