"""`decoding_type: User_Provided` of a speculative_config: a drafter of the user's own.

Knows the keys. How such a drafter is found and guarded stands in `loading`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.errors import OptionError
from edgespec.runtime.drafters.decoding import DecodingConfig, DecodingType
from edgespec.runtime.drafters.loading import load_drafter
from edgespec.runtime.drafters.options import option, refuse


def any_object(name: str, value: object) -> object:
    """An object as it is: what it must have is found out when it is opened. Raises OptionError for
    numbers, lists and the like, which a file could hold."""
    if isinstance(value, bool | int | float | list | tuple | dict):
        refuse(name, value, "Give an object, in Python.")
    return value


IN_PYTHON: dict[str, Any] = {"type": "null"}


@dataclass(frozen=True, kw_only=True)
class OwnDecoding(DecodingConfig):
    """The keys of its decoding type. Files and requests run no code: there the drafter is named on
    the command line, by --drafter."""

    drafter: object | None = option(
        None,
        "The drafter: an object, or package.module:Class; only in Python. For a file the command"
        " line names it.",
        read=any_object,
        schema=IN_PYTHON,
    )
    resource_manager: object | None = option(
        None,
        "TensorRT-LLM's resource manager, an object; only in Python. The drafter gets it as its"
        " attribute resource_manager.",
        read=any_object,
        schema=IN_PYTHON,
    )

    def __post_init__(self) -> None:
        DecodingConfig.__post_init__(self)
        if isinstance(self.drafter, str):
            object.__setattr__(self, "drafter", load_drafter(self.drafter))
        if self.resource_manager is None:
            return
        if self.drafter is None:
            raise OptionError("resource_manager is given without a drafter", "Give both.")
        try:  # TensorRT-LLM's drafters have it as an attribute
            self.drafter.resource_manager = self.resource_manager  # type: ignore[attr-defined]
        except Exception as error:  # whatever its own code raises
            message = f"a {type(self.drafter).__name__} cannot have the attribute resource_manager"
            raise OptionError(message, "Give an object of a class of your own.") from error

    @property
    def drafts_by(self) -> object | None:
        """The drafter."""
        return self.drafter


TYPE = DecodingType(name="User_Provided", keys=OwnDecoding)
