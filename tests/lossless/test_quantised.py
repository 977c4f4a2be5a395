"""The law of the house on engines whose weights are rounded: bitwise where it is promised, up to
the rounding that is measured elsewhere.

On the demo pair, whose logits are those of a trained model.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import edgespec
from edgespec.backends.build import build
from edgespec.backends.call import Result
from edgespec.backends.ort.options import WeightFormat
from edgespec.cli.main import cli, run
from edgespec.contract import Limits
from edgespec.errors import LimitError
from edgespec.runtime.acceptance.verify import ACCEPT_RULES
from edgespec.runtime.engine import Engine
from edgespec.runtime.lanes.decoder import CachedDecoder, DecoderRows
from edgespec.runtime.loop.generation import GenerationRequest, Response
from edgespec.runtime.requests.lossless_check import Replay, first_difference
from edgespec.runtime.sampling.sampler import NEAR_TIE
from edgespec.runtime.trees.tree import DraftPlan
from tests import threads
from tests.lossless import demo
from tests.lossless.drafters import accept_one_more, rule_row

LIMITS = Limits(max_input_len=512, max_kv_cache_capacity=512)
ENGINES = {
    "fp32": WeightFormat(),
    "int4-32": WeightFormat("int4", 32),
    "int4-128": WeightFormat("int4", 128),
    "int8-0": WeightFormat("int8", 0),
}
OWN_DRAFT = ("fp32", "int4-32")  # the others have the draft of fp32
# Quantized before the export, in the layout of compressed-tensors: what the settings say of
# weights, and how activations are rounded. The head is a copy of the embedding, in float32.
STORED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8_sq": ({"strategy": "channel"}, {"strategy": "tensor", "dynamic": False}),
    "int8_token": ({"strategy": "channel"}, {"strategy": "token", "dynamic": True}),
    "fp8": (
        {"strategy": "tensor", "type": "float"},
        {"strategy": "tensor", "type": "float", "dynamic": False},
    ),
}
EXACT = ("fp32", "int4-32", "int8-0", "int8_sq", "int8_token")
MANY_THREADS = ("int4-32", "int8_sq")  # exact however the rows of a call are shared out to threads
STEP = {"int": 0.1, "float": 0.03}  # of static activations: up to 12.7, or 13.4
SAMPLINGS = [
    edgespec.SamplingParams(temperature=0.0, max_generate_length=80),
    edgespec.SamplingParams(temperature=1.0, top_k=0, top_p=1.0, seed=1, max_generate_length=80),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    work = tmp_path_factory.mktemp("quantised")
    base_onnx, draft_onnx = demo.exports()
    for name, weight_format in ENGINES.items():
        if name in OWN_DRAFT:
            build(draft_onnx, work / name, LIMITS, options=weight_format)
        else:
            shutil.copytree(work / "fp32", work / name)
        build(base_onnx, work / name, LIMITS, options=weight_format)
    for name in STORED:
        checkpoint = stored_twin(demo.base(), work / f"{name}-checkpoint", *STORED[name])
        for onnx_dir in demo.exports(checkpoint):
            # The flag about the embedding means nothing to them, and is no fault
            build(onnx_dir, work / name, LIMITS, options=WeightFormat(share_embedding=False))
    return {name: work / name for name in (*ENGINES, *STORED)}


def stored_twin(plain: Path, out: Path, weights: dict[str, Any], inputs: dict[str, Any]) -> Path:
    """A copy whose Linears are rounded to nearest."""
    tensors, form = load_file(plain / "model.safetensors"), weights.get("type", "int")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight, module = tensors.pop(name).float(), name.removesuffix(".weight")
        if not inputs["dynamic"]:
            tensors[f"{module}.input_scale"] = torch.tensor(STEP[form])
        if form == "float":
            step = weight.abs().max() / 448
            tensors[f"{module}.weight_scale"] = step[None]
            tensors[name] = (weight / step).to(torch.float8_e4m3fn)
            continue
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[f"{module}.weight_scale"] = scale
        tensors[name] = torch.round(weight / scale).to(torch.int8)
    kind = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": kind | weights,
        "input_activations": kind | inputs,
    }
    settings = {"quant_method": "compressed-tensors", "format": f"{form}-quantized"}
    settings |= {"ignore": ["lm_head"]}
    shutil.copytree(plain, out)
    save_file(tensors, out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = settings | {"config_groups": {"group_0": group}}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module", params=EXACT)
def exact(request: pytest.FixtureRequest, engines: dict[str, Path]) -> Iterator[Engine]:
    many = request.param in MANY_THREADS
    with threads.default_threads() if many else nullcontext():
        engine = Engine(engines[request.param], exact=True)
    with engine:
        engine.stop_ids = frozenset()
        yield engine


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng(length).integers(3, 900, length).tolist()


# Exact


def logits_of(
    decoder: CachedDecoder, tokens: np.ndarray, start: int, sizes: list[int]
) -> np.ndarray:
    """The logits behind `start` tokens of prompt, read in calls of so many rows."""
    decoder.reset(0)
    found = []
    for size in (start, *sizes):
        chunk, tokens = tokens[:size], tokens[size:]
        (result,) = decoder.extend([decoder.causal(0, chunk, np.arange(size))])
        found.append(result.logits.rows().copy())
    return np.concatenate(found[1:])


@pytest.mark.parametrize("start", [1, 130])
def test_exact_logits_are_the_same_bits_in_calls_of_any_size(exact: Engine, start: int) -> None:
    tokens = np.array(prompt_of(start + 40))
    alone = logits_of(exact.base, tokens, start, [1] * 40)
    calls = [[size] * (40 // size) for size in (2, 3, 4, 7, 8, 9, 16, 17, 20, 40)]
    for sizes in (*calls, [3, 5] * 5, [1, 7] * 5) if start == 1 else ([5] * 8, [17] * 2, [40]):
        np.testing.assert_array_equal(
            logits_of(exact.base, tokens, start, sizes), alone[: sum(sizes)]
        )


@pytest.mark.parametrize("name", ["int4-32", "int8-0"])
def test_without_exact_one_row_alone_gives_other_bits(engines: dict[str, Path], name: str) -> None:
    """What the flag is for: were this to pass without it, it could go."""
    with Engine(engines[name]) as engine:
        tokens = np.array(prompt_of(45))
        one, many = (logits_of(engine.base, tokens, 5, sizes) for sizes in ([1] * 40, [40]))
    assert np.abs(one - many).max() > 1e-3


@pytest.mark.parametrize(
    ("length", "sampling", "plan"),
    [(1, SAMPLINGS[1], DraftPlan(1, 3, 4)), (30, SAMPLINGS[0], DraftPlan(1, 6, 7))],
    ids=["sampled", "greedy"],
)
def test_exact_chains_leave_every_token_as_it_was(
    exact: Engine, length: int, sampling: edgespec.SamplingParams, plan: DraftPlan
) -> None:
    sampling = replace(sampling, max_generate_length=48)
    plain = exact.plainly(prompt_of(length), sampling)
    assert len(plain.token_ids) == 48
    drafted = exact.generate(prompt_of(length), sampling, plan)
    assert drafted.token_ids == plain.token_ids
    assert first_difference(exact, plain, drafted, sampling) is None
    assert exact.rounding == 0.0


@pytest.mark.parametrize("exact", ["fp32", "int8_sq"], indirect=True)
def test_an_exact_engine_fills_its_cache_to_the_last_slot(exact: Engine) -> None:
    """The row that fills up a single one has a slot of its own behind the capacity."""
    sampling = replace(SAMPLINGS[0], max_generate_length=500)
    plain = exact.plainly(prompt_of(400), sampling)
    assert len(plain.token_ids) == 512 - 400 + 1
    assert exact.generate(prompt_of(400), sampling, exact.plan()).token_ids == plain.token_ids


# Other reasons: tests/unit/backends/test_weights.py
def test_an_engine_that_cannot_be_exact_is_refused_and_says_why(engines: dict[str, Path]) -> None:
    wanted = "cannot be exact: its weights are int4 in blocks of 128"
    with pytest.raises(LimitError, match=wanted):
        Engine(engines["int4-128"], exact=True)


def test_a_tree_is_refused_by_its_flag(exact: Engine) -> None:
    with pytest.raises(LimitError, match="top_k 4 drafts trees"):
        exact.plan(4, 2, 8)
    with pytest.raises(LimitError, match="only chains are exact"):
        exact.generate(prompt_of(5), SAMPLINGS[0], DraftPlan(4, 2, 8))


def test_infer_exact_says_yes_and_refuses_what_it_cannot(
    engines: dict[str, Path], tmp_path: Path
) -> None:
    def infer(name: str, *more: str) -> tuple[int, str]:
        args = [
            "infer",
            "--engine-dir",
            str(engines[name]),
            "--input-file",
            str(demo.INPUT),
        ]
        args += ["--output-file", str(tmp_path / "out.json"), "--spec-decode", "--exact", *more]
        result = CliRunner().invoke(cli, args)
        return result.exit_code, f"{result.output}{result.exception}"

    code, said = infer("int4-32", "--check-lossless", "--max-generate-length", "40", "--json")
    assert code == 0
    assert '"lossless": "yes"' in said
    code, said = infer("int4-128")
    assert code != 0
    assert "cannot be exact" in said


# Up to rounding


CHAIN, TREE = DraftPlan(1, 3, 4), DraftPlan(4, 3, 16)


# The first length of a prompt after which some answer differs, as it was found
DIFFERENT = {"int4-32": 47, "int4-128": 48, "int8-0": 46, "int8_sq": 54, "fp8": 55}
LIKE_OTHERS = ("int4-32",)  # whose width another has too


@pytest.mark.parametrize(
    ("name", "first"),
    [
        pytest.param(name, first, marks=pytest.mark.deep if name in LIKE_OTHERS else ())
        for name, first in DIFFERENT.items()
    ],
)
def test_what_differs_is_explained_by_the_rounding_that_is_measured_there(
    engines: dict[str, Path], name: str, first: int
) -> None:
    """A run is computed again bit by bit: its calls come out as they did, those of trees too. The
    first answer that differs is enough: of a chain on some engines, of a tree on others."""
    plans = (CHAIN, TREE) if name.startswith("int4") else (TREE, CHAIN)
    with Engine(engines[name]) as engine:
        engine.stop_ids = frozenset()
        assert NEAR_TIE < engine.rounding < (5 if name in STORED else 2)
        assert any("lossless up to kernel rounding" in note for note in engine.notes)
        for length, sampling in product(range(first, first + 20), SAMPLINGS[::-1]):
            prompt = prompt_of(length)
            plain = engine.plainly(prompt, sampling)
            for plan in plans:
                drafted = engine.generate(prompt, sampling, plan)
                found = first_difference(engine, plain, drafted, sampling)
                if found is not None:
                    assert found.explained, found
                    assert found.rounding > 0
                    assert found.reproduced, found
                    return
    pytest.fail("nothing differed, so that nothing would need to be explained")


def test_a_batch_is_computed_again_in_as_many_lanes(tmp_path: Path) -> None:
    limits, int4 = replace(LIMITS, max_batch_size=2), WeightFormat("int4", 32)
    for onnx_dir in demo.exports():
        build(onnx_dir, tmp_path / "two", limits, options=int4)
    with Engine(tmp_path / "two") as engine:
        engine.stop_ids = frozenset()
        jobs = [(prompt_of(length), SAMPLINGS[i % 2]) for i, length in enumerate((3, 17, 40, 29))]

        def served(plan: DraftPlan | None) -> list[Response]:
            asked = [GenerationRequest(prompt, sampling, plan) for prompt, sampling in jobs]
            found = {
                request: event
                for request, event in engine.run_queue(deque(asked), 2)
                if isinstance(event, Response)
            }
            return [found[request] for request in asked]

        plain, drafted = served(None), served(TREE)
        found = [
            first_difference(engine, one, other, sampling, batch_size=2)
            for one, other, (_, sampling) in zip(plain, drafted, jobs, strict=True)
        ]
        differing = [difference for difference in found if difference is not None]
        assert differing
        assert all(difference.explained for difference in differing), differing

        lanes: list[int] = []
        run = CachedDecoder.run

        def counting(self: CachedDecoder, parts: Sequence[DecoderRows]) -> list[Result]:
            lanes.append(len(parts))
            return run(self, parts)

        with mock.patch.object(CachedDecoder, "run", counting):
            one, *many = Replay.of(engine, drafted[1], 40, batch_size=2).logits()
        assert set(lanes) == {1, 2}
        assert len(many) == 7
        prefix = [*drafted[1].prompt_ids, *drafted[1].token_ids[:40]]
        alone = engine.next_logits(prefix)
        assert all(np.abs(other - one).max() < engine.rounding for other in many)
        assert any(np.abs(other - one).max() > 0 for other in many)
        assert np.abs(alone - one).max() < engine.rounding
        assert [lane.length for lane in engine.base.lanes] == [0, 0]


@pytest.mark.parametrize("name", ["int4-128", pytest.param("fp8", marks=pytest.mark.deep)])
def test_a_wrong_acceptance_is_explained_by_no_rounding(
    engines: dict[str, Path], name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through the command line: exit 1 with the fault, and 0 without it, on engines whose answers
    may differ."""
    out = tmp_path / "out.json"
    args = ["infer", "--engine-dir", str(engines[name]), "--input-file", str(demo.INPUT)]
    args += ["--output-file", str(out), "--spec-decode", "--check-lossless", "--json"]
    args += ["--max-generate-length", "30"]
    assert run(args) == 0
    assert json.loads(capfd.readouterr().out)["lossless_check"]["unexplained"] == 0
    with mock.patch.dict(ACCEPT_RULES, exact=rule_row(accept_one_more)):
        assert run(args) == 1
    printed = capfd.readouterr()
    assert "NOT lossless" in printed.err
    said = json.loads(printed.out)
    assert said["lossless"].startswith("NO: ")
    check = said["lossless_check"]
    assert check["unexplained"] >= 3
    assert check["identical"] + check["explained"] + check["unexplained"] == check["compared"] == 6
    entries = [response["lossless"] for response in json.loads(out.read_text())["responses"]]
    assert [entry.get("explained") for entry in entries].count(False) == check["unexplained"]
    for entry in entries:
        if entry.get("explained") is False:
            assert entry["candidates_apart_nats"] > entry["rounding_nats"]


def test_a_float32_engine_keeps_the_margin_of_float32(engines: dict[str, Path]) -> None:
    with Engine(engines["fp32"]) as engine:
        assert engine.rounding == NEAR_TIE
        assert engine.notes == ()
