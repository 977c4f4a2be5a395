"""Several processes train one draft: as one would, and none outlives another."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edgespec.training import trainer
from edgespec.training.ranks import joined
from edgespec.training.train import train
from tests import toys
from tests.unit.training.conftest import write_chats
from tests.unit.training.test_train import BLOCK, job_of, unstopped

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload([__name__])
FLOATS = ("training.bf16=false", "training.learning_rate=0.001", "training.optim=adamw_torch")
Pair = Callable[..., tuple[list[int | None], str]]


def process(rank: int, port: int, fault: tuple[int, int] | None, said: Path, *job: Any) -> None:
    """One of two; `fault` is the step at which the second gets a signal from itself."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ |= dict(zip(names, map(str, (rank, rank, 2, "127.0.0.1", port)), strict=True))
    sys.stderr = said.open("a", buffering=1)
    real, calls = trainer.Objective.forward, [0]

    def forward(self: Any, **batch: Any) -> Any:
        calls[0] += 1
        if fault and rank == 1 and calls[0] == fault[0]:
            os.kill(os.getpid(), fault[1])
        return real(self, **batch)

    trainer.Objective.forward = forward  # type: ignore[method-assign]
    with joined(silent_s=15 if fault else 60) as ranks:
        train(ranks.agreed(lambda: job_of(*job)), unstopped, ranks)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ranks")
    toys.make_base(place / "base", "qwen3", layers=7)
    write_chats(place / "chats.jsonl")
    return place


@pytest.fixture
def pair(place: Path, tmp_path: Path) -> Iterator[Pair]:
    """Two processes that train; their exit codes, and what they said. A stopped one is killed."""
    started = list[Any]()

    def run(method: str, *keys: str, fault: tuple[int, int] | None = None) -> Any:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        said, out = tmp_path / "said", tmp_path / "draft"
        for rank in range(2):
            job = (place / "base", place / "chats.jsonl", out, method, *keys)
            started.append(FORKED.Process(target=process, args=(rank, port, fault, said, *job)))
            started[-1].start()
        started[-2].join(200)
        code = started[-2].exitcode
        if fault:
            started[-1].kill()
        started[-1].join(60)
        return [code, started[-1].exitcode], said.read_text()

    yield run
    for child in started:
        child.kill()


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("method", "own"), [("eagle3", ()), ("dflash", BLOCK)])
def test_two_processes_are_one_with_the_whole_batch(
    method: str, own: tuple[str, ...], place: Path, tmp_path: Path, pair: Pair
) -> None:
    keys = (*FLOATS, *own, "training.gradient_accumulation_steps=2")
    job = (place / "base", place / "chats.jsonl", tmp_path / "one", method, *keys)
    train(job_of(*job), unstopped)
    assert pair(method, *keys, "training.per_device_train_batch_size=1")[0] == [0, 0]
    still = ("training.learning_rate=0.0", "training.max_steps=1")
    train(job_of(*job[:2], tmp_path / "start", *job[3:], *still), unstopped)
    start, a, b = (tensors(tmp_path / name) for name in ("start", "one", "draft"))
    for name in a:
        # Sums in another order: 1e-7 of a gradient, which Adam's ratio may raise where it is small
        moved = (a[name] - start[name]).norm()
        assert (a[name] - b[name]).norm() <= 1e-3 * moved, name
    reports = [
        json.loads((tmp_path / name / "training.json").read_text()) for name in ("one", "draft")
    ]
    assert reports[0]["acceptance"] == reports[1]["acceptance"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_process_ends_the_other_and_the_rest_goes_on_to_the_same_bits(
    number: int, tmp_path: Path, pair: Pair
) -> None:
    codes, said = pair("eagle3", fault=(4, number))
    assert codes[0] not in (0, None)
    assert "rank 1 of 2 (process " in said
    assert (tmp_path / ".draft.train" / "checkpoint-3" / "state.json").exists()
    assert pair("eagle3")[0] == [0, 0]
    (tmp_path / "draft").rename(tmp_path / "resumed")
    if number == signal.SIGKILL:
        assert pair("eagle3")[0] == [0, 0]
        a, b = tensors(tmp_path / "resumed"), tensors(tmp_path / "draft")
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_what_one_refuses_all_do_and_one_says_it(tmp_path: Path, pair: Pair) -> None:
    codes, said = pair("eagle3", "data.data_path=none.jsonl")
    assert codes[1] == 3
    assert said.count("none.jsonl cannot be read") == 1
