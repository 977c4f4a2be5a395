"""A JSON object of a configuration file, each read of which is checked. Knows no models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from edgespec.config.bounds import MAX_SIZES
from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object with its name: each read is checked, and null reads as missing."""

    raw: Mapping[str, Any]
    source: str

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        return self.raw.get(key)

    def wrong(self, key: str, wanted: str) -> EdgeSpecError:
        """The error for a value that is not what is `wanted`."""
        return CheckpointError(
            f"{self.source}: '{key}' is {shortened(self.get(key))}, not {wanted}.",
            "Correct the file, or download the checkpoint again.",
        )

    def missing(self, key: str) -> EdgeSpecError:
        """The error for a key that must be there."""
        return CheckpointError(
            f"{self.source}: '{key}' is missing.", "Add it, or download the checkpoint again."
        )

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number up to the largest plausible one (`MAX_SIZES`); without a default
        the key must be there. Raises CheckpointError."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        most = MAX_SIZES.get(key, 2**31 - 1)
        if not is_int(value) or not 1 <= value <= most:
            raise self.wrong(key, f"a positive whole number of at most {most}")
        return cast(int, value)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; without a default the key must be there. Raises CheckpointError."""
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.missing(key)
        if not (is_int(value) or isinstance(value, float)) or not 2**-63 <= value < 2**63:
            raise self.wrong(key, "a positive number between 2^-63 and 2^63")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false. Raises CheckpointError."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A text, or None. Raises CheckpointError."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def section(self, key: str) -> Fields:
        """The object under a key that must be there. Raises CheckpointError."""
        value = self.get(key)
        if value is None:
            raise self.missing(key)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(value, f"{self.source} ({key})")

    def optional_section(self, key: str) -> Fields:
        """The object under a key, or an empty one. Raises CheckpointError."""
        return Fields({}, self.source) if self.get(key) is None else self.section(key)


def is_int(value: object) -> bool:
    """Whether a JSON value is a whole number; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def shortened(value: object) -> str:
    """A value as an error shows it, of at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no whole number of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def token_ids(fields: Fields, key: str) -> tuple[int, ...]:
    """A token id or a list of them, each once; empty where the key is missing."""
    value = fields.get(key)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(is_int(i) and 0 <= i < 2**31 for i in ids):
        raise fields.wrong(key, "a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def dtype_of(fields: Fields) -> str:
    """float32, float16 or bfloat16; a missing key means float32. Raises UnsupportedModel for
    others."""
    name = (fields.text("torch_dtype") or fields.text("dtype") or "float32").removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(
            f"{fields.source}: weights of type {name!r}; this version exports float32, float16 and"
            " bfloat16."
        )
    return name
