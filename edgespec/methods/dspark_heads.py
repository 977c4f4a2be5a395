"""DSpark's heads as they are computed (arXiv 2607.05147): the Markov head walks a block
from left to right, and the confidence head says how probably each token will be accepted.

Knows arrays alone: the drafter runs a block by it, and the probe its first slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.methods.dspark import Heads

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Walk:
    """A block from left to right: the draft's own ids [S], the logits [S, Vd] that each was chosen
    by, and the confidences [S], None without the head."""

    ids: Ids
    logits: Floats
    confidences: Floats | None


class DSparkHeads:
    """The heads of a draft. `base_ids` [Vd] are the base's ids of the draft's own.

    `arrays` are float32, by the names of `Heads.shapes`.
    """

    def __init__(self, heads: Heads, arrays: Mapping[str, Floats], base_ids: Ids) -> None:
        self.heads, self.base_ids = heads, base_ids
        # read row by row: [V, r]; and whole, once a slot: [Vd, r]
        self.markov_w1 = arrays.get("markov_head.markov_w1.weight")
        self.markov_w2 = arrays.get("markov_head.markov_w2.weight")
        self.joint = _linear(arrays, "markov_head.gate_proj", "markov_head.joint_proj")
        self.confidence = _linear(arrays, "confidence_head.proj")

    def walk(
        self,
        anchor: int,
        logits: Floats,
        states: Floats | None,
        goes_on: Callable[[float], bool] = lambda confidence: True,
        chosen: Callable[[Floats], int] = lambda corrected: int(corrected.argmax()),
    ) -> Walk:
        """The block behind the token `anchor`, an id of the base: `logits` [S, Vd] and `states`
        [S, H] are those of the slots that draft. `chosen` is the draft's own id of a slot's token
        by its corrected logits [Vd]; by default the best, the lowest of equal ones.

        Where there is a confidence head, `goes_on` is asked with each slot's confidence, from left
        to right; the walk ends before the first that it turns down, and computes no logits of it.
        """
        ids: list[int] = []
        corrected: list[Floats] = []
        confidences: list[float] = []
        memory, before = self.start(), anchor
        for slot, said in enumerate(logits):
            state = None if states is None else states[slot]
            embedding = None if self.markov_w1 is None else self.markov_w1[before]
            confidence = self.confidence_of(embedding, state)
            if self.confidence is not None and not goes_on(confidence):
                break
            memory, bias = self.step(memory, embedding, state)
            corrected.append(said + bias)
            ids.append(chosen(corrected[-1]))
            confidences.append(confidence)
            before = int(self.base_ids[ids[-1]])
        return Walk(
            np.array(ids, np.int64),
            np.array(corrected, np.float32).reshape(-1, logits.shape[1]),
            None if self.confidence is None else np.array(confidences, np.float32),
        )

    def start(self) -> Floats:
        """The memory of a recurrent Markov head before a block, [r]."""
        return np.zeros(self.heads.markov_rank, np.float32)

    def step(
        self, memory: Floats, embedding: Floats | None, state: Floats | None
    ) -> tuple[Floats, Floats | np.float32]:
        """The memory behind a slot, and what is added to its logits [Vd]; `embedding` [r] is that
        of the token before, `state` [H] the slot's own."""
        if embedding is None:
            return memory, np.float32(0)
        assert self.markov_w2 is not None
        if self.heads.markov_kind == "vanilla":
            return memory, self.markov_w2 @ embedding
        assert self.joint is not None
        assert state is not None
        if self.heads.markov_kind == "gated":
            gate = sigmoid(self.joint(np.concatenate([state, embedding])))
            return memory, self.markov_w2 @ (gate * embedding)
        gate, candidate, output = np.split(
            self.joint(np.concatenate([memory, embedding, state])), 3
        )
        kept = sigmoid(gate)
        memory = kept * memory + (1 - kept) * np.tanh(candidate)
        return memory, self.markov_w2 @ np.tanh(output)

    def confidence_of(self, embedding: Floats | None, state: Floats | None) -> float:
        """How probably a slot's token will be accepted, if those before it are; 1 without the
        head."""
        if self.confidence is None:
            return 1.0
        assert state is not None
        read = [state]
        if self.heads.confidence_reads_markov:
            assert embedding is not None
            read.append(embedding)
        return float(sigmoid(self.confidence(np.concatenate(read)))[0])


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Floats  # [out, in]
    bias: Floats  # [out]

    def __call__(self, x: Floats) -> Floats:
        """[in] -> [out]"""
        y: Floats = self.weight @ x + self.bias
        return y


def _linear(arrays: Mapping[str, Floats], *names: str) -> _Linear | None:
    """The first Linear of these names that is there."""
    name = next((name for name in names if f"{name}.weight" in arrays), None)
    return None if name is None else _Linear(arrays[f"{name}.weight"], arrays[f"{name}.bias"])


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    y: Floats = np.float32(0.5) * (np.float32(1) + np.tanh(np.float32(0.5) * x))
    return y
