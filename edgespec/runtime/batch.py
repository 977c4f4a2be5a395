"""Several requests of one caller: handles of those that can be asked, and the end of each in its
place.

Knows handles and errors. What a prompt is, and how a handle is made, stands elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, TypeVar

from edgespec.errors import EdgeSpecError, RequestError
from edgespec.runtime.faults import FAULTS, as_error
from edgespec.runtime.loop.driver import Driver
from edgespec.runtime.loop.generation import Generation, Response
from edgespec.runtime.streams import End, Ends, cancelling, future_end

T = TypeVar("T")


class Batch:
    """Requests made by `makes`, one each. An error is raised with the place of its prompt; with
    `return_exceptions` it stands in the place of the answer."""

    def __init__(
        self, makes: Iterable[Callable[[], Generation]], *, return_exceptions: bool
    ) -> None:
        self.return_exceptions = return_exceptions
        self.ends, self.handles = dict[int, End](), dict[int, Generation]()
        for index, make in enumerate(makes):
            try:
                self.handles[index] = make()
            except FAULTS as error:
                self.end(index, as_error(error))

    def end(self, index: int, end: End) -> None:
        """What a request came to."""
        if isinstance(end, EdgeSpecError) and not self.return_exceptions:
            raise at_prompt(index, end) from end
        self.ends[index] = end

    def run(self, driver: Driver) -> list[Any]:
        """The ends of all, in their order."""
        places, handles = [*self.handles], [*self.handles.values()]
        with cancelling(handles):
            ends = Ends(handles)
            driver.submit(handles)
            for index, end in ends:
                self.end(places[index], end)
        return self.in_order()

    async def arun(self, driver: Driver) -> list[Any]:
        """`run` for an event loop."""
        handles = [*self.handles.values()]
        with cancelling(handles):
            futures = {index: future_end(handle) for index, handle in self.handles.items()}
            driver.submit(handles)
            for index, future in futures.items():
                self.end(index, await ended(future))
        return self.in_order()

    def in_order(self) -> list[Any]:
        """The ends by their place."""
        return [self.ends[index] for index in sorted(self.ends)]


async def ended(future: asyncio.Future[Response]) -> End:
    """A request's Response, or its error."""
    try:
        return await future
    except EdgeSpecError as error:
        return error


def one_each(name: str, value: T | Sequence[T], count: int) -> Sequence[T]:
    """One value for each request of a batch. RequestError for a list of another length."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        message = f"{name} is a list of {len(value)}, and there are {count} prompts"
        raise RequestError(message, "Give one for all, or one for each.")
    return value


def at_prompt(index: int, error: EdgeSpecError) -> EdgeSpecError:
    """An error of a batch, with the place of its prompt."""
    placed = copy(error)
    placed.add_note(f"at prompts[{index}]")
    return placed
