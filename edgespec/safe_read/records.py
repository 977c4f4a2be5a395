"""Frozen dataclasses as the JSON objects that edgespec writes: the types of their fields say how
each key is checked. Knows no keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin, get_type_hints

from edgespec.safe_read.fields import BundleFields

Count = Annotated[int, "from 0"]  # a plain int is a size, from 1
Reader = Callable[[BundleFields, str], Any]

READERS: dict[object, Reader] = {
    str: BundleFields.required_text,
    str | None: BundleFields.text,
    int: BundleFields.size,
    int | None: BundleFields.optional_size,
    Count: BundleFields.count,
    bool: BundleFields.required_flag,
    bool | None: BundleFields.optional_flag,
    float: BundleFields.any_number,
    float | None: BundleFields.optional_number,
    tuple[int, ...]: BundleFields.counts,
    tuple[int, ...] | None: lambda keys, key: None if keys.get(key) is None else keys.counts(key),
    tuple[str, ...]: BundleFields.texts,
    Mapping[str, float]: BundleFields.numbers,
    Mapping[str, Any]: lambda keys, key: keys.section(key).raw,
}


class Record:
    """A frozen dataclass that is a JSON object on disk, its fields in their order.

    `KEYS` are fields that have another name there, `IF_ANY` those that are left out where they are
    None.
    """

    __slots__ = ()
    KEYS: ClassVar[Mapping[str, str]] = {}
    IF_ANY: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def read(cls, keys: BundleFields) -> Self:
        """From a JSON object. BundleError names a wrong key."""
        return cls(**{name: read(keys, key) for name, key, read in _columns(cls)})  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The keys on disk."""
        names = [row.name for row in fields(self)]  # type: ignore[arg-type]
        kept = [
            name for name in names if name not in self.IF_ANY or getattr(self, name) is not None
        ]
        return {self.KEYS.get(name, name): _json(getattr(self, name)) for name in kept}


@cache
def _columns(cls: type[Record]) -> list[tuple[str, str, Reader]]:
    """(field, its key, how it is read) of each field."""
    hints = get_type_hints(cls, include_extras=True)
    names = [row.name for row in fields(cls)]  # type: ignore[arg-type]
    return [(name, cls.KEYS.get(name, name), _reader(hints[name])) for name in names]


def _reader(hint: Any) -> Reader:
    """How a type is read; a record that may be None is so where its object is missing or empty."""
    if (reader := READERS.get(hint)) is not None:
        return reader
    if get_origin(hint) is not None and issubclass(get_origin(hint), Mapping):
        one = get_args(hint)[1]
        return lambda keys, key: {
            name: one.read(keys.section(key).section(name)) for name in keys.section(key).raw
        }
    parts = get_args(hint)
    if not parts:
        return lambda keys, key: hint.read(keys.section(key))
    one = parts[0]
    return lambda keys, key: (
        one.read(keys.section(key)) if keys.get(key) not in (None, {}) else None
    )


def _json(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
