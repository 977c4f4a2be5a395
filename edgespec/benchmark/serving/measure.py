"""A load test of a server: plain and speculative decoding in turn, at each number of clients.

Knows the order of runs, what edgespec's server takes beside OpenAI's API, and rows.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from edgespec.benchmark.cases import PLAIN_VARIANT, Cell
from edgespec.benchmark.modes import SERVED_PLAIN, SERVED_SPECULATIVE
from edgespec.benchmark.prompts import PromptSource
from edgespec.benchmark.rows import DraftCounts, Row
from edgespec.benchmark.serving.client import Answer, ChatClient, RequestFailed
from edgespec.benchmark.serving.figures import (
    ITL,
    LATENCY,
    OF_RUN,
    THROUGHPUT,
    TTFT,
    Served,
    median_of,
)
from edgespec.benchmark.serving.load import Run, Turns, conversations_of, run_load
from edgespec.benchmark.statistics import Figure, figure
from edgespec.errors import RequestError
from edgespec.progress import Progress
from edgespec.prompts.convert import turns
from edgespec.runtime.loop.metrics import ratio

CONCURRENCY = (1, 4, 8, 16, 64)
REQUESTS_A_CLIENT, LEAST_REQUESTS = 2, 8  # of a run, where no number is given
NO_DRAFTS = "disable_spec_decode"
SALT = "cache_salt"


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """What is to be measured. `source` are the conversations of a file; its `num_prompts` are the
    requests of a run, where these are given."""

    model: str
    modes: Sequence[str]
    source: PromptSource
    concurrency: Sequence[int]
    output_tokens: int
    repeats: int
    warmup: int

    @property
    def prompts(self) -> list[Turns]:
        """What users say in each conversation."""
        assert self.source.requests is not None
        return [turns(request) for request in self.source.requests.requests]

    @property
    def body(self) -> dict[str, Any]:
        """What all requests say besides their messages."""
        sampling = self.source.sampling
        own = {"temperature": sampling.temperature, "seed": sampling.seed}
        return {"model": self.model, "max_tokens": self.output_tokens, **own}

    def requests(self, clients: int) -> int:
        """Of a run with so many clients."""
        return self.source.num_prompts or max(LEAST_REQUESTS, REQUESTS_A_CLIENT * clients)

    def settings(self) -> dict[str, Any]:
        """As a report has it."""
        sampling = self.source.sampling
        return {
            "modes": [*self.modes],
            "prompts": self.source.to_dict(),
            "sampling": {"temperature": sampling.temperature, "seed": sampling.seed},
            "repeats": self.repeats,
            "warmup": self.warmup,
            "acceptance": None,  # the server's own, which it does not tell
        }


@dataclass
class ServeBenchmark:
    """Runs a plan against a server. A run that is stopped is left out."""

    client: ChatClient
    plan: ServePlan
    progress: Progress
    stopping: Callable[[], bool]
    runs: dict[tuple[int, str], list[Run]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    complete: bool = False
    takes_salt: bool = True

    def run(self) -> None:
        """All of it; ends early, with what there is, once it is to stop. Raises RequestError where
        the server refuses what is asked of it."""
        for mode in () if self.stopping() else self.plan.modes:
            self.probe(mode)
        prompts = self.plan.prompts
        for clients in self.plan.concurrency:
            blocks = [(-1 - n, mode) for n in range(self.plan.warmup) for mode in self.plan.modes]
            for repeat in range(self.plan.repeats):
                modes = self.plan.modes if repeat % 2 == 0 else self.plan.modes[::-1]
                blocks += [(repeat, mode) for mode in modes]
            self.progress.start(f"{clients} clients", len(blocks) * self.plan.requests(clients))
            for repeat, mode in blocks:
                run = self.load(prompts, clients, mode, max(repeat, 0))
                if self.stopping():
                    return
                if repeat >= 0:
                    self.runs.setdefault((clients, mode), []).append(run)
        self.complete = True

    def load(self, prompts: Sequence[Turns], clients: int, mode: str, repeat: int) -> Run:
        """One run: plain and speculative ones of a repeat have the same conversations."""
        count, salt = self.plan.requests(clients), secrets.token_hex(8)
        conversations = conversations_of(prompts, repeat * count, count, clients)
        return run_load(
            self.client,
            conversations,
            clients,
            lambda number: self.body(mode, f"{salt}-{number}"),
            self.stopping,
            lambda: self.progress.advance(1),
        )

    def body(self, mode: str, salt: str) -> dict[str, Any]:
        """What a request says. Its salt keeps it from what the server kept of the same prompt in a
        run before; the turns of a conversation share it."""
        drafts = {NO_DRAFTS: True} if mode == SERVED_PLAIN else {}
        return {**self.plan.body, **drafts, **({SALT: salt} if self.takes_salt else {})}

    def probe(self, mode: str) -> None:
        """One request before the load. Raises RequestError where it fails."""
        prompt = [{"role": "user", "content": self.plan.prompts[0][0]}]
        try:
            self.client.ask({**self.body(mode, secrets.token_hex(8)), "messages": prompt})
        except RequestFailed as error:
            if self.takes_salt and SALT in str(error):
                self.takes_salt = False
                self.notes.append(
                    f"the server takes no {SALT}: it may know prompts from the runs before"
                )
                return self.probe(mode)
            remedy = "Look at the server's own messages."
            if mode == SERVED_PLAIN and NO_DRAFTS in str(error):
                remedy = "Measure it as it is: `mode` speculative."
            raise RequestError(f"the server does not answer: {error}", remedy) from None

    # ---- what was measured

    def rows(self) -> Iterator[Row]:
        """A row for each number of clients and way of decoding."""
        for (clients, mode), runs in self.runs.items():
            plain = self.runs.get((clients, SERVED_PLAIN), [])
            pairs = [*zip(runs, plain, strict=False)] if mode == SERVED_SPECULATIVE else []
            runs = [run for run, _ in pairs] or runs  # none whose plain one is missing
            answers = [answer for run in runs for answer in run.answered]
            prompt_tokens = sum(answer.prompt_tokens for answer in answers)
            yield Row(
                mode=mode,
                cell=Cell(None, self.plan.output_tokens, clients),
                variant=PLAIN_VARIANT,
                figures=figures_of(runs),
                over_plain=figure([over(run, one) for run, one in pairs]),
                speculation=speculation_of(answers) if mode == SERVED_SPECULATIVE else None,
                answers=len(answers),
                answers_equal_to_plain=sum(equal(run, one) for run, one in pairs),
                prompt_tokens=ratio(prompt_tokens, len(answers)),
                served=Served.of(runs),
            )


def figures_of(runs: Sequence[Run]) -> dict[str, Figure | None]:
    """A sample a run: throughputs, and medians over its answers, in ms."""
    return {
        name: figure([value for run in runs for value in of(run)])
        for name, (_, of) in OF_RUN.items()
    } | {name: figure([median_of(name, run) for run in runs]) for name in (TTFT, ITL, LATENCY)}


def over(run: Run, plain: Run) -> float | None:
    """The throughput of a run over that of the plain one beside it."""
    mine, its = (OF_RUN[THROUGHPUT][1](one) for one in (run, plain))
    return mine[0] / its[0] if mine and its and its[0] > 0 else None


def equal(run: Run, plain: Run) -> int:
    """How many answers are those of the plain run."""
    pairs = ((answer, plain.answers.get(key)) for key, answer in run.answers.items())
    return sum(
        isinstance(a, Answer)
        and isinstance(b, Answer)
        and (a.text, a.reasoning) == (b.text, b.reasoning)
        for a, b in pairs
    )


def speculation_of(answers: Sequence[Answer]) -> DraftCounts | None:
    """What was drafted and accepted, by vLLM's fields of each answer; None where the server told
    none."""
    told = [counts_of(answer.speculation or {}) for answer in answers]
    steps, accepted, drafted, *by_count = map(sum, zip_longest(*told, [0, 0, 0], fillvalue=0))
    if not steps:
        return None
    return DraftCounts(
        steps=steps,
        acceptance_length=1 + accepted / steps,
        acceptance_rate=ratio(accepted, drafted),
        per_position_acceptance=[sum(by_count[at:]) / steps for at in range(1, len(by_count))],
        conditional_acceptance=(),
        drafted_per_step=drafted / steps,
        levels_per_step=None,
        steps_without_drafts=None,
    )


def counts_of(told: Mapping[str, Any]) -> list[int]:
    """Steps, accepted and drafted tokens, and steps by how many drafts they accepted; none where a
    server told something else."""
    histogram = told.get("acceptance_histogram")
    numbers = [told.get(f"num_{name}") for name in COUNTED]
    counts = [*numbers, *(histogram if isinstance(histogram, list) else ())]
    return counts if all(type(count) is int and count >= 0 for count in counts) else []


COUNTED = ("spec_steps", "accepted_draft_tokens", "draft_tokens")
