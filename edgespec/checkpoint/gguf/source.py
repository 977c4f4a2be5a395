"""A GGUF file as a checkpoint: a small directory in edgespec's cache, with a config.json, a
tokenizer and a note of where the weights lie, which stay there.

Knows directories. The directory's name has a hash of the headers and the files' place, so that a
file that changed is another checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from edgespec.artifacts import atomic
from edgespec.artifacts.file_names import GGUF_NOTE as NOTE
from edgespec.artifacts.file_names import PROCESSOR_FILES, TOKENIZER
from edgespec.artifacts.provenance import installed_version
from edgespec.checkpoint.digests import Digests
from edgespec.checkpoint.gguf.config import config_of, form_of, in_words_of
from edgespec.checkpoint.gguf.encoder import (
    VISION,
    encoder_beside,
    encoder_tensors,
    image_tokens,
    processor_config,
    vision_config,
)
from edgespec.checkpoint.gguf.header import Header, parts_of, read_model
from edgespec.checkpoint.gguf.sidecars import generation_config, tokenizer_files
from edgespec.checkpoint.gguf.tensors import tensors_of
from edgespec.checkpoint.gguf.tokenizer import refusal
from edgespec.checkpoint.gguf.types import REROUNDED
from edgespec.checkpoint.source import DOWNLOAD_AGAIN, StoredTensors, TensorInfo, read_json, reading
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import FAMILIES, parse_model_config
from edgespec.safe_read.regular import read_regular

logger = logging.getLogger(__name__)

FORMAT = 3  # raise it when other files are made of the same header
SUFFIX = ".gguf"
KEPT_S = 24 * 3600  # a directory that another run may be reading


def is_gguf(path: Path) -> bool:
    """Whether a path is meant as a file in this format, by its name; `owner/repo:file.gguf` is a
    name of the hub."""
    named = ":" not in path.name or path.is_file()
    return path.suffix.lower() == SUFFIX and named and not path.is_dir()


def directory_of(path: Path) -> Path:
    """The checkpoint directory of a GGUF file, made where it is not there. Raises as `read_model`,
    `config_of` and `tensors_of` do, and OutputError where the cache cannot be written."""
    if not path.is_file():
        raise CheckpointError(f"there is no file {str(path)!r}.", "Pass a GGUF file's path.")
    header = read_model(path.parent.resolve() / path.name)  # the hub's cache links to other names
    encoder = encoder_beside(header, form_of(header)[1].encoder)
    files = [[str(file) for file in one.files] + [one.sha256] for one in (header, encoder) if one]
    tokenizer = _tokenizer_beside(header)
    own = tokenizer and hashlib.sha256(tokenizer).hexdigest()
    key = json.dumps([FORMAT, installed_version("edgespec"), files, own])
    name = f"{path.stem[:80]}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    root = atomic.user_cache() / "gguf"
    directory = root / name
    if directory.is_dir():
        return directory
    texts = _texts(header, encoder, tokenizer)
    with atomic.writing(directory):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Two runs may begin with the same file: one writes, the other finds it
        with atomic.locked(root.parent):
            if not directory.is_dir():
                _remove_outdated(root, header.files[0])
                with atomic.staged_directory(directory) as staging:
                    for file, data in texts.items():
                        (staging / file).write_bytes(data)
    return directory


def keep(directory: Path, owner: object) -> None:
    """Keeps such a directory where it is as long as what was opened of it is there."""
    with atomic.writing(directory):
        atomic.keep(directory, owner)
        with suppress(OSError):  # its last use; a cache may be read-only
            os.utime(directory / NOTE)


def is_outdated(directory: Path) -> bool:
    """Whether this version makes others of the same file, or the file is gone."""
    kept = read_json(directory / NOTE)
    return kept.get("format") != FORMAT or not Path(str(kept.get("file"))).is_file()


def _remove_outdated(root: Path, first: Path) -> None:
    """Removes the directories of this file as it was before, once they are a day old."""
    for note in root.glob(f"*/{NOTE}"):
        with suppress(CheckpointError):
            old = time.time() - note.stat().st_mtime > KEPT_S
            if old and file_of(note.parent) == first:
                atomic.remove_unused(note.parent)


def file_of(path: Path) -> Path | None:
    """The first file that such a directory stands for; None for any other directory."""
    note = path / NOTE
    return Path(str(read_json(note).get("file"))) if note.is_file() else None


def find(path: Path, *, allow_pickle: bool) -> StoredTensors | None:
    """The tensors of such a directory; None for any other. Raises CheckpointError where the file is
    gone or has another header."""
    first = file_of(path)
    if first is None:
        return None
    note = read_json(path / NOTE)
    kept = [(first, note.get("sha256"))]
    if note.get("encoder") is not None:
        kept.append((Path(str(note["encoder"])), note.get("encoder_sha256")))
    digests = Digests([part for file, _ in kept for part in parts_of(file)])
    headers = [read_model(file) for file, _ in kept]
    for header, (file, sha256) in zip(headers, kept, strict=True):
        if header.sha256 != sha256:
            raise CheckpointError(f"{file} was changed since it was opened.", "Give it again.")
    header, encoder = headers[0], headers[1] if len(headers) > 1 else None
    tensors = _tensors(header, encoder, read_json(path / "config.json"))
    _tell_rerounded(
        first, *sorted({t.type.name for t in header.tensors.values() if t.type.numbers})
    )
    return StoredTensors.of_files(tensors, digests)


@cache  # once in a run, however often the file is opened
def _tell_rerounded(file: Path, *names: str) -> None:
    if names:
        logger.warning(
            "%s: %s is rounded again, to int8 in blocks of %d: more bytes, and nearly the same"
            " weights",
            *(file.name, ", ".join(names), REROUNDED),
        )


def _tokenizer_beside(header: Header) -> bytes | None:
    """The tokenizer.json beside the file, where the file's own tokenizer cannot be read."""
    path = header.files[0].with_name(TOKENIZER)
    if refusal(header.metadata) is None or not path.is_file():
        return None
    with reading(path):
        return read_regular(path)


def _texts(header: Header, encoder: Header | None, tokenizer: bytes | None) -> dict[str, bytes]:
    """The files of the directory. What the weights lack is found before anything is written."""
    (architecture, form), config = form_of(header), config_of(header)
    family, row = FAMILIES.get(architecture), form.encoder
    note = {"format": FORMAT, "file": str(header.files[0]), "sha256": header.sha256}
    objects: dict[str, Any] = {}
    if encoder is not None and row is not None and family is not None and family.vision is not None:
        vision = vision_config(encoder, row, family.vision)
        config |= {VISION: vision} | image_tokens(header.metadata)
        note |= {"encoder": str(encoder.files[0]), "encoder_sha256": encoder.sha256}
        objects[PROCESSOR_FILES[0]] = processor_config(encoder, row, vision)
    _tensors(header, encoder, config)
    texts: dict[str, bytes] = {}
    try:
        if family is not None:  # a draft has the tokens of its base
            objects["generation_config.json"] = generation_config(header.metadata)
            texts = tokenizer_files(header.metadata, tokenizer)
    except (CheckpointError, UnsupportedModel) as error:
        raise type(error)(f"{header.files[0]}: {error.what}", error.remedy) from error
    objects |= {"config.json": config, NOTE: note}
    return texts | {name: json.dumps(value, indent=2).encode() for name, value in objects.items()}


def _tensors(
    header: Header, encoder: Header | None, config: dict[str, Any]
) -> dict[str, TensorInfo]:
    architecture, names = form_of(header)
    if architecture not in FAMILIES:  # a draft: its heads are read as a base's
        config = config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    try:
        model = parse_model_config(config, str(header.files[0]))
    except (CheckpointError, UnsupportedModel) as error:
        # Before the config.json is written, which nobody has seen
        remedy = error.remedy if isinstance(error, UnsupportedModel) else DOWNLOAD_AGAIN
        raise type(error)(in_words_of(names, error.what), remedy) from error
    tensors = tensors_of(header, names, model.decoder)
    if encoder is None or names.encoder is None or model.vision is None:
        return tensors
    return tensors | encoder_tensors(encoder, names.encoder, model.vision)
