"""The places of images in a prompt: one image token in the rendered text, one for each row of the
image in the tokens that the model reads.

Knows token ids and counts. Positions, and the rows themselves, stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from edgespec.config.values import ImageTokens
from edgespec.errors import RequestError, counted
from edgespec.prompts import Message

AN_ITEM = 'an image is an item of its own: {"type": "image", "image": "picture.png"}.'
NO_VIDEO = "of a video, send some frames as image items."


@dataclass(frozen=True, slots=True)
class ExpandedPrompt:
    """`tokens` with the image token once for each row of an image; `starts`: the slot of each
    image's first row."""

    tokens: tuple[int, ...]
    starts: tuple[int, ...]


def refuse_marks(messages: Iterable[Message], *, image: str | None, video: str | None) -> None:
    """Raises RequestError for a text with a model's own mark of an image or a video, such as
    `<|image_pad|>`: the tokenizer would take it for the place of one. None: there is no such token.
    """
    marks = {image: ("an image", AN_ITEM), video: ("a video", NO_VIDEO)}
    for message in messages:
        for mark, (item, remedy) in marks.items():
            if mark and mark in message.content:
                raise RequestError(
                    f"A message of the role {message.role} has the text {mark}, which stands for"
                    f" the rows of {item}.",
                    f"Remove it; {remedy}",
                )


def expand(ids: Sequence[int], tokens: ImageTokens, counts: Sequence[int]) -> ExpandedPrompt:
    """The ids of a rendered prompt with room for its images, in their order.

    `counts` are the images' numbers of rows, each at least 1. Raises RequestError unless the prompt
    has one image token for each of them, and no video token.
    """
    assert all(count > 0 for count in counts)
    prompt = np.asarray(ids, np.int64)
    if np.any(prompt == tokens.video):
        raise RequestError(
            "The prompt has a place for a video, and videos are not read.",
            "Send some frames of the video as image items.",
        )
    places = np.flatnonzero(prompt == tokens.image)
    if len(places) != len(counts):
        raise RequestError(
            f"The prompt has {counted(len(places), 'place')} for images, and the request has"
            f" {counted(len(counts), 'image')}.",
            "Where the chat template is applied, it shows images of some roles alone: put them into"
            " messages of the user. In a prompt of your own, write the model's mark of an image"
            " once for each.",
        )
    repeats = np.ones(len(prompt), np.int64)
    repeats[places] = counts
    starts = np.cumsum(repeats)[places] - repeats[places]
    return ExpandedPrompt(tuple(np.repeat(prompt, repeats).tolist()), tuple(starts.tolist()))
