"""What `/set` changes: sampling, how much is drafted, and what is shown.

A setting is a row of SETTINGS. Knows the names of input.json and of the flags.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.cli.accept_flags import OPTIONS
from edgespec.cli.draft_flags import plan_of
from edgespec.errors import RequestError
from edgespec.methods.names import POLICIES, RULES
from edgespec.prompts import SamplingParams
from edgespec.prompts.checks import MAX_COUNT, SAMPLING, flag, integer
from edgespec.prompts.places import JsonPlace, did_you_mean

if TYPE_CHECKING:
    from edgespec.methods.names import SpecPolicy
    from edgespec.runtime.acceptance.verify import AcceptOptions
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.plans.plan import TreeSpec
    from edgespec.runtime.trees.tree import DraftPlan

WORDS: dict[str, object] = {"on": True, "off": False, "none": None}
DRAFT_SIZES = ("spec_draft_top_k", "spec_draft_step", "spec_verify_size")
SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
    "max_generate_length",
    "stop",
)


@dataclass
class Settings:
    """How the next answer is generated and shown. `sizes` are those of drafts, by DRAFT_SIZES; None
    is left to the engine. `tree` says what to draft instead, until a size is set. `acceptance` is
    the accept rule, `spec_policy` says whether drafting is adaptive; None is the engine's."""

    sampling: SamplingParams
    drafts: bool = False
    sizes: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(DRAFT_SIZES))
    tree: TreeSpec | None = None
    acceptance: AcceptOptions | None = None
    spec_policy: SpecPolicy | None = None
    enable_thinking: bool = False
    show_speculation: bool = False

    def plan(self, engine: Engine) -> DraftPlan | None:
        """Returns the drafting plan; None decodes plainly. Raises LimitError for sizes that the
        engine cannot take, or that do not go with the accept rule."""
        if not self.drafts:
            return None
        return plan_of(engine, self.sizes.values(), self.tree, self.acceptance, self.spec_policy)


class Setting(NamedTuple):
    """A value by its name: how it is read, and the settings with another value.

    `change` raises RequestError, or LimitError, for a value that cannot be.
    """

    get: Callable[[Settings], object]
    change: Callable[[Settings, object, JsonPlace], Settings]


def of_sampling(name: str) -> Setting:
    """The row of a sampling parameter."""

    def change(settings: Settings, value: object, place: JsonPlace) -> Settings:
        values: dict[str, Any] = {name: SAMPLING[name](value, place)}
        return replace(settings, sampling=replace(settings.sampling, **values))

    return Setting(lambda settings: getattr(settings.sampling, name), change)


def of_size(name: str) -> Setting:
    """The row of a size of drafts; setting one turns drafts on."""

    def change(settings: Settings, value: object, place: JsonPlace) -> Settings:
        size = None if value is None else integer(1, MAX_COUNT)(value, place)
        return replace(settings, drafts=True, sizes=settings.sizes | {name: size}, tree=None)

    return Setting(lambda settings: settings.sizes[name], change)


def change_policy(settings: Settings, value: object, place: JsonPlace) -> Settings:
    """The settings with another policy; none is the engine's. Setting one turns drafts on."""
    if value is not None and value not in POLICIES:
        place.refuse(f"is {value!s:.60}", f"Write {' or '.join(POLICIES)}, or none.")
    return replace(settings, drafts=True, spec_policy=value)


def of_switch(name: str, field_name: str) -> Setting:
    """The row of a value that is on or off."""

    def change(settings: Settings, value: object, place: JsonPlace) -> Settings:
        values: dict[str, Any] = {field_name: flag(value, place)}
        return replace(settings, **values)

    return Setting(lambda settings: getattr(settings, field_name), change)


def rule_of(settings: Settings) -> AcceptOptions:
    """The accept rule, exact where none was chosen."""
    from edgespec.runtime.acceptance.verify import EXACT_ACCEPTANCE

    return settings.acceptance or EXACT_ACCEPTANCE


def change_rule(settings: Settings, value: object, place: JsonPlace) -> Settings:
    """The settings with another accept rule: its name, and behind it options as NAME=VALUE. Turns
    drafts on."""
    from edgespec.runtime.acceptance.verify import acceptance_of

    rule, *given = value.split() if isinstance(value, str) and value.strip() else [str(value)]
    if rule not in RULES:
        near = did_you_mean(rule, RULES, "Did you mean {}? ")
        place.refuse(f"is {rule:.60}", f"{near}Write one of {', '.join(RULES)}.")
    options: dict[str, Any] = {}
    for text in given:
        name, equals, written = text.partition("=")
        if not equals:
            place.refuse(
                f"has {text:.60} behind the rule", "Write options as posterior_threshold=0.09."
            )
        options[RULE_OPTIONS.get(name, name)] = parsed(written)
    return replace(settings, drafts=True, acceptance=acceptance_of(rule, **options))


def of_rule(rule: str, name: str) -> Setting:
    """The row of an option of an accept rule. Setting one takes that rule, with what is known of its
    other options; none is the option's default."""

    def change(settings: Settings, value: object, place: JsonPlace) -> Settings:
        from edgespec.runtime.acceptance.verify import acceptance_of

        del place
        now = rule_of(settings)
        if value is None and now.rule != rule:
            return settings
        options = now.to_dict() if now.rule == rule else {}
        options[name] = value
        if value is None:
            del options[name]
        return replace(settings, drafts=True, acceptance=acceptance_of(rule, **options))

    return Setting(lambda settings: getattr(rule_of(settings), name, None), change)


# A flag's name of an option of an accept rule -> the option's, which are settings
RULE_OPTIONS = {flag: name for flag, (_, name) in OPTIONS.items() if name}
ACCEPTANCE = {
    "acceptance": Setting(lambda settings: rule_of(settings).rule, change_rule),
    **{name: of_rule(rule, name) for rule, name in OPTIONS.values() if name},
}
SETTINGS = {
    **{name: of_sampling(name) for name in SAMPLING_NAMES},
    "spec_decode": of_switch("spec_decode", "drafts"),
    **{name: of_size(name) for name in DRAFT_SIZES},
    "spec_policy": Setting(lambda settings: settings.spec_policy, change_policy),
    **ACCEPTANCE,
    "enable_thinking": of_switch("enable_thinking", "enable_thinking"),
    "show_speculation": of_switch("show_speculation", "show_speculation"),
}


def changed(settings: Settings, name: str, text: str) -> Settings:
    """Returns the settings with the value that a user typed.

    on, off and none are words of their own; other text is read as JSON or, where it is none, as it
    stands. Raises RequestError for an unknown name or a value that cannot be.
    """
    key = name.removeprefix("--").replace("-", "_")
    key = RULE_OPTIONS.get(key, key)
    if key not in SETTINGS:
        raise RequestError(
            f"there is no setting {name}",
            f"{did_you_mean(key, SETTINGS, 'Did you mean {}? ')}Settings: {', '.join(SETTINGS)}.",
        )
    return SETTINGS[key].change(settings, parsed(text), JsonPlace(key))


def parsed(text: str) -> object:
    """Returns a typed value as JSON has it; text that is no JSON is a string."""
    if text in WORDS:
        return WORDS[text]
    try:
        return json.loads(text)
    except ValueError:
        return text


def shown(settings: Settings) -> str:
    """Returns all settings, one a line, as /set takes them."""
    words = {id(value): word for word, value in WORDS.items()}
    lines, width = [], max(map(len, SETTINGS))
    for name, row in SETTINGS.items():
        value = row.get(settings)
        text = words.get(id(value)) or json.dumps(value, ensure_ascii=False)
        lines.append(f"{name:{width}} {text}")
    return "\n".join(lines)
