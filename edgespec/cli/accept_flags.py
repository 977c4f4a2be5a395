"""The flags that say which drafts are accepted, the same for `infer`, `chat` and `run`.

Knows flags, by the names of TensorRT-LLM where it has them. What a rule does stands in
`runtime.acceptance`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from edgespec.errors import RequestError, counted
from edgespec.methods.names import RULES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from edgespec.prompts import Request
    from edgespec.runtime.acceptance.verify import AcceptOptions
    from edgespec.runtime.engine import Engine

# Flag's value -> the rule that it belongs to, and the name of its option there; "" is the rule.
OPTIONS = {
    "eagle_posterior_threshold": ("typical", "posterior_threshold"),
    "posterior_alpha": ("typical", "posterior_alpha"),
    "posterior_fast": ("typical", "posterior_fast"),
    "use_relaxed_acceptance_for_thinking": ("relaxed", ""),
    "relaxed_topk": ("relaxed", "relaxed_topk"),
    "relaxed_delta": ("relaxed", "relaxed_delta"),
    "begin_thinking_phase_token": ("relaxed", "begin_thinking_phase_token"),
    "end_thinking_phase_token": ("relaxed", "end_thinking_phase_token"),
}
TOKENS = ("begin_thinking_phase_token", "end_thinking_phase_token")
ACCEPTING = ("acceptance", *OPTIONS)  # all values of these flags


FLAGS: dict[str, dict[str, Any]] = {
    "--acceptance": {
        "type": click.Choice(RULES),
        "help": (
            "Which drafts are accepted. exact (the default): the tokens of plain decoding."
            " rejection: their distribution, drafts being drawn at random. typical, relaxed: LOSSY,"
            " drafts that the base finds likely enough."
        ),
    },
    "--eagle-posterior-threshold": {
        "type": float,
        "help": (
            "typical, which it implies: the least probability of a draft, such as 0.09. Without it"
            " typical decodes greedily."
        ),
    },
    "--posterior-alpha": {
        "type": float,
        "help": (
            "typical: a draft less probable than the threshold needs this times exp(-entropy)."
            "  [default: the root of the threshold]"
        ),
    },
    "--posterior-fast/--no-posterior-fast": {
        "default": None,
        "help": (
            "typical: accept every draft that is typical (the default, as in Medusa's paper), or"
            " draw from the typical tokens and compare (as TensorRT-LLM does)."
        ),
    },
    "--use-relaxed-acceptance-for-thinking": {
        "is_flag": True,
        "default": None,
        "help": "The same as --acceptance relaxed: within thoughts alone.",
    },
    "--relaxed-topk": {
        "type": int,
        "help": "relaxed: a draft is among so many best tokens.  [default: 10]",
    },
    "--relaxed-delta": {
        "type": float,
        "help": (
            "relaxed: a draft's log-probability is at most this much below the best one's."
            "  [default: 0.6]"
        ),
    },
    "--begin-thinking-phase-token": {
        "type": str,
        "metavar": "TOKEN|ID",
        "help": "relaxed: the token that begins thoughts.  [default: <think> or the model's like]",
    },
    "--end-thinking-phase-token": {
        "type": str,
        "metavar": "TOKEN|ID",
        "help": "relaxed: the token that ends thoughts; given together.",
    },
}


def accept_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--acceptance and the options of the rules."""
    for flag, settings in reversed(FLAGS.items()):
        command = click.option(flag, **settings)(command)
    return command


def take_acceptance(ctx: click.Context, values: dict[str, Any]) -> AcceptOptions | None:
    """The accept rule of these flags, which are taken out of `values`; None where none is given.

    Raises click.UsageError for an option of another rule, OptionError for a value that cannot be.
    """
    given = {name: values.pop(name) for name in ACCEPTING}
    given = {name: value for name, value in given.items() if value is not None}
    rule = given.pop("acceptance", None)
    for name in given:
        owner = OPTIONS[name][0]
        if rule not in (None, owner):
            message = f"--{name.replace('_', '-')} is an option of --acceptance {owner}"
            raise click.UsageError(f"{message}, not of {rule}", ctx)
        rule = owner
    if rule is None:
        return None
    from edgespec.runtime.acceptance.verify import acceptance_of

    options = {
        OPTIONS[name][1]: token(value) if name in TOKENS else value
        for name, value in given.items()
        if OPTIONS[name][1]
    }
    return acceptance_of(rule, **options)


def token(text: str) -> int | str:
    """A token's id where the text is a number, else the token as it is written."""
    return int(text) if text.isascii() and text.isdigit() else text


def relaxed_note(engine: Engine, asked: Sequence[bool]) -> str | None:
    """A note where the rule is for thoughts alone, the template has a thinking mode, and no request
    asks for it, by their `enable_thinking`."""
    if engine.acceptance.rule != "relaxed" or any(asked) or not engine.tokenizer.knows_thinking():
        return None
    return "relaxed acceptance is for thoughts alone, and no request has enable_thinking"


def notes_of_rules(
    engine: Engine, rules: Iterable[AcceptOptions | None], count: int
) -> Iterator[str]:
    """A note for each rule that requests ask for by themselves, of `count` in all, where the engine
    has another one and the rule is not exact; None: a request asks for none."""
    from edgespec.runtime.acceptance.verify import EXACT, acceptance_words

    own = [asked.rule for asked in rules if asked is not None]
    for rule in dict.fromkeys(own):
        if rule not in (EXACT, engine.acceptance.rule):
            asking = f"{own.count(rule)} of {counted(count, 'request')}"
            yield f"acceptance: {acceptance_words(rule)}, as {asking} asked for"


def refuse_lossy(acceptance: AcceptOptions | None, temperature: float) -> None:
    """Raises RequestError where a lossless check of all requests would compare what is not to be
    equal."""
    from edgespec.runtime.acceptance.verify import GUARANTEES, acceptance_of, lossless

    asked = acceptance_of(acceptance)
    guarantee = lossless(asked, temperature)
    if guarantee != "tokens":
        raise RequestError(
            f"`check_lossless` compares tokens, and `acceptance` {asked.rule} at temperature"
            f" {temperature:g} is {GUARANTEES[guarantee]}",
            "Give `compare_quality`, which scores plain answers too, or `acceptance` exact.",
        )


def refuse_check(
    requests: Iterable[Request], acceptance: AcceptOptions | None, source: str | None = None
) -> None:
    """Raises RequestError where a lossless check would compare what is not to be equal. `source` is
    what asks for the rule where no flag does: a file's block, or a request's."""
    from edgespec.runtime.acceptance.verify import GUARANTEES, acceptance_of, lossless

    asked = acceptance_of(acceptance)
    rule, other = f"`acceptance` {asked.rule}", "`acceptance` exact"
    if source is not None:
        rule = f"the {asked.rule} acceptance that {source} asks for"
        other = f"remove its keys from {source}"
    for request in requests:
        guarantee = lossless(asked, request.sampling.temperature)
        if request.disable_spec_decode or guarantee == "tokens":
            continue
        if guarantee == "distribution":
            raise RequestError(
                f"request {request.index} samples at temperature {request.sampling.temperature:g},"
                f" and {rule} is {GUARANTEES[guarantee]}: its tokens are others than those of plain"
                " decoding",
                f"Give `temperature` 0 or {other} to compare tokens, or `compare_quality`"
                " to measure the difference.",
            )
        raise RequestError(
            f"`check_lossless` compares with plain decoding, and {rule} is {GUARANTEES[guarantee]}",
            f"Give `compare_quality`, which measures what it costs, or {other}.",
        )
