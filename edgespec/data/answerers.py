"""Who answers conversations: open engines of this machine, or an OpenAI-compatible server.

Knows the Python API and the server's. Knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edgespec.benchmark.serving.client import ChatClient, RequestFailed
from edgespec.data.synthesize import Answer, AnswerFailed
from edgespec.errors import EdgeSpecError, RequestError
from edgespec.prompts import CANCELLED, CAPACITY, MAX_LENGTH, SamplingParams
from edgespec.prompts.chats import Chat, Turn
from edgespec.runtime.engine import Engine
from edgespec.runtime.streams import Stream


@dataclass
class EngineAnswerer:
    """Engines, with all of their lanes. The answers are those of plain decoding where they draft,
    as of any request with the exact accept rule."""

    engine: Engine
    temperature: float
    max_length: int
    streams: set[Stream] = field(default_factory=set)

    @property
    def concurrency(self) -> int:
        """As many lanes as there are."""
        return self.engine.max_batch_size

    def answer(self, chat: Chat, messages: Sequence[Turn], seed: int) -> Answer:
        """The answer to the last message. Raises AnswerFailed."""
        sampling = SamplingParams(
            temperature=self.temperature,
            top_p=1.0,
            top_k=0,
            seed=seed,
            max_generate_length=self.max_length,
        )
        try:
            with self.engine.stream(messages, sampling, tools=chat.tools, keep=True) as stream:
                self.streams.add(stream)
                try:
                    response = stream.result()
                finally:
                    self.streams.discard(stream)
        except EdgeSpecError as error:
            raise AnswerFailed(error.what) from error
        if response.finish_reason == CANCELLED:
            raise AnswerFailed("cancelled")
        return Answer(response.text, response.finish_reason in (MAX_LENGTH, CAPACITY))

    def abort(self) -> None:
        """Ends the requests that are under way."""
        for stream in self.streams.copy():
            stream.cancel()


@dataclass
class ServerAnswerer:
    """A server, asked `concurrency` conversations at a time. Nothing is asked twice: what fails is
    listed, and asked again by the next run."""

    client: ChatClient
    model: str
    temperature: float
    max_length: int
    concurrency: int

    def check(self) -> None:
        """Raises RequestError for a server that does not say that it serves the model."""
        try:
            names = self.client.models()
        except RequestFailed as error:
            raise RequestError(
                f"the server at {self.client.url} does not say what it serves: {error}",
                "Start one that has /v1/models, or look at the address.",
            ) from error
        if self.model not in names:
            raise RequestError(
                f"the server at {self.client.url} serves {', '.join(names) or 'nothing'}, and not"
                f" {self.model}.",
                "A draft learns the answers of its own base: start that, or name it as `model`.",
            )

    def answer(self, chat: Chat, messages: Sequence[Turn], seed: int) -> Answer:
        """The answer to the last message. Raises AnswerFailed."""
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": self.temperature,
            "seed": seed,
            "max_tokens": self.max_length,
        }
        try:
            found = self.client.ask(body | ({"tools": chat.tools} if chat.tools else {}))
        except RequestFailed as error:
            raise AnswerFailed(str(error)) from error
        return Answer(found.text, found.finish_reason == "length", found.reasoning)

    def abort(self) -> None:
        """Ends the requests that are under way."""
        self.client.abort()
