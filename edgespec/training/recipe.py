"""What a training recipe says, by the keys of `keys` and of its method's row in `table`.

Knows keys and values. Knows neither YAML (see `pipeline.recipe`) nor torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.errors import RequestError, UnsupportedModel
from edgespec.training.keys import KINDS, TYPE_KEY, Fixed, Idle, Key, Keys, shown
from edgespec.training.table import TRAINABLE

REPORT = "training.json"  # beside a trained draft: recipe, base, data and figures


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """A recipe that was read: `recipe["training.seed"]` is the value of a key, or its default."""

    method: str
    values: Mapping[str, Any]
    source: str
    notes: tuple[str, ...] = ()  # on keys that change nothing

    def __getitem__(self, key: str) -> Any:
        row, own = self.keys[key], TRAINABLE[self.method].defaults
        default = row.default if isinstance(row, Key) else None  # of a key that is refused
        return self.values.get(key, own.get(key, default))

    @property
    def keys(self) -> Keys:
        """All keys of such a recipe."""
        return TRAINABLE[self.method].all_keys

    def own_key(self, name: str) -> str:
        """A key of the method's own section, by its name without prefix: `ttt_steps`."""
        section = TRAINABLE[self.method].section
        return f"{section}.{section}_{name}"

    def section(self, name: str) -> Any:
        """The value of such a key."""
        return self[self.own_key(name)]

    def shape_key(self) -> str | None:
        """A key that shapes a new draft and is given, beside what says which method it is of."""
        row = TRAINABLE[self.method]
        given = {key: self.values.get(key) for key in map(self.own_key, row.shape_keys)}
        for key, value in given.items():
            if value and not (isinstance(value, dict) and value.keys() <= {*row.marks}):
                return key
        return None

    @property
    def loss(self) -> str:
        """What is minimized: the divergence from the base (kl), the text (ce), or LK."""
        return self["training.loss"] or ("kl" if self.section("self_logit_distillation") else "ce")

    def shaping(self) -> dict[str, Any]:
        """The keys and values that shape a result, of which a run that goes on may change none."""
        free = ("training.minutes", "training.output_dir", "training.report_to")
        return {key: self[key] for key, row in self.keys.items()
                if isinstance(row, Key) and key not in (*free, TYPE_KEY)}  # fmt: skip


def read_recipe(values: Mapping[str, Any], source: str, method: str | None = None) -> TrainRecipe:
    """The recipe that keys and values in sections make, for a `method` or the one that they are of.
    Raises RequestError that names the key, and UnsupportedModel for another kind of draft."""
    method = method or method_of(values, source)
    known, given, notes = TRAINABLE[method].all_keys, dict[str, Any](), list[str]()
    for key, value in flat(values, known):
        where, row = f"{source}: {key}", known.get(key)
        if row is None:
            close = difflib.get_close_matches(key[:80], known, n=1, cutoff=0)[0]
            raise RequestError(
                f"{where} is not a known key of a recipe for {method}",
                f"The nearest is {close}. Correct the key, or remove it.",
            )
        if value is None:
            continue
        if isinstance(row, Idle):
            notes.append(f"{key} changes nothing: {row.why}")
        elif isinstance(row, Fixed):
            if not any(value == fixed and type(value) is type(fixed) for fixed in row.values):
                remedy = (
                    f"Write {shown(row.values[0])}, or remove it." if row.values else "Remove it."
                )
                raise UnsupportedModel(f"{where} is {shown(value)}: {row.why}", remedy)
        else:
            given[key] = checked(value, row, where)
    return TrainRecipe(method, given, source, tuple(notes))


def method_of(values: Mapping[str, Any], source: str) -> str:
    """The method of a recipe, by its type. Raises RequestError and UnsupportedModel."""
    metadata = values.get("metadata")
    kind = metadata.get("recipe_type") if isinstance(metadata, dict) else None
    for method, row in TRAINABLE.items():
        inner = values.get(row.section)
        section = inner if isinstance(inner, dict) else {}
        if row.recipe_type == kind and row.claims(section):
            row.refuse(section, source)
            return method
    what = "has no metadata.recipe_type" if kind is None else f"is of the type {shown(kind)}"
    known = dict.fromkeys(row.recipe_type for row in TRAINABLE.values())
    raise UnsupportedModel(f"{source} {what}", f"Types that train here: {', '.join(known)}.")


def flat(values: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each key with its section before it, and its value."""
    sections = {key.partition(".")[0] for key in known}
    for section, inner in values.items():
        if isinstance(inner, dict):
            yield from ((f"{section}.{key}", value) for key, value in inner.items())
        elif inner is not None or section not in sections:
            yield str(section), inner


def checked(value: Any, row: Key, where: str) -> Any:
    """A value of the kind that its key wants. Raises RequestError."""
    wrong = type(value) not in KINDS[row.kind]
    wrong = wrong or (row.least is not None and value < row.least)
    wrong = wrong or (row.most is not None and value > row.most)
    if wrong or (row.choices and value not in row.choices):
        wanted = " or ".join(row.choices) or row.kind
        bounds = [f"at least {row.least:g}"] if row.least is not None else []
        bounds += [f"at most {row.most:g}"] if row.most is not None else []
        raise RequestError(f"{where} is {shown(value)}", f"Write {', '.join([wanted, *bounds])}.")
    return value
