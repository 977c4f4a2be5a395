"""The table of drafting methods: one row each.

Adding a method is a row here and a file beside this one; the tables of other packages that have
code for it are keyed by the row's `name`. Test code and users may add rows of their own.
"""

from __future__ import annotations

from edgespec.config.values import DraftConfig, ModelConfig
from edgespec.methods import (
    dflash,
    draft_model,
    dspark,
    eagle1,
    eagle3,
    jetspec,
    medusa,
    mtp,
    ngram,
    suffix,
)
from edgespec.methods.base import Method

ROWS = (
    eagle1.METHOD,
    eagle3.METHOD,
    mtp.METHOD,
    dflash.METHOD,
    jetspec.METHOD,
    dspark.METHOD,
    medusa.METHOD,
    draft_model.METHOD,
    suffix.METHOD,
    ngram.METHOD,
)
METHODS: dict[str, Method] = {row.name: row for row in ROWS}


def find_method(name: str) -> Method | None:
    """The row of a name or of one of its aliases, in any case; None where there is none."""
    wanted = name.lower()
    rows = METHODS.values()
    return next((m for m in rows if wanted in (m.name, *map(str.lower, m.aliases))), None)


def whole_model_method() -> Method | None:
    """The method that takes a whole model for a draft; None where there is no such row."""
    return next((m for m in METHODS.values() if m.of_model is not None), None)


def as_draft(config: ModelConfig | DraftConfig) -> DraftConfig:
    """What a checkpoint given as a draft is: a draft as it is, a whole model by the method that
    takes those."""
    if isinstance(config, DraftConfig):
        return config
    whole = whole_model_method()
    assert whole is not None
    assert whole.of_model is not None
    return whole.of_model(config)
