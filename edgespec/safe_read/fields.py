"""A JSON object that edgespec wrote, each read of which is checked. Knows no keys."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar, Self, cast

from edgespec.config.bounds import MAX_SIZES
from edgespec.config.fields import Fields, is_int
from edgespec.errors import BundleError

EXPORT_AGAIN = "Export the checkpoint again."


class BundleFields(Fields):
    """A JSON object that edgespec wrote: what is wrong in it is a BundleError with the key."""

    remedy: ClassVar[str] = EXPORT_AGAIN

    def refused(self, message: str) -> BundleError:
        """The error that says `what` of this object, with the remedy of this class."""
        return BundleError(f"{self.source}: {message}.", self.remedy)

    def wrong(self, key: str, wanted: str) -> BundleError:
        """The error for a value that is not what is `wanted`, with the remedy of this class."""
        return BundleError(super().wrong(key, wanted).what, self.remedy)

    def missing(self, key: str) -> BundleError:
        """The error for a key that is not there, with the remedy of this class."""
        return self.refused(f"'{key}' is missing")

    def section(self, key: str) -> Self:
        """The object at a key. Raises BundleError where the value is none."""
        return type(self)(super().section(key).raw, f"{self.source} ({key})")

    def optional_section(self, key: str) -> Self:
        """The object at a key; an empty one where it is missing or null. Raises BundleError."""
        return type(self)({}, self.source) if self.get(key) is None else self.section(key)

    def required_text(self, key: str) -> str:
        """The string at a key. Raises BundleError where it is missing or no string."""
        value = self.text(key)
        if value is None:
            raise self.missing(key)
        return value

    def required_flag(self, key: str) -> bool:
        """The true or false at a key. Raises BundleError where it is missing or neither."""
        if self.get(key) is None:
            raise self.missing(key)
        return self.flag(key, False)

    def optional_flag(self, key: str) -> bool | None:
        """True, false, or None where the key is missing or null. Raises BundleError."""
        return None if self.get(key) is None else self.flag(key, False)

    def any_number(self, key: str) -> float:
        """A number of any sign. Raises BundleError where it is missing."""
        value = self.optional_number(key)
        if value is None:
            raise self.missing(key)
        return value

    def optional_number(self, key: str) -> float | None:
        """A number of any sign, or None where the key is missing or null. Raises BundleError."""
        value = self.get(key)
        if value is not None and not is_int(value) and not isinstance(value, float):
            raise self.wrong(key, "a number")
        return cast("float | None", value)

    def numbers(self, key: str) -> dict[str, float]:
        """An object of numbers by name. Raises BundleError."""
        values = self.section(key)
        return {name: values.any_number(name) for name in values.raw}

    def texts(self, key: str) -> tuple[str, ...]:
        """The list of strings at a key that must be there. Raises BundleError."""
        value = self.get(key)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise self.wrong(key, "a list of texts")
        return tuple(value)

    def counts(self, key: str) -> tuple[int, ...]:
        """The list of whole numbers from 0 at a key that must be there. Raises BundleError."""
        value = self.get(key)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, list | tuple) or not all(map(is_count, value)):
            raise self.wrong(key, "a list of whole numbers from 0")
        return tuple(value)

    def optional_size(self, key: str) -> int | None:
        """The positive integer at a key; None where it is missing or null. Raises BundleError."""
        return None if self.get(key) is None else self.size(key)

    def count(self, key: str, default: int = 0) -> int:
        """A whole number from 0."""
        value = self.get(key)
        if value is None:
            return default
        most = MAX_SIZES.get(key, 2**31 - 1)
        if not is_int(value) or not 0 <= value <= most:
            raise self.wrong(key, f"a whole number from 0 to {most}")
        return cast(int, value)

    def offset(self, key: str) -> int:
        """A place in a file, in bytes, that must be there. Raises BundleError."""
        value = self.get(key)
        if value is None:
            raise self.missing(key)
        if not is_int(value) or not 0 <= value < 2**63:
            raise self.wrong(key, "a place in a file")
        return cast(int, value)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Raises BundleError where a key is not one of the `known`."""
        unknown = sorted(set(self.raw) - set(known))
        if unknown:
            raise self.refused(f"the key {unknown[0]!r} is unknown")


def is_count(value: object) -> bool:
    """Whether a JSON value is a whole number from 0 below 2^31."""
    return is_int(value) and 0 <= cast(int, value) < 2**31
