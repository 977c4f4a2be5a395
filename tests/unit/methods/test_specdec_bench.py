"""Acceptance by specdec_bench's names, by hand."""

from __future__ import annotations

import pytest

from edgespec.methods.specdec_bench import acceptance_rate


def test_names_and_rates_are_those_of_specdec_bench() -> None:
    found = acceptance_rate({(0, 0): [1, 3, 3], (0, 1): [4], (7, 0): [1, 1]})
    assert found["Request_AL"] == {"0": {"0": pytest.approx(7 / 3), "1": 4.0}, "7": {"0": 1.0}}
    assert found["Average_AL"] == pytest.approx((7 / 3 + 4 + 1) / 3)
    assert found["Acceptance_Length_Histogram"] == {"1": 3, "3": 2, "4": 1}
    assert found["Joint_Acceptance_Rate"] == {"1": 1.0, "3": 0.5, "4": pytest.approx(1 / 6)}
    assert found["Conditional_Acceptance_Rate"] == {"1": 1.0, "3": 0.5, "4": pytest.approx(1 / 3)}
