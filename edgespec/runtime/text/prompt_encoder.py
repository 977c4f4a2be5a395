"""Prompts to token ids: messages are rendered by the chat template, texts are encoded, and images
get their places.

Knows the tokenizer and what a prompt may be. How images are read and encoded stands in `vision`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from edgespec.config.values import ImageTokens
from edgespec.errors import RequestError, counted
from edgespec.prompts import ImageItem
from edgespec.runtime.limits import RequestLimits
from edgespec.runtime.text.prompt import (
    Conversation,
    Prompt,
    read_messages,
    read_prompt,
)
from edgespec.runtime.text.prompt_value import PromptValue
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.vision.placeholders import refuse_marks


class ImagePlacer(Protocol):
    """Puts the rows of images into the ids of a prompt."""

    @property
    def tokens(self) -> ImageTokens:
        """The model's own marks of images and videos."""

    def prompt(
        self,
        ids: Sequence[int],
        items: Sequence[ImageItem],
        *,
        check: Callable[[Sequence[int]], None],
        stopping: Callable[[], bool],
    ) -> PromptValue:
        """The prompt of a rendered text's ids, in which the image token stands once an item."""


def never() -> bool:
    """The `stopping` of a run that nothing stops: False."""
    return False


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Renders and encodes for one model; `images` None: it takes none."""

    tokenizer: Tokenizer
    limits: RequestLimits
    images: ImagePlacer | None = None

    def render(
        self,
        messages: Conversation,
        *,
        apply_chat_template: bool = True,
        add_generation_prompt: bool = True,
        enable_thinking: bool = False,
    ) -> str:
        """The text of messages: by the model's chat template, or joined. Raises RequestError for
        what the template rejects."""
        known = read_messages(messages)
        if not apply_chat_template:
            if enable_thinking or not add_generation_prompt:
                flag = "enable_thinking" if enable_thinking else "add_generation_prompt"
                problem = (
                    f"{flag} is a matter of the chat template, and apply_chat_template is false"
                )
                raise RequestError(problem, f"Remove {flag}, or let the template be applied.")
            return "".join(message.content for message in known)
        return self.tokenizer.render(
            known, add_generation_prompt=add_generation_prompt, enable_thinking=enable_thinking
        )

    def encode(self, prompt: Prompt, *, enable_thinking: bool = False) -> Sequence[int]:
        """The token ids of a prompt, with the rows of its images where it has some. Raises
        RequestError for what is none, and what `encode_rendered` does."""
        known = prompt if isinstance(prompt, PromptValue) else read_prompt(prompt)
        if isinstance(known, tuple):
            rendered = self.render(known, enable_thinking=enable_thinking)
            add = not self.tokenizer.template.has_special_tokens
            return self.encode_rendered(rendered, known, add_special_tokens=add)
        if enable_thinking:
            message = (
                "enable_thinking is a matter of the chat template, and the prompt has no messages"
            )
            raise RequestError(message, "Give messages, or leave it out.")
        if isinstance(known, str):
            return self.tokenizer.encode(known, add_special_tokens=True)
        return known

    def encode_rendered(
        self,
        rendered: str,
        messages: Conversation,
        *,
        add_special_tokens: bool,
        stopping: Callable[[], bool] = never,
    ) -> Sequence[int]:
        """The ids of rendered messages, with the rows of their images where they have some.

        A text of theirs must not have the model's own mark of an image, unless they were joined
        without a template, which adds special tokens; then the marks are the caller's. `stopping`
        is asked before each image. Raises RequestError or LimitError for images that cannot be
        taken, what opening and running the encoder raise, and Stopped.
        """
        known = read_messages(messages)
        if self.images is not None and not add_special_tokens:
            tokens = self.images.tokens
            image, video = map(self.tokenizer.token, (tokens.image, tokens.video))
            refuse_marks(known, image=image, video=video)
        ids = self.tokenizer.encode(rendered, add_special_tokens=add_special_tokens)
        items = [item for message in known for item in message.images]
        if not items:
            return ids
        if self.images is None:
            problem = (
                f"the prompt has {counted(len(items), 'image')}, and there is no image encoder"
            )
            raise RequestError(
                problem,
                "Name its directory, ENGINES/visual, by `multimodal_engine_dir`, or remove the"
                " images.",
            )
        check = partial(self.limits.check_prompt, drafts=False)
        return self.images.prompt(ids, items, check=check, stopping=stopping)
