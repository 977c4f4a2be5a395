"""Experts at every level of instructions: against float64, and row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.backends.ort.experts import PARTS, ExpertsLayout
from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.native.library import kernels
from edgespec.quantization.quantized_weight import dequantize
from tests.unit.backends.ort.native.sessions import compiled, session_of
from tests.unit.backends.ort.native.test_matmul import rounded
from tests.unit.backends.ort.native.weights import named, sized, some_weight

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

# experts, chosen, hidden, inner: below a block and a panel, just above, several of each
SIZES = [(1, 1, 7, 3), (3, 2, 33, 17), (5, 5, 64, 64), (9, 2, 130, 65), (6, 3, 96, 150)]
Q4_K = WeightLayout(4, 32, 1, 1, "super_min", 8)
Q6_K = WeightLayout(6, 16, 1, 1, "super", 16)
NVFP4 = WeightLayout(4, 16, 1, 1, "float16", 1, "fp4")
PLAIN = WeightLayout(4, 32, 1, 1)
Forms = tuple[WeightLayout, WeightLayout]  # of gate and up, and of down
FORMS: list[Forms] = [
    (PLAIN, PLAIN),
    (WeightLayout(8, 64, 1, 1), WeightLayout(4, 128, 1, 1)),
    (Q4_K, Q6_K),
    (Q6_K, Q6_K),
    (NVFP4, NVFP4),  # each weight with a global scale
]

pytestmark = compiled


@dataclass(frozen=True)
class Layer:
    """Random experts: packed, and each as float64."""

    layout: ExpertsLayout
    packed: NDArray[np.uint8]
    weights: list[tuple[NDArray[np.float64], ...]]  # of each expert: gate, up, down

    @classmethod
    def of(cls, experts: int, hidden: int, inner: int, forms: Forms = FORMS[0]) -> Layer:
        up, down = sized(forms[0], hidden, inner), sized(forms[1], inner, hidden)
        scales = np.random.default_rng(4).uniform(0.3, 0.9, len(PARTS) * experts)
        own = tuple(float(scale) for scale in scales.astype(np.float32))
        layout = ExpertsLayout(experts, up, down, own if up.codebook else (1.0,))
        packed = np.zeros(experts * layout.expert_bytes, np.uint8)
        weights = []
        for e in range(experts):
            parts = []
            for p, part in enumerate(PARTS):
                form = layout.layout(part, e)
                weight = some_weight(form, seed=3 * e + p)
                start, distance = layout.place(e, part)
                for i, panel in enumerate(form.pack(weight)):
                    at = start + i * distance
                    packed[at : at + panel.size] = panel.reshape(-1)
                parts.append(dequantize(weight).astype(np.float64))
            weights.append(tuple(parts))
        return cls(layout, packed.reshape(layout.shape), weights)

    def session(
        self, threads: int = 1, scales: dict[str, Floats] | None = None, **attributes: Any
    ) -> ort.InferenceSession:
        given = {"activation": 0} | self.layout.attributes
        return session_of(
            "Experts",
            {
                "x": ("float32", ["rows", "hidden"]),
                "ids": ("int64", ["rows", "chosen"]),
                "weights": ("float32", ["rows", "chosen"]),
            },
            {"y": ("float32", ["rows", "hidden"])},
            given | attributes,
            {"experts": self.packed, **(scales or {})},
            threads,
        )


def both_named(forms: Forms) -> str:
    return "+".join(dict.fromkeys(map(named, forms)))


def some_calls(layer: Layer, count: int, chosen: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Rows, and different experts for each."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(layer.layout.count)[:chosen] for _ in range(count)])
    hidden = layer.layout.up.in_features
    x = rng.standard_normal((count, hidden)) * np.exp(rng.uniform(-1, 1, (count, 1)))
    weights = rng.uniform(0.05, 1, (count, chosen))
    return {
        "x": x.astype(np.float32),
        "ids": ids.astype(np.int64),
        "weights": weights.astype(np.float32),
    }


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


def gelu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def wanted_of(
    layer: Layer, call: dict[str, NDArray[Any]], activation: Any = silu
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What each row is in float64, its rows and inner rows rounded as the kernel does; and the
    size of what its sums pass through."""
    x = rounded(layer.layout.up, call["x"])
    y, size = np.zeros(x.shape), np.zeros(x.shape)
    for row, ids in enumerate(call["ids"]):
        for share, expert in zip(call["weights"][row].astype(np.float64), ids, strict=True):
            gate, up, down = layer.weights[expert]
            inner = (activation(x[row] @ gate.T) * (x[row] @ up.T)).astype(np.float32)
            each = rounded(layer.layout.down, inner[None])[0]
            y[row] += share * (each @ down.T)
            size[row] += share * (np.abs(inner) @ np.abs(down.T))
    return y, size


@pytest.mark.parametrize("forms", FORMS, ids=both_named)
@pytest.mark.parametrize(("experts", "chosen", "hidden", "inner"), SIZES)
def test_each_row_is_the_sum_of_its_experts(
    level: str, forms: Forms, experts: int, chosen: int, hidden: int, inner: int
) -> None:
    layer = Layer.of(experts, hidden, inner, forms)
    session = layer.session()
    for count in (1, 2, 5, 7, 16, 33, 64):
        call = some_calls(layer, count, chosen, seed=count)
        (y,) = session.run(None, call)
        wanted, size = wanted_of(layer, call)
        # An inner value beside an edge may be rounded to the other side: a step of 1/127 of its
        # block, in a few places
        assert np.all(np.abs(y - wanted) <= 0.01 * size + 1e-12)
        assert np.sqrt(np.mean((y - wanted) ** 2)) <= 5e-4 * np.sqrt(np.mean(size**2))


def test_experts_that_nobody_chose_are_not_read_and_one_may_serve_all_rows(level: str) -> None:
    layer = Layer.of(7, 96, 70)
    call = some_calls(layer, 40, 1)
    call["ids"][:] = 4
    (y,) = layer.session().run(None, call)
    other = Layer(layer.layout, layer.packed.copy(), layer.weights)
    other.packed[[0, 1, 2, 3, 5, 6]] = 0xFF  # scales of NaN
    assert other.session().run(None, call)[0].tobytes() == y.tobytes()
    wanted, size = wanted_of(layer, call)
    assert np.all(np.abs(y - wanted) <= 0.01 * size)
    call["ids"][20:] = 5
    found = other.session().run(None, call)[0]
    assert found[:20].tobytes() == y[:20].tobytes()
    assert np.all(np.isnan(found[20:]))


@pytest.mark.parametrize("forms", FORMS, ids=both_named)
def test_bits_of_a_row_do_not_depend_on_its_neighbours(level: str, forms: Forms) -> None:
    layer = Layer.of(11, 96, 70, forms)
    one, two = layer.session(), layer.session(threads=2)
    call = some_calls(layer, 64, 3)
    rows = [{name: array[i : i + 1] for name, array in call.items()} for i in range(64)]
    alone = np.concatenate([one.run(None, row)[0] for row in rows])
    random = np.random.default_rng(2)
    for count in range(1, 65):
        order = random.permutation(64)[:count]
        together = {name: array[order] for name, array in call.items()}
        for session in (one, two):
            assert session.run(None, together)[0].tobytes() == alone[order].tobytes()


def test_many_rows_in_several_sequences_have_the_same_bits() -> None:
    layer = Layer.of(4, 40, 20)
    call = some_calls(layer, 600, 2)
    session = layer.session(threads=2)
    (y,) = session.run(None, call)
    parts = [
        session.run(None, {name: array[first : first + 150] for name, array in call.items()})[0]
        for first in range(0, 600, 150)
    ]
    assert y.tobytes() == np.concatenate(parts).tobytes()


@pytest.mark.parametrize("forms", FORMS, ids=both_named)
def test_all_levels_give_the_same_bits(forms: Forms) -> None:
    layer = Layer.of(5, 129, 75, forms)
    session, call = layer.session(), some_calls(layer, 13, 2)
    found = set()
    for name in kernels().levels:
        kernels().use_level(name)
        found.add(session.run(None, call)[0].tobytes())
    kernels().use_level(kernels().levels[0])
    assert len(found) == 1


def test_the_order_of_a_rows_experts_changes_nothing_but_the_sum_of_weights(level: str) -> None:
    layer = Layer.of(6, 64, 64)
    call = some_calls(layer, 9, 4)
    turned = call | {name: call[name][:, ::-1].copy() for name in ("ids", "weights")}
    session = layer.session()
    assert session.run(None, call)[0].tobytes() == session.run(None, turned)[0].tobytes()


def test_weights_are_divided_by_their_sum_where_the_model_does_so(level: str) -> None:
    layer = Layer.of(6, 64, 40)
    call = some_calls(layer, 9, 3)
    total = call["weights"].sum(1, keepdims=True)
    (y,) = layer.session(normalized=1).run(None, call)
    (plain,) = layer.session().run(None, call | {"weights": call["weights"] / total})
    np.testing.assert_allclose(y, plain, rtol=1e-5, atol=1e-6 * np.abs(plain).max())


def test_gelu_is_the_other_activation(level: str) -> None:
    layer = Layer.of(3, 64, 40)
    call = some_calls(layer, 6, 2)
    (y,) = layer.session(activation=1).run(None, call)
    wanted, size = wanted_of(layer, call, gelu)
    assert np.all(np.abs(y - wanted) <= 0.01 * size)
    assert np.abs(y - wanted_of(layer, call)[0]).max() > 0.05 * size.max()


def test_each_experts_rows_are_multiplied_by_its_own_scales(level: str) -> None:
    layer, rng = Layer.of(5, 70, 40), np.random.default_rng(3)
    call = some_calls(layer, 9, 2)
    scales = {
        "hidden_scales": rng.uniform(0.2, 2, (5, 70)).astype(np.float32),
        "inner_scales": rng.uniform(0.2, 2, (5, 40)).astype(np.float32),
    }
    session, plain = layer.session(scales=scales), layer.session()
    (y,) = session.run(None, call)
    for row in range(9):
        one = {name: array[row : row + 1] for name, array in call.items()}
        assert session.run(None, one)[0].tobytes() == y[row].tobytes()
        wanted, size = np.zeros(70), np.zeros(70)
        for j, expert in enumerate(call["ids"][row]):
            x = rounded(layer.layout.up, one["x"] * scales["hidden_scales"][expert])[0]
            gate, up, down = layer.weights[expert]
            inner = (silu(x @ gate.T) * (x @ up.T)).astype(np.float32)
            each = rounded(layer.layout.down, (inner * scales["inner_scales"][expert])[None])[0]
            wanted += call["weights"][row, j] * (each @ down.T)
            size += call["weights"][row, j] * (np.abs(each) @ np.abs(down.T))
        assert np.all(np.abs(y[row] - wanted) <= 0.01 * size)
    assert np.abs(y - plain.run(None, call)[0]).max() > 0.1 * np.abs(y).max()
    with pytest.raises(Exception, match="a scale for each input of each expert"):
        layer.session(scales=scales | {"inner_scales": scales["inner_scales"][:, 1:]}).run(
            None, call
        )


def test_a_nan_harms_its_own_row_alone(level: str) -> None:
    layer = Layer.of(4, 64, 40)
    call = some_calls(layer, 6, 2)
    (calm,) = layer.session().run(None, call)
    call["x"][2, 5], call["weights"][4, 1] = np.nan, np.inf
    (y,) = layer.session().run(None, call)
    others = [0, 1, 3, 5]
    assert y[others].tobytes() == calm[others].tobytes()
    assert np.all(np.isnan(y[2]))
    assert not np.any(np.isfinite(y[4]))


def test_no_rows_make_no_rows() -> None:
    layer = Layer.of(2, 40, 20)
    (y,) = layer.session().run(
        None,
        some_calls(layer, 1, 1)
        | {
            "x": np.zeros((0, 40), np.float32),
            "ids": np.zeros((0, 1), np.int64),
            "weights": np.zeros((0, 1), np.float32),
        },
    )
    assert y.shape == (0, 40)


def test_wrong_numbers_sizes_and_layouts_are_refused() -> None:
    layer = Layer.of(3, 64, 40)
    call = some_calls(layer, 2, 2)
    with pytest.raises(Exception, match="Experts: there is no expert 3"):
        layer.session().run(None, call | {"ids": call["ids"] * 0 + 3})
    with pytest.raises(Exception, match="Experts: there is no expert -1"):
        layer.session().run(None, call | {"ids": call["ids"] * 0 - 1})
    with pytest.raises(Exception, match="needs the experts of each row"):
        layer.session().run(None, call | {"ids": call["ids"][:, :1]})
    with pytest.raises(Exception, match="another version of the kernels"):
        layer.session(layout_version=99)
    with pytest.raises(Exception, match="no kernel for these sizes"):
        layer.session(activation=7)
    with pytest.raises(Exception, match="not as many global scales as weights"):
        layer.session(layout_version=2, global_scales=[1.0] * 3)
    with pytest.raises(Exception, match="bytes instead of"):
        layer.session(experts=4).run(None, call)
