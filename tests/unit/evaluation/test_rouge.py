"""ROUGE against values that are counted by hand."""

from __future__ import annotations

import pytest

from edgespec.evaluation.rouge import rouge


def f_measure(same: int, answer: int, summary: int) -> float:
    precision, recall = same / answer, same / summary
    return 200 * precision * recall / (precision + recall)


def test_scores_are_those_of_their_definition() -> None:
    found = rouge(["the cat sat on the mat"], ["the cat lay on a mat today"])
    assert found["rouge1"] == pytest.approx(f_measure(4, 6, 7))  # the, cat, on, mat
    assert found["rouge2"] == pytest.approx(f_measure(1, 5, 6))  # the cat
    assert found["rougeL"] == pytest.approx(f_measure(4, 6, 7))


def test_lsum_takes_lines_as_sentences() -> None:
    found = rouge(["one two\nthree four"], ["three four\none two"])
    assert found["rougeLsum"] == pytest.approx(100)
    assert found["rougeL"] == pytest.approx(50)


def test_mean_is_over_articles() -> None:
    found = rouge(["same words", "nothing"], ["same words", "else"])
    assert found["rouge1"] == pytest.approx(50)
