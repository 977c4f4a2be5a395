"""The vocabulary of a draft that has fewer tokens than its base: which tokens, what share of the
text they have, and the files that hold them.

Knows counts and files. A file has offsets, as ModelOpt's d2t.pt: draft token i is token i + d2t[i]
of the base.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from edgespec.artifacts import atomic
from edgespec.errors import RequestError
from edgespec.training.data import Rows

D2T = "d2t"  # the tensor in a safetensors file
TENSORS = ".safetensors"
UNREADABLE = (
    OSError, RuntimeError, ValueError, EOFError, KeyError, UnpicklingError, SafetensorError
)  # fmt: skip
MULTIPLE = 8  # of sizes that are chosen, which matrix products like
Counts = NDArray[np.int64]


def token_counts(rows: Rows, vocab_size: int) -> Counts:
    """How often each token [V] is to be predicted."""
    counts = np.zeros(vocab_size, np.int64)
    for row in rows.rows:
        counts += np.bincount(row.ids[1:][row.predicts[:-1]], minlength=vocab_size)
    return counts


def by_frequency(counts: Counts, always: Collection[int]) -> Counts:
    """All tokens, those that end answers first, then the most frequent ones."""
    ranked = counts.copy()
    ranked[[*always]] = counts.max() + 1
    return np.argsort(-ranked, kind="stable")


def most_frequent(counts: Counts, size: int, always: Collection[int]) -> torch.Tensor:
    """So many tokens, ascending; those of `always` are among them."""
    return torch.from_numpy(np.sort(by_frequency(counts, always)[:size]))


def coverage(counts: Counts, always: Collection[int]) -> NDArray[np.float64]:
    """The share of the text that the first 1, 2, ... V tokens have [V]."""
    shares = np.cumsum(counts[by_frequency(counts, always)]) / max(int(counts.sum()), 1)
    return np.asarray(shares, np.float64)


def size_for(shares: NDArray[np.float64], target: float) -> int:
    """How many tokens have at least that share, rounded up."""
    enough = int(np.searchsorted(shares, target - 1e-12)) + 1
    return min(-(-enough // MULTIPLE) * MULTIPLE, len(shares))


def write_vocabulary(path: Path, ids: torch.Tensor) -> None:
    """The file of a vocabulary [D], as safetensors by its ending, else as d2t.pt. Raises
    OutputError."""
    offsets = ids - torch.arange(len(ids))
    with atomic.writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.parent / atomic.temporary_name(path.name)
        try:
            if path.suffix == TENSORS:
                save_file({D2T: offsets.contiguous()}, staged)
            else:
                torch.save(offsets, staged)
            staged.replace(path)
        finally:
            staged.unlink(missing_ok=True)


def read_vocabulary(path: Path, size: int, vocab_size: int) -> torch.Tensor:
    """The base's tokens [size] of a file of offsets. Raises RequestError for another file, another
    size, a token that is named twice and one that the base does not have."""
    offsets = offsets_of(path)
    whole = isinstance(offsets, torch.Tensor) and offsets.dtype == torch.int64
    if not whole or offsets.shape != (size,):
        raise RequestError(
            f"{path} does not hold {size} offsets, as draft_vocab_size says.",
            "Write its length as draft_vocab_size.",
        )
    ids: torch.Tensor = offsets + torch.arange(size)
    outside = torch.nonzero((ids < 0) | (ids >= vocab_size)).flatten().tolist()
    places, remedy = dict[int, int](), "Make it anew with this base: edgespec train vocab."
    if outside:
        what = f"entry {outside[0]} leads to token {int(ids[outside[0]])}"
        raise RequestError(f"{path}: {what}, and the base has {vocab_size}.", remedy)
    for place, token in enumerate(ids.tolist()):
        if (first := places.setdefault(token, place)) != place:
            raise RequestError(
                f"{path} names a token twice: entries {first} and {place} are {token}.", remedy
            )
    return ids


def offsets_of(path: Path) -> Any:
    """What a file holds. Raises RequestError."""
    try:
        if path.suffix == TENSORS:
            return load_file(path)[D2T]
        return torch.load(path, weights_only=True)
    except UNREADABLE as error:
        why = str(error).partition("\n")[0]
        raise RequestError(
            f"{path} holds no {D2T}: {why}", "Give ModelOpt's d2t.pt, or safetensors with d2t."
        ) from error
