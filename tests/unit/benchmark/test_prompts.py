"""Batches of prompts are full, and those of a file are told apart by what they say."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgespec.benchmark.prompts import (
    PromptSource,
    digest,
    in_batches,
    refuse_own_drafts,
)
from edgespec.benchmark.slices import BenchPrompt
from edgespec.errors import RequestError
from edgespec.prompts import Message, Request, RequestFile, SamplingParams
from edgespec.prompts.rendering import Rendering

GREEDY = SamplingParams(temperature=0, seed=0)


@dataclass
class Tokenizer:
    vocab_size: int = 20

    def is_special(self, token_id: int) -> bool:
        return token_id % 5 == 0


def engine(vocab_size: int) -> Any:
    component = SimpleNamespace(vocab_size=vocab_size)
    return SimpleNamespace(tokenizer=Tokenizer(), config=SimpleNamespace(component=component))


def random_ids(seed: int, length: int, count: int, vocab_size: int = 20) -> list[tuple[int, ...]]:
    source = PromptSource(None, GREEDY, seed)
    return [prompt.ids for prompt in source.random(cast(Any, engine(vocab_size)), length, count)]


def test_random_prompts_are_the_same_for_a_seed_and_have_no_special_ids() -> None:
    found = random_ids(1, 50, 3)
    assert found == random_ids(1, 50, 3)
    assert found[:2] == random_ids(1, 50, 2)
    assert len({*found, *random_ids(2, 50, 3), *random_ids(1, 51, 3)}) == 9
    used = {token for ids in found for token in ids}
    assert used == {token for token in range(20) if token % 5}
    # neither ids of the tokenizer that the model lacks
    assert max(token for ids in random_ids(1, 50, 3, vocab_size=8) for token in ids) == 7


@pytest.mark.parametrize(
    ("count", "size", "numbers"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (3, 2, [[0, 1], [2, 0]]),
        (1, 3, [[0, 0, 0]]),
        (5, 4, [[0, 1, 2, 3], [4, 0, 1, 2]]),
    ],
)
def test_last_batch_is_filled_up_from_the_beginning(
    count: int, size: int, numbers: list[list[int]]
) -> None:
    prompts = [BenchPrompt(number, (1,), GREEDY) for number in range(count)]
    assert [[p.number for p in batch] for batch in in_batches(prompts, size)] == numbers


def request(text: str = "one", **values: Any) -> Request:
    sampling = SamplingParams(temperature=0, seed=0)
    return replace(Request(0, (Message("user", text),), sampling), **values)


def test_hash_of_prompts_is_of_what_they_say_and_how_they_are_sampled() -> None:
    same = digest([request()])
    longer = replace(request().sampling, max_generate_length=7)
    assert digest([request(index=4, name="x", sampling=longer)]) == same
    others = [
        [request("two")],
        [request(), request()],
        [request(turns=("again",))],
        [request(rendering=Rendering(enable_thinking=True))],
        [request(sampling=replace(request().sampling, seed=1))],
    ]
    assert len({same, *map(digest, others)}) == 6


def test_requests_that_say_what_drafts_are_refused() -> None:
    refuse_own_drafts(RequestFile(Path("a"), (request(),), 1))
    own = request(speculative={"decoding_type": "NGram"})
    with pytest.raises(RequestError, match=r"requests\[0\] has a speculative block"):
        refuse_own_drafts(RequestFile(Path("a"), (own,), 1))
