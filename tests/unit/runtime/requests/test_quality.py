"""What an accept rule costs, from two answers: agreement, the first difference, and log-likelihoods
of the base, over tokens and not over answers."""

from __future__ import annotations

from unittest import mock

import pytest

from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.requests import quality
from edgespec.runtime.requests.quality import Quality, compared, pooled


def response(*tokens: int) -> Response:
    return Response("", [*tokens], "max-length", RequestMetrics(1), None, [1])


def of(own: tuple[int, ...], exact: tuple[int, ...]) -> Quality:
    def fake(engine: object, prompt: list[int], tokens: list[int]) -> float | None:
        return -float(len(tokens)) if tokens else None

    with mock.patch.object(quality, "log_likelihood", fake):
        return compared(None, response(*own), response(*exact))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "exact", "agreeing", "count", "first"),
    [
        ((1, 2, 3), (1, 2, 3), 3, 3, None),
        ((1, 2, 3), (1, 9, 3), 2, 3, 1),
        ((1, 2), (1, 2, 3), 2, 3, 2),
        ((9, 2, 3), (1, 2), 1, 3, 0),
        ((), (), 0, 0, None),
        ((), (1,), 0, 1, 0),
    ],
)
def test_answers_are_compared_place_by_place(
    own: tuple[int, ...], exact: tuple[int, ...], agreeing: int, count: int, first: int | None
) -> None:
    found = of(own, exact)
    assert (found.agreeing, found.compared, found.first_difference) == (agreeing, count, first)
    assert found.agreement == (agreeing / count if count else 1)
    assert (found.log_likelihood is None) == (not own)
    assert ("exact answer" in found.words) is True


def test_many_comparisons_weigh_by_their_tokens() -> None:
    found = pooled([of((1, 2, 3), (1, 2, 3)), of((9,), (1,)), of((), (5,))])
    assert found["compared"] == 3
    assert found["identical"] == 1
    assert found["agreement"] == 3 / 5
    assert found["first_difference_mean"] == 0
    assert found["log_likelihood_per_token"] == pytest.approx((3 * -3 + 1 * -1) / 4)
    assert found["exact_log_likelihood_per_token"] == pytest.approx((3 * -3 - 1 - 1) / 5)
    assert found["log_likelihood_cost"] == pytest.approx(-11 / 5 + 10 / 4)


def test_nothing_compared_has_no_figures() -> None:
    found = pooled([of((), ())])
    assert found["agreement"] is None
    assert found["log_likelihood_cost"] is None
