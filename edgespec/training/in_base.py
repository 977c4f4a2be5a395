"""A draft that stands in its base's checkpoint: what it begins with, and the copy of the base with
the draft that is written. Knows no method.

The copy shares the base's files where it can: what holds none of the draft is a hard link, and the
bytes of the draft's tensors are replaced in a copy of the file that has them.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.names import PREDICTION_HEADS
from edgespec.checkpoint.source import TensorInfo
from edgespec.config import DraftConfig
from edgespec.errors import PairingError, UnsupportedModel
from edgespec.safe_read.tensors import numpy_dtype
from edgespec.training.files import CONFIG, DraftFiles
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, TrainRow

(ROOT,) = PREDICTION_HEADS
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class FilesInBase(DraftFiles):
    """The files of a draft that is written into a copy of its base."""

    base: Checkpoint = field(kw_only=True)

    @property
    def changed(self) -> set[Path]:
        """The files that hold some of the draft."""
        stored = self.base.tensors
        return {file_of(stored[name]) for name in self.names.values() if name in stored}

    def extra_bytes(self, target: Path) -> int:
        """All files of the base, or those that are not linked where both have one file system."""
        there = next(parent for parent in target.absolute().parents if parent.exists())
        linked = there.stat().st_dev == self.base.path.stat().st_dev
        files = self.changed if linked else {*map(file_of, self.base.tensors.values())}
        return sum(path.stat().st_size for path in files)

    def complete(self, kept: Path, target: Path) -> None:
        """Makes the copy of the base in the empty directory `target`, with the draft in `kept`."""
        stored, changed = self.base.tensors, self.changed
        weights = {file_of(info) for info in stored.values()}
        places = {path: path.name for path in weights - changed}
        if not changed:
            places = shard_names(sorted(weights))
        for path in self.base.path.iterdir():
            if path.name.startswith(".") or not path.is_file():
                continue
            name = places.get(path)
            if name is None:
                shutil.copy(path, target / path.name)
            else:
                link(path, target / name)
        tensors = load_file(kept / self.weights)
        if changed:
            for name, tensor in tensors.items():
                replace_bytes(stored[name], target, tensor)
        else:
            self.add(tensors, places, target)
        text = json.dumps(self.config, indent=2) + "\n"
        (target / CONFIG).write_text(text, encoding="utf-8")

    def add(self, tensors: dict[str, Any], places: dict[Path, str], target: Path) -> None:
        """Writes tensors that the base has not into one more file, and the index of all."""
        added = f"model-{len(places) + 1:05}-of-{len(places) + 1:05}.safetensors"
        save_file(tensors, target / added, metadata={"format": "pt"})
        stored = self.base.tensors
        files = {name: places[file_of(info)] for name, info in stored.items()}
        files |= dict.fromkeys(tensors, added)
        total = sum(info.num_bytes for info in stored.values())
        total += sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def file_of(info: TensorInfo) -> Path:
    """The file of a tensor of a base that `opened` took."""
    assert info.file is not None
    return info.file


def shard_names(files: list[Path]) -> dict[Path, str]:
    """The names of a base's files when there is one more."""
    count = len(files) + 1
    return {path: f"model-{i:05}-of-{count:05}.safetensors" for i, path in enumerate(files, 1)}


def link(source: Path, target: Path) -> None:
    """A hard link to a file, or a copy where there can be none."""
    try:
        os.link(source.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def replace_bytes(info: TensorInfo, directory: Path, tensor: Any) -> None:
    """Writes a tensor over the one of its name and shape in a copy of the file, in its type."""
    values = tensor.float().numpy().astype(numpy_dtype(info.dtype))
    assert values.shape == info.shape, info.name
    with (directory / file_of(info).name).open("r+b") as file:
        file.seek(info.offset)
        file.write(values.tobytes())


def opened(
    facts: BaseFacts, recipe: TrainRecipe, row: TrainRow, init: str | None
) -> tuple[DraftConfig, DraftFiles, Checkpoint | None]:
    """Configuration and files of the draft of a base, and the checkpoint whose draft it begins
    with: `init`, or the base itself where it has one and the recipe does not ask for a new one.

    Raises UnsupportedModel for weights in other files than safetensors, and PairingError for an
    `init` of another base.
    """
    base = facts.checkpoint
    if any(
        info.file is None or info.file.suffix != ".safetensors" for info in base.tensors.values()
    ):
        raise UnsupportedModel(
            f"{base.place}: its draft is written into a copy of it, and its weights are not in"
            " safetensors files.",
            "Give the original in safetensors.",
        )
    own = any(name.startswith(ROOT) for name in base.tensors)
    if own:
        row.names(base, None)  # type: ignore[arg-type]
    raw = base.config if own else row.config(facts, recipe)
    shapes = row.shapes(raw)
    assert row.parse is not None
    config = row.parse(raw, shapes, base.config_source)
    started = base if own and not recipe.section("new_head") else None
    if init is not None:
        started = open_checkpoint(init)
        if read_quantization(started) is not None:
            raise UnsupportedModel(f"`init`: {started.place} is quantized.", "Pass the original.")
        _, names = row.names(started, config)
        theirs = {own: started.tensors[name].shape for own, name in names.items()}
        if theirs != dict(shapes):
            raise PairingError(
                f"`init`: the draft in {started.place} has other sizes than one of {base.place}.",
                "Pass one of this base.",
            )
    return (
        config,
        FilesInBase(raw, {name: f"{ROOT}{name}" for name in shapes}, {}, base=base),
        started,
    )
