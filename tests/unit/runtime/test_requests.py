"""What a request may ask beside how its tokens are drawn: where an answer may end, and what the
prompt's own tokens were worth. Drafts and kept prefixes change neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

import edgespec
from edgespec.errors import RequestError
from edgespec.prompts import END_OF_SEQUENCE, MAX_LENGTH, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.sampling.sampler import log_softmax
from tests.lossless.pairs import shared_pair

GREEDY = SamplingParams(temperature=0, max_generate_length=14)
SAMPLED = replace(GREEDY, temperature=1.2, top_p=1.0, seed=-3)
PROMPT = [*range(5, 31)]
both = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with edgespec.load(shared_pair("llama", "eagle") / "engines") as found:
        yield found


def answered(engine: Engine, sampling: SamplingParams) -> edgespec.Response:
    """The answer, which trees leave as it is without drafts."""
    found = engine.generate(PROMPT, sampling, engine.plan(3, 3, 12))
    plain = engine.plainly(PROMPT, sampling)
    assert (found.token_ids, found.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert sum(found.metrics.per_step_drafted) > 0
    return found


@both
def test_a_token_to_stop_at_stops_but_not_within_the_least_length(
    engine: Engine, sampling: SamplingParams
) -> None:
    sampling = replace(sampling, ignore_eos=True)
    stop = answered(engine, sampling).token_ids[4]
    ended = answered(engine, replace(sampling, stop_token_ids=(stop,)))
    assert (ended.finish_reason, ended.token_ids[-1]) == (END_OF_SEQUENCE, stop)
    later = answered(engine, replace(sampling, stop_token_ids=(stop,), min_tokens=9))
    assert stop not in later.token_ids[:9]
    assert len(later.token_ids) > len(ended.token_ids)


@both
def test_ends_of_the_model_end_nothing_where_they_are_to_be_ignored(
    engine: Engine, sampling: SamplingParams
) -> None:
    end = min(engine.stop_ids)
    wanted = replace(sampling, logit_bias={end: 100})
    assert answered_ids(engine, wanted) == [end]
    assert answered_ids(engine, replace(wanted, ignore_eos=True)) == [end] * 14
    assert len(answered_ids(engine, replace(wanted, min_tokens=6))) == 7


def answered_ids(engine: Engine, sampling: SamplingParams) -> Sequence[int]:
    return engine.generate(PROMPT, sampling, engine.plan(3, 3, 12)).token_ids


@pytest.mark.parametrize("max_rows", [64, 7])
def test_log_probabilities_of_a_prompt_are_the_model_s(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    monkeypatch.setattr(engine.base.runner, "max_rows", max_rows)
    engine.generate(PROMPT, GREEDY, keep=True)  # whose rows are of no use here
    asked = replace(GREEDY, max_generate_length=0, prompt_logprobs=3)
    found = engine.generate(PROMPT, asked)
    assert (found.token_ids, found.text, found.finish_reason) == ([], "", MAX_LENGTH)
    first, *scored = found.prompt_logprobs
    assert first is None
    for index, candidates in enumerate(scored, start=1):
        wanted = log_softmax(engine.next_logits(PROMPT[:index]).astype(np.float64))
        best = [*np.argsort(-wanted)[:3].tolist()]
        assert [i for i, _ in candidates] == best + [PROMPT[index]] * (PROMPT[index] not in best)
        assert [p for _, p in candidates] == pytest.approx(
            [wanted[i] for i, _ in candidates], abs=1e-4
        )
    more = engine.generate(PROMPT, replace(asked, max_generate_length=14, prompt_logprobs=0))
    assert more.token_ids == engine.generate(PROMPT, GREEDY).token_ids
    own = [[pair for pair in c if pair[0] == t] for c, t in zip(scored, PROMPT[1:], strict=True)]
    assert [token for c in more.prompt_logprobs[1:] for token, _ in c or []] == PROMPT[1:]
    assert [c[0][1] for c in own] == pytest.approx([c[0][1] for c in more.prompt_logprobs[1:] if c])


def test_values_that_do_not_go_together_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="is 0, and there is no prompt_logprobs"):
        SamplingParams(max_generate_length=0)
    with pytest.raises(RequestError, match="min_tokens is 5, above max_generate_length"):
        SamplingParams(max_generate_length=4, min_tokens=5)
    with pytest.raises(RequestError, match="stop_token_ids names the token id 9999"):
        engine.generate(PROMPT, replace(GREEDY, stop_token_ids=(9999,)))
