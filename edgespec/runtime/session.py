"""The loop: draft, verify, commit.

Knows one sequence: n committed tokens and exactly one pending token, which the base has drawn and not yet read. A step
emits the accepted drafts and one token more. Knows nothing of text, files or what kind of drafter it has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import LimitError
from edgespec.prompts import END_OF_SEQUENCE, MAX_LENGTH
from edgespec.runtime.decoder import CachedDecoder
from edgespec.runtime.drafters.base import Drafter
from edgespec.runtime.sampling import Sampler
from edgespec.runtime.tree import DraftPlan, DraftTree
from edgespec.runtime.verify import walk

PREFILL_CHUNK = 512  # tokens a call: bounds the mask and the activations of a long prompt


@dataclass(frozen=True, slots=True)
class Step:
    """What one step emitted. `drafted` counts nodes beside the root; prefill is the step with `verified` False."""

    tokens: list[int]
    drafted: int = 0
    accepted: int = 0
    verified: bool = True
    finish_reason: str | None = None


@dataclass
class StageTimes:
    """Seconds by stage; engine time is part of each, `engine` is its share of all."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    engine: float = 0.0


@dataclass
class Session:
    """One sequence in one base, with a drafter or without."""

    base: CachedDecoder
    drafter: Drafter | None = None
    times: StageTimes = field(default_factory=StageTimes)
    sequence: int = 0  # counts the sequences begun: base and drafter remember one at a time

    def generate(
        self, prompt: Sequence[int], sampler: Sampler, max_new: int, stop_ids: frozenset[int], plan: DraftPlan | None
    ) -> Iterator[Step]:
        """Yield steps until an id of `stop_ids` is emitted, `max_new` tokens are, or the cache is full.

        Raises LimitError if the prompt does not fit. The sequence of tokens hangs on the logits alone: with a plan or
        without, the same sampler gives the same tokens.
        """
        drafter = self.drafter if plan is not None else None
        self.start(prompt, drafter)
        mine = self.sequence
        step = self.prefill(np.array(prompt, np.int64), sampler, drafter)
        emitted = 1
        step = self.cut(step, emitted, max_new, stop_ids)
        yield step
        while step.finish_reason is None:
            if self.sequence != mine:
                raise LimitError("another request was begun on this engine", "Finish one stream before the next.")
            tree = self.draft(step.tokens[-1], drafter, plan, max_new - emitted)
            step, features = self.verify(tree, sampler)
            step = self.cut(step, emitted, max_new, stop_ids)
            emitted += len(step.tokens)
            if drafter is not None and step.finish_reason is None:
                self.replay(drafter, features, step)
            yield step

    def start(self, prompt: Sequence[int], drafter: Drafter | None) -> None:
        if not prompt:
            raise LimitError("the prompt is empty", "Give at least one token.")
        if len(prompt) > self.base.capacity:
            what = f"the prompt has {len(prompt)} tokens, the engine's KV cache holds {self.base.capacity}"
            raise LimitError(what, "Shorten the prompt, or build with a larger --max-kv-cache-capacity.")
        self.times = StageTimes()
        self.sequence += 1
        self.base.reset()
        if drafter is not None:
            drafter.reset()

    def prefill(self, prompt: NDArray[np.int64], sampler: Sampler, drafter: Drafter | None) -> Step:
        """Commit the prompt in chunks and draw the first token.

        The drafter pairs each feature with the token after it, so the last feature of a chunk goes with the next
        chunk's first token, and the last one of all with the token drawn.
        """
        began, engine = time.perf_counter(), self.engine_s(drafter)
        pending = -1
        for start in range(0, len(prompt), PREFILL_CHUNK):
            chunk = prompt[start : start + PREFILL_CHUNK]
            end = start + len(chunk)
            result = self.base.causal(chunk, np.array([len(chunk) - 1]))
            following = prompt[start + 1 : end + 1]
            if end == len(prompt):
                pending = sampler.pick(result.logits[0, 0], end)
                following = np.append(following, pending)
            if drafter is not None:
                assert result.hidden_states is not None
                drafter.observe(result.hidden_states[0], following)
        self.times.prefill = time.perf_counter() - began
        self.times.engine += self.engine_s(drafter) - engine
        return Step([pending], verified=False)

    def draft(self, pending: int, drafter: Drafter | None, plan: DraftPlan | None, remaining: int) -> DraftTree:
        """A tree that can neither overrun the length nor the cache: with no room to draft, the root alone."""
        began, engine = time.perf_counter(), self.engine_s(drafter)
        tree = DraftTree.root_only(pending)
        if drafter is not None and plan is not None:
            tree = drafter.propose(pending, plan.within(levels=remaining - 1, nodes=self.base.room))
        self.times.draft += time.perf_counter() - began
        self.times.engine += self.engine_s(drafter) - engine
        return tree

    def verify(self, tree: DraftTree, sampler: Sampler) -> tuple[Step, NDArray[np.float32] | None]:
        """One base pass over the tree, the walk, and the commit of what stands; also the features of what stands."""
        began, engine = time.perf_counter(), self.base.engine_s
        position = self.base.length
        result = self.base.run(tree.tokens, position + tree.depths, tree.mask, np.arange(len(tree)))
        verdict = walk(tree, result.logits[0], sampler, position)
        verified = time.perf_counter()
        path = np.array(verdict.path, np.int64)
        self.base.commit(path)
        self.times.verify += verified - began
        self.times.commit += time.perf_counter() - verified
        self.times.engine += self.base.engine_s - engine
        features = None if result.hidden_states is None else result.hidden_states[0][path]
        return Step(verdict.emitted, drafted=len(tree) - 1, accepted=len(path) - 1), features

    def replay(self, drafter: Drafter, features: NDArray[np.float32] | None, step: Step) -> None:
        """Tell the drafter the true features of what was committed, with the tokens that came after."""
        assert features is not None
        began, engine = time.perf_counter(), drafter.engine_s
        drafter.observe(features, np.array(step.tokens, np.int64))
        self.times.draft += time.perf_counter() - began
        self.times.engine += drafter.engine_s - engine

    def cut(self, step: Step, before: int, max_new: int, stop_ids: frozenset[int]) -> Step:
        """End the step at its first stop id; say why generation ends, if it does.

        The pending token needs a row of its own in the next pass, so the cache is full when no row is left.
        """
        stops = [i for i, token in enumerate(step.tokens) if token in stop_ids]
        if stops:
            kept = step.tokens[: stops[0] + 1]
            return Step(kept, step.drafted, min(step.accepted, len(kept)), step.verified, END_OF_SEQUENCE)
        total = before + (len(step.tokens) if step.verified else 0)
        assert total <= max_new
        ended = total == max_new or self.base.room == 0
        return Step(step.tokens, step.drafted, step.accepted, step.verified, MAX_LENGTH if ended else None)

    def engine_s(self, drafter: Drafter | None) -> float:
        return self.base.engine_s + (drafter.engine_s if drafter is not None else 0.0)
