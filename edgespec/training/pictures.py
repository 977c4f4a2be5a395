"""Images in conversations: where they stand in the tokens of a base, and what it reads of them.

Knows the base's own image processor, as engines read it (`edgespec.images`, bit for bit that of
transformers), and its positions. A picture is decoded when it is checked and again for each batch:
none is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.config import ModelConfig
from edgespec.errors import RequestError, UnsupportedModel
from edgespec.images import ImageReader, ImageRules, read_processor
from edgespec.prompts import ImageItem
from edgespec.vision.grid import Grid
from edgespec.vision.placeholders import expand
from edgespec.vision.positions import prompt_positions

Messages = Sequence[Mapping[str, Any]]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a conversation, its patches by axis, and the hash of what is read of it."""

    item: ImageItem
    grid: Grid
    key: str


class Pictures:
    """Reads the images of conversations for one base."""

    def __init__(self, model: ModelConfig, processor_dir: Path, image_dir: Path) -> None:
        """Relative paths begin at `image_dir`. Raises CheckpointError and UnsupportedModel for a
        directory without a processor that is known."""
        assert model.vision is not None
        assert model.image_tokens is not None
        self.tokens, self.merge_size = model.image_tokens, model.vision.merge_size
        rules = ImageRules(directory=image_dir, roots=(Path("/"),))
        self.reader = ImageReader(rules, read_processor(processor_dir))

    def of(self, messages: Messages, where: str) -> tuple[Picture, ...]:
        """The images of a conversation. Raises RequestError with `where` for one that cannot be
        read."""
        found = []
        for name in image_names(messages):
            try:
                item = ImageItem(name)
                if item.kind == "url":
                    raise RequestError(f"image {item.shown} is a URL.", "Save it to a file.")
                image = self.reader.read(item)
            except RequestError as error:
                raise RequestError(f"{where}: {error.what}", error.remedy) from error
            found.append(Picture(item, image.grid, image.key))
        return tuple(found)

    def expanded(
        self, ids: Ids, answered: NDArray[np.bool_], pictures: Sequence[Picture], where: str
    ) -> tuple[Ids, NDArray[np.bool_]]:
        """Ids [S] and which of them are of answers, with the image token once for each row of an
        image. Raises RequestError where the text has another number of places for images."""
        counts = [int(np.prod(p.grid)) // self.merge_size**2 for p in pictures]
        try:
            whole = expand(ids.tolist(), self.tokens, counts)
        except RequestError as error:
            raise RequestError(f"{where}: {error.what}", error.remedy) from error
        repeats = np.ones(len(ids), np.int64)
        repeats[ids == self.tokens.image] = counts
        return np.array(whole.tokens, np.int64), np.repeat(answered, repeats)

    def positions(self, ids: Ids, pictures: Sequence[Picture]) -> Ids:
        """The positions [S, 3] of ids [S]."""
        starts = np.flatnonzero((ids == self.tokens.image) & (np.roll(ids, 1) != self.tokens.image))
        grids = [(int(s), p.grid) for s, p in zip(starts, pictures, strict=True)]
        return prompt_positions(len(ids), grids, self.merge_size)

    def inputs(self, texts: Iterable[tuple[Ids, Sequence[Picture]]], width: int) -> dict[str, Any]:
        """What the base reads beside the ids of texts: `positions` [3, B, width], and of images,
        where there are any, `pixel_values` [P, D] and `image_grid_thw` [N, 3]."""
        texts = [*texts]
        placed = [self.positions(ids, pictures) for ids, pictures in texts]
        padded = [np.pad(p, ((0, width - len(p)), (0, 0)), mode="edge") for p in placed]
        found: dict[str, Any] = {"positions": np.stack(padded).transpose(2, 0, 1)}
        items = [picture for _, pictures in texts for picture in pictures]
        if items:
            images = [self.reader.read(picture.item) for picture in items]
            found["pixel_values"] = np.concatenate([image.pixel_values for image in images])
            found["image_grid_thw"] = np.array([picture.grid for picture in items], np.int64)
        return found


def image_names(messages: Messages) -> list[str]:
    """The paths of a conversation's images, in order."""
    parts = [m["content"] for m in messages if not isinstance(m["content"], str)]
    return [str(part["image"]) for content in parts for part in content if part["type"] == "image"]


def pictures_of(
    base: str,
    model: ModelConfig,
    items: Iterable[tuple[str, Messages]],
    trains: bool,
    processor_dir: Path,
    image_dir: Path,
) -> Pictures | None:
    """What reads the images of conversations; None where there are none. Raises RequestError, with
    the line, for a base that reads text alone, and UnsupportedModel where the method does.
    """  # fmt: skip
    first = next((where for where, messages in items if image_names(messages)), None)
    if first is None:
        return None
    if model.vision is None or model.image_tokens is None:
        raise RequestError(
            f"{first} has an image, and {base} reads text alone.",
            "Give a vision-language base, or conversations without images.",
        )
    if not trains:
        raise UnsupportedModel(
            f"{first} has an image, and drafts of this method are trained on text alone here.",
            "Give conversations without images.",
        )
    if not image_dir.is_dir():
        raise RequestError(
            f"data.vlm_img_dir {image_dir} is not a directory.", "Name that of the images."
        )
    return Pictures(model, processor_dir, image_dir)
