"""What `bench` shows of a report: a table a mode, and what is to be known of the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.benchmark.compare import changes, unlike
from edgespec.cli.bench.tables import predictions, show, show_changes
from tests.unit.benchmark.reports import PLAIN, drafted, figure, passes, report, row, typed

ALL = (PLAIN, drafted(3, 0.7, 1.5, 1.6), passes(1, 0.01), passes(4, 0.012))


def test_tables_of_all_modes(capsys: pytest.CaptureFixture[str]) -> None:
    show(report(*ALL, power_mode="MAXN"))
    out = capsys.readouterr().out
    assert "reading prompts" not in out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "20.1" in lines["plain"]
    assert "1.55" in lines["chain 1/3/4 at 0.7"]
    assert "12.00" in lines["pass over 4"]
    assert "1.20" in lines["pass over 4"]
    assert "a board, 2 of 2 cores, power mode MAXN" in out
    assert "an exact 95 % interval needs 6 runs" in out
    assert "predicted" not in out  # a column without a value


def test_answers_that_differ_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    odd = drafted(3, None, 1.5) | {"answers": 4, "answers_equal_to_plain": 1}
    value = report(odd)
    show(replace(value, settings={"acceptance": "exact"}))
    assert "3 answers with drafts differ from the plain ones" in capsys.readouterr().out
    show(replace(value, settings={"acceptance": "typical"}))
    assert "differ" not in capsys.readouterr().out


def test_control_that_moved_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    slower = row("decode", figures={"tokens_per_s": figure(10.0, 10.5, 9.5, 10.2)})
    before, after = report(*ALL), report(slower, *ALL[1:], threads=1)
    show_changes(changes(before, after), [*unlike(before, after)])
    out = capsys.readouterr().out
    assert "allowed: threads: 2 and 1" in out
    assert "(control)" in out
    assert "plain decoding itself is slower: the machine was not the same" in out
    assert "too few samples" in out


def test_sentences_of_rows_compare_with_the_prediction() -> None:
    close = drafted(3, 0.7, 1.5) | {"predicted_speed_over_plain": 1.45}
    far = drafted(2, 0.7, 0.9) | {"predicted_speed_over_plain": 1.2}
    none = drafted(1, 0.7, 0.9)
    assert [*predictions([typed(one) for one in (close, far, none)])] == [
        "chain 1/3/4 at 0.7 128+64 b1: 1.50 x plain, predicted 1.45 (as predicted).",
        "chain 1/2/3 at 0.7 128+64 b1: 0.90 x plain, predicted 1.20 (25 % less).",
    ]
