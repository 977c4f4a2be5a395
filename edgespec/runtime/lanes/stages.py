"""Where the time goes: the stages of a run, by TensorRT Edge-LLM's ids where it has them.

Knows names and seconds. A stage's time is wall time around its calls, host work included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MULTIMODAL = "multimodal_processing"  # an image is read, decoded and resized
VISION_ENCODER = "vision_encoder"
PREFILL = "llm_prefill"
GENERATION = "llm_generation"
DRAFT_PREFILL = "spec_decode_draft_prefill"
DRAFT_PROPOSAL = "spec_decode_draft_proposal"
VERIFICATION = "spec_decode_base_verification"
COMMIT = "kv_commit"  # ours: moving the KV rows of what was accepted
# Ours: the draft reads the hidden states of what was accepted
DRAFT_REPLAY = "spec_decode_draft_replay"

# Stage -> the coarser one of a request's metrics.
COARSE = {
    PREFILL: "prefill",
    DRAFT_PREFILL: "prefill",
    DRAFT_PROPOSAL: "draft",
    DRAFT_REPLAY: "draft",
    GENERATION: "verify",
    VERIFICATION: "verify",
    COMMIT: "commit",
}
# In the order of a request; those of images are before it begins, and no part of its metrics
STAGES = (MULTIMODAL, VISION_ENCODER, *COARSE)


@dataclass
class StageTimes:
    """Seconds by coarse stage; engine time is part of each, `engine` is its share of all."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    engine: float = 0.0

    def __iadd__(self, other: StageTimes) -> StageTimes:
        self.prefill += other.prefill
        self.draft += other.draft
        self.verify += other.verify
        self.commit += other.commit
        self.engine += other.engine
        return self

    @property
    def host(self) -> float:
        """Time outside the engines, prefill included."""
        return self.prefill + self.draft + self.verify + self.commit - self.engine


@dataclass
class StageLog:
    """Seconds of every single pass of each stage. `engine_s` reads a running total.

    An engine that serves for days keeps no such list: it has `recording` False but in `recorded`.
    """

    engine_s: Callable[[], float]
    passes: dict[str, list[float]] = field(default_factory=dict)
    recording: bool = True

    def timed(self, stage: str, spent: StageTimes) -> TimedPass:
        """Time one pass of a stage; it is also added to `spent`."""
        return TimedPass(self, stage, spent)

    def add(self, stage: str, seconds: float, engine_s: float, spent: StageTimes) -> None:
        """Take in one pass of a stage, of which `engine_s` seconds were the engines'."""
        self.note(stage, seconds)
        coarse = COARSE[stage]
        setattr(spent, coarse, getattr(spent, coarse) + seconds)
        spent.engine += engine_s

    def note(self, stage: str, seconds: float) -> None:
        """Take in one pass of a stage that is no request's alone."""
        if self.recording:
            self.passes.setdefault(stage, []).append(seconds)

    @contextmanager
    def recorded(self) -> Iterator[dict[str, list[float]]]:
        """The passes of the block alone, by their stage."""
        self.passes, self.recording = {}, True
        try:
            yield self.passes
        finally:
            self.recording = False


class TimedPass:
    """One pass of a stage while it runs; one that raises is not counted. A step has four, so this
    is no generator, which would cost several times as much."""

    __slots__ = ("began", "engine_s", "log", "spent", "stage")

    def __init__(self, log: StageLog, stage: str, spent: StageTimes) -> None:
        self.log, self.stage, self.spent = log, stage, spent

    def __enter__(self) -> None:
        self.began, self.engine_s = time.perf_counter(), self.log.engine_s()

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is None:
            seconds = time.perf_counter() - self.began
            self.log.add(self.stage, seconds, self.log.engine_s() - self.engine_s, self.spent)
