"""Hidden states as ModelOpt's scripts dump them: a .pt file a conversation. Knows their keys.

They do not say which base they are of. A twentieth of them is held out; drafts are measured against
its text, which is the base's own where it answered greedily.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgespec.errors import BundleError, PairingError, RequestError
from edgespec.training.acceptance import Answer
from edgespec.training.data import Row, Rows
from edgespec.training.dumps import AUX, FINAL, Dump, Widths, refuse_nan

Tensor = torch.Tensor
PRE_NORM = "hidden_states_prenorm"
AGAIN = "Dump the conversations again with ModelOpt's compute_hidden_states_hf.py."


def is_modelopt(path: Path) -> bool:
    """Whether a directory has such files."""
    return next(path.glob("*.pt"), None) is not None


def open_modelopt(path: Path, widths: Widths, vocab_size: int, held: int, seed: int) -> Dump:
    """Such a dump, of which so many conversations at most are held out. Raises BundleError for a
    file that is damaged, PairingError for states of other widths or tokens."""
    files = sorted(path.glob("*.pt"))
    rows, digest = [], hashlib.sha256()
    for number, file in enumerate(files):
        read = load_pt(file)
        check(read, file, widths, vocab_size)
        ids = read["input_ids"].numpy().astype(np.int64)
        learned = read["loss_mask"].numpy() > 0
        digest.update(file.name.encode() + ids.tobytes() + learned.tobytes())
        # Their mask is of tokens; here what follows a token is learned
        rows.append(Row(ids, np.append(learned[1:], False), number=number))
    count = min(held, max(1, len(rows) // 20))
    chosen = {*np.random.default_rng(seed).permutation(len(rows))[:count].tolist()}
    kept = [row for row in rows if row.number not in chosen and len(row.ids) >= 3]
    if not kept:
        raise RequestError(f"{path} has one conversation, which is needed to measure with.", AGAIN)
    read_one = partial(states_at, tuple(files), not widths.final)
    answers = [answer_of(rows[i], partial(aux_at, read_one, i)) for i in sorted(chosen)]
    made = Rows(tuple(kept), 0, len(rows) - len(kept) - count)
    return Dump(path, made, tuple(answers), 0, digest.hexdigest(), read_one)


def load_pt(file: Path) -> Mapping[str, Any]:
    """A file's keys; tensors stay on disk until they are read."""
    try:
        read = torch.load(file, weights_only=True, mmap=True)
    except Exception as error:  # torch raises whatever a torn zip or pickle does
        raise BundleError(
            f"{file} cannot be read: {str(error).partition(chr(10))[0]}", AGAIN
        ) from error
    if not isinstance(read, dict):
        raise BundleError(f"{file} is no dump of hidden states: a {type(read).__name__}.", AGAIN)
    return read


def check(read: Mapping[str, Any], file: Path, widths: Widths, vocab_size: int) -> None:
    """Raises BundleError where a key is missing or of another form, PairingError for states of
    another base or of other layers."""
    for key in ("input_ids", "loss_mask", AUX, FINAL):
        if not isinstance(read.get(key), Tensor):
            raise BundleError(f"{file} has no {key}.", AGAIN)
    length = len(read["input_ids"])
    if read.get(PRE_NORM):
        raise BundleError(f"{file} has states from before the last norm ({PRE_NORM}).", AGAIN)
    if read["loss_mask"].shape != (length,) or read["input_ids"].shape != (length,):
        raise BundleError(f"{file}: loss_mask and input_ids are not of one length.", AGAIN)
    for key, width, what in (
        *(((AUX, widths.aux, "aux layers"),) if widths.final else ()),
        (FINAL, widths.final or widths.aux, "base"),
    ):
        states = read[key]
        if not states.is_floating_point():
            raise BundleError(f"{file}: {key} is {states.dtype}, not a floating type.", AGAIN)
        if states.shape != (length, width):
            raise PairingError(
                f"{file} is of other {what}: {key} is {[*states.shape]}, here {[length, width]}.",
                AGAIN,
            )
    if int(read["input_ids"].max()) >= vocab_size or int(read["input_ids"].min()) < 0:
        raise PairingError(f"{file} has tokens beyond the {vocab_size} of the base.", AGAIN)


def states_at(files: tuple[Path, ...], last: bool, number: int) -> dict[str, Tensor]:
    """The states of a conversation, of which the draft may read the `last` one. Raises BundleError
    for numbers that are none."""
    read = load_pt(files[number])
    states = {AUX: read[FINAL if last else AUX], FINAL: read[FINAL]}
    for name, tensor in states.items():
        refuse_nan(tensor, f"{files[number]}: {name}")
    return states


def aux_at(read: Any, number: int) -> Tensor:
    """The aux hidden states of a conversation."""
    states: Tensor = read(number)[AUX]
    return states


def answer_of(row: Row, read: Any) -> Answer:
    """A held-out text: its prompt is what comes before what is learned, or its first half."""
    learned = np.flatnonzero(row.predicts[:-1])
    whole = len(learned) == len(row.ids) - 1 or not len(learned)
    prompt = max(1, len(row.ids) // 2) if whole else int(learned[0]) + 1
    return Answer((*row.ids.tolist(),), prompt, read=read, place=(row.number, 0))
