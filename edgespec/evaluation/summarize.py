"""Summaries of articles by an engine, with drafts or without, scored and compared.

Knows prompts and answers of a run. The prompt is that of TensorRT-LLM's examples/summarize.py: the
article and " TL;DR:", at most so many tokens; decoding is greedy.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgespec.errors import EdgeSpecError, LimitError, RequestError
from edgespec.evaluation import reference
from edgespec.evaluation.articles import Article
from edgespec.evaluation.reference import Reference
from edgespec.evaluation.rouge import rouge
from edgespec.progress import Progress
from edgespec.prompts import CANCELLED, Message, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, GenerationRequest, Response
from edgespec.runtime.loop.metrics import Pooled, ratio
from edgespec.runtime.requests.lossless_check import Difference, first_difference
from edgespec.runtime.trees.tree import DraftPlan

ENDING = " TL;DR:"
Stopping = Callable[[], bool]
INSTRUCTION = "Summarize the article of the user in one or two sentences."


@dataclass(frozen=True, slots=True)
class ArticlePrompt:
    """An article as the model reads it."""

    article: Article
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Summaries:
    """The answers of one run, by the place of their prompt; an error where one failed, nothing
    where the run was stopped."""

    wall_s: float
    by_place: dict[int, Response | EdgeSpecError] = field(default_factory=dict)

    @property
    def responses(self) -> dict[int, Response]:
        """Those that did not fail, by place."""
        ends = self.by_place.items()
        return {place: end for place, end in ends if isinstance(end, Response)}

    @property
    def errors(self) -> dict[int, EdgeSpecError]:
        """Those that failed, by place."""
        ends = self.by_place.items()
        return {place: end for place, end in ends if isinstance(end, EdgeSpecError)}

    def to_dict(self, prompts: Sequence[ArticlePrompt], *, speculative: bool) -> dict[str, Any]:
        """ROUGE against the articles' summaries, and the metrics of the run."""
        responses = self.responses
        pooled = Pooled([response.metrics for response in responses.values()])
        return {
            "articles": len(responses),
            **scores({place: response.text for place, response in responses.items()}, prompts),
            **pooled.to_dict(speculative=speculative),
            "wall_s": self.wall_s,
            "output_tokens_per_s": ratio(pooled.completion_tokens, self.wall_s),
        }


def scores(texts: dict[int, str], prompts: Sequence[ArticlePrompt]) -> dict[str, float]:
    """ROUGE of some answers; nothing without one."""
    if not texts:
        return {}
    return rouge([*texts.values()], [prompts[place].article.summary for place in texts])


def prompts_of(
    engine: Engine, articles: Sequence[Article], max_input_len: int, *, chat: bool
) -> list[ArticlePrompt]:
    """The articles as prompts of at most `max_input_len` tokens each.

    Of a longer article the end is cut off, and what asks for the summary stays. With `chat` the
    model's template is applied, to messages that ask for a summary. Raises RequestError where not
    even a part of the article fits, or the template rejects the messages.
    """
    return [
        ArticlePrompt(article, fitting(engine, article, max_input_len, chat=chat))
        for article in articles
    ]


def fitting(engine: Engine, article: Article, most: int, *, chat: bool) -> Sequence[int]:
    """The longest prompt that has at most `most` tokens, by halving what is too much."""
    text = article.text.strip().replace(" n't", "n't")
    ids = encoded(engine, text, chat=chat)
    if ids is not None and len(ids) <= most:
        return ids
    low, high = 0, len(text)  # characters: `low` fit, `high` do not
    best: Sequence[int] = []
    while high - low > 1:
        middle = (low + high) // 2
        ids = encoded(engine, text[:middle], chat=chat)
        if ids is not None and len(ids) <= most:
            low, best = middle, ids
        else:
            high = middle
    if not best:
        message = f"line {article.number}: not a word of the article fits into {most} tokens"
        raise RequestError(message, "Raise `max_input_len`, or build with a larger one.")
    return best


def encoded(engine: Engine, text: str, *, chat: bool) -> Sequence[int] | None:
    """The prompt for so much of an article; None for one that is too long whatever it holds."""
    try:
        if chat:
            return engine.encode([Message("system", INSTRUCTION), Message("user", text)])
        return engine.encode(text + ENDING)
    except LimitError:
        return None


def sampling_of(output_len: int, temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    """Decoding of at most so many tokens, greedily or from all of the base's distribution."""
    return SamplingParams(
        temperature=temperature, top_k=0, top_p=1.0, seed=seed, max_generate_length=output_len
    )


def answer(
    engine: Engine,
    prompts: Sequence[ArticlePrompt],
    plan: DraftPlan | None,
    *,
    batch_size: int,
    sampling: SamplingParams,
    stopping: Stopping,
    progress: Progress,
) -> Summaries:
    """The answers to prompts, `batch_size` at a time. One that fails harms no other; once
    `stopping` says so, those under way are dropped. Raises LimitError for the batch size."""
    requests = [GenerationRequest(prompt.token_ids, sampling, plan) for prompt in prompts]
    places = {id(request): place for place, request in enumerate(requests)}
    ends: dict[int, Response | EdgeSpecError] = {}
    began = time.perf_counter()
    for request, event in engine.run_queue(deque(requests), batch_size, stopping):
        if isinstance(event, Chunk):
            continue
        if isinstance(event, EdgeSpecError) or event.finish_reason != CANCELLED:
            ends[places[id(request)]] = event
            progress.advance(1)
    return Summaries(time.perf_counter() - began, dict(sorted(ends.items())))


@dataclass
class Evaluation:
    """What is run over the prompts, and what came of it: the engine's answers, with drafts where
    there is a plan, plain ones to compare them with, and those of transformers."""

    engine: Engine
    prompts: Sequence[ArticlePrompt]
    plan: DraftPlan | None
    batch_size: int
    sampling: SamplingParams
    answers: Summaries = field(init=False)
    plain: Summaries | None = field(init=False, default=None)  # beside answers with drafts
    differences: dict[int, Difference] = field(init=False, default_factory=dict)
    checked: bool = field(init=False, default=False)  # whether plain answers must be equal
    reference: Reference | None = field(init=False, default=None)

    def run(
        self,
        model: Any,
        *,
        check_lossless: bool,
        stopping: Stopping,
        progress: Progress,
        compare_quality: bool = False,
    ) -> None:
        """All of it, as far as nothing stops it: the engine, plainly too with `check_lossless` or
        `compare_quality`, and a transformers `model` where it is not None."""
        self.answers = self.answered(self.plan, stopping, progress)
        if (check_lossless or compare_quality) and not stopping():
            self.plain = self.answered(None, stopping, progress)
            self.checked = check_lossless
            self.differences = self.differing(self.plain) if check_lossless else {}
        if model is not None and not stopping():
            progress.start("transformers", len(self.prompts))
            self.reference = reference.answer(
                model,
                [prompt.token_ids for prompt in self.prompts],
                output_len=self.sampling.max_generate_length,
                stop_ids=self.engine.stop_ids,
                stopping=stopping,
                progress=progress,
            )

    def answered(self, plan: DraftPlan | None, stopping: Stopping, progress: Progress) -> Summaries:
        """The engine's answers, with a plan or plainly."""
        progress.start("plain decoding" if plan is None else "speculative", len(self.prompts))
        return answer(
            self.engine,
            self.prompts,
            plan,
            batch_size=self.batch_size,
            sampling=self.sampling,
            stopping=stopping,
            progress=progress,
        )

    def differing(self, plain: Summaries) -> dict[int, Difference]:
        """Where answers with drafts left the plain ones, by place, with what explains it."""
        differences = {}
        for place, response in self.answers.responses.items():
            if (other := plain.responses.get(place)) is not None:
                difference = first_difference(
                    self.engine, other, response, self.sampling, self.batch_size
                )
                if difference is not None:
                    differences[place] = difference
        return differences

    @property
    def is_lossless(self) -> bool:
        """Whether rounding explains each difference from plain decoding."""
        return all(difference.explained for difference in self.differences.values())

    def summary(self) -> dict[str, Any]:
        """Scores and metrics of each program, and how they agree."""
        name = "plain" if self.plan is None else "speculative"
        out: dict[str, Any] = {
            "articles": len(self.prompts),
            "failed": len(self.answers.errors),
            "batch_size": self.batch_size,
            "output_len": self.sampling.max_generate_length,
            "temperature": self.sampling.temperature,
            "acceptance": self.rule,
            name: self.answers.to_dict(self.prompts, speculative=self.plan is not None),
        }
        if self.plain is not None:
            out["plain"] = self.plain.to_dict(self.prompts, speculative=False)
            out |= self.of_plain(self.plain)
        if self.reference is not None:
            out["transformers"] = self.of_reference(self.reference)
        return out

    @property
    def rule(self) -> str | None:
        """The accept rule; None without drafts."""
        return None if self.plan is None else self.engine.acceptance.rule

    def of_plain(self, plain: Summaries) -> dict[str, Any]:
        """How answers agree with plain ones: whether what differs is explained, where they must be
        equal, else how many are."""
        own, other = self.answers.responses, plain.responses
        compared = own.keys() & other.keys()
        if self.checked:
            unexplained = sum(not d.explained for d in self.differences.values())
            check = {"differing": len(self.differences), "not_explained": unexplained}
            return {"lossless_check": {"compared": len(compared), **check}}
        identical = sum(own[place].token_ids == other[place].token_ids for place in compared)
        comparison = {"acceptance": self.rule, "compared": len(compared), "identical": identical}
        return {"quality_comparison": comparison}

    def of_reference(self, reference: Reference) -> dict[str, Any]:
        """Scores of transformers, and in how many answers the engine's tokens are the same."""
        texts = {place: self.engine.decode(ids) for place, ids in reference.token_ids.items()}
        tokens = sum(map(len, reference.token_ids.values()))
        compared = self.answers.responses.keys() & reference.token_ids.keys()
        return {
            "articles": len(texts),
            **scores(texts, self.prompts),
            "completion_tokens": tokens,
            "wall_s": reference.wall_s,
            "output_tokens_per_s": ratio(tokens, reference.wall_s),
            "compared": len(compared),
            "identical": sum(
                self.answers.responses[place].token_ids == reference.token_ids[place]
                for place in compared
            ),
        }

    def entries(self) -> list[dict[str, Any]]:
        """Each article's answers, as the output file holds them."""
        return [self.entry(place, prompt) for place, prompt in enumerate(self.prompts)]

    def entry(self, place: int, prompt: ArticlePrompt) -> dict[str, Any]:
        """The answers to one article; no text where it was not answered."""
        end = self.answers.by_place.get(place)
        out: dict[str, Any] = {
            "line": prompt.article.number,
            "prompt_tokens": len(prompt.token_ids),
            "highlights": prompt.article.summary,
        }
        if isinstance(end, Response):
            out |= {
                "output_text": end.text,
                "output_ids": end.token_ids,
                "finish_reason": end.finish_reason,
                "metrics": end.metrics.to_dict(speculative=self.plan is not None),
            }
        elif end is not None:
            out["error"] = {"what": end.what, "remedy": end.remedy}
        if place in self.differences:
            out["lossless"] = {"equal": False, **self.differences[place].to_dict()}
        if self.reference is not None and place in self.reference.token_ids:
            out["transformers_output_ids"] = self.reference.token_ids[place]
        return out
