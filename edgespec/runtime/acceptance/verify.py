"""Decides which drafted tokens are accepted: the table of rules that a request may ask for.

Knows the names of the rules and what each guarantees. Each rule is a file in `acceptance/`.
"""

from __future__ import annotations

from typing import Any, Final

from edgespec.errors import RequestError
from edgespec.prompts.places import did_you_mean
from edgespec.runtime.acceptance import exact, rejection, relaxed, typical
from edgespec.runtime.acceptance.base import (
    GUARANTEES,
    AcceptOptions,
    AcceptResult,
    AcceptRow,
    Lossless,
    made,
)
from edgespec.runtime.acceptance.exact import ExactAcceptance, walk
from edgespec.runtime.acceptance.rejection import RejectionAcceptance
from edgespec.runtime.acceptance.relaxed import RelaxedAcceptance
from edgespec.runtime.acceptance.typical import TypicalAcceptance

EXACT = ExactAcceptance.rule
EXACT_ACCEPTANCE: Final = ExactAcceptance()

# Name in a request -> its rule.
ACCEPT_RULES: dict[str, AcceptRow] = {
    options.rule: row
    for options, row in (
        (ExactAcceptance, exact.ROW),
        (RejectionAcceptance, rejection.ROW),
        (TypicalAcceptance, typical.ROW),
        (RelaxedAcceptance, relaxed.ROW),
    )
}

Acceptance = str | AcceptOptions | None


def acceptance_of(asked: Acceptance, **values: Any) -> AcceptOptions:
    """A rule with its options: the exact one for None, by its name, or as it is given.

    `values` are options by name. Raises RequestError for a rule that there is none of, OptionError
    for an option that the rule does not have, or a value that cannot be.
    """
    if isinstance(asked, AcceptOptions):
        if ACCEPT_RULES.get(asked.rule) is None:
            raise unknown(asked.rule)
        return asked
    if asked is None:
        asked = EXACT
    if not isinstance(asked, str):
        message = f"acceptance is of type {type(asked).__name__}"
        remedy = f"Give one of {', '.join(ACCEPT_RULES)}, or its options."
        raise RequestError(message, remedy, param="acceptance")
    if asked not in ACCEPT_RULES:
        raise unknown(asked)
    return made(ACCEPT_RULES[asked].options, values)


def unknown(name: str) -> RequestError:
    """The error for a rule that there is none of."""
    near = did_you_mean(name, ACCEPT_RULES, "Did you mean {}? ")
    message = f"there is no accept rule {name!r}"
    return RequestError(message, f"{near}Rules: {', '.join(ACCEPT_RULES)}.", param="acceptance")


def lossless(acceptance: AcceptOptions, temperature: float) -> Lossless:
    """What a rule guarantees for a request: what plain decoding gives greedily is the same as its
    distribution."""
    row = ACCEPT_RULES[acceptance.rule]
    if row.lossless == "distribution" and temperature == 0:
        return "tokens"
    return row.lossless


def acceptance_words(rule: str) -> str:
    """A rule and what it guarantees, as it is shown."""
    row = ACCEPT_RULES[rule]
    return f"{row.title}, {GUARANTEES[row.lossless]}"


__all__ = [
    "ACCEPT_RULES",
    "EXACT",
    "EXACT_ACCEPTANCE",
    "GUARANTEES",
    "AcceptOptions",
    "AcceptResult",
    "AcceptRow",
    "Acceptance",
    "ExactAcceptance",
    "Lossless",
    "RejectionAcceptance",
    "RelaxedAcceptance",
    "TypicalAcceptance",
    "acceptance_of",
    "acceptance_words",
    "lossless",
    "walk",
]
