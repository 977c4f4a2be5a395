"""Base passes over N rows, timed one by one: what verifying a draft of N nodes costs, the root
included.

Knows an idle engine and its lanes. The rows are a chain of random tokens, and the rows that they
attend to are those that stand in their lanes, whosever these were: how long a pass takes is no
matter of their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from edgespec.errors import EnvironmentProblem, LimitError
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.stages import StageTimes
from edgespec.runtime.loop.sequence import SequenceState
from edgespec.runtime.loop.step_values import Draft
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftTree

Stopping = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class PassSize:
    """`rows` rows of each of `batch_size` sequences, behind `context` tokens each."""

    context: int
    batch_size: int
    rows: int


def check_rows(engine: Engine, rows: Sequence[int], contexts: Sequence[int]) -> None:
    """Raises LimitError for passes that the engine cannot run."""
    most, capacity = engine.config.limits.verify_tree_size, engine.base.capacity
    if max(rows) > most:
        message = f"`rows` {max(rows)}: the base engine was built to verify {most} nodes"
        raise LimitError(
            message, f"Leave it out, or build with `max_verify_tree_size` {max(rows)}."
        )
    if max(contexts) + max(rows) > capacity:
        message = (
            f"{max(contexts)} tokens and {max(rows)} rows: the KV cache holds {capacity} tokens"
        )
        raise LimitError(message, "Lower `input_tokens`, or build with a larger cache.")


def fitting_rows(engine: Engine, rows: Sequence[int], contexts: Sequence[int]) -> list[int]:
    """Of rows that nobody asked for by name those that the engine can run."""
    most = min(engine.config.limits.verify_tree_size, engine.base.capacity - max(contexts))
    return [count for count in rows if count <= max(most, 1)]


def timed_passes(
    engine: Engine,
    size: tuple[int, int],
    rows: Sequence[int],
    repeats: int,
    *,
    warmup: int = 1,
    stopping: Stopping = lambda: False,
) -> Iterator[tuple[PassSize, float]]:
    """Seconds of single passes behind `size`, a context and a batch size: for each repeat one of
    each number of rows, forward and backward by turns, so that they share what the machine does.
    The first `warmup` repeats are not yielded. Raises EnvironmentProblem for an engine that is
    busy."""
    context, batch_size = size
    with lanes_of(engine, context, batch_size) as sequences:
        for repeat in range(warmup + repeats):
            for count in reversed(rows) if repeat % 2 else rows:
                if stopping():
                    return
                seconds = pass_s(engine, sequences, count, seed=repeat)
                if repeat >= warmup:
                    yield PassSize(context, batch_size, count), seconds


@contextmanager
def lanes_of(engine: Engine, context: int, batch_size: int) -> Iterator[list[SequenceState]]:
    """Sequences of `context` tokens in the first lanes, free again afterwards."""
    with engine.driver.paused():
        session, base = engine.session, engine.base
        if session.num_free_lanes < len(base.lanes):
            message = "the engine answers other requests, and a pass is timed alone"
            raise EnvironmentProblem(message, "Time passes while nothing else runs.")
        rng, vocab_size = np.random.default_rng(0), engine.config.component.vocab_size
        try:
            for lane in range(batch_size):
                tokens = rng.integers(0, vocab_size, context + 1).tolist()
                sequence = SequenceState(tokens, Sampler(), 1)
                sequence.lane = lane
                base.reset(lane)
                base.reserve(
                    lane, min(base.capacity, context + engine.config.limits.verify_tree_size)
                )
                session.running.append(sequence)
                hold(engine, lane, tokens[:-1])
            yield list(session.running)
        finally:
            session.restart()
            for lane in range(batch_size):
                base.reset(lane)


def hold(engine: Engine, lane: int, tokens: Sequence[int]) -> None:
    """Let a lane be as long as these tokens; a recurrent state reads a chunk of them, as its length
    matters little."""
    base = engine.base
    if base.recurrent:
        base.read(lane, np.array(tokens[-base.prefill_chunk :], np.int64))
    else:
        base.hold(lane, len(tokens))


def pass_s(engine: Engine, sequences: Sequence[SequenceState], rows: int, seed: int) -> float:
    """Seconds of one pass over a chain of `rows` nodes of each sequence and of the accept rule on
    it, as a step verifies them. Nothing of it is kept."""
    rng, vocab_size = np.random.default_rng(seed), engine.config.component.vocab_size
    drafts = [
        Draft(seq, DraftTree.chain(seq.pending, rng.integers(0, vocab_size, rows - 1).tolist()))
        for seq in sequences
    ]
    began = perf_counter()
    engine.session.verify(drafts, StageTimes())
    seconds = perf_counter() - began
    for seq in sequences:
        engine.base.drop_scratch(seq.lane)
    return seconds
