"""A GGUF file as a checkpoint: a small directory in edgespec's cache, with a config.json, a
tokenizer and a note of where the weights lie, which stay there.

Knows directories. The directory's name has a hash of the headers and the files' place, so that a
file that changed is another checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from edgespec import __version__
from edgespec.artifacts import atomic
from edgespec.checkpoint.digests import Digests
from edgespec.checkpoint.gguf.config import config_of, form_of
from edgespec.checkpoint.gguf.header import Header, read_model
from edgespec.checkpoint.gguf.sidecars import generation_config, tokenizer_files
from edgespec.checkpoint.gguf.tensors import tensors_of
from edgespec.checkpoint.source import StoredTensors, read_json
from edgespec.errors import CheckpointError
from edgespec.families import parse_model_config

logger = logging.getLogger(__name__)

FORMAT = 1  # of the directory; raise it when one of before cannot be read
NOTE = "gguf.json"  # in the directory
SUFFIX = ".gguf"


def is_gguf(path: Path) -> bool:
    """Whether a path is a file of that name."""
    return path.suffix == SUFFIX and path.is_file()


def directory_of(path: Path) -> Path:
    """The checkpoint directory of a GGUF file, made where it is not there. Raises as `read_model`,
    `config_of` and `tensors_of` do, and OutputError where the cache cannot be written."""
    header = read_model(path.resolve())
    files = [str(file) for file in header.files]
    key = json.dumps([FORMAT, __version__, header.sha256, files])
    name = f"{path.stem[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    root = atomic.user_cache() / "gguf"
    directory = root / name
    if directory.is_dir():
        return directory
    texts = _texts(header)
    with atomic.writing(directory):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Two runs may begin with the same file: one writes, the other finds it
        with atomic.locked(root.parent):
            if not directory.is_dir():
                with atomic.staged_directory(directory) as staging:
                    for file, data in texts.items():
                        (staging / file).write_bytes(data)
    return directory


def find(path: Path, *, allow_pickle: bool) -> StoredTensors | None:
    """The tensors of such a directory; None for any other. Raises CheckpointError where the file is
    gone or has another header."""
    note = path / NOTE
    if not note.is_file():
        return None
    kept = read_json(note)
    first = Path(str(kept.get("file")))
    digests = Digests(())
    header = read_model(first)
    digests = Digests(header.files)
    if header.sha256 != kept.get("sha256"):
        raise CheckpointError(f"{first} was changed since it was opened.", "Give the file again.")
    tensors = _tensors(header, read_json(path / "config.json"), str(first))
    return StoredTensors.of_files(tensors, digests)


def _texts(header: Header) -> dict[str, bytes]:
    """The files of the directory. What the weights lack is found before anything is written."""
    config = config_of(header)
    _tensors(header, config, str(header.files[0]))
    note = {"format": FORMAT, "file": str(header.files[0]), "sha256": header.sha256}
    objects = {
        "config.json": config,
        "generation_config.json": generation_config(header.metadata),
        NOTE: note,
    }
    texts = {name: json.dumps(value, indent=2).encode() for name, value in objects.items()}
    return texts | tokenizer_files(header.metadata)


def _tensors(header: Header, config: dict[str, Any], source: str) -> Any:
    _, names = form_of(header)
    model = parse_model_config(config, source)
    return tensors_of(header, names, model.decoder)
