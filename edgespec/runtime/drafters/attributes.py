"""What an object of the user's says of itself: its attributes are read once, when it is opened.

Knows attributes, and that reading one may run code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from edgespec.errors import OptionError
from edgespec.runtime.drafters.guard import said_of

CODE_FAILED = (Exception, SystemExit)  # code of the user's may end the program as well


def attribute(drafter: object, name: str, default: object = None) -> object:
    """An attribute of a drafter. Raises OptionError where reading it fails."""
    try:
        return getattr(drafter, name, default)
    except CODE_FAILED as error:
        message = f"{name} of the drafter {type(drafter).__name__} raised {said_of(error):.120}"
        raise OptionError(message, "Mend it: it is read when the engine is opened.") from error


def method(drafter: object, name: str) -> Callable[..., Any] | None:
    """A method of a drafter, None where it has none. Raises OptionError where reading it fails."""
    value = attribute(drafter, name)
    return value if callable(value) else None


def flag(drafter: object, name: str) -> bool:
    """Whether a drafter says yes. Raises OptionError for what is neither true nor false."""
    value = attribute(drafter, name, False)
    if not isinstance(value, bool):
        refuse(drafter, name, value, "Make it True or False.")
    return value


def limit(drafter: object, name: str) -> int | None:
    """A limit that a drafter names, None for none. Raises OptionError for what is no size."""
    value = attribute(drafter, name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        refuse(drafter, name, value, "Make it a number of 0 or more, or None for no limit.")
    return value


def refuse(drafter: object, name: str, value: object, remedy: str) -> NoReturn:
    """Raises OptionError for the value of an attribute."""
    try:
        shown = f"{value!r:.60}"
    except Exception:  # the value's own code
        shown = f"of type {type(value).__name__}"
    raise OptionError(f"{name} of the drafter {type(drafter).__name__} is {shown}", remedy)
