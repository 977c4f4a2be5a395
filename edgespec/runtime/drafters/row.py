"""What a row of DRAFTERS holds: how a method's drafter is opened, and how much it may draft.

Knows the columns. Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.base import DEFAULT_ROW_COST, Runner, Table
from edgespec.backends.engine_config import EngineConfig
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.drafters.options import DrafterOptions
from edgespec.runtime.plans.plan import PlanLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEngine:
    """A draft's open engine. `table` is the embedding that it reads: its own or the base's."""

    runner: Runner
    config: EngineConfig
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSources:
    """What a drafter can be made from. `draft` is None for a method that needs no engine.

    `num_lanes` sequences run at a time, of up to `capacity` tokens each. Each row of a base pass
    beside the first one takes `row_cost` of a pass of one row. `options` are those of the
    row's class, with its defaults where none were given; None where the row has none.
    """

    engine_dir: Path
    base: EngineConfig
    num_lanes: int
    capacity: int
    draft: DraftEngine | None = None
    row_cost: float = DEFAULT_ROW_COST
    options: DrafterOptions | None = None


def not_trained_with_a_mode(base: EngineConfig, draft: EngineConfig | None) -> bool | None:
    """For methods whose drafts are trained on the base's own answers, in either mode."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRow:
    """A drafting method at run time; its row in METHODS says whether it has an engine.

    `limits` are those of a drafting plan, by the configs of base and draft; where options change
    them, `limits_by_options`, by the base's config and the options. `words` follow "chain" or
    "tree" where a plan is shown. `options` is the class of its options, if it has any; `open`
    gets one of them in its sources. `forget` lets a drafter of the method drop what sequences that
    ended have left behind, where they do. `tries` are options that `edgespec tune` compares.
    `paces_itself`: its drafter decides by itself how much pays, by `row_cost`.
    `trained_with_thinking` is the mode that its drafts know, None where they know both.
    """

    open: Callable[[DrafterSources], Drafter]
    limits: Callable[[EngineConfig, EngineConfig | None], PlanLimits]
    words: str = ""
    options: type[DrafterOptions] | None = None
    limits_by_options: Callable[[EngineConfig, Any], PlanLimits] | None = None
    forget: Callable[[Any], None] | None = None
    paces_itself: bool = False
    tries: tuple[Mapping[str, Any], ...] = ()
    trained_with_thinking: Callable[[EngineConfig, EngineConfig | None], bool | None] = (
        not_trained_with_a_mode
    )
