"""A JSON object of a report, each read of which is checked. Knows types and figures, no keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, cast

from edgespec.benchmark.statistics import Figure
from edgespec.config.fields import is_int
from edgespec.errors import command
from edgespec.safe_read.fields import BundleFields


class ReportFields(BundleFields):
    """An object of a report; null reads as missing."""

    remedy: ClassVar[str] = f"Give a report that {command('bench', json=True)} wrote."

    def values(self, kind: type) -> dict[str, Any]:
        """What a dataclass keeps under the keys of its fields, as far as READERS has their types.
        Raises BundleError for a value of another type."""
        known = [field for field in fields(kind) if field.type in READERS]
        return {field.name: READERS[str(field.type)](self, field.name) for field in known}

    def whole(self, key: str) -> int | None:
        """A whole number from 0, or None. Raises BundleError."""
        if not is_int(self.get(key) or 0):
            raise self.wrong(key, "a whole number from 0")
        return cast("int | None", self.real(key))

    def required_whole(self, key: str) -> int:
        """A whole number from 0 that must be there. Raises BundleError."""
        if (value := self.whole(key)) is None:
            raise self.missing(key)
        return value

    def real(self, key: str) -> float | None:
        """A number from 0, or None. Raises BundleError."""
        if (value := self.get(key)) is not None and not is_number(value):
            raise self.wrong(key, "a number from 0")
        return cast("float | None", value)

    def required_real(self, key: str) -> float:
        """A number from 0 that must be there. Raises BundleError."""
        if (value := self.real(key)) is None:
            raise self.missing(key)
        return value

    def reals(self, key: str) -> tuple[float, ...]:
        """Numbers from 0; none where the key is missing. Raises BundleError."""
        values = self.get(key) or []
        if not isinstance(values, list) or not all(map(is_number, values)):
            raise self.wrong(key, "a list of numbers from 0")
        return tuple(values)

    def figure(self, key: str) -> Figure | None:
        """What was measured several times, or None. Raises BundleError."""
        if self.get(key) is None:
            return None
        if not (samples := self.section(key).reals("samples")):
            raise self.wrong(key, "a figure with samples")
        return Figure(samples)


def is_number(value: object) -> bool:
    """Whether it is a finite number that is not negative."""
    return (is_int(value) or isinstance(value, float)) and 0 <= cast(float, value) < 2**63


READERS: Mapping[str, Callable[[ReportFields, str], Any]] = {
    "bool": ReportFields.required_flag,
    "int": ReportFields.required_whole,
    "int | None": ReportFields.whole,
    "float": ReportFields.required_real,
    "float | None": ReportFields.real,
    "str": ReportFields.required_text,
    "str | None": ReportFields.text,
    "Sequence[str]": ReportFields.texts,
    "Sequence[float]": ReportFields.reals,
    "Mapping[str, Any]": lambda object_, key: object_.section(key).raw,
}
