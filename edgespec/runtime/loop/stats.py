"""What an engine has done since it was opened, for a server's metrics.

Knows counts. Knows no sequences and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.runtime.loop.sequence import StepOutput


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Requests that have a lane and that wait for one, now, and bytes of kept prefixes; the others
    count since the engine was opened, as vLLM's metrics do.

    `prefix_cache_queries` are tokens of prompts and `prefix_cache_hits` those that were not
    computed. A step is one decode step of all that run. `drafts` are the trees that were verified,
    one a step and sequence, `draft_tokens` their nodes without the root, and
    `accepted_per_position[i]` the trees of which more than i drafts were accepted.
    """

    running: int = 0
    waiting: int = 0
    prefix_cache_bytes: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()


class Counters:
    """The counts of EngineStats while they grow."""

    def __init__(self) -> None:
        self.prompt_tokens = self.reused_tokens = self.generation_tokens = self.steps = 0
        self.drafts = self.draft_tokens = 0
        self.accepted: list[int] = []

    def add(self, output: StepOutput, prompt_tokens: int, reused_tokens: int) -> None:
        """What a step gave one sequence; its prompt counts with its first token."""
        if not output.verified:
            self.prompt_tokens += prompt_tokens
            self.reused_tokens += reused_tokens
        self.generation_tokens += len(output.tokens)
        self.drafts += output.drafted > 0
        self.draft_tokens += output.drafted
        self.accepted += [0] * (output.accepted - len(self.accepted))
        for position in range(output.accepted):
            self.accepted[position] += 1

    def stats(self, running: int, waiting: int, prefix_cache_bytes: int) -> EngineStats:
        """The counts as they are now."""
        accepted = tuple(self.accepted)
        return EngineStats(
            running,
            waiting,
            prefix_cache_bytes,
            self.prompt_tokens,
            self.reused_tokens,
            self.prompt_tokens,
            self.generation_tokens,
            self.steps,
            self.drafts,
            self.draft_tokens,
            sum(accepted),
            accepted,
        )
