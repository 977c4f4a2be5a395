"""Prompts to token ids: messages are rendered by the chat template, texts are encoded, and images
get their places.

Knows the tokenizer and what a prompt may be. How images are read and encoded stands in `vision`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from edgespec.config.values import ImageTokens
from edgespec.errors import RequestError, counted
from edgespec.prompts import ImageItem, Message
from edgespec.prompts.rendering import DEFAULT_RENDERING, Rendering
from edgespec.runtime.limits import RequestLimits
from edgespec.runtime.text.control_tokens import unmarked
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

    def render(self, messages: Conversation, asked: Rendering = DEFAULT_RENDERING) -> str:
        """The text of messages: by the model's chat template, or joined. Raises RequestError for
        what the template rejects."""
        known = read_messages(messages)
        if asked.apply_chat_template:
            return self.tokenizer.render(known, asked)
        if (name := asked.of_template) is not None:
            problem = f"{name} is a matter of the chat template, and apply_chat_template is false"
            raise RequestError(problem, f"Remove {name}, or let the template be applied.")
        return "".join(message.content for message in known)

    def encode(self, prompt: Prompt, asked: Rendering = DEFAULT_RENDERING) -> Sequence[int]:
        """The token ids of a prompt, with the rows of its images where it has some. Raises
        RequestError for what is none, and what `encode_rendered` does."""
        known = prompt if isinstance(prompt, PromptValue) else read_prompt(prompt)
        if isinstance(known, tuple):
            return self.encode_rendered(self.render(known, asked), known, asked)
        if (name := asked.of_template) is not None:
            message = f"{name} is a matter of the chat template, and the prompt has no messages"
            raise RequestError(message, "Give messages, or leave it out.")
        if isinstance(known, str):
            marked = known if asked.allow_control_tokens else self.marked(known)
            return self.ids_of(known, marked, add_special_tokens=True)
        return known

    def ids_of(self, text: str, marked: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text, once it may fit, and of the same in which control tokens are marked
        that are to stay text. Raises LimitError, and what the tokenizer does."""
        self.limits.check_text(text, lambda: self.tokenizer.chars_per_token)
        if marked == text:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self.tokenizer.encode_marked(marked, add_special_tokens=add_special_tokens)

    def marked(self, value: Any) -> Any:
        """What comes from a user, with the control tokens marked that are spelled in it."""
        return self.tokenizer.control_tokens.marked(value)

    def rendered_with_marks(
        self, rendered: str, messages: Sequence[Message], asked: Rendering
    ) -> str:
        """Rendered messages, with the control tokens marked that are spelled in their texts. Raises
        RequestError where the template reads such a token as more than a text."""
        texts = [message.mapped(self.marked) for message in messages]
        tools, variables = self.marked(asked.tools), self.marked(asked.variables)
        own = replace(asked, tools=tools, chat_template_kwargs=variables)
        if texts == [*messages] and own == asked:
            return rendered
        marked = self.render(texts, own)
        if unmarked(marked) != rendered:
            message = "A text has a control token that the chat template does not take for text"
            raise RequestError(f"{message}.", "Remove it, or set `allow_control_tokens`.")
        return marked

    def encode_rendered(
        self,
        rendered: str,
        messages: Conversation,
        asked: Rendering = DEFAULT_RENDERING,
        *,
        stopping: Callable[[], bool] = never,
    ) -> Sequence[int]:
        """The ids of rendered messages, with the rows of their images where they have some.

        A text of theirs must not have the model's own mark of an image, unless they were joined
        without a template, which adds special tokens; then the marks are the caller's. `stopping`
        is asked before each image. Raises RequestError or LimitError for images that cannot be
        taken, what opening and running the encoder raise, and Stopped.
        """
        known = read_messages(messages)
        by_template = asked.apply_chat_template and self.tokenizer.template.has_special_tokens
        add_special_tokens = not by_template
        if self.images is not None and by_template:
            tokens = self.images.tokens
            image, video = map(self.tokenizer.token, (tokens.image, tokens.video))
            refuse_marks(known, image=image, video=video)
        marked = rendered
        if not asked.allow_control_tokens:
            marked = self.rendered_with_marks(rendered, known, asked)
        ids = self.ids_of(rendered, marked, add_special_tokens=add_special_tokens)
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
