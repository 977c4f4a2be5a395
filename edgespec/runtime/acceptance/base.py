"""What an accept rule is: a function from a tree and the base's logits to the tokens of a step, and
its options.

Knows the values that pass between the loop and a rule. Knows no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from edgespec.backends.call import Logits
from edgespec.errors import OptionError
from edgespec.prompts.checks import is_finite
from edgespec.prompts.places import did_you_mean, show
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftTree

Lossless = Literal["tokens", "distribution", "no"]
# How a rule's guarantee is shown
GUARANTEES: dict[Lossless, str] = {
    "tokens": "lossless token for token",
    "distribution": "lossless in distribution",
    "no": "LOSSY",
}

Own = TypeVar("Own", bound="AcceptOptions")


@dataclass(frozen=True, slots=True)
class AcceptResult:
    """`path` are the accepted nodes, the root first; `emitted[i]` is the token that comes after
    `path[i]`, the last one being the bonus. len(emitted) == len(path) == accepted + 1."""

    path: list[int]
    emitted: list[int]


class ModelTokens(Protocol):
    """What a rule may ask of the model's tokenizer."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text; None where the model has none."""

    def token(self, token_id: int) -> str | None:
        """The token of an id; None where the model has none."""


@dataclass(frozen=True)
class AcceptOptions:
    """An accept rule with its options: each rule has a subclass, and `rule` is its row's name.

    Raises OptionError for a value that cannot be.
    """

    rule: ClassVar[str] = ""

    def for_model(self: Own, tokens: ModelTokens) -> Own:
        """The same with what only the model's tokenizer knows filled in. Raises OptionError where
        the model lacks it."""
        return self

    @property
    def note(self) -> str | None:
        """What a user should know of these options beside what the rule guarantees."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON has them, by their names."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def refuse(self, name: str, allowed: str) -> None:
        """Raises OptionError for the value of an option."""
        message = f"{name} of {self.rule} acceptance is {show(getattr(self, name))}"
        raise OptionError(message, f"Give {allowed}.")


# The tree, the base's logits [N, V], the request's sampler, all tokens up to the root, the root
# included, and the rule's options.
AcceptRule = Callable[[DraftTree, Logits, Sampler, Sequence[int], Any], AcceptResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptRow:
    """An accept rule: a row of ACCEPT_RULES.

    `lossless` is what it guarantees: the tokens of plain decoding, their distribution, or neither.
    `draws_drafts`: drafters that can draw their drafts with the request's sampling, and say from
    which probabilities. `chains_only`: no node may have two children.
    """

    title: str
    lossless: Lossless
    accept: AcceptRule
    options: type[AcceptOptions]
    draws_drafts: bool = False
    chains_only: bool = False


def is_number(value: object) -> bool:
    """Whether a value is a number that a float can hold, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)


def made(options: type[Own], values: dict[str, Any]) -> Own:
    """Options of their class from values by name. Raises OptionError for an unknown name, with the
    nearest known one, and for a value that cannot be."""
    known = [item.name for item in fields(options)]
    for name in values:
        if name not in known:
            near = did_you_mean(name, known, "Did you mean {}? ")
            names = ", ".join(known) or "none"
            message = f"{options.rule} acceptance has no option {name!r}"
            raise OptionError(message, f"{near}Its options: {names}.")
    return options(**values)
