"""What costs mean, in sentences: word for word for a profile that was made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from edgespec.contract import Role
from edgespec.runtime.costs.cost_model import CostModel
from edgespec.runtime.costs.cost_profile import CostProfile, ObserveTime, PassTime, ProposeTime
from edgespec.runtime.loop.metrics import RequestMetrics
from edgespec.runtime.measuring.cost_description import (
    Outlook,
    Prediction,
    built_line,
    explained,
    listed,
    outlooks,
    pays_words,
    table,
    to_dict,
)

ROWS = (1, 2, 4, 8, 16)


def base(context: int, plain: float, row: float, batch: int = 1) -> tuple[PassTime, ...]:
    """Steps whose first row costs `plain` and each other one `row`."""
    return tuple(
        PassTime(rows=n, context=context, batch=batch, seconds=plain + row * (n - 1)) for n in ROWS
    )


def drafts(context: int, batch: int = 1) -> tuple[ProposeTime, ...]:
    """1 ms a level."""
    return tuple(
        ProposeTime(levels=n, top_k=1, context=context, batch=batch, seconds=0.001 * n)
        for n in (1, 2, 4)
    )


PAIR = CostProfile(
    role=Role.BASE,
    base=(*base(128, 0.010, 0.001), *base(2048, 0.020, 0.002), *base(128, 0.016, 0.008, batch=4)),
    method="eagle3",
    propose=drafts(128),
    observe=tuple(ObserveTime(rows=n, context=128, batch=1, seconds=0.0) for n in (1, 2, 4)),
)
ALONE = CostProfile(role=Role.LLM, base=base(32, 0.010, 0.020))


def test_sentences_and_table_of_a_pair(golden: Callable[[str, str], None]) -> None:
    """Behind 128 tokens a chain of n drafts takes 10 + 2 n ms beside a plain 10: one pays from
    1 + a = 1.2, four from 1 + a + a² + a³ + a⁴ = 1.8, that is from 46 %."""
    golden("costs_explained.txt", "\n".join([*explained(PAIR), *table(PAIR)]) + "\n")


def test_sentences_where_nothing_pays() -> None:
    first, rows, made, pays = explained(ALONE)
    assert first == "A plain step takes 10.00 ms behind 32 tokens."
    assert rows.endswith(
        "2 rows take 3.00 times as long, 4 rows 7.00, 8 rows 15.00 and 16 rows 31.00."
    )
    assert made == (
        "No draft engine was measured: what follows is of drafts that cost nothing to make."
    )
    assert pays == (
        "Behind 32 tokens chains of drafts never pay. The best chain is at 30 % none (1.00x), at 50"
        " % none (1.00x), at 70 % none (1.00x) and at 90 % none (1.00x)."
    )


def test_the_table_of_a_base_alone() -> None:
    header, row = table(ALONE)
    assert header.split()[-5:] == ["pays", "from", "at", "70", "%"]
    assert row.split()[-2:] == ["never", "1.00x"]
    assert "draft" not in header


def test_the_line_of_a_build() -> None:
    assert built_line(PAIR, 6.25) == (
        "costs, behind 128 tokens: a plain step 10.00 ms, 4 rows 1.30 times that, 8 rows 1.70 times"
        " that, 4 drafts 4.00 ms (measured in 6.2 s)"
    )
    assert built_line(ALONE, 1.0) == (
        "costs, behind 32 tokens: a plain step 10.00 ms, 4 rows 7.00 times that, 8 rows 15.00 times"
        " that (measured in 1.0 s)"
    )


def test_json_of_a_profile() -> None:
    told = json.loads(json.dumps(to_dict(PAIR)))
    assert [(one["context"], one["batch"]) for one in told["outlook"]] == [
        (128, 1),
        (2048, 1),
        (128, 4),
    ]
    first = told["outlook"][0]
    assert first["plain_step_s"] == 0.01
    assert first["step_s_by_rows"]["8"] == pytest.approx(0.017)
    assert first["draft_s_by_levels"] == pytest.approx(
        {"1": 0.001, "2": 0.002, "3": 0.003, "4": 0.004}
    )
    assert first["break_even_acceptance"][0] == pytest.approx(0.2)
    assert first["best_chain"][2] == {
        "acceptance": 0.7,
        "levels": 3,
        "over_plain": pytest.approx((1 + 0.7 + 0.49 + 0.343) * 10 / 16),
    }


def test_an_outlook_may_be_of_a_place_that_was_not_measured() -> None:
    assert Outlook.of(PAIR, 1088, 1).costs.plain == pytest.approx(0.015)
    assert len(outlooks(PAIR)) == 3


def test_lists_in_sentences() -> None:
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == [
        "a",
        "a and b",
        "a, b and c",
    ]


# ---- a run


def drafted(accepted: list[int], drafts: int = 3, prompt: int = 96) -> RequestMetrics:
    return RequestMetrics(
        prompt,
        num_spec_tokens=3,
        per_step_accepted=accepted,
        per_step_drafted=[drafts] * len(accepted),
    )


def test_a_prediction_by_hand() -> None:
    """20 steps of 3 drafts, 2 of them accepted: 3 tokens in 16 ms beside a plain 10, behind 96 to
    156 tokens, which cost as 128 do."""
    run = [drafted([2] * 10), drafted([2] * 10)]
    model = CostModel(PAIR)
    found = Prediction.of(model, run, 1, 1)
    assert found is not None
    assert found.plain_s == pytest.approx(0.01, rel=0.02)
    assert found.step_s == pytest.approx(0.016, rel=0.02)
    assert found.over_plain == pytest.approx(3 * 10 / 16, rel=0.02)
    assert found.line(1.5) == (
        f"by the stored costs {found.over_plain:.2f}x plain decoding at this acceptance (a step"
        f" {1000 * found.step_s:.2f} ms, a plain one {1000 * found.plain_s:.2f} ms);"
        " measured: 1.50x"
    )
    assert found.line(None).endswith(" ms)")
    assert found.to_dict()["predicted_over_plain"] == found.over_plain


def test_steps_without_drafts_cost_plain_ones_and_trees_all_their_nodes() -> None:
    model = CostModel(PAIR)
    plain = Prediction.of(model, [drafted([0] * 20, drafts=0)], 1, 1)
    assert plain is not None
    assert plain.over_plain == pytest.approx(1)
    tree = Prediction.of(model, [drafted([0] * 20, drafts=15)], 1, 1)
    assert tree is not None
    costs = model.at(100)
    assert tree.step_s == pytest.approx(costs.step(16, 3, 1), rel=0.02)


def test_few_steps_predict_nothing() -> None:
    assert Prediction.of(CostModel(PAIR), [drafted([2] * 5)], 1, 1) is None
    assert Prediction.of(CostModel(PAIR), [], 1, 1) is None


def test_one_chain_never_does_and_two_never_do() -> None:
    def words(*break_even: float | None) -> str:
        return pays_words(Outlook(128, 1, CostModel(PAIR).at(128), (), break_even, {}))

    assert words(None, 0.5).endswith("2 from 50 %; 1 never does.")
    assert words(0.5, None, None).endswith("1 from 50 %; 2 and 3 never do.")
