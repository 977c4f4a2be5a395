"""The proof that a build makes of its engine: golden outputs, alone and in batches with another
sequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edgespec.backends.base import AccuracySpec, LaneRows, Remedies, Table
from edgespec.backends.call import Call, Floats, Result
from edgespec.backends.golden import Golden, check_golden
from edgespec.backends.host import host_results
from edgespec.config import RopeConfig
from edgespec.contract import GraphContract, GraphShape, Role, canonical_contract
from edgespec.errors import BuildError

TOLERANCE = 1e-4
SPEC = AccuracySpec(tolerance=TOLERANCE)
REMEDIES = Remedies(mismatch="Another result.", too_coarse="Be finer.")
SHAPE = GraphShape(Role.BASE, 4, 1, 1, 4, 4, vocab_size=5, features=4)
Fault = Callable[[Floats], Floats]  # [B, S, width] as they should be -> as the engine gives them


def no_fault(right: Floats) -> Floats:
    return right


class Answers:
    """A runner that gives the golden answers to golden rows and zeroes to others, each changed by
    `change`, then by `fault`."""

    contract: GraphContract = canonical_contract(SHAPE)
    capacity = prefill_chunk = max_rows = 8
    engine_s = 0.0
    table: Table | None = None

    def __init__(self, golden: Golden, change: dict[str, float], lanes: int, fault: Fault) -> None:
        self.golden, self.change, self.lanes, self.fault = golden, change, lanes, fault
        self.starts: list[list[int]] = []

    def run(self, call: Call) -> list[Result]:
        self.starts.append(call.write_indices.tolist())
        answers = [self.answer(embeds) for embeds in call.inputs_embeds]
        logits, hidden_states = (
            self.fault(np.stack(arrays)) for arrays in zip(*answers, strict=True)
        )
        return host_results(call, logits, hidden_states)

    def answer(self, embeds: Floats) -> list[Floats]:
        label = "prompt" if len(embeds) == 5 else "tree"
        outputs = [self.golden[f"{label}_{name}"][0].copy() for name in ("logits", "hidden_states")]
        if not np.array_equal(embeds, self.golden[f"{label}_inputs_embeds"][0]):
            return [np.zeros_like(value) for value in outputs]
        for name, value in zip(("logits", "hidden_states"), outputs, strict=True):
            value[-1, 0] += self.change.get(f"{label}_{name}", 0.0)
        return outputs

    def keep_rows(self, lane: int, slots: np.ndarray, start: int) -> None: ...

    def read_rows(self, lane: int, count: int) -> LaneRows:
        raise NotImplementedError

    def write_rows(self, lane: int, rows: LaneRows) -> None: ...

    def free(self, lane: int) -> None: ...

    def zero(self, lane: int) -> None: ...

    def copy_lane(self, source: int, target: int, count: int) -> None: ...

    def close(self) -> None: ...


def golden() -> Golden:
    rng = np.random.default_rng(0)
    arrays: Golden = {}
    for label, start, rows in (("prompt", 0, 5), ("tree", 5, 3)):
        arrays[f"{label}_ids"] = np.arange(rows)
        arrays[f"{label}_positions"] = np.arange(start, start + rows)
        arrays[f"{label}_attention_mask"] = np.tri(rows, 8, start, dtype=bool)[None, None]
        for name, width in (("inputs_embeds", 4), ("logits", 5), ("hidden_states", 4)):
            arrays[f"{label}_{name}"] = rng.uniform(-2, 2, (1, rows, width)).astype(np.float32)
        arrays[f"{label}_logits"][0, 0, 0] = (
            4.0  # the largest value, which differences are measured by
        )
        arrays[f"{label}_hidden_states"][0, 0, 0] = 4.0
    return arrays


def difference(change: dict[str, float], lanes: int = 1, fault: Fault = no_fault) -> float:
    arrays = golden()
    runner = Answers(arrays, change, lanes, fault)
    ropes = (RopeConfig(theta=10000.0, rotary_dim=4),)
    worst = check_golden(runner, arrays, ropes, SPEC, REMEDIES)
    batches = [[0], [5]] if lanes == 1 else [[0], [5]] + 3 * [[0, 0], [5, 5]]
    assert runner.starts == batches  # the prompt into an empty cache, then the tree behind it
    return worst.difference


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_engine_that_gives_the_golden_outputs_differs_by_nothing(lanes: int) -> None:
    assert difference({}, lanes) == 0.0


def test_a_difference_is_relative_to_the_largest_golden_value() -> None:
    assert difference({"tree_logits": 2e-4}) == pytest.approx(0.5e-4, rel=1e-2)


@pytest.mark.parametrize(
    "output", ["prompt_logits", "tree_logits", "prompt_hidden_states", "tree_hidden_states"]
)
@pytest.mark.parametrize("change", [8 * TOLERANCE, float("nan")])
def test_an_engine_that_misses_any_golden_output_is_refused(output: str, change: float) -> None:
    label, name = output.split("_", 1)
    with pytest.raises(BuildError, match=f"{name} on the golden {label}"):
        difference({output: change})


FAULTS: dict[str, Fault] = {
    "second-sequence-is-zero": lambda right: np.concatenate([right[:1], 0 * right[1:]]),
    "first-sequence-for-all": lambda right: np.broadcast_to(right[:1], right.shape),
    "last-sequence-for-all": lambda right: np.broadcast_to(right[-1:], right.shape),
    "sequences-exchanged": lambda right: right[::-1],
    "sequences-averaged": lambda right: np.broadcast_to(right.mean(0, keepdims=True), right.shape),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_engine_that_is_right_alone_and_wrong_in_a_batch_is_refused(fault: str) -> None:
    assert difference({}, lanes=1, fault=FAULTS[fault]) == 0.0
    with pytest.raises(BuildError, match="golden prompt"):
        difference({}, lanes=2, fault=FAULTS[fault])


# ---- outputs that are rounded: their direction and their size


def rounded(fault: Fault, max_scale: float | None) -> float:
    """How far the size of the outputs is from that of the golden ones."""
    arrays = golden()
    spec = AccuracySpec(tolerance=0.1, min_cosine=0.99, max_scale=max_scale)
    ropes = (RopeConfig(theta=10000.0, rotary_dim=4),)
    runner = Answers(arrays, {}, 1, fault)
    return check_golden(runner, arrays, ropes, spec, REMEDIES).scale


def test_a_size_that_no_direction_shows_is_refused_where_that_is_asked() -> None:
    def louder(right: Floats) -> Floats:
        return right * np.float32(1.02)

    assert rounded(louder, None) == pytest.approx(0.02, rel=1e-3)
    assert rounded(louder, 0.03) == pytest.approx(0.02, rel=1e-3)
    with pytest.raises(BuildError, match=r"golden prompt differ in size by 2 %"):
        rounded(louder, 0.01)


def test_another_direction_is_refused_whatever_its_size() -> None:
    with pytest.raises(BuildError, match=r"golden prompt have a cosine of -?0\.\d{3}"):
        rounded(lambda right: np.roll(right, 1, axis=-1), None)


def test_outputs_that_are_no_numbers_have_no_direction() -> None:
    with pytest.raises(BuildError, match="a cosine of nan"):
        rounded(lambda right: right * np.float32("nan"), None)
