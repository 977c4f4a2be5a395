"""What `/set` changes: sampling, how much is drafted, and what is shown.

A setting is a row of SETTINGS. Knows the names of input.json and of the flags.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from edgespec.cli.draft_flags import plan_of
from edgespec.errors import RequestError
from edgespec.prompts import SamplingParams
from edgespec.prompts.checks import MAX_COUNT, SAMPLING, flag, integer
from edgespec.prompts.places import Place, did_you_mean

if TYPE_CHECKING:
    from edgespec.runtime.engine import Engine
    from edgespec.runtime.plans import TreeSpec
    from edgespec.runtime.tree import DraftPlan

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
    is left to the engine. `tree` says what to draft instead, until a size is set."""

    sampling: SamplingParams
    drafts: bool = False
    sizes: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(DRAFT_SIZES))
    tree: TreeSpec | None = None
    enable_thinking: bool = False
    show_speculation: bool = False

    def plan(self, engine: Engine) -> DraftPlan | None:
        """Returns the drafting plan; None decodes plainly. Raises LimitError for sizes that the
        engine cannot take."""
        return plan_of(engine, self.sizes.values(), self.tree) if self.drafts else None


class Setting(NamedTuple):
    """A value by its name: how it is read, and the settings with another value.

    `change` raises RequestError, or LimitError, for a value that cannot be.
    """

    get: Callable[[Settings], object]
    change: Callable[[Settings, object, Place], Settings]


def of_sampling(name: str) -> Setting:
    """The row of a sampling parameter."""

    def change(settings: Settings, value: object, place: Place) -> Settings:
        values: dict[str, Any] = {name: SAMPLING[name](value, place)}
        return replace(settings, sampling=replace(settings.sampling, **values))

    return Setting(lambda settings: getattr(settings.sampling, name), change)


def of_size(name: str) -> Setting:
    """The row of a size of drafts; setting one turns drafts on."""

    def change(settings: Settings, value: object, place: Place) -> Settings:
        size = None if value is None else integer(1, MAX_COUNT)(value, place)
        return replace(settings, drafts=True, sizes=settings.sizes | {name: size}, tree=None)

    return Setting(lambda settings: settings.sizes[name], change)


def of_switch(name: str, field_name: str) -> Setting:
    """The row of a value that is on or off."""

    def change(settings: Settings, value: object, place: Place) -> Settings:
        values: dict[str, Any] = {field_name: flag(value, place)}
        return replace(settings, **values)

    return Setting(lambda settings: getattr(settings, field_name), change)


SETTINGS = {
    **{name: of_sampling(name) for name in SAMPLING_NAMES},
    "spec_decode": of_switch("spec_decode", "drafts"),
    **{name: of_size(name) for name in DRAFT_SIZES},
    "enable_thinking": of_switch("enable_thinking", "enable_thinking"),
    "show_speculation": of_switch("show_speculation", "show_speculation"),
}


def changed(settings: Settings, name: str, text: str) -> Settings:
    """Returns the settings with the value that a user typed.

    on, off and none are words of their own; other text is read as JSON or, where it is none, as it
    stands. Raises RequestError for an unknown name or a value that cannot be.
    """
    key = name.removeprefix("--").replace("-", "_")
    if key not in SETTINGS:
        raise RequestError(
            f"there is no setting {name}",
            f"{did_you_mean(key, SETTINGS, 'Did you mean {}? ')}Settings: {', '.join(SETTINGS)}.",
        )
    return SETTINGS[key].change(settings, parsed(text), Place(key))


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
    lines = []
    for name, row in SETTINGS.items():
        value = row.get(settings)
        text = words.get(id(value)) or json.dumps(value, ensure_ascii=False)
        lines.append(f"{name:20} {text}")
    return "\n".join(lines)
