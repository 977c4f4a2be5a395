"""What is compared before an engine is said to give a row the same bits in every call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from edgespec.backends.host import HostLogits, HostStates
from edgespec.backends.row_bits import ORDERS, TREE_PARENTS, BitsTrial, TrialRows, chain, nodes


def trial() -> BitsTrial:
    shape = SimpleNamespace(recurrent=None)
    runner: Any = SimpleNamespace(
        contract=SimpleNamespace(shape=shape),
        read_rows=lambda lane, count: None,
        write_rows=lambda lane, rows: None,
        keep_rows=lambda lane, slots, start: None,
    )
    return BitsTrial(runner, None, lambda: None)  # type: ignore[arg-type]


def result(states: float) -> Any:
    logits = HostLogits(np.ones((2, 5), np.float32))
    return SimpleNamespace(logits=logits, hidden_states=HostStates(np.full((2, 3), states)))


def test_a_row_whose_hidden_states_alone_differ_is_found() -> None:
    one = trial()
    assert one.compare(chain(0, 2), result(1.0), "among 2 rows") is None
    assert one.compare(chain(0, 2), result(1.0), "among 2 rows") is None
    assert "row 0 has other bits" in str(one.compare(chain(0, 2), result(2.0), "alone"))


def test_a_tree_is_run_in_all_orders() -> None:
    one, ran = trial(), []

    def differs(part: TrialRows) -> None:
        ran.append(part.rows.tolist())

    one.differs = differs  # type: ignore[assignment]
    assert one.tree() is None
    for order in (range(len(TREE_PARENTS)), *ORDERS):
        assert nodes(order).rows.tolist() in ran
    assert len(ORDERS) > 1
