"""What a pair may reach before it is built: cases computed by hand."""

from __future__ import annotations

import json

import pytest

from edgespec.config.model_cost import Drafting, ExpertsWork, PairWork, PassWork
from edgespec.runtime.measuring.cost_estimate import (
    ACCEPTANCES,
    CALL_S,
    CONTEXTS,
    FORMATS,
    PER_BYTE,
    WEIGHT_BYTES,
    Machine,
    bandwidth,
    estimate,
    estimates,
    lines,
    pass_seconds,
    step_costs,
    to_dict,
)

GIGABYTE = Machine(1e9, 2)
BASE, DRAFT = PassWork(400_000_000, 100_000_000, cache=50_000), PassWork(20_000_000, 5_000_000)


def pair(drafting: Drafting = "levels", levels: int | None = None) -> PairWork:
    return PairWork(BASE, DRAFT, drafting, levels)


def test_one_row_reads_all_weights_and_the_cache() -> None:
    """Half a billion weights of four bits, and 1000 tokens of 50 000 numbers: 0.27 + 0.2 GB. What
    is multiplied is next to nothing."""
    read = 0.5 * WEIGHT_BYTES["int4"] + 0.2
    seconds = pass_seconds(BASE, 1, 1000, "int4", GIGABYTE) - CALL_S
    assert seconds == pytest.approx(read, rel=1e-3)
    assert seconds > read


def test_many_rows_take_as_long_as_their_products() -> None:
    multiplied = 1000 * 0.5 / PER_BYTE["int4"]
    seconds = pass_seconds(BASE, 1000, 0, "int4", GIGABYTE) - CALL_S
    assert seconds == pytest.approx(multiplied, rel=1e-3)


def test_rows_of_experts_read_more_of_them() -> None:
    experts = PassWork(0, 0, (ExpertsWork(8, 2, 10_000_000),))
    one, two = (pass_seconds(experts, rows, 0, "fp32", GIGABYTE) - CALL_S for rows in (1, 2))
    assert two / one == pytest.approx(8 * (1 - 0.75**2) / 2, rel=1e-2)


def test_each_way_of_drafting_costs_its_passes() -> None:
    one = pass_seconds(DRAFT, 1, 0, "int4", GIGABYTE)
    levels = step_costs(pair("levels"), 0, "int4", GIGABYTE)
    assert levels.propose[:4] == pytest.approx([0, 0, one, 2 * one])
    assert levels.observe[1] == pytest.approx(one)
    model = step_costs(pair("model"), 0, "int4", GIGABYTE)
    assert (model.propose[3], model.observe[3]) == (pytest.approx(3 * one), 0)
    block = step_costs(pair("block"), 0, "int4", GIGABYTE)
    assert block.propose[3] == pytest.approx(pass_seconds(DRAFT, 4, 0, "int4", GIGABYTE))
    heads = step_costs(pair("heads"), 0, "int4", GIGABYTE)
    assert (heads.propose[1], heads.propose[3]) == (pytest.approx(one), pytest.approx(one))


def test_drafts_pay_more_at_higher_acceptance_and_no_more_levels_than_there_are() -> None:
    found = estimate(pair("heads", levels=2), 128, "int4", GIGABYTE)
    speeds = [best.over_plain for best in found.best]
    assert speeds == sorted(speeds)
    assert speeds[-1] > 1.5
    assert max(best.levels for best in found.best) == 2
    assert found.break_even is not None
    assert 0 < found.break_even < 0.3


def test_a_draft_as_large_as_its_base_never_pays_at_low_acceptance() -> None:
    found = estimate(PairWork(BASE, BASE, "model"), 128, "int4", GIGABYTE)
    assert found.break_even is None
    assert all(best.over_plain == 1 for best in found.best)


def test_it_says_that_it_is_an_estimate_and_of_what() -> None:
    found = estimates(pair(), Machine(30e9, 2))
    first, header, *rows = lines(found, Machine(30e9, 2))
    assert first.startswith("estimated, nothing was run: 2 cores here read 30 GB/s; ")
    assert first.endswith("edgespec build measures")
    assert header.split()[:2] == ["weights", "tokens"]
    assert len(rows) == len(FORMATS) * len(CONTEXTS)
    assert rows[0].split()[:4] == ["int4", "128", "10.79", "ms"]
    told = json.loads(json.dumps(to_dict(found, GIGABYTE)))
    assert [best["acceptance"] for best in told["estimates"][0]["best"]] == list(ACCEPTANCES)
    assert told["assumed"]["bytes_per_s"] == 1e9


def test_memory_of_this_machine_is_read_at_a_plausible_speed() -> None:
    assert 1e8 < bandwidth(1) < 1e13
    assert Machine.here().cores >= 1
