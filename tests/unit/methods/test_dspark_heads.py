"""DSpark's heads against the definition in torch: the walk of each kind of Markov head, and what
the confidence head says of each slot."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from edgespec.methods.base import HeadSizes
from edgespec.methods.dspark import Heads, MarkovKind
from edgespec.methods.dspark_heads import DSparkHeads

VOCAB, DRAFT, HIDDEN, RANK, SLOTS = 40, 23, 12, 5, 6
OFFSETS = np.sort(np.random.default_rng(3).choice(VOCAB, DRAFT, replace=False)).astype(np.int64)


def heads_of(kind: Any, **changes: Any) -> Heads:
    keys = {"confidence": True, "confidence_reads_markov": True, "first_slot": 0}
    return Heads(**{"markov_rank": RANK, "markov_kind": kind} | keys | changes)


def arrays_of(heads: Heads, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = heads.shapes(HeadSizes(VOCAB, DRAFT, HIDDEN))
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


class Definition(nn.Module):
    """The heads of arXiv 2607.05147 one slot at a time, in torch and float64."""

    def __init__(self, kind: str, arrays: dict[str, np.ndarray], *, reads: bool) -> None:
        super().__init__()
        self.kind, self.reads = kind, reads
        self.arrays = {name: torch.from_numpy(array).double() for name, array in arrays.items()}

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(
            x, self.arrays[f"{name}.weight"], self.arrays.get(f"{name}.bias")
        )

    def walk(self, anchor: int, logits: Any, states: Any) -> tuple[list[int], list[float]]:
        memory, before, tokens, confidences = torch.zeros(RANK).double(), anchor, [], []
        for base, state in zip(torch.from_numpy(logits), torch.from_numpy(states), strict=True):
            e = self.arrays["markov_head.markov_w1.weight"][before]
            h = state.double()
            if self.kind == "vanilla":
                latent = e
            elif self.kind == "gated":
                latent = self.linear("markov_head.gate_proj", torch.cat([h, e])).sigmoid() * e
            else:
                z = self.linear("markov_head.joint_proj", torch.cat([memory, e, h]))
                gate, candidate, output = z.chunk(3)
                memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
                latent = output.tanh()
            corrected = base.double() + self.linear("markov_head.markov_w2", latent)
            read = torch.cat([h, e]) if self.reads else h
            confidences.append(float(self.linear("confidence_head.proj", read).sigmoid()))
            before = int(OFFSETS[int(corrected.argmax())])
            tokens.append(before)
        return tokens, confidences


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("kind", get_args(MarkovKind))
def test_the_walk_is_that_of_the_definition(kind: str, reads: bool) -> None:
    heads = heads_of(kind, confidence_reads_markov=reads)
    changed = 0
    for seed in range(8):
        rng, arrays = np.random.default_rng([seed, 1]), arrays_of(heads, seed)
        logits = rng.standard_normal((SLOTS, DRAFT)).astype(np.float32)
        states = rng.standard_normal((SLOTS, HIDDEN)).astype(np.float32)
        anchor = int(rng.integers(VOCAB))
        found = DSparkHeads(heads, arrays, OFFSETS).walk(anchor, logits, states)
        tokens, confidences = Definition(kind, arrays, reads=reads).walk(anchor, logits, states)
        assert OFFSETS[found.ids].tolist() == tokens
        np.testing.assert_allclose(found.confidences, confidences, rtol=1e-4, atol=1e-6)
        assert found.ids.tolist() == found.logits.argmax(1).tolist()
        changed += int((found.ids != logits.argmax(1)).sum())
    assert changed > 8 * SLOTS // 2  # the heads decide, not the slots alone


def test_without_a_markov_head_slots_are_their_own_best() -> None:
    heads = heads_of("vanilla", markov_rank=0, confidence_reads_markov=False)
    rng, arrays = np.random.default_rng(0), arrays_of(heads, 0)
    logits = rng.standard_normal((SLOTS, DRAFT)).astype(np.float32)
    states = rng.standard_normal((SLOTS, HIDDEN)).astype(np.float32)
    found = DSparkHeads(heads, arrays, OFFSETS).walk(3, logits, states)
    assert found.ids.tolist() == logits.argmax(1).tolist()
    np.testing.assert_array_equal(found.logits, logits)
    assert found.confidences is not None


def test_without_a_confidence_head_there_are_no_confidences() -> None:
    heads = heads_of("vanilla", confidence=False, confidence_reads_markov=False)
    logits = np.zeros((2, DRAFT), np.float32)
    found = DSparkHeads(heads, arrays_of(heads, 0), OFFSETS).walk(1, logits, None, lambda _: False)
    assert found.confidences is None
    assert len(found.ids) == 2  # nobody is asked how far to go


@pytest.mark.parametrize("kind", get_args(MarkovKind))
def test_a_walk_ends_before_the_slot_that_is_turned_down(kind: str) -> None:
    heads = heads_of(kind)
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((SLOTS, DRAFT)).astype(np.float32)
    states = rng.standard_normal((SLOTS, HIDDEN)).astype(np.float32)
    own = DSparkHeads(heads, arrays_of(heads, 5), OFFSETS)
    whole = own.walk(3, logits, states)
    assert whole.confidences is not None
    for count in range(SLOTS + 1):
        asked: list[float] = []

        def goes_on(confidence: float, asked: list[float] = asked, count: int = count) -> bool:
            asked.append(confidence)
            return len(asked) <= count

        found = own.walk(3, logits, states, goes_on)
        assert asked == whole.confidences[: count + 1].tolist()
        assert found.ids.tolist() == whole.ids[:count].tolist()
        np.testing.assert_array_equal(found.logits, whole.logits[:count])
        np.testing.assert_array_equal(found.confidences, whole.confidences[:count])


def test_ties_go_to_the_lowest_id() -> None:
    heads = heads_of("vanilla", confidence=False, confidence_reads_markov=False)
    arrays = {name: np.zeros_like(array) for name, array in arrays_of(heads, 0).items()}
    logits = np.ones((2, DRAFT), np.float32)
    logits[1, [4, 9]] = 2
    found = DSparkHeads(heads, arrays, OFFSETS).walk(1, logits, None)
    assert found.ids.tolist() == [0, 4]


def test_the_blocks_logits_are_not_written_to() -> None:
    """They are views of a buffer that the engine owns."""
    heads = heads_of("vanilla")
    logits, states = np.ones((2, DRAFT), np.float32), np.ones((2, HIDDEN), np.float32)
    logits.flags.writeable = False
    DSparkHeads(heads, arrays_of(heads, 0), OFFSETS).walk(1, logits, states)
