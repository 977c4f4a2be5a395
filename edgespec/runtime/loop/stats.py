"""What an engine has done since it was opened, for a server's metrics.

Knows counts. Knows no sequences and no clock.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from edgespec.runtime.loop.sequence import StepOutput

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)  # as vLLM has them


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Requests that have a lane and that wait for one, now, and bytes of kept prefixes; the others
    count since the engine was opened, as vLLM's metrics do.

    `prefix_cache_queries` are tokens of prompts and `prefix_cache_hits` those that were not
    computed. A step is one decode step of all that run. `drafts` are the trees that were verified,
    one a step and sequence, `draft_tokens` their nodes without the root, and
    `accepted_per_position[i]` the trees of which more than i drafts were accepted. An iteration is
    a chunk of a prompt, a decode step or both: `iteration_tokens` were computed of prompts or
    generated in all, and `iterations[i]` had up to 1, 8, 16, 32 ... 2048 of them, the last more.
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
    iteration_tokens: int = 0
    iterations: tuple[int, ...] = ()


class Counters:
    """The counts of EngineStats while they grow."""

    def __init__(self) -> None:
        self.prompt_tokens = self.reused_tokens = self.generation_tokens = self.steps = 0
        self.drafts = self.draft_tokens = 0
        self.accepted: list[int] = []
        self.tokens = self.iteration_tokens = 0  # of the iteration under way, and of all before
        self.iterations = [0] * (len(ITERATION_TOKENS) + 1)

    def add(self, output: StepOutput, prompt_tokens: int, reused_tokens: int) -> None:
        """What a step gave one sequence; its prompt counts with its first token."""
        if not output.verified:
            self.prompt_tokens += prompt_tokens
            self.reused_tokens += reused_tokens
        self.generation_tokens += len(output.tokens)
        self.tokens += len(output.tokens)
        self.drafts += output.drafted > 0
        self.draft_tokens += output.drafted
        self.accepted += [0] * (output.accepted - len(self.accepted))
        for position in range(output.accepted):
            self.accepted[position] += 1

    def end_iteration(self) -> None:
        """An iteration is over; one that computed nothing is none."""
        if self.tokens:
            self.iterations[bisect_left(ITERATION_TOKENS, self.tokens)] += 1
            self.iteration_tokens += self.tokens
            self.tokens = 0

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
            self.iteration_tokens,
            tuple(self.iterations),
        )
