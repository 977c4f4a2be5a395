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
from edgespec.benchmark.serving.figures import Served, figures_of, throughput
from edgespec.benchmark.serving.load import Run, Turns, run_load
from edgespec.benchmark.statistics import figure
from edgespec.errors import RequestError
from edgespec.progress import Progress
from edgespec.prompts.convert import turns
from edgespec.runtime.loop.metrics import ratio

LEAST_PROMPTS = 8  # of a run, where no number is given
NO_DRAFTS, SALT = "disable_spec_decode", "cache_salt"


@dataclass(frozen=True, kw_only=True)
class ServePlan:
    """What is to be measured. `source` are the conversations of a file; its `num_prompts` are those
    of a run, None: one a client, at least 8."""

    model: str
    modes: Sequence[str]
    source: PromptSource
    concurrency: Sequence[int]
    output_tokens: int
    repeats: int
    warmup: int


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

    def __post_init__(self) -> None:
        assert self.plan.source.requests is not None
        self.prompts = [turns(request) for request in self.plan.source.requests.requests]

    def run(self) -> None:
        """All of it; ends early, with what there is, once it is to stop. Raises RequestError where
        the server refuses what is asked of it."""
        plan = self.plan
        for mode in plan.modes:
            if not self.stopping():
                self.probe(mode)
        for clients in plan.concurrency:
            order = [(-1, mode) for _ in range(plan.warmup) for mode in plan.modes]
            for repeat in range(plan.repeats):
                order += [(repeat, mode) for mode in plan.modes[:: -1 if repeat % 2 else 1]]
            count = plan.source.num_prompts or max(LEAST_PROMPTS, clients)
            self.progress.start(f"{clients} clients", len(order) * count)
            for repeat, mode in order:
                run = self.load(clients, count, mode, max(repeat, 0))
                if self.stopping():
                    return
                if repeat >= 0:
                    self.runs.setdefault((clients, mode), []).append(run)
        self.complete = True

    def load(self, clients: int, count: int, mode: str, repeat: int) -> Run:
        """One run: both ways of a repeat have the same conversations, and the next repeat the next
        ones, from the first again behind the last."""
        salt, first = secrets.token_hex(8), repeat * count
        conversations: list[Turns] = [
            self.prompts[(first + i) % len(self.prompts)] for i in range(count)
        ]
        return run_load(
            self.client,
            conversations,
            clients,
            lambda number: self.body(mode, f"{salt}-{number}"),
            self.stopping,
            lambda: self.progress.advance(1),
        )

    def body(self, mode: str, salt: str) -> dict[str, Any]:
        """What a request says beside its messages. Its salt keeps it from what the server kept of
        the same prompt in a run before; the turns of a conversation share it."""
        plan = self.plan
        body = {
            "model": plan.model,
            "max_tokens": plan.output_tokens,
            "temperature": 0.0,
            "seed": 0,
        }
        body |= {NO_DRAFTS: True} if mode == SERVED_PLAIN else {}
        return body | ({SALT: salt} if self.takes_salt else {})

    def probe(self, mode: str) -> None:
        """One request before the load. Raises RequestError where it fails."""
        prompt = [{"role": "user", "content": self.prompts[0][0]}]
        try:
            self.client.ask({**self.body(mode, secrets.token_hex(8)), "messages": prompt})
        except RequestFailed as error:
            if self.takes_salt and SALT in str(error):
                self.takes_salt = False
                self.notes.append(
                    f"the server takes no {SALT}: it may know prompts of earlier runs"
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
            answers = [answer for run in runs for answer in run.answers.values()]
            yield Row(
                mode=mode,
                cell=Cell(None, self.plan.output_tokens, clients),
                variant=PLAIN_VARIANT,
                figures=figures_of(runs),
                over_plain=figure([over(run, one) for run, one in pairs]),
                speculation=speculation_of(answers),
                answers=len(answers),
                answers_equal_to_plain=sum(equal(run, one) for run, one in pairs),
                prompt_tokens=ratio(sum(one.tokens("prompt") for one in answers), len(answers)),
                served=Served.of(runs),
            )


def over(run: Run, plain: Run) -> float | None:
    """The throughput of a run over that of the plain one beside it."""
    mine, its = throughput(run), throughput(plain)
    return mine / its if mine and its else None


def equal(run: Run, plain: Run) -> int:
    """How many answers are those of the plain run."""
    pairs = ((answer, plain.answers.get(key)) for key, answer in run.answers.items())
    return sum(b is not None and (a.text, a.reasoning) == (b.text, b.reasoning) for a, b in pairs)


def speculation_of(answers: Sequence[Answer]) -> DraftCounts | None:
    """What was drafted and accepted, by vLLM's fields of each answer; None where the server told
    none."""
    told = [counts_of(answer.speculation) for answer in answers]
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
    names = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
    counts = [*map(told.get, names), *(told.get("acceptance_histogram") or ())]
    return counts if all(type(count) is int and count >= 0 for count in counts) else []
