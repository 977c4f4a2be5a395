"""What is asked of a chat template beside its messages.

Knows the values. Knows no template and no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from edgespec.prompts import checks
from edgespec.prompts.checks import Check
from edgespec.prompts.places import JsonPlace
from edgespec.prompts.tools import chat_template_kwargs, tools

THINKING = "enable_thinking"


class PromptOptions(TypedDict, total=False):
    """How messages become a prompt, as all forms of a request take it: see `Rendering`."""

    enable_thinking: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    allow_control_tokens: bool


class RenderOptions(PromptOptions, total=False):
    """The same, with what else input.json has."""

    apply_chat_template: bool
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True)
class Rendering:
    """How messages become a prompt.

    `tools` are functions that the model may call, as OpenAI's clients write them, and
    `chat_template_kwargs` further variables that the template reads, by name. Without
    `allow_control_tokens` a control token that is spelled in a text stays text. Raises RequestError
    for values that input.json could not have either.
    """

    apply_chat_template: bool = True
    add_generation_prompt: bool = True
    enable_thinking: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    allow_control_tokens: bool = True

    def __post_init__(self) -> None:
        here = JsonPlace("prompt")
        for name, check in RENDERING.items():
            object.__setattr__(self, name, check(getattr(self, name), here.key(name)))
        kwargs = dict(self.variables)
        if THINKING in kwargs:  # where vLLM's clients write it
            there = here.key("chat_template_kwargs").key(THINKING)
            object.__setattr__(self, THINKING, checks.flag(kwargs.pop(THINKING), there))
            object.__setattr__(self, "chat_template_kwargs", kwargs)

    @property
    def variables(self) -> Mapping[str, Any]:
        """The further variables; empty where there are none."""
        return self.chat_template_kwargs or {}

    @property
    def of_template(self) -> str | None:
        """The first of these that only a chat template can follow; None where there is none."""
        asked = {
            THINKING: self.enable_thinking,
            "add_generation_prompt": not self.add_generation_prompt,
            "tools": self.tools,
            "chat_template_kwargs": self.variables,
        }
        return next((name for name, value in asked.items() if value), None)


RENDERING: dict[str, Check[object]] = {
    "apply_chat_template": checks.flag,
    "add_generation_prompt": checks.flag,
    THINKING: checks.flag,
    "tools": tools,
    "chat_template_kwargs": chat_template_kwargs,
    "allow_control_tokens": checks.flag,
}

DEFAULT_RENDERING = Rendering()
