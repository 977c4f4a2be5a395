"""What a probe runs: a text's tokens, and the images in it as the base reads them.

Knows the tokenizer, the image processor and the image encoder of a checkpoint; the encoder runs
without an engine. Knows no draft.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.artifacts.atomic import writing
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.tokenizer import refuse_growth
from edgespec.checkpoint.vision import vision_prefix
from edgespec.config import ModelConfig
from edgespec.errors import CheckpointError, RequestError, UnsupportedModel, counted
from edgespec.export.sidecars import copy_tokenizer
from edgespec.export.stepwise import opened
from edgespec.export.vision import encode, encoder_piece
from edgespec.graphs.vision import VisionGraph
from edgespec.images import ImageReader, ImageRules, read_processor
from edgespec.prompts import ImageItem
from edgespec.safe_read.regular import open_regular
from edgespec.safe_read.tokenizer import panics_as
from edgespec.vision.contract import EMBEDS
from edgespec.vision.placeholders import expand
from edgespec.vision.positions import prompt_positions
from edgespec.vision.rows import ImageRows

SHIPPED = Path(__file__).with_name("probe.txt")
MIN_TOKENS, MAX_TOKENS = 16, 512
MAX_CHARACTERS = MAX_TOKENS * 128  # of a text: hardly a token is so long
Array = NDArray[Any]
Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ProbeText:
    """`tokens` [T], of which those from each `starts` on stand for the rows of an image."""

    tokens: Ids
    images: tuple[ImageRows, ...] = ()
    starts: tuple[int, ...] = ()
    merge_size: int = 1

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def positions(self) -> Ids:
        """Those of the rotary embedding: [T], or with images [T, 3]."""
        if not self.images:
            return np.arange(len(self))
        grids = [(s, image.grid) for s, image in zip(self.starts, self.images, strict=True)]
        return prompt_positions(len(self), grids, self.merge_size)

    @cached_property
    def is_text(self) -> NDArray[np.bool_]:
        """[T], False in the slots of images."""
        mask = np.ones(len(self), bool)
        for start, image in zip(self.starts, self.images, strict=True):
            mask[start : start + len(image)] = False
        return mask

    def placed(self, embeds: Array) -> Array:
        """Embeddings [T, H] with rows of images in their slots."""
        rows = embeds.copy()
        for start, image in zip(self.starts, self.images, strict=True):
            rows[start : start + len(image)] = image.embeds
        return rows

    def extras(self, widths: Mapping[str, int]) -> dict[str, Array]:
        """What a base reads of images beside their embeddings [1, T, width], by input."""
        if not self.images:
            return {}
        extras = {name: np.zeros((1, len(self), n), np.float32) for name, n in widths.items()}
        for start, image in zip(self.starts, self.images, strict=True):
            for name, rows in extras.items():
                rows[0, start : start + len(image)] = image.extras[name]
        return extras

    @property
    def image_width(self) -> int | None:
        """H of the rows of images; None without images."""
        return self.images[0].embeds.shape[1] if self.images else None

    def without_images(self) -> ProbeText:
        """The text alone, slots of images left out."""
        return ProbeText(self.tokens[self.is_text])


def read_text(source: Path | None) -> str:
    """The text of a file, as much of it as may be needed, or the shipped one. Raises
    RequestError."""
    path = source or SHIPPED
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            return file.read(MAX_CHARACTERS)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is not UTF-8.", "Convert it: iconv -f latin1 -t utf-8."
        ) from error
    except OSError as error:
        raise RequestError(
            f"{path} cannot be read: {error.strerror}", "Give a text file to `probe_text`."
        ) from error


def text_of(
    base: Checkpoint, model: ModelConfig, text: str, images: Sequence[Path] = ()
) -> ProbeText:
    """A text and its images for a base.

    Images stand where the text has the model's mark of one; where it has none, before it. Raises
    CheckpointError for a damaged tokenizer.json and for a base without what reads images,
    RequestError for too few tokens, for marks of another number than images, and for an image that
    cannot be read.
    """
    ids = tokens_of(base, text)
    if not images:
        return ProbeText(ids)
    vision, tokens = model.vision, model.image_tokens
    if vision is None or tokens is None or vision_prefix(base) is None:
        message = f"{base.place} has no image encoder, and `probe_image` was given"
        raise UnsupportedModel(message, "Leave it out, or give a vision-language model.")
    rows = [encoded(base, model, path) for path in images]
    marks = int((ids == tokens.image).sum())
    if not marks:
        one = [tokens.vision_start, tokens.image, tokens.vision_end]
        ids = np.concatenate([np.array(one * len(rows), np.int64), ids])
    elif marks != len(rows):
        message = f"the probe's text has {counted(marks, 'mark')} of images"
        raise RequestError(
            f"{message}, and `probe_image` gives {len(rows)}",
            "Give as many of one as of the other.",
        )
    whole = expand(ids.tolist(), tokens, [len(image) for image in rows])
    tokens_of_text = np.array(whole.tokens, np.int64)
    return ProbeText(tokens_of_text, tuple(rows), whole.starts, vision.merge_size)


def encoded(base: Checkpoint, model: ModelConfig, path: Path) -> ImageRows:
    """The rows of an image by the encoder in a checkpoint, whose weights stand in a temporary
    directory meanwhile."""
    assert model.vision is not None
    processor = replace(read_processor(base.path).limited(MAX_TOKENS), max_tokens=None)
    image = ImageReader(ImageRules(roots=(path,)), processor).read(ImageItem(str(path)))
    graph = VisionGraph.open(base, model.vision)
    with TemporaryDirectory() as name, writing(Path(name)):
        piece = opened(lambda plan: encoder_piece(graph, plan), Path(name))
        outputs = encode(piece, model.vision, image.pixel_values, image.grid)
    return ImageRows(outputs.pop(EMBEDS), outputs, image.grid, image.key)


def tokens_of(base: Checkpoint, text: str) -> Ids:
    """[T], the text's first tokens, by the base's tokenizer. Raises CheckpointError for a damaged
    tokenizer.json, RequestError for too few tokens."""
    from edgespec.prompts.tokenizer_file import check_growth, normalizer_growth, read_tokenizer

    refuse_growth(base)
    with TemporaryDirectory() as name:
        copy_tokenizer(base, Path(name))
        with panics_as(lambda why: damaged_tokenizer(base, why)):
            try:
                tokenizer = read_tokenizer(Path(name) / "tokenizer.json")
                check_growth(tokenizer, text, normalizer_growth(tokenizer))
                encoding = tokenizer.encode(text)
            except Exception as error:  # what the library raises for any damage
                raise damaged_tokenizer(base, str(error)) from error
    ids = np.array(encoding.ids[:MAX_TOKENS], np.int64)
    if len(ids) < MIN_TOKENS:
        message = f"the probe's text has {len(ids)} tokens; at least {MIN_TOKENS} are needed"
        raise RequestError(
            message, "Give a file with some paragraphs to `probe_text`, or leave it out."
        )
    return ids


def damaged_tokenizer(base: Checkpoint, why: str) -> CheckpointError:
    """The error for a tokenizer.json that cannot be used."""
    message = f"tokenizer.json of {base.place} cannot be used: {why}"
    return CheckpointError(message, "Download it again.")
