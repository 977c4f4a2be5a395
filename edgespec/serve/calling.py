"""Which tools an answer may call, and whether it must: what protocols say in fields of their own.

Knows functions as OpenAI's clients write them, and the form of a model's calls. Knows no protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.errors import RequestError
from edgespec.prompts import Guided, Message
from edgespec.prompts.places import show
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.serve.reasoning import ThoughtSplitter
from edgespec.serve.service import Call
from edgespec.serve.tool_calls import AnswerSplitter, CallSplitter, forced, form_of

FORCED = "tools (as tool_choice asks for a call)"  # what holds such an answer to a form
UNKNOWN_FORM = "tools: the model's calls stay text, as their form is not known"


@dataclass(frozen=True, slots=True)
class Calling:
    """`choice` is none, auto, required, or the name of the one function to call, in a tuple.
    `several`: an answer may have more than one call."""

    tools: Sequence[Mapping[str, Any]] = ()
    choice: str | tuple[str] = "auto"
    several: bool = True

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """The functions that the model is told of."""
        return () if self.choice == "none" else self.tools

    def guided(self, tokenizer: Tokenizer) -> Guided | None:
        """The form of an answer that has to be a call. Raises RequestError where it cannot be."""
        if self.choice in ("auto", "none"):
            return None
        named = [*self.choice] if isinstance(self.choice, tuple) else []
        own = [tool for tool in self.tools if not named or tool["function"]["name"] in named]
        if not own:
            message = f"request: tool_choice asks for {show(*named) if named else 'a call'}"
            raise RequestError(f"{message}, which is not in tools.", "Add it.", param="tool_choice")
        form, several = form_of(tokenizer), self.several and not named
        found = None if form is None else forced(form, own, tokenizer, several=several)
        if found is None:
            message = "request: no call can be forced in the form in which this model writes calls."
            raise RequestError(message, "Let tool_choice be auto.", param="tool_choice")
        return found

    async def encode(
        self, call: Call, messages: Sequence[Message], thinking: bool
    ) -> Sequence[int]:
        """The prompt's ids. Raises RequestError, and what encoding images raises."""
        engine = call.service.engine
        if self.offered and form_of(engine.tokenizer) is None:
            call.adjusted.append(UNKNOWN_FORM)
        return await asyncio.to_thread(
            engine.encode,
            messages,
            enable_thinking=thinking,
            tools=self.offered or None,
            allow_control_tokens=call.service.allow_control_tokens,
        )

    def splitter(self, call: Call, prompt: Sequence[int]) -> AnswerSplitter:
        """What divides the text of an answer."""
        tokenizer, calls = call.service.engine.tokenizer, None
        if self.offered and (form := form_of(tokenizer)) is not None:
            calls = CallSplitter(form, tokenizer, self.offered, single=not self.several)
        return AnswerSplitter(ThoughtSplitter(call.service.marks, tokenizer, prompt), calls)
