"""JetSpec and DSpark on real engines: chains and trees, greedy and sampled, alone and in batches,
with rows that were kept of earlier prompts.

What comes out is what plain decoding says, and every block was drafted from what the base really
says of the tokens that were kept, by the slow references. What all block drafts share is claimed in
`test_dflash`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.backends.base import LaneRows
from edgespec.backends.build import build
from edgespec.contract import Limits
from edgespec.errors import EdgeSpecError
from edgespec.export.components import ExportOptions, export
from edgespec.prompts import SamplingParams
from edgespec.runtime.block import BlockOutput
from edgespec.runtime.drafters.base import DraftRequest, Observation
from edgespec.runtime.drafters.block_drafter import BlockDrafter
from edgespec.runtime.drafters.dspark import DSparkDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.generation import Chunk, GenerationRequest, Response
from edgespec.runtime.lossless_check import first_difference
from edgespec.runtime.prefix import PrefixCache
from edgespec.runtime.tree import BlockPlan, DraftPlan, DraftTree
from tests import reference, toys
from tests.parity.dflash_reference import DFlashReference
from tests.parity.dspark_reference import DSparkReference

VOCAB, CAPACITY, LANES = 256, 64, 4
LIMITS = Limits(
    max_input_len=60, max_kv_cache_capacity=CAPACITY, max_verify_tree_size=40, max_draft_tree_size=8
)
GREEDY = SamplingParams(temperature=0.0, seed=0)
SAMPLED = SamplingParams(temperature=1.0, top_k=0, top_p=0.9, seed=5)
CLOSE = {"rtol": 2e-4, "atol": 2e-4}


@dataclass(frozen=True)
class Block:
    """What the engine said of a block behind `before`, the tokens known by then; the pending one is
    the last of them."""

    before: tuple[int, ...]
    logits: np.ndarray


class Steering:
    """A real drafter whose logits are turned: a slot's true token becomes by far the best one with
    probability `right`, else another. What the engine itself said is kept in `blocks`."""

    scripts: Sequence[Sequence[int]]
    right: float

    def steer(self, scripts: Sequence[Sequence[int]], right: float, lanes: int) -> None:
        self.scripts, self.right, self.rng = scripts, right, np.random.default_rng(0)
        self.told: dict[int, list[int]] = {lane: [] for lane in range(lanes)}
        self.blocks: list[Block] = []
        self.lengths: list[int] = []

    def observe(self, observations: Sequence[Observation]) -> None:
        for item in observations:
            self.told[item.lane] += item.tokens.tolist()
        super().observe(observations)  # type: ignore[misc]

    def reset(self, lane: int) -> None:
        super().reset(lane)  # type: ignore[misc]
        self.told[lane] = []

    def restore(self, lane: int, rows: LaneRows) -> None:
        super().restore(lane, rows)  # type: ignore[misc]
        self.told[lane] = next(
            [*script[1 : len(rows) + 1]] for script in self.scripts if len(script) > len(rows)
        )

    def move(self, source: int, target: int) -> None:
        super().move(source, target)  # type: ignore[misc]
        self.told[target] = self.told[source]

    def drafted(self, request: DraftRequest, output: BlockOutput) -> DraftTree:
        told = self.told[request.lane]
        script = next((s for s in self.scripts if list(s[1 : len(told) + 1]) == told), [])
        self.blocks.append(Block((*script[:1], *told), output.logits.copy()))
        turned = output.logits.copy()
        for slot, token in zip(turned, script[len(told) + 1 :], strict=False):
            right = self.rng.random() < self.right
            slot[token if right else (token + 1) % VOCAB] = 1e4  # beyond what heads add
        states = output.states
        tree: DraftTree = super().drafted(request, BlockOutput(turned, states))  # type: ignore[misc]
        self.lengths.append(len(tree) - 1)
        return tree


@contextmanager
def steered(engine: Engine, scripts: Sequence[Sequence[int]], right: float) -> Iterator[Any]:
    """The engine with its drafter steered, which shares the real one's engine and state."""
    real = engine.drafter
    assert isinstance(real, BlockDrafter)
    drafter: Any = object.__new__(type("Steered", (Steering, type(real)), {}))
    vars(drafter).update(vars(real))
    drafter.steer(scripts, right, len(real.lanes))
    engine.session.drafter = drafter
    yield drafter
    engine.session.drafter = real


@dataclass(frozen=True)
class Pair:
    one: Engine
    four: Engine
    ref: DFlashReference
    model: Any

    @property
    def chain(self) -> BlockPlan:
        first = getattr(self.ref, "first_slot", 1)
        drafts = self.ref.block_size - first
        return BlockPlan(1, drafts, drafts + 1, first)

    @property
    def plans(self) -> list[BlockPlan]:
        """A chain, a short one, and a tree where the method has trees."""
        short = replace(self.chain, steps=2, verify_size=3)
        wide = BlockPlan(3, self.chain.steps, 20)
        return [self.chain, short, *([] if isinstance(self.ref, DSparkReference) else [wide])]

    def assert_true(self, blocks: Sequence[Block]) -> None:
        """Each block against the reference, from the features of all tokens but the pending one."""
        for block in blocks:
            *committed, pending = block.before
            _, hidden = reference.base_hidden_states(self.model, torch.tensor([committed]))
            states = reference.gather_aux_hidden_states(hidden, self.ref.aux_layers)[0]
            first = self.chain.first_slot
            wanted = self.ref.block(states, pending, len(block.logits) + first)[first:]
            np.testing.assert_allclose(block.logits, wanted.numpy(), **CLOSE)


METHODS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "jetspec": (toys.make_jetspec, {"block_size": 6}),
    "dspark": (toys.make_dspark, {"block_size": 5, "kind": "gated"}),
}


@pytest.fixture(scope="module", params=METHODS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    path, (make, keys) = tmp_path_factory.mktemp(request.param), METHODS[request.param]
    base = toys.make_base(path / "base", "qwen3", layers=8, vocab=VOCAB)
    draft = make(path / "draft", base, **keys)
    export(str(base), path, ExportOptions(base_for=request.param, draft_dir=str(draft)))
    export(str(draft), path, ExportOptions(base_model_dir=str(base)))
    for name, lanes in (("one", 1), ("four", LANES)):
        for component in ("llm", f"{request.param}_draft"):
            build(path / component, path / name, replace(LIMITS, max_batch_size=lanes))
    kind = DSparkReference if request.param == "dspark" else DFlashReference
    with Engine(path / "one") as one, Engine(path / "four") as four:
        for engine in (one, four):
            engine.stop_ids = frozenset()
            if isinstance(engine.drafter, DSparkDrafter):
                engine.drafter.threshold = 0.0
        yield Pair(one, four, kind(draft, base), toys.load_base(base))


@pytest.fixture
def pair(opened: Pair) -> Iterator[Pair]:
    yield opened
    for engine in (opened.one, opened.four):
        engine.session.drafter, engine.session.prefixes = engine.drafter, PrefixCache(0)


def prompt_of(length: int) -> list[int]:
    return np.random.default_rng([7, length]).integers(3, VOCAB, length).tolist()


def plainly(pair: Pair, prompt: Sequence[int], sampling: SamplingParams, count: int) -> Response:
    return pair.one.plainly(prompt, replace(sampling, max_generate_length=count))


def assert_equal(pair: Pair, plain: Response, found: Response, sampling: SamplingParams) -> None:
    assert first_difference(pair.one, plain, found, sampling) is None
    assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)


@pytest.mark.parametrize("right", [None, 0.7, 1])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_sequence_says_what_it_says_plainly(
    pair: Pair, sampling: SamplingParams, right: float | None
) -> None:
    prompt = prompt_of(9)
    plain = plainly(pair, prompt, sampling, 30)
    for plan in pair.plans:
        asked = replace(sampling, max_generate_length=30)
        if right is None:
            assert_equal(pair, plain, pair.one.generate(prompt, asked, plan), sampling)
            continue
        with steered(pair.one, [[*prompt, *plain.token_ids]], right) as drafter:
            found = pair.one.generate(prompt, asked, plan)
        assert_equal(pair, plain, found, sampling)
        accepted = found.metrics.per_step_accepted
        if right == 1:  # nothing is turned down: the fewest steps that there can be
            assert len(accepted) == -(-29 // (plan.steps + 1))
        else:
            assert len(set(accepted)) > 1
        pair.assert_true(drafter.blocks)
        assert len(drafter.blocks) >= len(accepted) - 1


def served(engine: Engine, jobs: Sequence[GenerationRequest]) -> list[Response]:
    found: dict[GenerationRequest, Response] = {}
    for job, event in engine.serve(deque(jobs), engine.max_batch_size):
        assert not isinstance(event, EdgeSpecError), event
        if not isinstance(event, Chunk):
            found[job] = event
    return [found[job] for job in jobs]


def test_a_batch_says_what_each_says_alone(pair: Pair) -> None:
    """Seven sequences through four lanes, with and without drafts, that end at different times."""
    sizes = [(1, 9), (30, 22), (12, 30), (5, 1), (3, 16), (40, 20), (52, 12)]
    plans: list[DraftPlan | None] = [*pair.plans, None]
    jobs = [
        GenerationRequest(
            prompt_of(n),
            replace((GREEDY, SAMPLED)[i % 2], max_generate_length=new),
            plans[i % len(plans)],
        )
        for i, (n, new) in enumerate(sizes)
    ]
    plain = [
        plainly(pair, job.prompt_ids, job.sampling, job.sampling.max_generate_length)
        for job in jobs
    ]
    scripts = [[*job.prompt_ids, *one.token_ids] for job, one in zip(jobs, plain, strict=True)]
    with steered(pair.four, scripts, 0.6) as drafter:
        answers = served(pair.four, jobs)
    for job, wanted, found in zip(jobs, plain, answers, strict=True):
        assert_equal(pair, wanted, found, job.sampling)
    pair.assert_true(drafter.blocks)
    assert sum(sum(one.metrics.per_step_accepted) for one in answers) > 20


@pytest.mark.parametrize("four", [False, True], ids=["one lane", "four lanes"])
def test_rows_kept_of_an_earlier_prompt_serve_the_next(pair: Pair, *, four: bool) -> None:
    engine = pair.four if four else pair.one
    engine.session.prefixes = PrefixCache(2**24)
    head = prompt_of(20)
    prompts = [[*head, *prompt_of(4)], [*head, *prompt_of(9)]]
    plain = [plainly(pair, prompt, GREEDY, 12) for prompt in prompts]
    sampling = replace(GREEDY, max_generate_length=12)
    with steered(engine, [], 0.6) as drafter:
        for prompt, wanted in zip(prompts, plain, strict=True):
            drafter.scripts = [[*prompt, *wanted.token_ids]]
            job = GenerationRequest(prompt, sampling, pair.chain, len(head), keep_all=True)
            (answer,) = served(engine, [job])
            assert_equal(pair, wanted, answer, GREEDY)
            assert answer.metrics.reused_tokens >= (0 if prompt is prompts[0] else len(head) - 1)
    pair.assert_true(drafter.blocks)


@pytest.mark.parametrize("opened", ["dspark"], indirect=True)
def test_a_sequence_whose_length_the_confidences_set(pair: Pair) -> None:
    assert isinstance(pair.one.drafter, DSparkDrafter)
    prompt = prompt_of(9)
    plain = plainly(pair, prompt, SAMPLED, 30)
    with steered(pair.one, [[*prompt, *plain.token_ids]], 0.8) as steering:
        steering.threshold = 0.5
        found = pair.one.generate(prompt, replace(SAMPLED, max_generate_length=30), pair.chain)
    assert_equal(pair, plain, found, SAMPLED)
    assert len(set(steering.lengths)) > 2
    pair.assert_true(steering.blocks)
