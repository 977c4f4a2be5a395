"""Engines for several cache lengths behind one runner, over a simulated TensorRT: a request runs in
the smallest that holds it, and says what it says in an engine of one length, whatever ran before,
runs beside it, or was kept of a prefix."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import edgespec
from edgespec.backends.build import build
from edgespec.backends.cuda.device import opening as device_opening
from edgespec.backends.registry import open_runner
from edgespec.backends.tensorrt.backend import BACKEND
from edgespec.backends.tensorrt.capacities import VariantRunner
from edgespec.contract import Limits
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.opening import open_engine
from tests import made, shared
from tests.lossless.answers import VOCAB, plainly, served
from tests.lossless.tensorrt_pairs import GREEDY, PAIRS, SAMPLED
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.installed import install

LANES = 3
SMALL, LARGE = 40, 128
PORTABLE, NATIVE = "10.13.3.9", "10.16.2.10"
LIMITS = Limits(
    max_batch_size=LANES,
    max_input_len=96,
    max_kv_cache_capacity=LARGE,
    max_verify_tree_size=16,
    max_draft_tree_size=16,
    smaller_kv_cache_capacities=(SMALL,),
)
KINDS = [
    ("eagle3", NATIVE),
    ("mtp", PORTABLE),
    pytest.param(("dflash", NATIVE), marks=pytest.mark.deep),
]
Kind = tuple[str, str]
Expected = dict[tuple[int, int, bool], list[int]]
# Tokens of a prompt and of its answer: the sum decides
SHORT, LONG = (9, 12), (60, 12)


def built(kind: Kind) -> Path:
    name, version = kind
    parts = PAIRS[name]()
    options = BACKEND.parse_options({"compute": "fp32", "timing_cache": "none"})

    def make(out: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            install(patch, version)
            for onnx_dir in (parts.base, parts.draft):
                build(onnx_dir, out, LIMITS, backend=BACKEND.name, options=options)

    digests = [made.digest(path) for path in (parts.base, parts.draft)]
    return shared.made_once(("engines by capacity", version, digests, LIMITS), make)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(kind))
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


def opened(kind: Kind) -> Engine:
    engine = edgespec.load(built(kind))
    engine.stop_ids = frozenset()
    return engine


@contextmanager
def largest_alone() -> Iterator[None]:
    """Engines are opened as if they had been built for one length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_engine, "open_runner", partial(open_runner, capacity=LARGE))
        yield


@pytest.fixture(scope="module")
def expected(kind: Kind) -> Expected:
    """What an engine of one length says, without drafts, by sizes and whether it is sampled."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, kind[1])
        with largest_alone(), opened(kind) as found:
            return {
                (*sizes, sampled): found.plainly(
                    prompt_of(sizes[0]), sampling_of(sizes[1], sampled=sampled)
                ).token_ids
                for sizes in (SHORT, LONG, (28, 12), (20, 20), (21, 20), (100, 28), (3, 16))
                for sampled in (False, True)
                if sizes[0] <= LIMITS.max_input_len
            }


@pytest.fixture(scope="module")
def engine(kind: Kind, expected: Expected) -> Iterator[Engine]:
    assert expected  # of an engine that is closed: there is one device at a time
    with pytest.MonkeyPatch.context() as patch:
        install(patch, kind[1])
        with opened(kind) as found:
            yield found


@pytest.fixture(autouse=True)
def nothing_kept(engine: Engine) -> None:
    engine.forget_prefixes()


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, VOCAB, length).tolist()


def sampling_of(new: int, *, sampled: bool = False) -> edgespec.SamplingParams:
    return replace(SAMPLED if sampled else GREEDY, max_generate_length=new)


def runner_of(engine: Engine) -> VariantRunner:
    runner = engine.base.runner
    assert isinstance(runner, VariantRunner)
    return runner


def draft_of(engine: Engine) -> VariantRunner:
    runner = engine.session.drafter.decoder.runner  # type: ignore[union-attr]
    assert isinstance(runner, VariantRunner)
    return runner


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_request_runs_in_the_smallest_engine_that_holds_it(
    engine: Engine, expected: Expected, sampled: bool
) -> None:
    for sizes, capacity in (
        (SHORT, SMALL),
        (LONG, LARGE),
        ((20, 20), SMALL),  # exactly
        ((21, 20), LARGE),
        (SHORT, SMALL),
    ):
        prompt, sampling = prompt_of(sizes[0]), sampling_of(sizes[1], sampled=sampled)
        drafted = engine.generate(prompt, sampling)
        assert drafted.token_ids == expected[*sizes, sampled]
        assert (runner_of(engine).in_use, draft_of(engine).in_use) == (capacity, capacity)
        assert engine.plainly(prompt, sampling).token_ids == drafted.token_ids


def test_sequences_move_together_where_a_long_one_joins_and_when_it_ends(
    engine: Engine, expected: Expected
) -> None:
    sizes = [SHORT, (28, 12), LONG, (20, 20), (3, 16), LONG, SHORT]
    jobs = [
        GenerationRequest(prompt_of(length), sampling_of(new, sampled=bool(i % 2)), engine.plan())
        for i, (length, new) in enumerate(sizes)
    ]
    found = served(engine, jobs)
    for i, (size, response) in enumerate(zip(sizes, found, strict=True)):
        assert response.token_ids == expected[*size, bool(i % 2)]


def test_rows_that_were_kept_in_one_engine_serve_the_other(
    engine: Engine, expected: Expected, kind: Kind
) -> None:
    head, sampling = prompt_of(20), sampling_of(8)
    engine.generate([*head, 5], sampling, keep=True)
    assert runner_of(engine).in_use == SMALL
    long = [*head, 5, *engine.generate([*head, 5], sampling).token_ids, *prompt_of(30)]
    response = engine.generate(long, sampling, keep=True)
    assert runner_of(engine).in_use == LARGE
    assert response.metrics.reused_tokens >= 20
    again = engine.generate([*long[:22], 7], sampling)
    assert runner_of(engine).in_use == SMALL
    assert again.metrics.reused_tokens >= (0 if kind[0] == "mtp" else 20)
    assert plainly(engine, long, sampling).token_ids == response.token_ids
    assert plainly(engine, [*long[:22], 7], sampling).token_ids == again.token_ids


def test_a_request_beyond_the_largest_ends_where_it_does_today(engine: Engine) -> None:
    found = engine.generate(prompt_of(90), sampling_of(100))
    assert found.finish_reason == "capacity"
    assert runner_of(engine).in_use == LARGE
    assert len(found.token_ids) == LARGE - 90 + 1


def test_a_long_prompt_without_a_reservation_finds_room(engine: Engine) -> None:
    engine.generate(prompt_of(SHORT[0]), sampling_of(SHORT[1]))
    assert runner_of(engine).in_use == SMALL
    logits = engine.next_logits(prompt_of(96))
    assert runner_of(engine).in_use == LARGE
    assert int(logits.argmax()) == engine.plainly(prompt_of(96), sampling_of(1)).token_ids[0]


def test_all_of_the_device_is_given_back(kind: Kind, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install(patch, kind[1])
        patch.setattr(HostDevice, "current", HostDevice.current)  # put back at the end
        own = shutil.copytree(built(kind), tmp_path / "engines")
        with edgespec.load(own) as found:
            for length, new in (SHORT, LONG):
                found.generate(prompt_of(length), sampling_of(new))
            assert [*runner_of(found).runners] == [SMALL, LARGE]
            device = HostDevice.current
            assert device is not None
        assert device.closed
        assert not device.memory
        assert not device.blocks
        assert not device.streams
        assert not device.graphs


# ---- where memory is short


def test_an_engine_in_use_gives_way_where_memory_holds_one_alone(
    expected: Expected, kind: Kind
) -> None:
    """The device has room for the larger base with a draft, and not for a second base."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, kind[1])
        patch.setattr(HostDevice, "current", HostDevice.current)  # put back at the end
        with largest_alone(), opened(kind) as found:
            found.plainly(prompt_of(LONG[0]), sampling_of(LONG[1]))
            device = HostDevice.current
            assert device is not None
            one = sum(size for _, size in device.memory.values())
        patch.setattr(device_opening, "open_device", lambda: HostDevice(one))
        with opened(kind) as found:
            for sizes in (SHORT, LONG, SHORT):
                answer = found.plainly(prompt_of(sizes[0]), sampling_of(sizes[1]))
                assert answer.token_ids == expected[*sizes, False]
                capacity = SMALL if sizes == SHORT else LARGE
                assert [*runner_of(found).runners] == [capacity]
