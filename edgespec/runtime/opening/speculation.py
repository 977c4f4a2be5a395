"""What is asked of drafts: what drafts, with which options, how much, when, and by which accept
rule.

One value for engines and for requests, whoever says it and in whose words. Knows no keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.errors import Spellings
from edgespec.runtime.acceptance.verify import AcceptOptions
from edgespec.runtime.drafters.options import DrafterOptions
from edgespec.runtime.plans.plan import NO_SIZES, Sizes, TreeSpec
from edgespec.runtime.plans.schedules import AcceptanceGate, Gates, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What an engine or a request is asked to draft; None is left to the engine.

    `drafter` is the name of a method that needs no engine, or a drafter of the user's; None is what
    the engine was opened with. `sizes` or a `tree` say how much; errors name them by `spellings`,
    behind the `label`. `gate` has the answers over which accepted drafts a step are averaged, and
    the average below which drafting stops. `draft` and `aux_layers` are the checkpoint and the
    hidden_states indices that the draft engine is to have been made from.
    """

    label: str
    drafter: object | None = None
    options: DrafterOptions | None = None
    sizes: Sizes = NO_SIZES
    tree: TreeSpec | None = None
    spellings: Spellings = field(default_factory=dict)
    schedule: Schedule | None = None
    gate: tuple[int, float] | None = None
    acceptance: AcceptOptions | None = None
    draft: str | None = None
    aux_layers: tuple[int, ...] | None = None

    def gates(self) -> Gates | None:
        """What limits the drafts of an engine that has answered nothing yet; None where nothing
        does."""
        if self.schedule is None and self.gate is None:
            return None
        return Gates(self.schedule, None if self.gate is None else AcceptanceGate(*self.gate))
