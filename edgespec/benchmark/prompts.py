"""The prompts of a run: random ones of a given length, or those of a file, in batches.

Knows requests, token ids and the plain answers that say what is right. Knows no plans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edgespec.benchmark.cases import PLAIN_VARIANT, Cell
from edgespec.benchmark.slices import BenchPrompt, Interrupted, SliceRunner
from edgespec.benchmark.synthetic import Truth
from edgespec.errors import LimitError, RequestError
from edgespec.prompts import Request, RequestFile, SamplingParams
from edgespec.prompts.checks import MAX_COUNT
from edgespec.runtime.engine import Engine
from edgespec.runtime.requests.answers import FileAnswers
from edgespec.runtime.text.prompt_value import PromptValue

RANDOM_BATCHES = 2  # of random prompts, where no number is given


@dataclass(frozen=True)
class PromptSource:
    """Where prompts come from: random where `requests` is None. `sampling` is that of random
    prompts; those of a file have their own. `seed` is that of the draws of dialled acceptance."""

    requests: RequestFile | None
    sampling: SamplingParams
    seed: int = 0
    num_prompts: int | None = None
    categories: tuple[str, ...] = ()

    def groups(self, runner: SliceRunner, cell: Cell) -> list[list[BenchPrompt]]:
        """Batches of `cell.batch_size` prompts, each with its plain answer. The last batch is
        filled up with the first prompts again. Raises LimitError for a prompt that does not fit,
        Interrupted."""
        if self.requests is None:
            count = self.num_prompts or RANDOM_BATCHES * cell.batch_size
            assert cell.input_tokens is not None
            prompts = [*self.random(runner.engine, cell.input_tokens, count)]
            answered = [*self.answered(runner, self.sized(prompts, cell), cell.batch_size)]
        else:
            answered = self.conversations(runner, cell)
        return in_batches(answered, cell.batch_size)

    def sized(self, prompts: Sequence[BenchPrompt], cell: Cell) -> list[BenchPrompt]:
        """The prompts with answers of the cell's length."""
        length = cell.output_tokens
        return [
            replace(p, sampling=replace(p.sampling, max_generate_length=length)) for p in prompts
        ]

    def random(self, engine: Engine, length: int, count: int) -> Iterator[BenchPrompt]:
        """Prompts of random ids, special ones left out."""
        size = min(engine.config.component.vocab_size, engine.tokenizer.vocab_size)
        ids = np.array([i for i in range(size) if not engine.tokenizer.is_special(i)])
        for number in range(count):
            rng = np.random.default_rng([self.seed, length, number])
            drawn = ids[rng.integers(0, len(ids), length)].tolist()
            yield BenchPrompt(number, tuple(drawn), self.sampling)

    def answered(
        self, runner: SliceRunner, prompts: Sequence[BenchPrompt], batch_size: int
    ) -> Iterator[BenchPrompt]:
        """Prompts with their plain answers: the run that warms up, and says what is right."""
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            answers = runner.run(batch, PLAIN_VARIANT)
            for prompt, response in zip(batch, answers.responses, strict=True):
                yield self.with_truth(prompt, response.token_ids)

    def with_truth(self, prompt: BenchPrompt, token_ids: Sequence[int]) -> BenchPrompt:
        """A prompt whose plain answer is known."""
        return replace(prompt, truth=Truth.of(token_ids, self.seed, prompt.number))

    def conversations(self, runner: SliceRunner, cell: Cell) -> list[BenchPrompt]:
        """All turns of a file's requests as prompts of their own: the turns before them stand in
        them with their plain answers."""
        assert self.requests is not None
        requests = self.requests.requests[: self.num_prompts]
        sized = [with_length(request, cell.output_tokens) for request in requests]
        engine, prompts = runner.engine, list[BenchPrompt]()
        answers = FileAnswers(engine, None, cell.batch_size, stopping=runner.stopping)
        for answer in sorted(answers.run(sized), key=lambda answer: answer.key):
            if answer.error is not None:
                raise answer.error
            if answer.cancelled or answer.response is None:
                raise Interrupted
            response = answer.response
            sampling = replace(answer.request.sampling, seed=response.seed or 0)
            ids = response.prompt_ids  # with images they stay a prompt value
            ids = ids if isinstance(ids, PromptValue) else tuple(ids)
            prompt = BenchPrompt(len(prompts), ids, sampling)
            prompts.append(self.with_truth(prompt, response.token_ids))
        return prompts

    def to_dict(self) -> dict[str, Any]:
        """As a report has it; the texts of a file go into a hash alone."""
        return {
            "source": "random" if self.requests is None else "file",
            "file": None if self.requests is None else self.requests.path.name,
            "sha256": None if self.requests is None else digest(self.requests.requests),
            "categories": [*self.categories],
            "num_prompts": self.num_prompts,
            "seed": self.seed,
        }


def with_length(request: Request, length: int) -> Request:
    """A request whose answers are at most so long."""
    sampling = replace(
        request.sampling,
        max_generate_length=length,
        min_tokens=min(request.sampling.min_tokens, length),
        num_logprobs=0,
        prompt_logprobs=None,
    )
    return replace(request, sampling=sampling)


def in_batches(prompts: Sequence[BenchPrompt], size: int) -> list[list[BenchPrompt]]:
    """Batches of exactly `size`, the last one filled up from the beginning."""
    count = -(-len(prompts) // size)
    return [
        [prompts[(start * size + i) % len(prompts)] for i in range(size)] for start in range(count)
    ]


def digest(requests: Sequence[Request]) -> str:
    """A hash of what requests say and how they are sampled, without the length of answers."""
    said = [
        (
            [(m.role, m.content, *(i.source for i in m.images), m.more) for m in request.messages],
            request.turns,
            repr(replace(request.sampling, max_generate_length=MAX_COUNT)),
            request.rendering,
        )
        for request in requests
    ]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def check_sizes(engine: Engine, cells: Sequence[Cell]) -> None:
    """Raises LimitError for lengths and batches that the engines cannot take, before anything
    runs."""
    for cell in cells:
        engine.limits.check_batch_size(cell.batch_size)
        if cell.input_tokens is None:
            continue
        engine.limits.check_prompt([0] * cell.input_tokens, drafts=engine.spec_decode)
        whole = cell.input_tokens + cell.output_tokens
        if whole > engine.base.capacity + 1:  # the last token needs no row of its own
            message = (
                f"`input_tokens` {cell.input_tokens} and `output_tokens` {cell.output_tokens}: the"
                f" KV cache holds {engine.base.capacity} tokens"
            )
            raise LimitError(message, "Lower one, or build with a larger `max_kv_cache_capacity`.")


def refuse_own_drafts(requests: RequestFile) -> None:
    """Raises RequestError for requests that say by themselves what drafts: here that is said for
    all alike."""
    for request in requests.requests:
        if request.speculative is not None:
            message = f"requests[{request.index}] has a speculative block of its own"
            raise RequestError(message, "Remove it: bench drafts by its own flags, for all alike.")
