"""The drafter of docs/own_drafter.md, as it stands there: on a table of measurements in JSON
it takes fewer base passes than n-gram lookup with any of its settings. What the base says is given;
what is drafted is real."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from edgespec.runtime.drafters.base import Drafter, DraftRequest, Observation
from edgespec.runtime.drafters.guard import Guard
from edgespec.runtime.drafters.ngram import NgramDrafter, NgramOptions
from edgespec.runtime.drafters.user import ProposingDrafter
from edgespec.runtime.text.tokenizer import Tokenizer
from edgespec.runtime.trees.tree import DraftPlan

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "own_drafter.md"
LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(ROOT / "recipes" / "demo" / "base")


def code_of_the_page() -> str:
    """The first block of code, without its indent."""
    block = re.search(r"    # json_drafter\.py\n(?:    .*\n|\n)+", PAGE.read_text(encoding="utf-8"))
    assert block is not None
    return textwrap.dedent(block[0])


def drafter_of_the_page(tokenizer: Tokenizer) -> ProposingDrafter:
    space: dict[str, Any] = {}
    exec(code_of_the_page(), space)
    own = space["JsonDrafter"]()
    return ProposingDrafter(own, Guard("own", None), tokenizer.vocab_size, lambda: tokenizer)


KEYS = ("temperature", "humidity", "pressure", "wind_speed", "cloud_cover", "visibility")


def measurements(seed: int) -> str:
    """A table of measurements as a model writes it."""
    rng = Random(seed)
    return json.dumps([{key: rng.randrange(10, 99) for key in KEYS} for _ in range(12)], indent=2)


def base_passes(drafter: Drafter, prompt: list[int], answer: list[int]) -> int:
    """Steps that it takes to say `answer`, where the base accepts a draft if it is what comes."""
    plan, said, passes = DraftPlan(1, LENGTH, LENGTH + 1), 1, 0
    drafter.reset(0)
    drafter.begin(0, prompt, 0)
    drafter.observe([Observation(0, None, np.array(answer[:1]))])
    while said < len(answer):
        (tree,) = drafter.propose([DraftRequest(0, answer[said - 1], plan)])
        assert tree.lost is None
        drafts, coming = tree.tokens[1:].tolist(), answer[said:]
        accepted = next(
            (n for n, (a, b) in enumerate(zip(drafts, coming, strict=False)) if a != b),
            min(len(drafts), len(coming)),
        )
        step = coming[: accepted + 1]
        drafter.observe([Observation(0, None, np.array(step))])
        said, passes = said + len(step), passes + 1
    return passes


@pytest.mark.parametrize("seed", range(3))
def test_drafter_of_the_page_beats_n_gram_lookup_on_json(tokenizer: Tokenizer, seed: int) -> None:
    prompt, answer = (
        tokenizer.encode("The weather as JSON:\n"),
        tokenizer.encode(measurements(seed)),
    )
    own = base_passes(drafter_of_the_page(tokenizer), prompt, answer)
    settings = [
        NgramOptions(max_draft_len=LENGTH, max_matching_ngram_size=size, is_use_oldest=oldest)
        for size in (1, 2, 3, 5)
        for oldest in (True, False)
    ]
    others = [base_passes(NgramDrafter(options), prompt, answer) for options in settings]
    assert own <= 0.8 * min(others)
    assert own < 0.25 * len(answer)


def test_page_names_what_there_is() -> None:
    from edgespec.runtime.drafters import trtllm

    text = PAGE.read_text(encoding="utf-8")
    names = re.search(r"from edgespec\.runtime\.drafters\.trtllm import (.*)", text)
    assert names is not None
    assert all(hasattr(trtllm, name.strip()) for name in names[1].split(","))
    assert Path(__file__).relative_to(ROOT).as_posix() in text
