"""Answers all requests of a file: warm-up, answers kept in the journal, lossless check, output.

Knows what a run over a file is made of and when its time is measured. Prints nothing: whoever calls
gives what shows progress, what says that a run is to stop, and what shows a warning.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from edgespec.compat.speculative_config import of_request
from edgespec.prompts import Journal, NoJournal, RequestFile
from edgespec.runtime.acceptance.verify import AcceptOptions
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk, Response
from edgespec.runtime.measuring.cost_description import Prediction
from edgespec.runtime.measuring.cost_steps import StepPlace
from edgespec.runtime.measuring.plain_steps import time_plain_steps
from edgespec.runtime.measuring.speedup import MIN_STEPS, StepCost
from edgespec.runtime.requests.answers import (
    Answer,
    FileAnswers,
    Stopping,
    seeded,
    to_dict,
    unasked,
)
from edgespec.runtime.requests.memory import peak_bytes
from edgespec.runtime.requests.profile import RunStats
from edgespec.runtime.sampling.sampler import Sampler
from edgespec.runtime.trees.tree import DraftPlan
from edgespec.runtime.vision.image_stats import ImageStats


class RunProgress(Protocol):
    """What shows how far a run is."""

    def add(self, chunk: Chunk) -> None:
        """Counts the tokens of a step."""

    def finish(self, count: int) -> None:
        """So many turns are answered."""


class FileRun:
    """One run over a file's requests: the answers so far, and the fault that ended it early, if one
    did.

    `stopping` is asked after every step; once it says yes, what is under way ends there.
    """

    def __init__(
        self,
        engine: Engine,
        requests: RequestFile,
        plan: DraftPlan | None,
        journal: Journal | NoJournal,
        *,
        stopping: Stopping,
        warn: Callable[[str], None],
    ) -> None:
        """Raises RequestError for a `speculative` of a request that cannot be."""
        self.engine, self.requests, self.journal, self.warn = engine, requests, journal, warn
        asked = [request for request in requests.requests if request.speculative is not None]
        self.configs = {  # of the requests that bring one, by their index
            request.index: of_request(
                request.speculative,
                f"{requests.path}: requests[{request.index}].speculative",
                engine.method,
            )
            for request in asked
        }
        self.plan, self.speculative = plan, plan is not None or bool(asked)
        self.answers = FileAnswers(
            engine, plan, requests.batch_size, self.configs, stopping=stopping
        )
        self.done: dict[tuple[int, int], Answer] = {}
        self.fault: Exception | None = None
        self.stopped: str | None = None  # why nothing is drafted any more
        self.wall_s, self.peak_bytes = 0.0, 0
        self.check_wall_s: float | None = None
        self.passes: dict[str, list[float]] = {}
        self.images = ImageStats()
        self.plain_step: StepCost | None = None

    def rules(self) -> list[AcceptOptions | None]:
        """The accept rule of each request that has a `speculative` of its own; None for the
        run's."""
        return [config.acceptance for config in self.configs.values()]

    def run(
        self,
        progress: RunProgress,
        *,
        warmup: int,
        check_lossless: bool,
        compare_quality: bool = False,
    ) -> None:
        """All of it: warm-up batches, each request, the check or the comparison with the exact
        answers where asked for, and the output file.

        A fault of ours ends the run, not what is done: it is kept in `fault`.
        """
        self.warm_up(warmup)
        self.answers.observe = progress.add
        try:
            # A comparison begins with the very prompts; else their images would be held for nothing
            self.answer(progress, keep_images=check_lossless or compare_quality)
            if check_lossless or compare_quality:
                self.check(self.answers.compare if check_lossless else self.answers.compare_quality)
            else:
                self.time_plain_steps()
        except Exception as error:
            self.fault = error
            left = (a for request in self.requests.requests for a in unasked(request, 0))
            self.done = {answer.key: answer for answer in left} | self.done

    def write(self) -> None:
        """Write the output file, after which the journal is removed. Raises OutputError."""
        self.journal.finish([self.entry(a) for a in self.in_order()], str(self.requests.path))

    def warm_up(self, times: int) -> None:
        """Run the first batch's first turns, unmeasured; neither the prefix cache nor a drafter
        remembers them."""
        first = [replace(r, turns=()) for r in self.requests.requests[: self.requests.batch_size]]
        for _ in range(times):
            if not self.answers.stopping():
                deque(self.answers.run(first), maxlen=0)
        self.engine.forget_prefixes()
        self.engine.forget_answers()

    def answer(self, progress: RunProgress, *, keep_images: bool = False) -> None:
        """Answer each request and keep it in the journal as it ends. Its prompt stays as ids, with
        `keep_images` as it is."""
        began, before = time.perf_counter(), self.image_stats()
        try:
            with self.engine.measured() as self.passes:
                for answer in self.answers.run(self.requests.requests):
                    self.done[answer.key] = answer if keep_images else without_images(answer)
                    self.keep(answer)
                    self.tell_stopped()
                    progress.finish(len(self.done))
        finally:
            self.wall_s = time.perf_counter() - began
            self.peak_bytes, self.images = peak_bytes(), self.image_stats() - before

    def image_stats(self) -> ImageStats:
        """What the engine has done with images so far."""
        images = self.engine.images
        return ImageStats() if images is None else images.stats

    def tell_stopped(self) -> None:
        """Warn once where drafting has stopped for good."""
        if (why := self.engine.drafting_stopped) is not None and not self.stopped:
            self.stopped = why
            self.warn(why)

    def keep(self, answer: Answer) -> None:
        """Add an answer to the journal. The first failure is a warning, and the run goes on."""
        failed_before = self.journal.failure is not None
        self.journal.add(self.entry(answer))
        if self.journal.failure is not None and not failed_before:
            why = self.journal.failure.strerror or self.journal.failure
            self.warn(
                f"{self.journal.path} cannot be written ({why}): answers are in memory alone for"
                " now"
            )

    def check(self, compare: Callable[[Iterable[Answer]], Iterable[Answer]]) -> None:
        """Answer every drafted turn again, plainly, without prefixes of the drafts, and compare the
        two."""
        self.engine.forget_prefixes()
        began = time.perf_counter()
        self.done |= {answer.key: answer for answer in compare([*self.done.values()])}
        self.done = {key: without_images(answer) for key, answer in self.done.items()}
        self.check_wall_s = time.perf_counter() - began

    def time_plain_steps(self) -> None:
        """Time a few plain steps, where enough steps were drafted and no request was decoded
        plainly: they say whether the drafts paid."""
        drafted = [a for a in self.done.values() if a.response is not None and a.speculative]
        steps = sum(a.response.metrics.steps for a in drafted if a.response is not None)
        whole = self.requests.batch_size == 1 and any(
            a.response is not None and not a.speculative for a in self.done.values()
        )
        if whole or steps < MIN_STEPS or self.answers.stopping():
            return
        last = drafted[-self.requests.batch_size :]
        tokens = [len(r.prompt_ids) + len(r.token_ids) for a in last if (r := a.response)]
        place = StepPlace(max(tokens) - 1, len(last))
        sampler = Sampler.of(seeded(last[-1]))
        self.plain_step = time_plain_steps(self.engine, place, sampler, self.answers.stopping)

    def entry(self, answer: Answer) -> dict[str, object]:
        """An answer as output.json and the journal hold it."""
        return to_dict(answer, self.engine.tokenizer)

    def in_order(self) -> list[Answer]:
        """The answers in the order of the requests and their turns."""
        return [self.done[key] for key in sorted(self.done)]

    def prediction(self, answers: Sequence[Answer]) -> Prediction | None:
        """What the stored costs say of the run's speed; None where none are stored for what
        drafted, or where requests drafted by plans of their own."""
        costs, plan = self.engine.costs, self.plan
        if costs is None or plan is None or self.configs:
            return None
        drafted = [a.response.metrics for a in answers if a.response and a.speculative]
        at_a_time = min(self.requests.batch_size, max(1, len(drafted)))
        return Prediction.of(costs, drafted, at_a_time, plan.top_k)

    def stats(self) -> RunStats:
        """What the run took, for the summary and the profile."""
        answers = self.in_order()
        return RunStats(
            answers,
            self.wall_s,
            self.passes,
            self.requests.batch_size,
            self.speculative,
            self.check_wall_s,
            self.peak_bytes,
            self.stopped,
            self.plain_step,
            self.engine.drafting.has_trained_draft,
            self.prediction(answers),
            self.images,
        )


def without_images(answer: Answer) -> Answer:
    """An answer whose prompts are ids alone: the rows of their images take megabytes."""
    return replace(answer, response=ids_alone(answer.response), plain=ids_alone(answer.plain))


def ids_alone(response: Response | None) -> Response | None:
    """A response whose prompt is a list of ids; None stays None."""
    return None if response is None else replace(response, prompt_ids=[*response.prompt_ids])
