"""The draft's vocabulary map: which token of the base each token of the draft is.

Knows the forms in which it is published: offsets, absolute ids, and a mask over the vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.source import TensorInfo
from edgespec.config import DraftConfig
from edgespec.errors import CheckpointError


def read_d2t(checkpoint: Checkpoint, config: DraftConfig) -> NDArray[np.int64] | None:
    """Offsets [draft_vocab_size]: target id = draft id + offset. None where the draft has the
    base's vocabulary.

    A table of absolute ids is detected and converted; a missing table is made from t2d. Raises
    CheckpointError for tables that point outside the vocabulary, name a token twice or can be read
    in two ways.
    """
    names = {name.removeprefix("model."): name for name in checkpoint.tensors}
    used = _read_t2d(checkpoint, names["t2d"], config) if "t2d" in names else None
    draft_ids = np.arange(config.draft_vocab_size, dtype=np.int64)
    if "d2t" in names:
        table = _read_table(checkpoint, names["d2t"], config)
        return _target_ids(table, draft_ids, used, config, checkpoint) - draft_ids
    if config.draft_vocab_size == config.vocab_size:
        return None
    if used is None:
        raise CheckpointError(
            f"{checkpoint.place} has {config.draft_vocab_size} draft tokens of {config.vocab_size}"
            " and neither d2t nor t2d, which hold their ids.",
            "Download the draft again, or add the d2t table that it was trained with.",
        )
    _check_t2d_count(used, config, checkpoint)
    return np.flatnonzero(used) - draft_ids


def _read_table(checkpoint: Checkpoint, name: str, config: DraftConfig) -> NDArray[np.int64]:
    _check_map(checkpoint, checkpoint.tensors[name], (config.draft_vocab_size,), ("int64", "int32"))
    return checkpoint.read(name).astype(np.int64)


def _read_t2d(checkpoint: Checkpoint, name: str, config: DraftConfig) -> NDArray[np.bool_]:
    """Which of the base's tokens the draft knows: bool [vocab_size]."""
    _check_map(
        checkpoint,
        checkpoint.tensors[name],
        (config.vocab_size,),
        ("bool", "uint8", "int8", "int32", "int64"),
    )
    return checkpoint.read(name).astype(np.bool_)


def _check_map(
    checkpoint: Checkpoint, info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    if info.shape != shape or info.dtype not in dtypes:
        raise CheckpointError(
            f"{info.name} of {checkpoint.place} is {info.dtype} {list(info.shape)}; "
            f"expected {dtypes[0]} {list(shape)} by its config.json."
        )


def _target_ids(
    table: NDArray[np.int64],
    draft_ids: NDArray[np.int64],
    used: NDArray[np.bool_] | None,
    config: DraftConfig,
    checkpoint: Checkpoint,
) -> NDArray[np.int64]:
    """The base's id of each draft token, by whichever of the two readings of d2t holds."""
    if used is not None:
        _check_t2d_count(used, config, checkpoint)
    offset, absolute = draft_ids + table, table
    wrong_offset = _fault(offset, used, config.vocab_size)
    wrong_absolute = _fault(absolute, used, config.vocab_size)
    if checkpoint.config.get("d2t") == "ids":
        wrong_offset = wrong_offset or "its format has ids"
    if wrong_offset is None and wrong_absolute is None and not np.array_equal(offset, absolute):
        raise CheckpointError(
            f"d2t of {checkpoint.place} can be read as offsets and as ids: as offsets, draft token"
            f" 0 is {offset[0]} and the last {offset[-1]}; as ids, {absolute[0]} and"
            f" {absolute[-1]}.",
            "Add the t2d tensor, which decides between the two, or write d2t as offsets of a sorted"
            " vocabulary.",
        )
    if wrong_offset is None:
        return offset
    if wrong_absolute is None:
        return absolute
    raise CheckpointError(
        f"d2t of {checkpoint.place} is broken. Read as offsets: {wrong_offset}. Read as ids:"
        f" {wrong_absolute}.",
        "Download the draft again; its config.json must declare the vocab_size of the base it was"
        " trained for.",
    )


def _fault(ids: NDArray[np.int64], used: NDArray[np.bool_] | None, vocab_size: int) -> str | None:
    """What is wrong with a reading, at the first offending index; None if nothing is."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        return f"entry {outside[0]} leads to token {ids[outside[0]]}, outside 0..{vocab_size - 1}"
    _, first = np.unique(ids, return_index=True)
    if first.size < ids.size:
        again = int(np.setdiff1d(np.arange(ids.size), first)[0])
        before = int(np.flatnonzero(ids == ids[again])[0])
        return f"entries {before} and {again} both lead to token {ids[again]}"
    if used is not None and not used[ids].all():
        stray = int(np.flatnonzero(~used[ids])[0])
        return f"entry {stray} leads to token {ids[stray]}, which t2d does not mark"
    return None


def _check_t2d_count(used: NDArray[np.bool_], config: DraftConfig, checkpoint: Checkpoint) -> None:
    if int(used.sum()) != config.draft_vocab_size:
        raise CheckpointError(
            f"t2d of {checkpoint.place} marks {int(used.sum())} tokens; its config.json declares a"
            f" draft_vocab_size of {config.draft_vocab_size}."
        )
