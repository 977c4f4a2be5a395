"""What a draft engine was built for limits those requests alone that it drafts for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import edgespec
from edgespec.errors import LimitError
from edgespec.prompts import SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.limits import RequestLimits, takes_whole_prompts
from tests.lossless.engines import api_engines

GREEDY = SamplingParams(temperature=0, max_generate_length=3)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Of an EAGLE-3 pair, whose draft takes prompts of 4 tokens."""
    with Engine(api_engines() / "one") as engine:
        draft = engine.configs["draft"]
        short = replace(draft, limits=replace(draft.limits, max_input_len=4))
        engine.limits = RequestLimits({**engine.configs, "draft": short}, engine.max_batch_size)
        yield engine


def test_prompt_beyond_the_draft_engine_is_refused_where_it_drafts(engine: Engine) -> None:
    engine.generate(PROMPT[:4], GREEDY)
    with pytest.raises(LimitError, match="5 tokens, the draft engine was built for 4"):
        engine.generate(PROMPT, GREEDY)


@pytest.mark.parametrize(
    "plan",
    [edgespec.PLAIN, edgespec.SuffixDecodingConfig(), edgespec.NGramDecodingConfig()],
    ids=["plain", "suffix", "ngram"],
)
def test_prompt_beyond_the_draft_engine_is_answered_where_it_does_not_draft(
    engine: Engine, plan: object
) -> None:
    answer = engine.generate(PROMPT, GREEDY, plan)  # type: ignore[arg-type]
    assert len(answer.token_ids) == 3


def test_heads_without_layers_take_prompts_of_any_length(engine: Engine) -> None:
    """Medusa's have no cache, whatever --max-input-len they were built with."""
    draft = engine.configs["draft"]
    assert takes_whole_prompts(draft)
    heads = replace(draft, component=replace(draft.component, rope=None))
    assert not takes_whole_prompts(heads)
