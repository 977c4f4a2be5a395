"""Places in an input file or among arguments, and how error messages show them.

Knows names and positions. Knows nothing of the meaning of a value.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from edgespec.errors import RequestError

MAX_SHOWN = 60  # characters of a value or a name


class JsonPlace(NamedTuple):
    """The place of a value, as messages show it: `input.json: requests[3].messages[0].content`."""

    source: str
    steps: tuple[str | int, ...] = ()

    def key(self, name: str) -> JsonPlace:
        """Returns the place of a key of this object."""
        return JsonPlace(self.source, (*self.steps, name))

    def item(self, index: int) -> JsonPlace:
        """Returns the place of an item of this list."""
        return JsonPlace(self.source, (*self.steps, index))

    @property
    def path(self) -> str:
        """The path within the source, such as `requests[3].messages`."""
        steps = (f"[{step}]" if isinstance(step, int) else f".{_name(step)}" for step in self.steps)
        return "".join(steps).removeprefix(".")

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raises RequestError with the place, what is wrong with the value, and the remedy."""
        raise RequestError(
            f"{self.source}: {self.path} {problem}." if self.steps else f"{self.source} {problem}.",
            remedy,
            param=self.path,
        )

    def at_most(self, limit: int, count: int, units: str, remedy: str) -> None:
        """Raises RequestError where it has more `units` than the limit."""
        if count > limit:
            self.refuse(f"has {count} {units}, and {limit} is the limit", remedy)


def show(value: object) -> str:
    """Returns a value as JSON, truncated; objects and lists are only named."""
    if isinstance(value, dict | list) and value:
        return "an object" if isinstance(value, dict) else "a list"
    return _cut(_as_json(value))


def did_you_mean(word: object, known: Iterable[str], sentence: str) -> str:
    """Returns `sentence` formatted with the known name nearest to `word`; empty if none is near."""
    close = difflib.get_close_matches(str(word)[:80], list(known), n=1)
    return sentence.format(f'"{close[0]}"') if close else ""


def _name(step: str) -> str:
    return step if len(step) <= MAX_SHOWN and step.isprintable() else show(step)


def _as_json(value: object) -> str:
    try:
        return json.dumps(value)
    except TypeError:  # a value from Python that JSON cannot represent
        return repr(value)
    except ValueError:  # thousands of digits
        return "a number of thousands of digits"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
