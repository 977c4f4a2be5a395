"""What costs and acceptance come to: cases computed by hand, and choices against trying all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

import pytest

from edgespec.contract import Role
from edgespec.runtime.costs.cost_model import (
    MAX_ROWS,
    CostModel,
    StepCosts,
    best_chain,
    best_paths,
    best_static_tree,
    break_even,
    chain_tokens,
)
from edgespec.runtime.costs.cost_profile import CostProfile, ObserveTime, PassTime, ProposeTime

Path = tuple[int, ...]


def pass_time(rows: int, seconds: float, context: int = 128, batch: int = 1) -> PassTime:
    return PassTime(rows=rows, context=context, batch=batch, seconds=seconds)


def propose_time(
    levels: int, seconds: float, top_k: int = 1, context: int = 128, batch: int = 1
) -> ProposeTime:
    return ProposeTime(levels=levels, top_k=top_k, context=context, batch=batch, seconds=seconds)


def observe_time(rows: int, seconds: float, context: int = 128, batch: int = 1) -> ObserveTime:
    return ObserveTime(rows=rows, context=context, batch=batch, seconds=seconds)


def model(
    base: Sequence[PassTime],
    propose: Sequence[ProposeTime] = (),
    observe: Sequence[ObserveTime] = (),
) -> CostModel:
    method = "eagle3" if propose else None
    return CostModel(
        CostProfile(
            role=Role.BASE,
            base=tuple(base),
            method=method,
            propose=tuple(propose),
            observe=tuple(observe),
        )
    )


def linear(plain: float, row: float, level: float, observed: float = 0.0) -> StepCosts:
    """Costs in proportion, beside a first row that costs `plain`."""
    passes = [0.0, *(plain + row * n for n in range(MAX_ROWS))]
    propose = [level * n for n in range(MAX_ROWS + 1)]
    return StepCosts(passes, propose, [0.0, *[observed] * MAX_ROWS])


# ---- what was measured, looked up


def test_rows_between_measured_ones_cost_in_proportion_and_the_last_two_go_on() -> None:
    costs = model([pass_time(1, 10.0), pass_time(4, 13.0), pass_time(8, 21.0)]).at(128)
    assert costs.plain == 10.0
    assert [costs.passes[n] for n in (0, 1, 2, 4, 6, 8, 10)] == pytest.approx(
        [0, 10, 11, 13, 17, 21, 25]
    )


def test_more_rows_never_cost_less() -> None:
    """A slow minute at few rows is no reason to verify more: what falls is averaged."""
    costs = model([pass_time(1, 10.0), pass_time(2, 14.0), pass_time(4, 12.0)]).at(128)
    assert costs.passes[1:6] == pytest.approx([10, 13, 13, 13, 13])


def test_contexts_between_measured_ones_cost_in_proportion() -> None:
    costs = model([pass_time(1, 10.0, 128), pass_time(1, 20.0, 1128), pass_time(1, 60.0, 3128)])
    assert costs.costs(0, 1, 1).plain == 10.0
    assert costs.costs(628, 1, 1).plain == pytest.approx(15)
    assert costs.costs(2128, 1, 1).plain == pytest.approx(40)
    assert costs.costs(4128, 1, 1).plain == pytest.approx(80)  # as the last two go on


def test_contexts_within_a_step_cost_the_same() -> None:
    costs = model([pass_time(1, 10.0, 128), pass_time(1, 20.0, 1128)])
    assert costs.at(640) is costs.at(640 + 63)
    assert costs.at(640).plain == pytest.approx(costs.costs(672, 1, 1).plain)
    assert costs.at(704) is not costs.at(640)


def test_batches_between_measured_ones_cost_in_proportion() -> None:
    costs = model([pass_time(1, 10.0), pass_time(1, 12.0, batch=2), pass_time(1, 24.0, batch=8)])
    assert [costs.at(128, batch).plain for batch in (1, 2, 4, 8, 10)] == pytest.approx(
        [10, 12, 16, 24, 28]
    )


def test_a_batch_of_one_context_pays_for_others_as_each_sequence_does_alone() -> None:
    """Behind 1128 tokens a sequence pays 5 more, so four of them 20."""
    costs = model(
        [pass_time(1, 10.0, 128), pass_time(1, 15.0, 1128), pass_time(1, 16.0, 128, batch=4)]
    )
    assert costs.costs(128, 4, 1).plain == pytest.approx(16)
    assert costs.costs(1128, 4, 1).plain == pytest.approx(36)


def test_trees_cost_by_their_width() -> None:
    costs = model(
        [pass_time(1, 10.0)],
        [
            propose_time(2, 2.0),
            propose_time(4, 4.0),
            propose_time(2, 5.0, 4),
            propose_time(4, 9.0, 4),
        ],
    )
    assert costs.at(128, 1, 1).propose[4] == pytest.approx(4)
    assert costs.at(128, 1, 4).propose[4] == pytest.approx(9)
    assert costs.at(128, 1, 2).propose[4] == pytest.approx(4 + (9 - 4) / 3)


def test_without_a_draft_engine_drafts_cost_rows_alone() -> None:
    costs = model([pass_time(1, 10.0), pass_time(4, 13.0)]).at(128)
    assert costs.chain(3, 2.0) == pytest.approx(13)
    assert costs.step(4, 3, 2.0) == pytest.approx(13)


def test_a_step_is_its_draft_its_pass_and_what_is_observed() -> None:
    costs = model(
        [pass_time(1, 10.0), pass_time(4, 13.0)],
        [propose_time(1, 1.0), propose_time(3, 3.0)],
        [observe_time(1, 0.5), observe_time(4, 2.0)],
    ).at(128)
    assert costs.chain(0, 1.0) == 10.0
    assert costs.chain(3, 2.5) == pytest.approx(13 + 3 + (0.5 + 1.5 * 0.5))
    assert costs.observed(300) == pytest.approx(costs.observe[-1] + 0.5 * (300 - MAX_ROWS))


# ---- what drafts bring


def test_tokens_of_chains() -> None:
    assert chain_tokens([]) == [1.0]
    assert chain_tokens([0.5, 0.5, 0.2]) == pytest.approx([1.0, 1.5, 1.75, 1.8])


def test_best_chain_of_a_case_by_hand() -> None:
    """Plain 10; each draft costs 1 to make and 1 to verify. At acceptance 0.5 chains of 0, 1, 2, 3
    emit 1, 1.5, 1.75, 1.875 tokens in 10, 12, 14, 16: 0.1, 0.125, 0.125, 0.117 a second."""
    found = best_chain(linear(10, 1, 1), [0.5] * 3)
    assert (found.levels, found.nodes) == (1, 2)  # the shorter one of two
    assert found.over_plain == pytest.approx(1.25)
    assert (found.tokens, found.seconds) == (1.5, 12)


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    found = best_chain(linear(10, 10, 1), [0.9] * 3)
    assert (found.levels, found.over_plain, found.seconds) == (0, 1.0, 10)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("row", [0.1, 1.0, 4.0])
def test_best_chain_against_all(rate: float, row: float) -> None:
    costs = linear(10, row, 0.7, 0.3)
    tokens = chain_tokens([rate] * 12)
    speeds = [
        tokens[n] * costs.plain / (costs.passes[n + 1] + 0.7 * n + 0.3) if n else 1.0
        for n in range(13)
    ]
    assert best_chain(costs, [rate] * 12).over_plain == pytest.approx(max(speeds))


def test_break_even_by_hand() -> None:
    """A chain of one draft costs 12 beside a plain 10: 1 + a = 1.2. Of two 14: 1 + a + a² = 1.4."""
    costs = linear(10, 1, 1)
    assert break_even(costs, 1) == pytest.approx(0.2)
    assert break_even(costs, 2) == pytest.approx((-1 + (1 + 1.6) ** 0.5) / 2)
    assert break_even(linear(10, 10, 1), 1) is None
    assert break_even(linear(10, 0, 0), 3) == pytest.approx(0, abs=1e-9)


# ---- trees


ACCEPTANCES: list[list[list[float]]] = [
    [[0.6, 0.2], [0.5, 0.3], [0.4, 0.1]],
    [[0.4, 0.3, 0.2], [0.3, 0.3, 0.3]],
    [[0.9, 0.05], [0.9, 0.05], [0.9, 0.0]],
    [[0.2, 0.6], [0.1, 0.5]],  # the second rank is the better one
]


def all_paths(acceptance: Sequence[Sequence[float]]) -> Iterator[Path]:
    for depth in range(1, len(acceptance) + 1):
        yield from product(*(range(len(ranks)) for ranks in acceptance[:depth]))


def reached(acceptance: Sequence[Sequence[float]], path: Path) -> float:
    """The probability that a node is accepted."""
    found = 1.0
    for depth, rank in enumerate(path):
        found *= acceptance[depth][rank]
    return found


def trees(acceptance: Sequence[Sequence[float]], nodes: int) -> Iterator[tuple[Path, ...]]:
    """All sets of so many nodes beside the root that are connected."""
    for chosen in combinations(all_paths(acceptance), nodes):
        there = set(chosen)
        if all(len(path) == 1 or path[:-1] in there for path in chosen):
            yield chosen


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_no_connected_tree_of_as_many_nodes_emits_more(
    acceptance: list[list[float]], nodes: int
) -> None:
    found = best_paths(acceptance, nodes)
    paths = [path for _, path in found]
    assert all(len(path) == 1 or path[:-1] in paths[:place] for place, path in enumerate(paths))
    assert [p for p, _ in found] == pytest.approx([reached(acceptance, path) for path in paths])
    most = max(sum(reached(acceptance, path) for path in tree) for tree in trees(acceptance, nodes))
    assert sum(p for p, _ in found) == pytest.approx(most)


@pytest.mark.parametrize("acceptance", ACCEPTANCES)
@pytest.mark.parametrize(("row", "level"), [(0.1, 0.1), (1.0, 0.2), (0.2, 2.0), (3.0, 3.0)])
def test_best_static_tree_against_all(
    acceptance: list[list[float]], row: float, level: float
) -> None:
    """Deep trees cost levels, wide ones rows."""
    costs, most = linear(10, row, level, 0.3), 5
    best = 1.0
    for nodes in range(1, most):
        for tree in trees(acceptance, nodes):
            tokens = 1 + sum(reached(acceptance, path) for path in tree)
            seconds = costs.step(nodes + 1, max(map(len, tree)), tokens)
            best = max(best, tokens * costs.plain / seconds)
    found = best_static_tree(costs, acceptance, most)
    assert found.over_plain == pytest.approx(best)
    assert found.nodes == 1 + len(found.choices)
    assert found.levels == max(map(len, found.choices), default=0)
    assert found.tokens == pytest.approx(
        1 + sum(reached(acceptance, path) for path in found.choices)
    )
