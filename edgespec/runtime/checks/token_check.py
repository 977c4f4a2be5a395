"""Whether drafts leave the tokens of an engine directory as they are: a part of `edgespec verify`.

Knows requests and the lossless check. Knows no engine library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edgespec.backends.base import SeveralCapacities
from edgespec.backends.findings import Finding, failed, not_run, passed
from edgespec.errors import EdgeSpecError, LimitError, RequestError, counted
from edgespec.methods.names import FIXED
from edgespec.prompts import NoJournal, RequestFile, text_requests
from edgespec.runtime.drafters.engine_drafter import EngineDrafter
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Chunk
from edgespec.runtime.requests.answers import Answer
from edgespec.runtime.requests.file_runner import FileRun

TOKENS = "tokens"
MAX_TOKENS = 48  # of an answer
# Texts in which drafts are often right, and texts in which they are not
PROMPTS = (
    "The capital of France is",
    "1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8,",
    "def add(a, b):\n    return a +",
    "Es war einmal ein König, der hatte",
)
SAMPLED_TEMPERATURE, SAMPLED_SEED = 0.8, 1


class Quiet:
    """Shows no progress."""

    def add(self, chunk: Chunk) -> None:
        """Nothing."""

    def finish(self, count: int) -> None:
        """Nothing."""


def check_tokens(
    engine_dir: Path, requests: RequestFile | None, images: Mapping[str, Any]
) -> list[Finding]:
    """Plain and speculative decoding of these requests compared, token by token, with the engines'
    default fixed plan; without requests those of PROMPTS, greedy and sampled. `images` are Engine's
    arguments that say what reads the images of requests.

    Raises BundleError, PairingError or EnvironmentProblem where the directory cannot be opened.
    """
    # A fixed plan: an adaptive one would draft little where drafts are seldom right
    with Engine(engine_dir, spec_decode="auto", spec_policy=FIXED, **images) as engine:
        if not engine.spec_decode:
            return [not_run(TOKENS, "nothing drafts here: there is no draft to compare with")]
        if requests is not None:
            return [compared(engine, TOKENS, requests)]
        # An answer that ends at once compares nothing
        engine.stop_ids = frozenset()
        return [
            compared(engine, f"{TOKENS}, {name}{of}", built_in(temperature))
            for of in each_capacity(engine)
            for name, temperature in (("greedy", 0.0), ("sampled", SAMPLED_TEMPERATURE))
        ]


def each_capacity(engine: Engine) -> Iterator[str]:
    """Yields once for an engine of one capacity. Where there are several, once for each, in words:
    no smaller ones are used then."""
    drafter = engine.drafter
    runners = [engine.base.runner]
    runners += [drafter.decoder.runner] if isinstance(drafter, EngineDrafter) else []
    several = [runner for runner in runners if isinstance(runner, SeveralCapacities)]
    if not several:
        yield ""
    for capacity in sorted({capacity for runner in several for capacity in runner.capacities}):
        for runner in several:
            runner.least = min(capacity, max(runner.capacities))
        yield f", {capacity} tokens"


def built_in(temperature: float) -> RequestFile:
    """The built-in requests: texts that are continued as they are."""
    return text_requests(
        PROMPTS,
        apply_chat_template=False,
        temperature=temperature,
        max_generate_length=MAX_TOKENS,
        seed=SAMPLED_SEED,
    )


def compared(engine: Engine, name: str, requests: RequestFile) -> Finding:
    """The finding of a set of requests."""
    run = FileRun(
        engine,
        requests,
        engine.plan(),
        NoJournal(),
        stopping=lambda: False,
        warn=lambda text: None,
    )
    run.run(Quiet(), warmup=0, check_lossless=True)
    if run.fault is not None:
        if not isinstance(run.fault, EdgeSpecError):
            raise run.fault
        return failed(name, f"{run.fault.what}. {run.fault.remedy}")
    return finding_of(engine, name, run.in_order())


def finding_of(engine: Engine, name: str, answers: list[Answer]) -> Finding:
    """What the answers say: all equal, or different where rounding explains it; an answer that
    failed fails the check."""
    both = [a for a in answers if a.plain is not None and a.response is not None]
    errors = [a.error for a in answers if a.error is not None]
    faults = [error for error in errors if not isinstance(error, LimitError | RequestError)]
    differing = [a.difference for a in both if a.difference is not None]
    unexplained = [difference for difference in differing if not difference.explained]
    tokens = sum(len(a.response.token_ids) for a in both if a.response is not None)
    steps = sum(a.response.metrics.steps for a in both if a.response is not None)
    figures = {
        "method": engine.method,
        "answers": len(both),
        "tokens": tokens,
        "tokens_per_step": tokens / steps if steps else None,
        "differences": [difference.to_dict() for difference in differing],
    }
    if unexplained:
        return failed(name, unexplained[0].words, **figures)
    if faults:
        return failed(name, f"{counted(len(faults), 'answer')} failed: {faults[0].what}", **figures)
    refused = f"{counted(len(errors), 'request')} refused: {errors[0].what}" if errors else ""
    if not tokens:
        return not_run(name, refused or "no request was answered with drafts")
    same = f"{counted(len(both) - len(differing), 'answer')} of {len(both)} equal"
    words = f"{same}, {tokens} tokens"
    if differing:
        words += f"; {counted(len(differing), 'difference')} that rounding explains"
    return passed(name, f"{words}; {refused}" if refused else words, **figures)
