"""Hidden states of a base on disk: what a dump holds, which of it is there, and whether it is what
a training needs.

`dump.json` says what it was made of, `rows.safetensors` has the token ids, and shards the states,
some conversations each: `N.aux_hidden_states` [S, k * Ht] and `N.hidden_states` [S, H] of
conversation N, or in place of the latter `N.top_logits` and `N.top_ids` [S, K]. `answers` has the
base's answers to the held-out prompts, which acceptance is measured with. Knows files; how states
are made stands in `dumping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch.nn.functional import pad as padded

from edgespec.artifacts import json_files
from edgespec.errors import BundleError, EdgeSpecError, PairingError, RequestError, counted
from edgespec.training.acceptance import Answer
from edgespec.training.data import Row, Rows
from edgespec.training.recipe import TrainRecipe

Tensor = torch.Tensor
DUMP, ROWS, ANSWERS, FORMAT = "dump.json", "rows.safetensors", "answers.safetensors", 1
AUX, FINAL, TOP, TOP_IDS = "aux_hidden_states", "hidden_states", "top_logits", "top_ids"
OTHER = "make it again with edgespec data hidden-states, into another directory."
AGAIN = OTHER.capitalize()
# Recipe keys by which the rows and prompts of a dump are made
DATA_KEYS = (
    *("data.sample_size", "training.training_seq_len", "training.answer_only_loss"),
    *("training.seed", "validation.num_prompts", "validation.max_new_tokens"),
)


@dataclass(frozen=True, slots=True)
class Widths:
    """Of the states of a token: the aux hidden states, and the last state, or in its place so many
    `top` logits. A `final` of 0: the draft reads the last state, which is there once, as aux."""

    aux: int
    final: int
    top: int
    dtype: str  # of hidden states; logits are float32, and ids int32

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states."""
        states = self.aux + (0 if self.top else self.final)
        return states * (4 if self.dtype == "float32" else 2) + 8 * self.top

    def tensors(self) -> dict[str, tuple[int, str]]:
        """Name -> width and type of each."""
        last = {TOP: (self.top, "float32"), TOP_IDS: (self.top, "int32")}
        if not self.top:
            last = {FINAL: (self.final, self.dtype)} if self.final else {}
        return {AUX: (self.aux, self.dtype)} | last


@dataclass(frozen=True, slots=True)
class Dump:
    """A dump that can be trained from. `read` gives a conversation's states by its number, and
    `num_top` is the number of logits that it has in the place of the last state, or 0."""

    path: Path
    rows: Rows
    answers: tuple[Answer, ...]
    num_top: int
    sha256: str  # of what was answered and read
    read: Callable[[int], Mapping[str, Tensor]]

    def batch(self, rows: Sequence[Row], width: int) -> dict[str, Tensor]:
        """The states of a batch's rows, padded behind with zeros to a `width` S: `aux`
        [B, S, k * Ht], and `targets` [B, S, ...], of which `row.Task` makes logits."""
        found = [states_of(self.read(row.number), self.num_top) for row in rows]
        return {
            name: torch.stack([padded(each[i], (0, 0, 0, width - len(each[i]))) for each in found])
            for i, name in enumerate(("aux", "targets"))
        }


def states_of(read: Mapping[str, Tensor], num_top: int) -> tuple[Tensor, Tensor]:
    """Aux hidden states and targets of one conversation, in float32."""
    aux = read[AUX].float()
    if num_top:
        return aux, torch.cat([read[TOP], read[TOP_IDS].float()], -1)
    return aux, read.get(FINAL, read[AUX]).float()


# What is written


def facts(
    recipe: TrainRecipe,
    made_of: Mapping[str, Any],
    widths: Widths,
    aux_layers: Sequence[int],
    shards: Sequence[int],
) -> dict[str, Any]:
    """What dump.json says; two runs into one directory agree in all of it. `shards` are the numbers
    of the conversations that shards begin with, and of the end."""
    return {
        "format": FORMAT,
        **made_of,
        "aux_layers": [*aux_layers],
        "states": {"aux": widths.aux, "final": widths.final, "top": widths.top,
                   "dtype": widths.dtype},
        "recipe": {key: recipe[key] for key in DATA_KEYS},
        "shards": [*shards],
    }  # fmt: skip


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"states-{number:05}.safetensors"


def missing_shards(directory: Path, count: int) -> list[int]:
    """The shards that are not there."""
    return [number for number in range(count) if not (directory / shard_name(number)).is_file()]


# What is read


def open_dump(path: Path) -> tuple[Dump, dict[str, Any]]:
    """A dump with what its dump.json says. Raises BundleError for one that is damaged or not whole,
    RequestError where there is none."""
    if not (path / DUMP).is_file():
        raise RequestError(
            f"{path} has neither {DUMP} nor ModelOpt's .pt files: it is no dump of hidden states.",
            "Make one with edgespec data hidden-states.",
        )
    said = json_files.read_json(path / DUMP)
    if said.get("format") != FORMAT:
        raise BundleError(f"{path / DUMP} has the format {said.get('format')!r}.", AGAIN)
    try:
        shards, states = [int(n) for n in said["shards"]], said["states"]
        widths = Widths(states["aux"], states["final"], states["top"], states["dtype"])
        sha256 = str(said["data"]["sha256"])
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{path / DUMP} is damaged: {error}.", AGAIN) from error
    if missing := missing_shards(path, len(shards) - 1):
        raise BundleError(
            f"{path} is not whole: {len(missing)} of {counted(len(shards) - 1, 'shard')} are"
            f" missing, the first is {shard_name(missing[0])}.",
            "Repeat the command that made it, with each rank: it goes on from there.",
        )
    rows = stored_rows(path)
    for number, (low, high) in enumerate(pairwise(shards)):
        lengths = {f"{i}": len(rows.rows[i].ids) for i in range(low, high)}
        check_shard(path / shard_name(number), lengths, widths)
    read = partial(read_states, path, tuple(shards), widths)
    return Dump(path, rows, stored_answers(path, widths), widths.top, sha256, read), said


def stored_rows(path: Path) -> Rows:
    """The conversations of a dump."""
    with damaged(path / ROWS):
        stored = load_file(path / ROWS)
        ends = stored["lengths"].cumsum(0)[:-1]
        cut = [torch.tensor_split(stored[key], ends) for key in ("ids", "predicts")]
    made = [
        Row(ids.numpy().astype(np.int64), predicts.numpy().astype(np.bool_), number=number)
        for number, (ids, predicts) in enumerate(zip(*cut, strict=True))
    ]
    return Rows(tuple(made), 0, 0)


def stored_answers(path: Path, widths: Widths) -> tuple[Answer, ...]:
    """The base's answers, whose aux hidden states are read when they are measured with."""
    file = path / ANSWERS
    if not file.is_file():
        raise BundleError(
            f"{path} is not whole: {ANSWERS} is missing.", "Repeat the command of rank 0."
        )
    with damaged(file):
        stored = load_file(file)
        prompts, places = stored["prompt_lens"].tolist(), stored["places"].tolist()
        ids = [stored[f"{i}.ids"].tolist() for i in range(len(prompts))]
    check_shard(file, {f"{i}": len(row) for i, row in enumerate(ids)}, Widths(
        widths.aux, 0, 0, widths.dtype), {AUX})  # fmt: skip
    return tuple(
        Answer(
            (*row,), prompt, read=partial(finite, file, f"{i}.{AUX}"), place=(place[0], place[1])
        )
        for i, (row, prompt, place) in enumerate(zip(ids, prompts, places, strict=True))
    )


def check_shard(
    file: Path, lengths: Mapping[str, int], widths: Widths, only: set[str] | None = None
) -> None:
    """Raises BundleError where tensors of a shard are missing, or of another size or type."""
    with damaged(file), safe_open(file, "pt") as stored:
        there = {*stored.keys()}
        for key, length in lengths.items():
            for name, (width, dtype) in widths.tensors().items():
                if only is not None and name not in only:
                    continue
                if (full := f"{key}.{name}") not in there:
                    raise BundleError(f"{file} lacks {full}.", f"Remove it. {AGAIN}")
                part = stored.get_slice(full)
                found = [*part.get_shape()], part.get_dtype()
                if found != ([length, width], SPELLED[dtype]):
                    raise BundleError(
                        f"{file}: {full} is {found[1]} {found[0]}, not {SPELLED[dtype]}"
                        f" {[length, width]}.",
                        AGAIN,
                    )


SPELLED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}


def read_states(
    path: Path, shards: tuple[int, ...], widths: Widths, number: int
) -> dict[str, Tensor]:
    """The states of a conversation. Raises BundleError for numbers that are none."""
    file = path / shard_name(int(np.searchsorted(shards, number, "right")) - 1)
    return {name: finite(file, f"{number}.{name}") for name in widths.tensors()}


def finite(file: Path, name: str) -> Tensor:
    """A tensor of a shard. Raises BundleError for NaN and Inf."""
    with damaged(file):
        tensor: Tensor = opened(file).get_tensor(name)
    refuse_nan(tensor, f"{file}: {name}")
    return tensor


def refuse_nan(tensor: Tensor, what: str) -> None:
    """Raises BundleError where a tensor has NaN or Inf."""
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise BundleError(f"{what} has numbers that are none (NaN or Inf).", AGAIN)


@lru_cache(maxsize=16)
def opened(file: Path) -> Any:
    """An open shard, mapped into memory."""
    return safe_open(file, "pt")


@contextmanager
def damaged(file: Path) -> Iterator[None]:
    """Makes a BundleError of what the library raises for a file that is torn."""
    try:
        yield
    except (SafetensorError, OSError, KeyError) as error:
        raise BundleError(
            f"{file} is damaged: {error}.", "Remove it, and repeat the command that made the dump."
        ) from error


# Whether it is what a training needs


def refuse_other(
    path: Path, said: Mapping[str, Any], wanted: Mapping[str, Any], recipe: TrainRecipe
) -> None:
    """Raises PairingError where a dump is of another base, tokenizer or set of layers, and
    RequestError where it is of other data than the recipe says."""
    for error in differences(path, said, wanted, recipe):
        raise error


def differences(
    path: Path, said: Mapping[str, Any], wanted: Mapping[str, Any], recipe: TrainRecipe
) -> Iterator[EdgeSpecError]:
    """What of a dump is not as wanted."""
    for key, what in (
        ("base", "base"), ("tokenizer", "tokenizer"), ("chat_template", "chat template"),
        ("aux_layers", "set of aux layers"),
    ):  # fmt: skip
        if by_hash(said.get(key)) != by_hash(wanted[key]):
            yield PairingError(
                f"the hidden states of {path} are of another {what}: {shown(said.get(key))}, not"
                f" {shown(wanted[key])}.",
                AGAIN,
            )
    if "data" in wanted and by_hash(said["data"]) != by_hash(wanted["data"]):
        yield RequestError(
            f"{path} was made of other data than data.data_path.", f"Leave the key out, or {OTHER}"
        )
    theirs = said.get("recipe", {})
    for key in DATA_KEYS:
        if theirs.get(key) != recipe[key]:
            yield RequestError(
                f"{path} was made with {key} {theirs.get(key)!r}; the recipe says {recipe[key]!r}.",
                f"Write {theirs.get(key)!r}, or {OTHER}",
            )


def by_hash(value: Any) -> Any:
    """What of a value says that it is the same, whatever its name."""
    return value.get("identity", value.get("sha256")) if isinstance(value, dict) else value


def shown(value: Any) -> str:
    """A value in a message; of a base its name and the beginning of its hash."""
    if isinstance(value, dict):
        return f"{value.get('name')} ({str(value.get('identity'))[:12]})"
    return f"{value[:12]}" if isinstance(value, str) else str(value)
