"""Many threads ask one engine at once, in every form of the API, and each gets what it gets alone.

Texts of mixed lengths, greedy and sampled, with seeds, stop strings, drafts of several plans and
none; streams that are left early, tasks that are cancelled, and requests that must be refused.
Each request is answered alone first; then THREADS threads ask REQUESTS requests each, drawn from
those. Exits with 1 if any answer differs, any error is another than expected, or anything is left
of a request.

    python scripts/stress_api.py [--engine-dir DIR] [--threads 16] [--requests 500]

Without --engine-dir the pair in recipes/demo is exported and built for four sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import edgespec
from edgespec import PLAIN, DraftPlan, EdgeSpecError, Engine, Response, SamplingParams

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "demo"
WORDS = [
    "def",
    "class",
    "return",
    "for",
    "while",
    "if",
    "else",
    "import",
    "from",
    "self",
    "print",
    "range",
    "len",
    "int",
    "str",
    "list",
]


@dataclass(frozen=True)
class Case:
    """A request, with what it is answered alone: token ids and a finish reason."""

    prompt: Any
    sampling: SamplingParams
    plan: Any
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""


@dataclass
class Found:
    """What the threads met; one thread adds at a time."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, wrong: str | None = None) -> None:
        """Counts a request, and keeps what was wrong with its answer."""
        with self.lock:
            self.counts[kind] += 1
            if wrong is not None:
                self.wrong.append(f"{kind}: {wrong}")


def cases_for(engine: Engine, count: int, longest: int) -> list[Case]:
    """Requests of all lengths and kinds that the engine takes."""
    rng, found = random.Random(0), list[Case]()
    while len(found) < count:
        one = case(rng, longest=longest)
        if len(engine.encode(one.prompt)) <= engine.config.limits.max_input_len:
            found.append(one)
    return found


def case(rng: random.Random, *, longest: int) -> Case:
    """A request of any length and kind."""
    text = " ".join(rng.choices(WORDS, k=rng.randint(1, 12)))
    prompt = rng.choice([text, [{"role": "user", "content": text}]])
    sampling = SamplingParams(
        temperature=rng.choice([0, 0, 0.6, 1.2]),
        top_k=rng.choice([0, 5, 50]),
        top_p=rng.choice([0.8, 1.0]),
        seed=rng.randrange(2**31),
        repetition_penalty=rng.choice([1.0, 1.1]),
        max_generate_length=rng.randint(1, longest),
        stop=rng.choice([(), (), ("e",)]),
    )
    plans = [None, None, PLAIN, DraftPlan(1, 2, 3), DraftPlan(3, 2, 6)]
    return Case(prompt, sampling, rng.choice(plans))


def alone(engine: Engine, cases: list[Case]) -> list[Case]:
    """The same with their answers, one request after the other."""
    found = []
    for one in cases:
        said = engine.generate(one.prompt, one.sampling, one.plan)
        found.append(
            replace(
                one,
                token_ids=tuple(said.token_ids),
                text=said.text,
                finish_reason=said.finish_reason,
            )
        )
    return found


def differs(one: Case, said: Response) -> str | None:
    """How an answer differs from the one alone; a cancelled one may be a beginning of it."""
    ids = tuple(said.token_ids)
    if said.finish_reason == "cancelled" and ids == one.token_ids[: len(ids)]:
        return None
    if (ids, said.text, said.finish_reason) == (one.token_ids, one.text, one.finish_reason):
        return None
    return f"{one} was answered {said.finish_reason} {ids}"


# ---- the forms


def by_generate(engine: Engine, one: Case, rng: random.Random) -> str | None:
    return differs(one, engine.generate(one.prompt, one.sampling, one.plan))


def by_stream(engine: Engine, one: Case, rng: random.Random) -> str | None:
    stream = engine.stream(one.prompt, one.sampling, one.plan)
    text = "".join(chunk.text for chunk in stream)
    said = stream.result()
    return differs(one, said) or (None if text == said.text else f"chunks {text!r} of {one}")


def by_cancelled_stream(engine: Engine, one: Case, rng: random.Random) -> str | None:
    with engine.stream(one.prompt, one.sampling, one.plan) as stream:
        for _ in range(rng.randint(0, 3)):
            next(stream, None)
        if rng.random() < 0.5:
            stream.cancel()
    return differs(one, stream.result())


def by_dropped_stream(engine: Engine, one: Case, rng: random.Random) -> str | None:
    next(engine.stream(one.prompt, one.sampling, one.plan))
    return None


def by_event_loop(engine: Engine, one: Case, rng: random.Random) -> str | None:
    async def ask() -> list[Any]:
        stream = engine.astream(one.prompt, one.sampling, one.plan)
        cancelled = asyncio.create_task(engine.agenerate(one.prompt, one.sampling, one.plan))
        await asyncio.sleep(0)
        cancelled.cancel()
        text = "".join([chunk.text async for chunk in stream])
        return [await stream.result(), text]

    said, text = asyncio.run(ask())
    return differs(one, said) or (None if text == said.text else f"chunks {text!r} of {one}")


def by_refusal(engine: Engine, one: Case, rng: random.Random) -> str | None:
    wrong: Any = rng.choice(["", b"abc", [10**9], [{"role": "usr", "content": "a"}], "a " * 9999])
    try:
        engine.generate(wrong, one.sampling, one.plan)
    except (edgespec.RequestError, edgespec.LimitError):
        return None
    return f"{str(wrong)[:40]} was answered"


FORMS = {by_generate: 50, by_stream: 20, by_cancelled_stream: 12, by_dropped_stream: 3}
FORMS |= {by_event_loop: 5, by_refusal: 5}


def by_batch(engine: Engine, some: list[Case], found: Found) -> None:
    """A batch of several requests, one of them refused."""
    prompts = [*(one.prompt for one in some), ""]
    samplings = [*(one.sampling for one in some), None]
    plans = [*(one.plan for one in some), None]
    *said, refused = engine.generate_batch(prompts, samplings, plans, return_exceptions=True)
    for one, end in zip(some, said, strict=True):
        found.add("batch", str(end) if isinstance(end, EdgeSpecError) else differs(one, end))
    if not isinstance(refused, edgespec.LimitError):
        found.add("batch", "an empty prompt was answered")


# ---- the run


def ask(engine: Engine, cases: list[Case], requests: int, seed: int, found: Found) -> None:
    """What one thread does."""
    rng, left = random.Random(seed), requests
    while left > 0:
        if rng.random() < 0.02:
            some = rng.sample(cases, min(left, 4))
            by_batch(engine, some, found)
            left -= len(some)
            continue
        (form,) = rng.choices([*FORMS], [*FORMS.values()])
        try:
            wrong = form(engine, rng.choice(cases), rng)
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        found.add(form.__name__, wrong)
        left -= 1


def stress(
    engine: Engine, *, threads: int, requests: int, distinct: int = 400, longest: int = 24
) -> dict[str, Any]:
    """The whole run; what was counted, and what was wrong."""
    cases = alone(engine, cases_for(engine, distinct, longest))
    found, began = Found(), time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        done = [pool.submit(ask, engine, cases, requests, seed, found) for seed in range(threads)]
        for one in done:
            one.result()
    seconds = time.perf_counter() - began
    engine.generate("one more, behind all that were dropped")
    if engine.driver.pending or engine.scheduler.has_work:
        found.wrong.append(f"left behind: {engine.driver.pending}")
    return {
        "threads": threads,
        "requests": sum(found.counts.values()),
        "seconds": round(seconds, 1),
        "forms": dict(found.counts),
        "wrong": found.wrong,
    }


def built(out: Path) -> Path:
    """The demo pair's engines for four sequences, below `out`."""
    from edgespec.cli.main import run

    base, draft = str(RECIPE / "base"), str(RECIPE / "draft")
    commands = [
        ["export", base, str(out / "base"), "--eagle-base"],
        ["export", draft, str(out / "draft"), "--base-model-dir", base],
    ]
    for part in ("base", "draft"):
        engine = ["--engine-dir", str(out / "engines"), "--max-batch-size", "4"]
        commands.append(["build", "--onnx-dir", str(out / part / "llm"), *engine])
    for command in commands:
        if code := run(command):
            sys.exit(code)
    return out / "engines"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-dir", type=Path, help="default: the demo pair, built anew")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--requests", type=int, default=500, help="of each thread")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as out:
        engine_dir = args.engine_dir or built(Path(out))
        with edgespec.load(engine_dir) as engine:
            found = stress(engine, threads=args.threads, requests=args.requests)
    print(json.dumps(found, indent=2))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
