"""Plain decoding and each plan in turn: what drifts meanwhile drifts for all."""

from __future__ import annotations

from edgespec.benchmark.cases import Cell, DecodingVariant, cells, plan_words, variants
from edgespec.benchmark.schedule import MOST_BESIDE_PLAIN, turns
from edgespec.benchmark.synthetic import Dial
from edgespec.runtime.trees.static_tree import StaticPlan
from edgespec.runtime.trees.tree import BlockPlan, DraftPlan

PLAIN = DecodingVariant()


def chains(count: int) -> list[DecodingVariant]:
    return [DecodingVariant(DraftPlan(1, steps, steps + 1)) for steps in range(1, count + 1)]


def test_every_run_has_a_plain_one_in_its_block() -> None:
    order = [*turns(3, 2, chains(6))]
    by_pair: dict[tuple[int, int, int], list[DecodingVariant]] = {}
    for turn in order:
        by_pair.setdefault(turn.pair, []).append(turn.variant)
    assert len(by_pair) == 3 * 2 * 2  # repeats, groups, blocks
    for block in by_pair.values():
        assert block.count(PLAIN) == 1
        assert len(block) <= 1 + MOST_BESIDE_PLAIN
    for variant in chains(6):
        assert sum(turn.variant == variant for turn in order) == 3 * 2
    # blocks are not mixed: the runs of a pair are next to each other
    pairs = [turn.pair for turn in order]
    assert (
        len([pair for pair, before in zip(pairs, [None, *pairs], strict=False) if pair != before])
        == 12
    )


def test_order_alternates() -> None:
    first, second = chains(2)
    order = [turn.variant for turn in turns(2, 2, [first, second])]
    forward = [PLAIN, first, second]
    assert order == [*forward, *forward[::-1], *forward, *forward[::-1]]


def test_plain_alone_runs_once_a_repeat() -> None:
    assert [turn.pair for turn in turns(2, 1, [])] == [(0, 0, 0), (1, 0, 0)]


def test_sizes_are_crossed_and_named_once() -> None:
    assert cells([8, None, 8], [4], [1, 2]) == [
        Cell(8, 4, 1),
        Cell(8, 4, 2),
        Cell(None, 4, 1),
        Cell(None, 4, 2),
    ]
    plan, dials = DraftPlan(1, 3, 4), [Dial((0.5,)), None, Dial((0.5,))]
    found = variants([plan, plan, DraftPlan(1, 3, 4, adaptive=True)], dials)
    assert [(v.policy, v.dial) for v in found] == [
        ("fixed", Dial((0.5,))),
        ("fixed", None),
        ("adaptive", Dial((0.5,))),
        ("adaptive", None),
    ]


def test_plans_in_words() -> None:
    assert plan_words(DraftPlan(1, 3, 4)) == "chain of 3"
    assert plan_words(DraftPlan(4, 3, 16)) == "tree 4/3/16"
    assert plan_words(BlockPlan(1, 7, 8)) == "block 1/7/8"
    assert plan_words(StaticPlan.of([[0], [1], [0, 0]])) == "static tree of 4"
    told = DecodingVariant(StaticPlan.of([[0], [1]]), Dial((0.5, 0.25))).to_dict()
    assert told["plan"]["choices"] == [[0], [1]]
    assert told["synthetic_acceptance"] == [0.5, 0.25]
    assert PLAIN.to_dict() == {"plan": None, "spec_policy": None, "synthetic_acceptance": None}
