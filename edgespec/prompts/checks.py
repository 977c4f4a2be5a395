"""Checks of values. A check returns the parsed value, or raises RequestError with its place.

Knows types and limits. Knows nothing of the places of keys, nor of files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from edgespec.prompts.guided import guided
from edgespec.prompts.places import JsonPlace, did_you_mean, show

MAX_BATCH_SIZE = 16
MAX_COUNT = 2**31 - 1
MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1  # 64 bits, signed or not
MAX_LOGPROBS = 50
MAX_BIAS = 100
MAX_BIASED_TOKENS = 1024
MAX_PENALTY = 100
MAX_ADDED_PENALTY = 2
MAX_STOP_TOKENS = 64
MAX_STOPS = 16
MAX_STOP_BYTES = 2**10

ROLES = ("system", "developer", "user", "assistant", "tool")

T_co = TypeVar("T_co", covariant=True)
Check = Callable[[object, JsonPlace], T_co]


class LogitBias(Mapping[int, float]):
    """An immutable mapping from token ids to the bias of their logits.

    Accepts ids or digit strings as keys. Raises RequestError for invalid ids or values.
    """

    __slots__ = ("_of",)

    def __init__(self, given: object = None, here: JsonPlace | None = None) -> None:
        self._of: dict[int, float] = _biases(given, here or JsonPlace("LogitBias"))

    def __getitem__(self, token_id: int) -> float:
        return self._of[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def __hash__(self) -> int:
        return hash(frozenset(self._of.items()))

    def __repr__(self) -> str:
        return repr(self._of)


def flag(value: object, here: JsonPlace) -> bool:
    """Returns a bool. Raises RequestError for other types."""
    if not isinstance(value, bool):
        here.refuse(f"is {show(value)}, not true or false", "Write true or false, without quotes.")
    return value


def integer(low: int, high: int) -> Check[int]:
    """Returns a check for an integer from `low` to `high`."""

    def check(value: object, here: JsonPlace) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            here.refuse(f"is {show(value)}", f"Write an integer from {low} to {high}.")
        return value

    return check


def number(is_allowed: Callable[[float], bool], allowed: str) -> Check[float]:
    """Returns a check for a finite number; `allowed` describes the range in the remedy."""

    def check(value: object, here: JsonPlace) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            here.refuse(f"is {show(value)}, not a number", f"Write {allowed}.")
        if not is_finite(value) or not is_allowed(value):
            here.refuse(f"is {show(value)}", f"Write {allowed}.")
        return float(value)

    return check


def seed(value: object, here: JsonPlace) -> int | None:
    """Returns a seed; None is a random one."""
    return None if value is None else integer(MIN_SEED, MAX_SEED)(value, here)


def prompt_logprobs(value: object, here: JsonPlace) -> int | None:
    """Returns how many candidates each token of a prompt is to have; None is no log-probabilities
    of a prompt."""
    return None if value is None else integer(0, MAX_LOGPROBS)(value, here)


def stop_token_ids(value: object, here: JsonPlace) -> tuple[int, ...]:
    """Returns the token ids of a list; null is none."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        here.refuse(f"is {show(value)}, not a list", "Write a list of token ids, such as [2].")
    here.at_most(MAX_STOP_TOKENS, len(value), "tokens", "Remove some of them.")
    return tuple(integer(0, MAX_COUNT)(item, here.item(i)) for i, item in enumerate(value))


def check_lengths(most: int, least: int, prompt_logprobs: int | None, here: JsonPlace) -> None:
    """Raises RequestError for a `max_generate_length` that does not go with the other two."""
    if most == 0 and prompt_logprobs is None:
        there = here.key("max_generate_length")
        there.refuse("is 0, and there is no prompt_logprobs", "Write an integer of 1 or more.")
    if least > most:
        problem = f"is {least}, above max_generate_length, which is {most}"
        here.key("min_tokens").refuse(problem, f"Write {most} or less.")


def logit_bias(value: object, here: JsonPlace) -> LogitBias:
    """Returns the biases of a mapping."""
    return value if isinstance(value, LogitBias) else LogitBias(value, here)


def stop(value: object, here: JsonPlace) -> tuple[str, ...]:
    """Returns the stop strings of a string or a list of strings; null is none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (_stop_string(value, here),)
    if not isinstance(value, list | tuple):
        here.refuse(f"is {show(value)}", 'Write a string or a list of strings, such as ["\\n\\n"].')
    here.at_most(MAX_STOPS, len(value), "strings", "Remove some of them.")
    return tuple(_stop_string(item, here.item(index)) for index, item in enumerate(value))


def role(value: object, here: JsonPlace) -> str:
    """Returns the role of a message: many chat templates silently skip an unknown one."""
    if not isinstance(value, str) or value not in ROLES:
        here.refuse(
            f"is {show(value)}",
            f"Write one of {', '.join(ROLES)}.{did_you_mean(value, ROLES, ' Did you mean {}?')}",
        )
    return value


def text(value: object, here: JsonPlace) -> str:
    """Returns a string. Raises RequestError for other types and for unpaired surrogates."""
    if not isinstance(value, str):
        here.refuse(f"is {show(value)}, not a string", "Write a string.")
    text_size(value, here)
    return value


def unsupported(reason: str, *neutral: object) -> Check[None]:
    """Returns a check for a key of TensorRT Edge-LLM that this version does not support.

    It accepts null and the `neutral` values, which have no effect.
    """

    def check(value: object, here: JsonPlace) -> None:
        if not any(value == item and type(value) is type(item) for item in (None, *neutral)):
            here.refuse(
                f"is {show(value)}, which this version does not support: {reason}",
                "Remove the key.",
            )

    return check


def text_size(text: str, here: JsonPlace) -> int:
    """Returns the number of UTF-8 bytes. Raises RequestError for an unpaired surrogate."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        here.refuse(
            f"has an unpaired surrogate, \\u{ord(text[error.start]):04x}, at character"
            f" {error.start}",
            "Write both surrogates, or the character itself.",
        )


_added_penalty = number(
    lambda x: -MAX_ADDED_PENALTY <= x <= MAX_ADDED_PENALTY,
    f"a number from -{MAX_ADDED_PENALTY} to {MAX_ADDED_PENALTY}; 0 is off",
)
SAMPLING: dict[str, Check[object]] = {
    "temperature": number(lambda x: x >= 0, "a number of 0 or more; 0 is greedy"),
    "top_p": number(lambda x: 0 < x <= 1, "a number above 0 and up to 1; 1 is off"),
    "top_k": integer(0, MAX_COUNT),
    "seed": seed,
    "max_generate_length": integer(0, MAX_COUNT),
    "min_p": number(lambda x: 0 <= x <= 1, "a number from 0 to 1; 0 is off"),
    # A factor above 100 could take logits out of the range of float16
    "repetition_penalty": number(
        lambda x: 1 / MAX_PENALTY <= x <= MAX_PENALTY,
        f"a number from {1 / MAX_PENALTY} to {MAX_PENALTY}; 1 is off",
    ),
    "logit_bias": logit_bias,
    "stop": stop,
    "num_logprobs": integer(0, MAX_LOGPROBS),
    "presence_penalty": _added_penalty,
    "frequency_penalty": _added_penalty,
    "min_tokens": integer(0, MAX_COUNT),
    "ignore_eos": flag,
    "stop_token_ids": stop_token_ids,
    "prompt_logprobs": prompt_logprobs,
    "guided": guided,
}


_bias = number(lambda x: -MAX_BIAS <= x <= MAX_BIAS, f"a number from -{MAX_BIAS} to {MAX_BIAS}")


def _biases(given: object, here: JsonPlace) -> dict[int, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        here.refuse(
            f"is {show(given)}, not an object",
            'Write token ids with their bias, such as {"1234": -100}.',
        )
    here.at_most(MAX_BIASED_TOKENS, len(given), "tokens", "Remove some of them.")
    biases: dict[int, float] = {}
    for key, value in given.items():
        token_id = _token_id(key, here)
        if token_id in biases:
            here.refuse(f"names the token {token_id} twice", "Keep one of the two.")
        biases[token_id] = _bias(value, here.key(str(token_id)))
    return biases


def _token_id(key: object, here: JsonPlace) -> int:
    """Accepts an id, or its ASCII digits as in JSON keys."""
    if isinstance(key, str) and len(key) <= 20 and key.isascii() and key.isdigit():
        key = int(key)
    if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key <= MAX_COUNT:
        here.refuse(
            f"has the key {show(key)}, which is not a token id",
            f"Write the ids as 0 to {MAX_COUNT}.",
        )
    return key


def _stop_string(value: object, here: JsonPlace) -> str:
    if not isinstance(value, str):
        here.refuse(f"is {show(value)}, not a string", "Write strings only.")
    if not value:
        here.refuse("is an empty string, which matches everywhere", "Remove it.")
    size_bytes = text_size(value, here)
    here.at_most(MAX_STOP_BYTES, size_bytes, "bytes of text", "Shorten the stop string.")
    return value


def is_finite(value: float) -> bool:
    """Returns whether a number is neither NaN nor Inf, nor an integer that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of float
        return False
