"""LowBitHead at every level of instructions: what it finds is what numpy finds in the logits that
LowBitMatMul writes, whether they are written or not."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edgespec.backends.host import HostLogits
from edgespec.backends.ort.contract import FOUND
from edgespec.backends.ort.head import Found, search
from edgespec.backends.ort.native.layout import WeightLayout
from edgespec.backends.ort.native.library import MOST_TOP, kernels
from tests.unit.backends.ort.native.sessions import compiled, matmul_session, session_of
from tests.unit.backends.ort.native.weights import plain_weight

pytestmark = compiled

Floats = NDArray[np.float32]
# below a vector, a panel and a part; just above; several parts
VOCABS = (1, 5, 16, 17, 63, 65, 511, 513, 1024, 2007)
COUNTS = (1, 2, 3, 4, 5, 7, 10)
ODD = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], np.float32)


def rows_with(vocab: int, kind: str, seed: int = 0) -> Floats:
    """Rows of logits: of all sizes, of few values, or with some that are no numbers."""
    random = np.random.default_rng(seed)
    logits = random.standard_normal((9, vocab)).astype(np.float32)
    if kind == "ties":
        signs = np.where(random.random(logits.shape) < 0.5, 1, -1)  # of zeros as well
        return np.rint(logits) * signs.astype(np.float32)
    logits *= np.exp(random.uniform(-4, 4, (9, 1))).astype(np.float32)
    if kind == "odd":
        places = random.random(logits.shape) < random.choice([0.002, 0.3], (9, 1))
        logits[places] = random.choice(ODD, int(places.sum()))
        logits[3:6] = np.array([[-np.inf], [np.nan], [-0.0]])
    return logits


def check_found(found: Found, logits: Floats, ids: int, count: int) -> None:
    """What was found is what numpy finds in the first `ids` logits, to the bit."""
    host = HostLogits(logits[:, :ids])
    with np.errstate(invalid="ignore", over="ignore"):
        top = host.top(count)
    assert found.searched == ids
    np.testing.assert_array_equal(found.ids, top.ids)
    wanted = np.take_along_axis(logits, top.ids, 1)
    assert found.values.tobytes() == wanted.tobytes()
    np.testing.assert_array_equal(found.finite, np.isfinite(logits[:, :ids]).all(1))
    for row, (best, value) in enumerate(map(host.best, range(len(logits)))):
        assert found.ids[row, 0] == best
        assert np.float32(value).tobytes() == found.values[row, 0].tobytes()
    if found.sums:
        np.testing.assert_allclose(found.logsumexp, top.logsumexp, rtol=1e-6, atol=1e-6)
    else:
        assert np.isnan(found.logsumexp).all()


@pytest.mark.parametrize("kind", ["numbers", "ties", "odd"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_search_finds_what_numpy_finds(level: str, vocab: int, kind: str) -> None:
    logits = rows_with(vocab, kind)
    for count in (count for count in (*COUNTS, MOST_TOP) if count <= vocab):
        check_found(search(logits, vocab, count, sums=count % 2 == 0), logits, vocab, count)
    few = max(1, vocab * 2 // 3)
    check_found(search(logits, few, 1, sums=True), logits, few, 1)


def test_a_sum_of_exponentials_is_that_of_float64(level: str) -> None:
    for kind in ("numbers", "ties"):
        logits = rows_with(2007, kind)
        with np.errstate(over="ignore"):
            peak = logits.max(1).astype(np.float64)
            wanted = peak + np.log(np.exp(logits - peak[:, None]).sum(1))
        found = search(logits, 2007, 1, sums=True).logsumexp
        assert np.abs(found - wanted).max() <= 1.2e-7 * np.abs(wanted).max() + 2e-7


@pytest.mark.parametrize("kind", ["numbers", "ties", "odd"])
def test_all_levels_find_the_same_bits(kind: str) -> None:
    logits, found = rows_with(2007, kind), []
    for name in kernels().levels:
        kernels().use_level(name)
        arrays = astuple(search(logits, 2007, 7, sums=True))[2:]
        found.append([np.nan_to_num(array).tobytes() for array in arrays])
    kernels().use_level(kernels().levels[0])
    assert all(one == found[0] for one in found)


# ---- the operator


class HeadSession:
    """A session of one LowBitHead, and the LowBitMatMul of its weight."""

    def __init__(self, layout: WeightLayout, packed: NDArray[np.uint8], threads: int = 1) -> None:
        self.layout, self.packed = layout, packed
        self.product = matmul_session(layout, packed)
        self.session = head_session(layout, threads)

    def run(
        self, x: Floats, written: list[bool], count: int, ids: int, *, sums: bool = False
    ) -> tuple[Floats, Found]:
        """Logits, and what was found of all rows."""
        asked = np.array([count, ids, sums], np.int64)
        feeds = {"x": x, "weight": self.packed, "written": np.array(written, bool), "search": asked}
        logits, *found = self.session.run(None, feeds)
        flat = [np.asarray(array).reshape(-1, *array.shape[2:]) for array in found]
        return logits, Found(ids, sums, *flat)

    def logits(self, x: Floats) -> Floats:
        """The logits that LowBitMatMul writes, [rows of all lanes, out]."""
        y: Floats = self.product.run(None, {"x": x.reshape(-1, x.shape[-1])})[0]
        return y


def head_session(layout: WeightLayout, threads: int = 1, **attributes: Any) -> ort.InferenceSession:
    """A session of one LowBitHead."""
    sizes = {"K": layout.in_features, "N": [layout.out_features]}
    return session_of(
        "LowBitHead",
        {
            "x": ("float32", ["lanes", "rows", layout.in_features]),
            "weight": ("uint8", ["panels", "blocks", "bytes"]),
            "written": ("bool", ["lanes"]),
            "search": ("int64", [3]),
        },
        {
            "logits": ("float32", ["lanes", "rows", layout.out_features]),
            **{spec.name: (spec.dtype, list(spec.shape)) for spec in FOUND},
        },
        {**sizes, **layout.attributes, **attributes},
        threads=threads,
    )


def made_head(vocab: int, width: int = 70, bits: int = 4, threads: int = 1) -> HeadSession:
    """A head of which many outputs are the same, so that logits are."""
    random, layout = (
        np.random.default_rng(vocab),
        WeightLayout(4 if bits == 4 else 8, 32, width, vocab),
    )
    kinds = max(1, vocab // 3)
    values = random.integers(-layout.middle, layout.middle, (kinds, width), np.int8)
    scales = random.uniform(0.5, 2, (kinds, layout.num_blocks)).astype(np.float32)
    same = random.integers(0, kinds, vocab)
    return HeadSession(
        layout, layout.pack(plain_weight(layout, values[same], scales[same])), threads
    )


def made_rows(lanes: int, rows: int, width: int = 70) -> Floats:
    random = np.random.default_rng(lanes * 100 + rows)
    return random.standard_normal((lanes, rows, width)).astype(np.float32)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("vocab", VOCABS)
def test_what_is_found_does_not_depend_on_what_is_written(
    level: str, vocab: int, bits: int
) -> None:
    head, x = made_head(vocab, bits=bits, threads=2), made_rows(3, 4)
    x[1, 2, 5], x[2, 0, 60], x[2, 1] = np.nan, np.inf, 0
    wanted = head.logits(x)
    for count in (count for count in COUNTS if count <= vocab):
        for written in ([False] * 3, [True, False, True], [True] * 3):
            logits, found = head.run(x, written, count, vocab, sums=count > 3)
            check_found(found, wanted, vocab, count)
            for lane, own in enumerate(wanted.reshape(3, 4, vocab)):
                if written[lane]:
                    assert logits[lane].tobytes() == own.tobytes()


def test_a_search_of_the_first_ids_leaves_the_others_out(level: str) -> None:
    head, x = made_head(1300), made_rows(2, 3)
    wanted = head.logits(x)
    for ids in (1, 64, 512, 513, 1299):
        for written in ([False, False], [True, False]):
            logits, found = head.run(x, written, 1, ids, sums=True)
            check_found(found, wanted, ids, 1)
            if written[0]:
                assert logits[0].tobytes() == wanted[:3].tobytes()


def test_logits_that_nobody_asked_for_are_not_written(level: str) -> None:
    head, x = made_head(700), made_rows(2, 3)
    logits = np.full((2, 3, 700), 7, np.float32)
    binding = head.session.io_binding()
    feeds = {"x": x, "weight": head.packed, "written": np.array([False, True])}
    for name, array in (feeds | {"search": np.array([1, 700, 0])}).items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
    for spec in FOUND:
        binding.bind_output(spec.name)
    head.session.run_with_iobinding(binding)
    assert (logits[0] == 7).all()
    assert logits[1].tobytes() == head.logits(x)[3:].tobytes()


def test_bits_that_are_found_of_a_row_do_not_depend_on_its_neighbours(level: str) -> None:
    vocab = 1111
    one, two = made_head(vocab), made_head(vocab, threads=2)
    x = made_rows(1, 40)
    alone = [one.run(x[:, i : i + 1], [False], 5, vocab, sums=True)[1] for i in range(40)]
    random = np.random.default_rng(3)
    for count in range(1, 41):
        order = random.permutation(40)[:count]
        for head in (one, two):
            found = head.run(x[:, order], [bool(count % 2)], 5, vocab, sums=True)[1]
            for row, source in enumerate(order):
                own = alone[source]
                assert found.ids[row].tobytes() == own.ids[0].tobytes()
                assert found.values[row].tobytes() == own.values[0].tobytes()
                assert found.logsumexp[row].tobytes() == own.logsumexp[0].tobytes()


def test_a_search_of_written_logits_gives_the_bits_of_the_head(level: str) -> None:
    head, x = made_head(1500, width=33), made_rows(1, 6, 33)
    found = head.run(x, [False], 8, 1500, sums=True)[1]
    later = search(head.logits(x), 1500, 8, sums=True)
    for one, other in zip(astuple(found)[2:], astuple(later)[2:], strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([0, 20, 0], "cannot find 0 of 20"),
        ([1, 21, 0], "cannot find 1 of 21"),
        ([21, 20, 0], "cannot find 21 of 20"),
        ([65, 20, 0], "cannot find 65 of 20"),
    ],
)
def test_a_search_for_too_much_is_refused(asked: list[int], message: str) -> None:
    head = made_head(20)
    with pytest.raises(Exception, match=message):
        head.run(made_rows(1, 1), [False], asked[0], asked[1])


def test_a_call_of_no_rows_finds_nothing(level: str) -> None:
    for rows in (made_rows(2, 0), made_rows(0, 3)):
        logits, found = made_head(20).run(rows, [False] * len(rows), 1, 20)
        assert (logits.size, found.ids.size, found.finite.size) == (0, 0, 0)


def test_a_head_of_another_size_is_refused() -> None:
    head, x = made_head(20), made_rows(1, 1)
    with pytest.raises(Exception, match="which lanes are written"):
        head.run(x, [False, True], 1, 20)
    head.packed = head.packed[:0]
    with pytest.raises(Exception, match="LowBitHead: its weight has 0 bytes"):
        head.run(x, [False], 1, 20)
    with pytest.raises(Exception, match="another version of the kernels"):
        head_session(head.layout, layout_version=99)
