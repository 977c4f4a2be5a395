"""The largest logits of rows, found on the device: those that the host finds, in its order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgespec.backends.cuda.kernels import PART_IDS
from edgespec.backends.cuda.logits import MAX_TOP, DeviceLogits, Wanted
from edgespec.backends.cuda.workspace import Workspace
from edgespec.backends.host import HostLogits
from tests.tensorrt_simulator.cpu_kernels import made_device

WIDE = 2 * PART_IDS + 37  # of three parts


@pytest.fixture(params=["simulated", "source"])
def workspace(request: pytest.FixtureRequest) -> Iterator[Workspace]:
    made = Workspace(made_device(request.param))
    made.join()
    yield made
    made.leave()


def rows_of(kind: str, vocab: int) -> np.ndarray:
    """Six rows of logits."""
    rng = np.random.default_rng(vocab)
    if kind == "random":
        return rng.standard_normal((6, vocab), np.float32) * 5
    if kind == "ties":  # of zeros of both signs too
        return rng.integers(-2, 2, (6, vocab)).astype(np.float32) * np.float32(-1)
    return np.full((6, vocab), -3.5, np.float32)


def logits_of(workspace: Workspace, array: np.ndarray) -> DeviceLogits:
    address = workspace.alloc(array.nbytes)
    workspace.put(address, array)
    rows, ids = array.shape
    return DeviceLogits(workspace, address, rows, ids, ids, Wanted(1, ids))


@pytest.mark.parametrize("vocab", [1, 7, PART_IDS, PART_IDS + 1, WIDE])
@pytest.mark.parametrize("kind", ["random", "ties", "equal"])
def test_the_device_finds_what_the_host_finds(workspace: Workspace, kind: str, vocab: int) -> None:
    array = rows_of(kind, vocab)
    found, expected = logits_of(workspace, array), HostLogits(array)
    for count in (1, 10):
        top, host = found.top(count), expected.top(count)
        assert (top.ids == host.ids).all()
        assert (top.values == host.values).all()
        assert np.allclose(top.logsumexp, host.logsumexp, rtol=1e-6, atol=1e-6)
    assert [found.best(i) for i in range(6)] == [expected.best(i) for i in range(6)]
    assert found.finite()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocab", [7, WIDE])
def test_nan_and_inf_are_found_in_their_rows(workspace: Workspace, vocab: int, bad: float) -> None:
    array = rows_of("random", vocab)
    array[2, vocab - 3] = array[4, 1] = bad
    found = logits_of(workspace, array)
    assert not found.finite()
    assert not found.take(np.array([0, 4])).finite()
    assert found.take(np.array([0, 1, 5])).finite()
    assert found.first_rows(2).finite()
    for row, (id_, value) in enumerate(HostLogits(array).best(i) for i in range(6)):
        assert found.best(row)[0] == id_
        assert found.best(row)[1] == value or np.isnan(value)


def test_a_nan_is_the_best_of_its_row_wherever_it_stands(workspace: Workspace) -> None:
    array = rows_of("random", WIDE)
    array[0, [0, 5]] = np.nan
    array[1, [3, WIDE - 1]] = -np.float32(np.nan)
    array[1, 2] = np.inf
    found = logits_of(workspace, array)
    assert [found.best(i)[0] for i in (0, 1)] == [0, 3]
    assert np.isnan([found.best(i)[1] for i in (0, 1)]).all()


def test_the_first_ids_are_searched_alone(workspace: Workspace) -> None:
    array = rows_of("random", WIDE)
    array[:, -5:] = 100.0  # of a vocabulary that is filled up
    found, expected = logits_of(workspace, array), HostLogits(array)
    assert found.best(0)[0] == WIDE - 5
    few, host = found.first_ids(WIDE - 5), expected.first_ids(WIDE - 5)
    assert few.vocab_size == WIDE - 5
    assert (few.top(4).ids == host.top(4).ids).all()
    assert (few.rows() == host.rows()).all()
    assert (few.take(np.array([3, 1])).row(1) == host.row(1)).all()
    assert (found.top(4).ids == expected.top(4).ids).all()


def test_rows_come_to_the_host_where_they_are_asked_for(workspace: Workspace) -> None:
    array = rows_of("random", WIDE)
    found = logits_of(workspace, array)
    assert (found.rows() == array).all()
    taken = found.take(np.array([5, 0]))
    workspace.put(found.address, array * 0)
    assert (taken.rows() == array[[5, 0]]).all()
    assert (taken.first_rows(1).rows() == array[[5]]).all()
    assert not found.row(3).any()


def test_more_than_a_kernel_finds_is_found_on_the_host(workspace: Workspace) -> None:
    array = rows_of("ties", 300)
    found = logits_of(workspace, array)
    for count in (MAX_TOP, MAX_TOP + 1, 300, 1000):
        assert (found.top(count).ids == HostLogits(array).top(count).ids).all()
    assert found.wanted.count == MAX_TOP


def test_no_rows_have_no_largest(workspace: Workspace) -> None:
    none = logits_of(workspace, rows_of("random", 9)).take(np.arange(0))
    assert none.finite()
    assert none.top(3).ids.shape == (0, 3)
    assert none.rows().shape == (0, 9)
