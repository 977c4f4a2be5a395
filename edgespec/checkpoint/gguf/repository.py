"""Which files of a repository a name such as `owner/repo:Q4_K_M` means, and whether the first bytes
of one are those of a model that can be read.

Knows file names and headers. hub.py asks the network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from edgespec.checkpoint.gguf.config import form_of
from edgespec.checkpoint.gguf.encoder import best, is_named
from edgespec.checkpoint.gguf.header import SPLIT, Header, read_beginning
from edgespec.checkpoint.gguf.source import SUFFIX
from edgespec.checkpoint.gguf.tokenizer import refusal
from edgespec.checkpoint.source import some_of
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families.base import GgufForm

BEGINNING_BYTES = 2**20  # all keys before the tokens
# What llama.cpp and those who publish with it call a quantization
_QUANT = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))$", re.I)


def models_of(files: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The GGUF models among a repository's files: the first file -> all its parts. Raises
    CheckpointError where a part is missing."""
    there = {file for file in files if file.lower().endswith(SUFFIX)}
    models: dict[str, tuple[str, ...]] = {}
    for file in sorted(there):
        name = PurePosixPath(file).name
        if is_named(name):
            continue
        match = SPLIT.fullmatch(file)
        if match is None:
            models[file] = (file,)
        elif int(match[2]) == 1:
            count = int(match[4])
            parts = tuple(f"{match[1]}-{i:05}{match[3]}" for i in range(1, count + 1))
            if missing := set(parts) - there:
                raise CheckpointError(
                    f"the repository has no {min(missing)}, one of {count} parts.",
                    "Take another quantization.",
                )
            models[file] = parts
    return models


def chosen(repo_id: str, files: Iterable[str], wanted: str) -> tuple[str, ...]:
    """The files of the model that is meant by a quantization or by a file's name, in any case; the
    first one first. Raises CheckpointError with the choices for none and for several."""
    models, low = models_of(files), wanted.lower()
    if low.endswith(SUFFIX):
        found = [file for file in models if low in (file.lower(), PurePosixPath(file).name.lower())]
    else:
        ends = re.compile(rf"(?:^|[-._/]){re.escape(low)}(?:$|/)")
        found = [file for file in models if ends.search(_stem(file).lower())]
        exact = [file for file in found if quantization(file) == wanted.upper()]
        found = exact if len(exact) == 1 else found
    if len(found) == 1:
        return models[found[0]]
    several = f"{len(found)} models" if found else "no model"
    raise CheckpointError(
        f"{repo_id} has {several} of GGUF named {wanted!r}.", choices(repo_id, found or models)
    )


def choices(repo_id: str, models: Iterable[str]) -> str:
    """The names by which the models of a repository can be asked for."""
    names = list(models)
    quants = [quantization(name) for name in names]
    tags = [
        quant if quant and quants.count(quant) == 1 else name
        for name, quant in zip(names, quants, strict=True)
    ]
    if not tags:
        return f"{repo_id} has no GGUF files: name it without `:`."
    return f"Name one of its models: {some_of(f'{repo_id}:{tag}' for tag in tags)}."


def quantization(file: str) -> str | None:
    """`Q4_K_M` of `Model-Q4_K_M.gguf`, or None."""
    match = _QUANT.search(PurePosixPath(_stem(file)).name)
    return match and match[1].upper()


def encoder_of(files: Iterable[str], first: str) -> str | None:
    """The image encoder beside a model, of several the one with the best weights."""
    beside = [file for file in files if is_named(file) and Path(file).parent == Path(first).parent]
    return best(beside) if beside else None


def form_of_beginning(data: bytes, name: str) -> GgufForm:
    """How the converter writes the architecture of a file, by its first bytes. Raises
    UnsupportedModel or CheckpointError where this version does not read it or its tokenizer."""
    metadata = read_beginning(data, Path(name))
    _, form = form_of(Header((Path(name),), metadata, {}, ""))
    known = {"tokenizer.ggml.model", "tokenizer.ggml.pre"} <= metadata.keys()
    if known and (error := refusal(metadata)) is not None:
        raise UnsupportedModel(f"{name}: {error.what}", error.remedy)
    return form


def _stem(file: str) -> str:
    """A file's path without the suffix and the number of a part."""
    match = SPLIT.fullmatch(file)
    return match[1] if match else file[: -len(SUFFIX)]
