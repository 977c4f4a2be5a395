"""Random pictures for vision-language toys, and what transformers makes of prompts with them.

Knows transformers' own encoder and generate; rows of images come from it as the runtime takes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgespec.runtime.text.prompt_value import ImageSlots, PromptValue
from edgespec.vision.rows import ImageRows
from tests.toys.vl import IMAGE, MERGE, PATCH, VISION_END, VISION_START


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixel values [P, D] of an image of `height` by `width` patches."""

    pixels: torch.Tensor
    height: int
    width: int

    @classmethod
    def random(cls, seed: int, height: int, width: int) -> Picture:
        generator = torch.Generator().manual_seed(seed)
        size = height * width, 3 * 2 * PATCH * PATCH
        return cls(torch.randn(size, generator=generator), height, width)

    @property
    def grid(self) -> tuple[int, int, int]:
        return 1, self.height, self.width

    @property
    def pixel_values(self) -> np.ndarray:
        return self.pixels.numpy()

    @property
    def key(self) -> str:
        return hashlib.sha256(self.pixel_values.tobytes()).hexdigest()

    @property
    def source(self) -> str:
        return "a random picture"

    @property
    def num_rows(self) -> int:
        return self.height * self.width // MERGE**2


Part = Sequence[int] | Picture


def tokens_of(parts: Sequence[Part]) -> list[int]:
    """The ids of a prompt: image tokens between the marks where a picture stands."""
    out: list[int] = []
    for part in parts:
        if isinstance(part, Picture):
            out += [VISION_START, *[IMAGE] * part.num_rows, VISION_END]
        else:
            out += part
    return out


def inputs_of(parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """What transformers reads of such a prompt."""
    ids = torch.tensor([tokens_of(parts)])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    pictures = [part for part in parts if isinstance(part, Picture)]
    if pictures:
        inputs["pixel_values"] = torch.cat([picture.pixels for picture in pictures])
        inputs["image_grid_thw"] = torch.tensor([picture.grid for picture in pictures])
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


def rows_of(model: Any, picture: Picture) -> ImageRows:
    """A picture's rows, by transformers' encoder."""
    with torch.no_grad():
        found = model.model.get_image_features(picture.pixels, torch.tensor([picture.grid]))
    (embeds,) = found.pooler_output
    layers = getattr(found, "deepstack_features", None)
    extras = {"deepstack_embeds": torch.cat(list(layers), -1).numpy()} if layers else {}
    return ImageRows(embeds.numpy(), extras, picture.grid, picture.key)


def prompt_of(model: Any, parts: Sequence[Part]) -> PromptValue:
    """The same prompt as the runtime takes it."""
    return prompt_with(lambda picture: rows_of(model, picture), parts)


def prompt_with(rows: Callable[[Picture], ImageRows], parts: Sequence[Part]) -> PromptValue:
    """The same with the rows that `rows` makes of each picture."""
    images, start = [], 0
    for part in parts:
        if isinstance(part, Picture):
            images.append(ImageSlots(start + 1, rows(part)))
        start += len(tokens_of([part]))
    return PromptValue.with_images(tokens_of(parts), images, MERGE)


def inputs_of_layers(model: Any, parts: Sequence[Part], layers: Sequence[int]) -> np.ndarray:
    """[S, k*H], the stream before each of `layers`, in one pass over a prompt."""
    found: dict[int, torch.Tensor] = {}
    hooks = [
        model.model.language_model.layers[i].register_forward_pre_hook(
            lambda _, args, i=i: found.__setitem__(i, args[0][0])
        )
        for i in layers
    ]
    try:
        logits_of(model, parts)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([found[i] for i in layers], -1).numpy()


def greedy(model: Any, parts: Sequence[Part], count: int) -> list[int]:
    """`count` ids by transformers' generate, which none of them ends."""
    inputs = inputs_of(parts)
    length = inputs["input_ids"].shape[1]
    with torch.no_grad():
        found = model.generate(
            **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None
        )
    ids: list[int] = found[0, length:].tolist()
    assert len(ids) == count
    return ids


def logits_of(model: Any, parts: Sequence[Part]) -> np.ndarray:
    """[S, V] of one pass over a prompt."""
    with torch.no_grad():
        found: np.ndarray = model(**inputs_of(parts)).logits[0].float().numpy()
    return found
