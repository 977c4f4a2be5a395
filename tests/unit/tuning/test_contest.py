"""Who wins: beyond noise, and the simplest of those that are as fast."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.runtime.trees.tree import DraftPlan
from edgespec.tuning.candidates import Candidate
from edgespec.tuning.contest import PLAIN, Speeds, Trial, turns, winner
from edgespec.tuning.ranking import Ranked
from edgespec.tuning.report import line


def row(nodes: int, *, adaptive: bool = False) -> Ranked:
    plan = DraftPlan(1, nodes - 1, nodes, adaptive=adaptive)
    return Ranked(Candidate("eagle3", plan), 1.5, nodes, nodes - 1, 2)


def speeds(found: dict[str, float], count: int = 8, noise: float = 0.0) -> Speeds:
    """So many pairs of runs; each other one of a candidate is faster by `noise`."""
    of: dict[Trial, float | None] = {}
    for group in range(count):
        for key, speed in found.items():
            factor = 1 + noise * (-1) ** (group + len(key)) if key != PLAIN else 1
            of[Trial(group, key)] = speed * factor
    return Speeds(of)


def best(speeds: Speeds, rows: Sequence[Ranked]) -> Ranked | None:
    """The candidate that wins."""
    chosen = winner(speeds, [speeds.measured(one) for one in rows])
    return None if chosen is None else chosen.row


def test_plain_and_all_are_measured_forward_and_backward() -> None:
    order = [turn.key for turn in turns(2, ["a", "b"])]
    assert order == [PLAIN, "a", "b", "b", "a", PLAIN]
    assert len({*turns(3, ["a", "b"])}) == 3 * 3


def test_the_fastest_wins() -> None:
    slow, fast = row(3), row(9)
    measured = speeds({PLAIN: 100, slow.candidate.key: 110, fast.candidate.key: 150})
    assert best(measured, [slow, fast]) is fast


def test_the_simplest_wins_where_the_difference_is_noise() -> None:
    small, large = row(3), row(9)
    found = {PLAIN: 100.0, small.candidate.key: 149.0, large.candidate.key: 150.0}
    of = speeds(found).of
    for group in range(8):  # by turns one and the other is faster
        of[Trial(group, large.candidate.key)] = 150.0 + 20 * (-1) ** group
    assert best(Speeds(of), [small, large]) is small


def said(speeds: Speeds, rows: Sequence[Ranked]) -> str:
    """The line of a search that came to this."""
    measured = [speeds.measured(one) for one in rows]
    return line(winner(speeds, measured), measured)


def test_a_winner_that_is_not_the_fastest_is_not_called_so() -> None:
    small, large = row(3), row(9)
    of = speeds({PLAIN: 100.0, small.candidate.key: 149.0}).of
    for group in range(8):
        of[Trial(group, large.candidate.key)] = 150.0 + 20 * (-1) ** group
    assert said(Speeds(of), [small, large]) == (
        "chosen: chain of 2, 1.49 x plain; chain of 8, 1.50 x, is no faster beyond noise"
    )
    assert said(Speeds(of), [small]) == "fastest: chain of 2, 1.49 x plain"


def test_noise_alone_does_not_let_a_much_slower_one_win() -> None:
    small, large = row(3), row(9)
    of = speeds({PLAIN: 100.0, small.candidate.key: 130.0}).of
    for group in range(8):
        of[Trial(group, large.candidate.key)] = 150.0 + 40 * (-1) ** group
    assert best(Speeds(of), [small, large]) is large


def test_adaptive_stays_on_unless_fixed_was_faster() -> None:
    fixed, adaptive = row(4), row(4, adaptive=True)
    alike = speeds({PLAIN: 100, fixed.candidate.key: 150, adaptive.candidate.key: 150})
    assert best(alike, [fixed, adaptive]) is adaptive
    slower = speeds({PLAIN: 100, fixed.candidate.key: 150, adaptive.candidate.key: 120})
    assert best(slower, [fixed, adaptive]) is fixed


def test_none_wins_that_is_not_faster_than_plain_beyond_noise() -> None:
    one = row(4)
    assert best(speeds({PLAIN: 100, one.candidate.key: 90}), [one]) is None
    assert best(speeds({PLAIN: 100, one.candidate.key: 101}, noise=0.1), [one]) is None
    # too few runs to tell
    assert best(speeds({PLAIN: 100, one.candidate.key: 150}, count=3), [one]) is None


def test_a_run_without_steps_is_left_out() -> None:
    found = Speeds({Trial(0, PLAIN): 100.0, Trial(0, "a"): None, Trial(1, "a"): 90.0})
    assert found.over("a") is None


def test_a_simpler_one_that_is_slower_beyond_noise_loses_though_it_is_close() -> None:
    small, large = row(3), row(9)
    found = {PLAIN: 100.0, small.candidate.key: 147.0, large.candidate.key: 150.0}
    assert best(speeds(found), [small, large]) is large
