"""What tests of losslessness ask of engines: an answer without drafts, computed once for all that
is compared with it, and the answers of several requests together.

Knows engines and requests. Knows no draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from edgespec.errors import EdgeSpecError
from edgespec.prompts import SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, GenerationRequest, Response
from edgespec.runtime.requests.lossless_check import first_difference

VOCAB = 256
_plain: WeakKeyDictionary[Engine, dict[object, Response]] = WeakKeyDictionary()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng([seed, length]).integers(3, VOCAB, length).tolist()
    return found


def asked(sampling: SamplingParams, max_new: int) -> SamplingParams:
    return replace(sampling, max_generate_length=max_new)


def plainly(engine: Engine, prompt: Sequence[int], sampling: SamplingParams) -> Response:
    """The answer without drafts. Rows of other prompts are forgotten, not made use of."""
    known = _plain.setdefault(engine, {})
    key = (tuple(prompt), repr(sampling), engine.stop_ids)
    if key not in known:
        engine.forget_prefixes()
        known[key] = engine.plainly(prompt, sampling)
    return known[key]


def outcomes(
    engine: Engine, jobs: Sequence[GenerationRequest], lanes: int | None = None
) -> list[Response | EdgeSpecError]:
    """What each request of a batch comes to."""
    found: dict[GenerationRequest, Response | EdgeSpecError] = {}
    for job, event in engine.run_queue(deque(jobs), lanes or engine.max_batch_size):
        if not isinstance(event, Chunk):
            assert job not in found
            found[job] = event
    return [found[job] for job in jobs]


def served(
    engine: Engine, jobs: Sequence[GenerationRequest], lanes: int | None = None
) -> list[Response]:
    """The answers to a batch."""
    found = outcomes(engine, jobs, lanes)
    answers = [one for one in found if isinstance(one, Response)]
    assert len(answers) == len(jobs), found
    return answers


def assert_same(engine: Engine, plain: Response, found: Response, sampling: SamplingParams) -> None:
    difference = first_difference(engine, plain, found, sampling)
    assert difference is None, difference.words
    assert found.token_ids == plain.token_ids
    assert (found.text, found.finish_reason) == (plain.text, plain.finish_reason)


def assert_as_alone(
    engine: Engine, jobs: Sequence[GenerationRequest], found: Sequence[Response]
) -> None:
    """Each says what the engine, which may be another one, says to it alone and without drafts."""
    for job, response in zip(jobs, found, strict=True):
        assert isinstance(response, Response), response
        assert_same(engine, plainly(engine, job.prompt_ids, job.sampling), response, job.sampling)
