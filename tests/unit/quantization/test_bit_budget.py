"""Which weights get more than 4 bits: as many as the budget allows, where they help most."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from edgespec.quantization.bit_budget import BitsByWeight, WeightGroup, spend
from edgespec.quantization.block_forms import EIGHT_BITS, FORMS, FOUR_BITS, SIX_BITS

ERRORS = {4: 1.0, 6: 0.1, 8: 0.006}


def group(number: int, loss: float, rows: int = 64) -> WeightGroup:
    return WeightGroup((f"w{number}",), ((rows, 256),), loss, ERRORS)


@pytest.mark.parametrize("size", [4.7, 5.0, 5.9, 6.5, 8.0])
def test_no_other_choice_within_the_budget_loses_less(size: float) -> None:
    losses = np.random.default_rng(0).exponential(1, 5)
    groups = [group(i, loss) for i, loss in enumerate(losses)]

    def cost(choice: tuple[int, ...]) -> tuple[float, float]:
        used = sum(FORMS[bits].bits_per_weight for bits in choice) / len(choice)
        return used, sum(loss * ERRORS[bits] for loss, bits in zip(losses, choice, strict=True))

    least = min(cost(c)[1] for c in product(FORMS, repeat=5) if cost(c)[0] <= size)
    chosen = spend(groups, size)
    used, loss = cost(tuple(chosen[f"w{i}"] for i in range(5)))
    assert used <= size
    assert loss <= 1.25 * least  # one after the other is not always the best


def test_a_group_that_is_large_or_would_not_gain_keeps_4_bits() -> None:
    exact = WeightGroup(("on_the_grid",), ((64, 256),), 9.0, {4: 1.0, 6: 30.0, 8: 2.0})
    large, small = group(0, 1.0, rows=640), group(1, 0.9, rows=64)
    chosen = spend([exact, large, small], 5.0)
    assert chosen == {"on_the_grid": 4, "w0": 4, "w1": 8}


@pytest.mark.parametrize("form", [FOUR_BITS, SIX_BITS, EIGHT_BITS])
def test_bits_count_blocks_that_are_filled_up(form: object) -> None:
    assert form in (FOUR_BITS, SIX_BITS, EIGHT_BITS)
    kinds = 1 + form.has_minimums
    assert form.bits_of(512) == form.bits + kinds * (512 / 32 * 8 + 2 * 16) / 512
    assert form.bits_of(288) == form.bits + kinds * (288 / 32 * 8 + 2 * 16) / 288
    assert form.bits_of(16) == (32 * form.bits + kinds * 24) / 16


def test_a_line_says_which_weights_got_more() -> None:
    bits = {f"model.layers.{i}.self_attn.{n}_proj.weight": 4 for i in range(3) for n in "qkvo"}
    bits |= {f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": 4 for i in (0, 1) for e in (0, 1)}
    bits |= {"lm_head.weight": 6, "model.layers.1.mlp.experts.0.up_proj.weight": 8}
    for name in "vo":
        bits[f"model.layers.2.self_attn.{name}_proj.weight"] = 6
    wanted = (
        "4.91 bits a weight: experts 8 in 1 of 2 layers, lm_head 6, o and v 6 in 1 of 3 layers,"
        " all else 4"
    )
    assert BitsByWeight(bits, 4.906).text == wanted
