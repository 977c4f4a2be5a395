"""The TensorRT backend as it is over a simulated library: in batches, with prefixes that are kept,
and with drafts that are accepted here and there, every sequence says what it says alone and
without drafts."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgespec
from edgespec.backends.build import build
from edgespec.backends.call import Call, Result
from edgespec.backends.cuda.logits import DeviceLogits
from edgespec.backends.host import HostLogits
from edgespec.backends.tensorrt.backend import BACKEND
from edgespec.backends.tensorrt.plans import MemoryPlan
from edgespec.backends.tensorrt.runner import TensorRTRunner
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import GenerationRequest
from edgespec.runtime.trees.tree import DraftPlan
from tests import made, shared
from tests.lossless.answers import VOCAB, assert_as_alone, assert_same, plainly, served
from tests.lossless.drafters import ScriptedDrafter
from tests.lossless.pairs import LIMITS
from tests.lossless.tensorrt_pairs import GREEDY, PAIRS, SAMPLED, Parts
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.installed import install

LANES = 3
PORTABLE, NATIVE = "10.13.3.9", "10.16.2.10"
deep = pytest.mark.deep  # the older release beyond one pair, and graphs of test_tensorrt_dialects
KINDS = [
    ("eagle3", NATIVE),
    ("eagle3", PORTABLE),
    pytest.param(("eagle3-gemma3", NATIVE), marks=deep),
    ("mtp", NATIVE),
    pytest.param(("mtp", PORTABLE), marks=deep),
    ("dflash", NATIVE),
    pytest.param(("dflash", PORTABLE), marks=deep),
    ("medusa", NATIVE),
]


def built(parts: Parts, version: str) -> Path:
    """The directory of the engines of a pair, for LANES sequences."""
    limits = replace(LIMITS, max_batch_size=LANES)
    options = BACKEND.parse_options({"compute": "fp32", "timing_cache": "none"})

    def make(out: Path) -> None:
        for onnx_dir in (parts.base, parts.draft):
            build(onnx_dir, out, limits, backend=BACKEND.name, options=options)

    digests = [made.digest(path) for path in (parts.base, parts.draft)]
    return shared.made_once(("simulated engines", version, digests, limits), make)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(kind))
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param


@pytest.fixture(scope="module")
def engine(kind: tuple[str, str]) -> Iterator[Engine]:
    name, version = kind
    with pytest.MonkeyPatch.context() as patch:
        install(patch, version)
        with edgespec.load(built(PAIRS[name](), version)) as opened:
            opened.stop_ids = frozenset()
            yield opened


@pytest.fixture(autouse=True)
def as_it_was(engine: Engine) -> Iterator[None]:
    drafter = engine.session.drafter
    engine.forget_prefixes()
    yield
    engine.session.drafter = drafter


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, VOCAB, length).tolist()


def counted(call: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    """A call that counts itself by its name."""

    def counting(*args: Any) -> Any:
        counts[call.__name__] += 1
        return call(*args)

    return counting


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_tokens_come_out_with_drafts_and_without(
    engine: Engine, sampling: edgespec.SamplingParams
) -> None:
    for length in (1, 30):
        plain = plainly(engine, prompt_of(length), sampling)
        assert_same(engine, plain, engine.generate(prompt_of(length), sampling), sampling)


@pytest.mark.parametrize("right", [0.6, 1.0])
def test_what_is_accepted_of_a_tree_is_moved_on_the_device(
    engine: Engine, kind: tuple[str, str], right: float
) -> None:
    prompt = prompt_of(12)
    plain = plainly(engine, prompt, GREEDY)
    engine.session.drafter = ScriptedDrafter([(prompt, plain.token_ids)], VOCAB, right)
    runner = engine.base.runner
    assert isinstance(runner, TensorRTRunner)
    device = runner.workspace.device
    assert isinstance(device, HostDevice)
    device.launched.clear()
    plan = DraftPlan(1, 3, 4) if kind[0] == "mtp" else DraftPlan(4, 3, 16)
    drafted = engine.generate(prompt, GREEDY, plan)
    assert drafted.token_ids == plain.token_ids
    assert sum(drafted.metrics.per_step_accepted) > 0
    assert "move_rows" in device.launched or right == 1.0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_logits_stay_on_the_device(
    engine: Engine,
    kind: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    sampling: edgespec.SamplingParams,
) -> None:
    """A call copies one block up and one down. Logits come to the host by the row, and only where a
    token is drawn from them."""
    runner = engine.base.runner
    assert isinstance(runner, TensorRTRunner)
    plain = plainly(engine, prompt_of(12), sampling)
    engine.generate(prompt_of(12), sampling)  # now calls know what drafts ask
    runner.workspace.version += 1  # plans of before are dropped
    monkeypatch.setattr(HostDevice, "can_capture", False)
    counts: Counter[str] = Counter()
    for of, name in (
        (HostDevice, "upload"),
        (HostDevice, "download"),
        (TensorRTRunner, "run"),
        (DeviceLogits, "row"),
        (DeviceLogits, "rows"),
    ):
        monkeypatch.setattr(of, name, counted(getattr(of, name), counts))
    assert engine.generate(prompt_of(12), sampling).token_ids == plain.token_ids
    assert counts["run"] > 1
    assert counts["upload"] == counts["run"] or kind[0] == "medusa"  # its heads read states alone
    assert counts["download"] == counts["run"] + counts["row"]
    assert counts["rows"] == 0
    assert bool(counts["row"]) == (sampling is SAMPLED)


def test_a_mixture_gives_each_what_it_gets_alone(engine: Engine) -> None:
    lengths = [(1, 9), (30, 14), (12, 20), (5, 1), (22, 5), (3, 16)]
    samplings = [GREEDY, SAMPLED]
    jobs = [
        GenerationRequest(prompt_of(n), replace(samplings[i % 2], max_generate_length=new), None)
        for i, (n, new) in enumerate(lengths)
    ]
    assert_as_alone(engine, jobs, served(engine, jobs))


def test_what_a_call_finds_of_its_logits_is_what_the_host_finds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In calls of several lanes too, with other numbers of rows each."""
    sizes, found = [], TensorRTRunner.results

    def checked(self: TensorRTRunner, plan: MemoryPlan, call: Call) -> list[Result]:
        results = found(self, plan, call)
        for result in results:
            host, count = HostLogits(result.logits.rows()), self.wanted.count
            known = result.logits.top(count)
            assert (known.ids == host.top(count).ids).all()
            assert (known.values == host.top(count).values).all()
            assert np.allclose(known.logsumexp, host.top(count).logsumexp, rtol=1e-6)
            assert result.logits.finite()
        sizes.append(len(results))
        return results

    monkeypatch.setattr(TensorRTRunner, "results", checked)
    jobs = [
        GenerationRequest(prompt_of(n), replace(GREEDY, max_generate_length=9), None)
        for n in (4, 11, 25)
    ]
    served(engine, jobs)
    assert max(sizes) > 1


def test_rows_kept_of_one_lane_serve_another(engine: Engine) -> None:
    head = prompt_of(20)
    jobs = [
        GenerationRequest([*head, tail, 9], replace(SAMPLED, max_generate_length=8), None, keep=20)
        for tail in (3, 4, 5, 6)
    ]
    found = served(engine, jobs)
    assert_as_alone(engine, jobs, found)
    assert sum(one.metrics.reused_tokens for one in found) >= 19


def test_an_engine_gives_all_of_its_device_back(kind: tuple[str, str], tmp_path: Path) -> None:
    name, version = kind
    with pytest.MonkeyPatch.context() as patch:
        install(patch, version)
        # Engines of one directory share their device
        own = shutil.copytree(built(PAIRS[name](), version), tmp_path / "engines")
        with edgespec.load(own) as opened:
            opened.generate(prompt_of(3), GREEDY)
            device = HostDevice.current
            assert device is not None
            assert device.memory
        assert device.closed
        assert not device.memory
        assert not device.blocks
        assert not device.streams
        assert not device.graphs
