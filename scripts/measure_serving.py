"""How requests of one engine hold each other up: the figures of docs/serving.md.

    python scripts/measure_serving.py ENGINES
    python scripts/measure_serving.py ENGINES --turn 14000     # an agent's turn, before and after a restart

ENGINES is a pair for 8 sequences and prompts of 4,096 tokens, or of the turn's length. Times are wall times: measure on a
machine that does nothing else, and compare figures of one run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

import edgespec
from edgespec.artifacts import page_cache
from edgespec.runtime.engine import Engine

LONG, SHORT, ANSWER = 3500, 16, 160
NEW = 300  # tokens of an agent's turn
GREEDY = edgespec.SamplingParams(temperature=0, max_generate_length=1)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 4000, length).tolist()


def first_token_ms(engine: Engine, ids: list[int]) -> float:
    began = time.perf_counter()
    next(iter(engine.stream(ids, GREEDY)))
    return 1000 * (time.perf_counter() - began)


def behind_a_long_prompt(engine: Engine, seed: int) -> float:
    """First token of a short request that comes while a long prompt is read."""
    reader = threading.Thread(target=first_token_ms, args=(engine, prompt(LONG, seed)))
    reader.start()
    time.sleep(0.1)
    found = first_token_ms(engine, prompt(SHORT, seed + 1))
    reader.join()
    return found


def gaps_ms(engine: Engine, seed: int, *, beside: bool) -> list[float]:
    """Between the steps of an answer; `beside`: while a long prompt is read, and no longer."""
    going_on = dict.fromkeys(engine.stop_ids, -100.0)
    params = edgespec.SamplingParams(
        temperature=1, seed=seed, max_generate_length=3000, logit_bias=going_on
    )
    gaps, last = list[float](), 0.0
    reader = threading.Thread(target=first_token_ms, args=(engine, prompt(LONG, seed)))
    with engine.stream(prompt(SHORT, seed + 1), params) as stream:
        for count, _ in enumerate(stream):
            now = time.perf_counter()
            if count == 20 and beside:
                reader.start()
            if count > 20:
                gaps.append(1000 * (now - last))
            if len(gaps) > ANSWER and (not beside or not reader.is_alive()):
                break
            last = now
    if beside:
        reader.join()
    return gaps


async def loop_held_ms(engine: Engine, make: Callable[[int], object], count: int) -> float:
    """The longest time for which `count` submissions kept the event loop from anything else."""
    held, last, done = 0.0, time.perf_counter(), False

    async def watch() -> None:
        nonlocal held, last
        while not done:
            await asyncio.sleep(0)
            now = time.perf_counter()
            held, last = max(held, now - last), now

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.05)
    held = 0.0
    tasks = [asyncio.create_task(engine.agenerate(make(i), GREEDY)) for i in range(count)]
    await asyncio.sleep(2)
    done = True
    await watcher
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return 1000 * held


def turns(engines: str, length: int, seed: int) -> dict[str, list[float]]:
    """Wall and processor milliseconds until the first token of a prompt, all of whose tokens but
    the last NEW were there before: in memory, on the disk after a restart, and there with nothing
    of the files in the page cache; and of closing the engine."""
    began = prompt(length - NEW, seed)
    found = dict[str, list[float]]()

    def timed(name: str, work: Callable[[], object]) -> None:
        wall, used = time.perf_counter(), time.process_time()
        work()
        ended = time.perf_counter(), time.process_time()
        found[name] = [1000 * (ended[0] - wall), 1000 * (ended[1] - used)]

    def turn(engine: Engine, name: str) -> None:
        ids = [*began, *prompt(NEW, seed + len(found))]
        timed(name, lambda: first_token_ms(engine, ids))

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "prefixes"
        engine = edgespec.load(engines, prefix_cache_bytes=None, prefix_cache_dir=directory)
        first_token_ms(engine, prompt(SHORT, 1))
        turn(engine, "nothing is there")
        turn(engine, "in memory")
        timed("closing writes both", engine.close)
        for case in ("after a restart", "after a restart of the machine"):
            if case.endswith("machine"):
                for path in directory.iterdir():
                    page_cache.renew(path)
            with edgespec.load(
                engines, prefix_cache_bytes=None, prefix_cache_dir=directory
            ) as engine:
                first_token_ms(engine, prompt(SHORT, 1))
                turn(engine, case)
        sizes = [path.stat().st_size for path in directory.iterdir()]
    found["MiB of a file"] = [max(sizes) / 2**20]
    return found


def percentiles(gaps: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(gaps, q)), 1) for q in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engines")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turn", type=int, help="tokens of an agent's prompt")
    args = parser.parse_args()
    if args.turn:
        rounds = [turns(args.engines, args.turn, 100 * n) for n in range(args.repeats)]
        for name in rounds[0]:
            each = zip(*(one[name] for one in rounds), strict=True)
            print(f"{name:32}", *(f"{median(values):9.0f}" for values in each))
        return
    with edgespec.load(args.engines) as engine:
        first_token_ms(engine, prompt(SHORT, 1))
        seeds = [10 * i for i in range(1, args.repeats + 1)]
        figures: dict[str, object] = {
            "costs": engine.why_no_costs or "measured",
            "short_alone_ms": median(first_token_ms(engine, prompt(SHORT, 7 + s)) for s in seeds),
            "long_alone_ms": median(first_token_ms(engine, prompt(LONG, 5 + s)) for s in seeds),
            "short_behind_long_ms": median(
                behind_a_long_prompt(engine, 10 * i) for i in range(1, 5 * args.repeats + 1)
            ),
            "gaps_alone_ms": percentiles(
                [g for s in seeds for g in gaps_ms(engine, s, beside=False)]
            ),
            "gaps_beside_long_ms": percentiles(
                [g for s in seeds for g in gaps_ms(engine, s + 3, beside=True)]
            ),
            "equal_prompts_ms": [first_token_ms(engine, prompt(3700, 2)) for _ in range(2)],
        }
        text = "def add(first, second): return first + second\n" * 5
        figures["loop_held_by_1000_ms"] = asyncio.run(
            loop_held_ms(engine, lambda i: f"{i} {text}", 1000)
        )
        figures["loop_held_by_1_mb_ms"] = asyncio.run(
            loop_held_ms(engine, lambda i: text * (2**20 // len(text) - 1), 1)
        )
        print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
