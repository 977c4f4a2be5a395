"""Norms and gates at every level of instructions: against float64, row by row, and as parts of the
product that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.native.library import kernels
from tests.unit.backends.ort.native.sessions import (
    Port,
    compiled,
    matmul_session,
    session_of,
)
from tests.unit.backends.ort.native.weights import some_weight

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

pytestmark = compiled

WIDTHS = [1, 2, 15, 16, 17, 100, 129, 1024]
EPSILON = 1e-5
SILU, GELU_TANH, SIGMOID = ACTIVATIONS = range(3)
# of a norm: what comes in beside x and the weight
FORMS = [(), ("residual",), ("inner", "residual")]


@cache
def norm_session(form: tuple[str, ...], threads: int = 1) -> ort.InferenceSession:
    rows, weight = ("float32", ["rows", "n"]), ("float32", ["w"])
    return session_of(
        "RmsNorm",
        {
            "x": rows,
            "inner": weight if "inner" in form else None,
            "residual": ("float32", ["more", "n"]) if "residual" in form else None,
            "weight": weight,
        },
        {"y": rows, "sum": rows if "residual" in form else None},
        {"epsilon": EPSILON},
        threads=threads,
    )


@cache
def gate_session(activation: int, threads: int = 1) -> ort.InferenceSession:
    rows = ("float32", ["rows", "n"])
    return session_of(
        "Gate",
        {"gate": rows, "up": ("float32", ["more", "n"])},
        {"y": rows},
        {"activation": activation},
        threads=threads,
    )


@cache
def halves_session(activation: int) -> ort.InferenceSession:
    return session_of(
        "Gate",
        {"gate": ("float32", ["rows", "n"]), "up": None},
        {"y": ("float32", ["rows", "m"])},
        {"activation": activation},
    )


def some(seed: int, *dims: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(dims).astype(np.float32)


def feeds_of(form: tuple[str, ...], rows: int, n: int, seed: int = 0) -> dict[str, Floats]:
    """Rows of different sizes, and weights."""
    scales = np.exp(np.random.default_rng(seed).uniform(-6, 6, (rows, 1))).astype(np.float32)
    feeds = {"x": some(seed, rows, n) * scales, "weight": some(seed + 1, n)}
    beside = {"inner": some(seed + 2, n), "residual": some(seed + 3, rows, n) * scales}
    return feeds | {name: beside[name] for name in form}


def normed(x: Doubles, weight: Floats) -> Doubles:
    return x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + EPSILON) * weight


def activated(activation: int, x: Floats) -> Doubles:
    """The definitions, not what the kernels make of them."""
    wide = x.astype(np.float64)
    if activation == GELU_TANH:
        inner = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
        return 0.5 * wide * (1 + np.tanh(inner))
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-wide))
    return sigmoid if activation == SIGMOID else wide * sigmoid


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("form", FORMS)
def test_norm_is_that_of_float64(level: str, form: tuple[str, ...], n: int) -> None:
    feeds = feeds_of(form, 5, n)
    wide = feeds["x"].astype(np.float64)
    if "inner" in form:
        wide = normed(wide, feeds["inner"])
    if "residual" in form:
        wide = feeds["residual"] + wide
    found = norm_session(form).run(None, feeds)
    wanted = normed(wide, feeds["weight"])
    # a sum loses what its terms have beyond it
    size = np.abs(wanted) + np.abs(feeds["weight"]) * ("residual" in form)
    assert np.all(np.abs(found[0] - wanted) <= 1e-6 * size)
    if "residual" in form:
        terms = np.abs(feeds["residual"]) + np.abs(wide - feeds["residual"])
        assert np.all(np.abs(found[1] - wide) <= 5e-7 * terms)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 17, 300])
def test_gate_is_that_of_float64(level: str, activation: int, n: int) -> None:
    gate, up = some(0, 7, n) * np.float32(6), some(1, 7, n)
    (found,) = gate_session(activation).run(None, {"gate": gate, "up": up})
    wanted = activated(activation, gate) * up
    # where tanh is close to -1, 1 + tanh of float64 itself has no more digits
    slack = 1e-15 * np.abs(gate * up)
    assert np.all(np.abs(found - wanted) <= 2e-6 * np.abs(wanted) + slack)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_at_the_ends(level: str, activation: int) -> None:
    gate = np.array([[0, -0.0, 1e-30, 88, -88, 1e4, -1e4, 3e38, -3e38, np.inf, np.nan]], np.float32)
    up = np.ones_like(gate)
    (found,) = gate_session(activation).run(None, {"gate": gate, "up": up})
    (one,) = found
    if activation == SIGMOID:
        assert np.all(one[[0, 1, 2]] == 0.5)
        assert np.all(one[[3, 5, 7, 9]] == 1)
    else:
        assert np.all(one[[0, 1]] == 0)
        assert np.all(one[[3, 5, 7, 9]] == gate[0, [3, 5, 7, 9]])
    assert np.all(np.abs(one[[4, 6]]) < 1e-33)  # what is below it is not told from zero
    assert np.isnan(one[10])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_and_what_it_gates_may_stand_side_by_side(level: str, activation: int) -> None:
    both = some(0, 5, 2 * 37)
    (found,) = halves_session(activation).run(None, {"gate": both})
    apart = {"gate": both[:, :37].copy(), "up": both[:, 37:].copy()}
    (wanted,) = gate_session(activation).run(None, apart)
    assert found.tobytes() == wanted.tobytes()


def test_all_levels_give_the_same_bits() -> None:
    for n in (38, 1003):
        found = set()
        for name in kernels().levels:
            kernels().use_level(name)
            form = FORMS[-1]
            results = norm_session(form).run(None, feeds_of(form, 9, n))
            for activation in ACTIVATIONS:
                gate = some(3, 9, n) * np.float32(20)
                results += gate_session(activation).run(None, {"gate": gate, "up": some(4, 9, n)})
            found.add(b"".join(result.tobytes() for result in results))
        kernels().use_level(kernels().levels[0])
        assert len(found) == 1


def test_bits_of_a_row_do_not_depend_on_its_neighbours(level: str) -> None:
    form, n = FORMS[-1], 1100
    feeds = feeds_of(form, 40, n)
    by_row = [name for name, array in feeds.items() if array.ndim == 2]
    gate, up = some(5, 40, n) * np.float32(9), some(6, 40, n)

    def results(rows: NDArray[np.int64], threads: int) -> list[Floats]:
        own = {name: a[rows] if name in by_row else a for name, a in feeds.items()}
        made: list[Floats] = norm_session(form, threads).run(None, own)
        gates = {"gate": gate[rows], "up": up[rows]}
        return made + gate_session(SILU, threads).run(None, gates)

    each = [results(np.array([row]), 1) for row in range(40)]
    alone = [np.concatenate(parts) for parts in zip(*each, strict=True)]
    random = np.random.default_rng(2)
    for count in (1, 2, 7, 29, 40):
        order = random.permutation(40)[:count]
        for threads in (1, 2):
            for found, wanted in zip(results(order, threads), alone, strict=True):
                assert found.tobytes() == wanted[order].tobytes()


def test_a_nan_stays_in_its_row(level: str) -> None:
    form = FORMS[-1]
    feeds = feeds_of(form, 3, 50)
    calm = norm_session(form).run(None, feeds)
    feeds["x"][1, 7] = np.nan
    found = norm_session(form).run(None, feeds)
    for one, wanted in zip(found, calm, strict=True):
        assert np.all(np.isnan(one[1]))
        assert one[[0, 2]].tobytes() == wanted[[0, 2]].tobytes()


# ---- as parts of a product


def joined(
    operator: str,
    layout: WeightLayout,
    packed: NDArray[np.uint8],
    inputs: Mapping[str, Port | None],
    attributes: dict[str, Any],
    threads: int = 1,
) -> ort.InferenceSession:
    """A session of a product that makes its rows, and y [rows, out] of them."""
    rows = ("float32", ["rows", layout.in_features])
    outputs: dict[str, Port | None] = {}
    if operator == "NormLowBitMatMul":
        outputs["sum"] = rows if inputs["residual"] is not None else None
    return session_of(
        operator,
        {**inputs, "bias": None},
        {**outputs, "y": ("float32", ["rows", layout.out_features])},
        {"K": layout.in_features, "N": [layout.out_features], **layout.attributes, **attributes},
        {"packed": packed},
        threads,
    )


LAYOUTS = [
    WeightLayout(4, 32, 300, 70),
    WeightLayout(8, 128, 129, 100),
    WeightLayout(4, 32, 300, 70, "super_min", 8),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_behind_a_norm_is_the_two(
    level: str, form: tuple[str, ...], layout: WeightLayout
) -> None:
    packed, n = layout.pack(some_weight(layout)), layout.in_features
    rows, weight = ("float32", ["rows", n]), ("float32", [n])
    inputs = {
        "x": rows,
        "inner": weight if "inner" in form else None,
        "residual": rows if "residual" in form else None,
        "weight": weight,
    }
    sessions = [
        joined("NormLowBitMatMul", layout, packed, inputs, {"epsilon": EPSILON}, threads)
        for threads in (1, 2)
    ]
    product = matmul_session(layout, packed)
    for count in (1, 3, 13, 70):
        feeds = feeds_of(form, count, n)
        y, *total = norm_session(form).run(None, feeds)
        wanted = [*total, *product.run(None, {"x": y})]
        for session in sessions:
            for a, b in zip(session.run(None, feeds), wanted, strict=True):
                assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_product_behind_a_gate_is_the_two(
    level: str, activation: int, layout: WeightLayout
) -> None:
    packed, n = layout.pack(some_weight(layout)), layout.in_features
    product = matmul_session(layout, packed)
    apart = {
        "gate": ("float32", ["rows", n]),
        "up": ("float32", ["rows", n]),
    }
    together = {
        "gate": ("float32", ["rows", 2 * n]),
        "up": None,
    }
    for count in (1, 13, 70):
        both = some(count, count, 2 * n)
        feeds = {"gate": both[:, :n].copy(), "up": both[:, n:].copy()}
        (rows,) = gate_session(activation).run(None, feeds)
        (wanted,) = product.run(None, {"x": rows})
        for inputs, given in ((apart, feeds), (together, {"gate": both})):
            attributes = {"activation": activation}
            session = joined("GatedLowBitMatMul", layout, packed, inputs, attributes, threads=2)
            assert session.run(None, given)[0].tobytes() == wanted.tobytes()


@cache
def biased_session(threads: int = 1) -> ort.InferenceSession:
    """Two weights behind a gate, with biases: -> y0 [rows, 70] and y1 [rows, 130]."""
    layouts = [WeightLayout(4, 32, 300, out) for out in (70, 130)]
    rows = ("float32", ["rows", 300])
    form = layouts[0].attributes | {"activation": SILU}
    return session_of(
        "GatedLowBitMatMul",
        {"gate": rows, "up": rows, "bias": ("float32", ["n"])},
        {"y0": ("float32", ["rows", 70]), "y1": ("float32", ["rows", 130])},
        {"K": 300, "N": [70, 130], **form},
        {f"packed{layout.out_features}": layout.pack(some_weight(layout)) for layout in layouts},
        threads,
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_biases_are_added_to_the_products(level: str, threads: int) -> None:
    bias = some(9, 200)
    for count in (1, 13, 70):
        feeds = {"gate": some(count, count, 300), "up": some(count + 1, count, 300)}
        session = biased_session(threads)
        plain = session.run(None, feeds | {"bias": np.zeros(200, np.float32)})
        found = session.run(None, feeds | {"bias": bias})
        for one, other, own in zip(found, plain, (bias[:70], bias[70:]), strict=True):
            assert one.tobytes() == (other + own).tobytes()


# ---- what is refused


@pytest.mark.parametrize(
    ("form", "changed", "message"),
    [
        ((), {"weight": (9,)}, "a weight has 9 elements for rows of 8"),
        (("inner", "residual"), {"inner": (7,)}, "a weight has 7 elements for rows of 8"),
        (("residual",), {"residual": (2, 8)}, "it needs as many residuals as rows"),
        (("inner",), {}, "it needs a residual behind a norm"),
        ((), {"x": (3, 0)}, "it needs rows"),
    ],
)
def test_a_norm_of_other_sizes_is_refused(
    form: tuple[str, ...], changed: dict[str, tuple[int, ...]], message: str
) -> None:
    feeds = feeds_of(form, 3, 8) | {name: some(0, *dims) for name, dims in changed.items()}
    with pytest.raises(Exception, match=f"RmsNorm: {message}"):
        norm_session(form).run(None, feeds)


def test_a_gate_of_other_sizes_or_kinds_is_refused() -> None:
    with pytest.raises(Exception, match="Gate: it needs as many rows as gates"):
        gate_session(SILU).run(None, {"gate": some(0, 3, 8), "up": some(0, 2, 8)})
    with pytest.raises(Exception, match="Gate: it needs rows, or halves of rows"):
        halves_session(SILU).run(None, {"gate": some(0, 3, 7)})
    with pytest.raises(Exception, match="no kernel for this activation"):
        gate_session(3)


def test_a_product_of_rows_of_another_width_is_refused() -> None:
    layout = WeightLayout(4, 32, 64, 20)
    inputs = {
        "gate": ("float32", ["rows", "n"]),
        "up": ("float32", ["rows", "n"]),
    }
    packed = layout.pack(some_weight(layout))
    session = joined("GatedLowBitMatMul", layout, packed, inputs, {"activation": SILU})
    with pytest.raises(Exception, match="GatedLowBitMatMul: its rows are not 64 wide"):
        session.run(None, {"gate": some(0, 1, 65), "up": some(0, 1, 65)})


def test_biases_of_other_sizes_are_refused() -> None:
    feeds = {"gate": some(0, 1, 300), "up": some(0, 1, 300), "bias": some(0, 199)}
    with pytest.raises(Exception, match="GatedLowBitMatMul: it needs 200 biases, not 199"):
        biased_session().run(None, feeds)
