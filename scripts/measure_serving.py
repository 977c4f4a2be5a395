"""How requests of one engine hold each other up: the figures of docs/serving.md.

    python scripts/measure_serving.py ENGINES
    python scripts/measure_serving.py ENGINES --turn 14000     # an agent's turn, before and after a restart
    python scripts/measure_serving.py ENGINES --streams 16     # streams over HTTP against `generate_batch`

ENGINES is a pair for 8 sequences and prompts of 4,096 tokens, or of the turn's length. Times are wall times: measure on a
machine that does nothing else, and compare figures of one run. For clients of another server beside: `edgespec bench serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

import edgespec
from edgespec.artifacts import page_cache
from edgespec.benchmark.serving.client import ChatClient
from edgespec.benchmark.serving.load import run_load
from edgespec.benchmark.serving.process import serving
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


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def streamed(engines: str, count: int, tokens: int, rounds: int, *, plain: bool) -> None:
    """Of `count` answers at once, as streams over HTTP from a server of its own and as a batch in
    this process, in turn: tokens a second and, of the process that has the engine, milliseconds of
    processor time a token. The texts must be equal."""
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=tokens, ignore_eos=True)
    body = {
        "model": Path(engines).resolve().name,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    body |= {"disable_spec_decode": True} if plain else {}
    plan = edgespec.PLAIN if plain else None
    found: dict[str, list[tuple[float, float]]] = {"streams": [], "batch": []}
    with edgespec.load(engines) as engine, serving(Path(engines)) as server:
        address = server.url(lambda: False)
        assert address is not None
        client = ChatClient(address)
        for number in range(-1, rounds):  # the first one is not measured
            asked = [f"Tell me about the number {100 * number + i}." for i in range(count)]
            texts = dict[str, list[str]]()
            for way in ("streams", "batch") if number % 2 else ("batch", "streams"):
                pid = server.process.pid if way == "streams" else os.getpid()
                wall, used = time.perf_counter(), processor_s(pid)
                if way == "streams":
                    run = run_load(
                        client, [[text] for text in asked], count, lambda _: body, lambda: False
                    )
                    assert not run.failures, run.failures
                    answers = [run.answers[i, 0] for i in range(count)]
                    texts[way] = [answer.text for answer in answers]
                    num_tokens = sum(answer.tokens("completion") for answer in answers)
                else:
                    prompts = [[{"role": "user", "content": text}] for text in asked]
                    responses = engine.generate_batch(prompts, sampling, plan)
                    texts[way] = [response.text for response in responses]
                    num_tokens = sum(len(response.token_ids) for response in responses)
                wall, used = time.perf_counter() - wall, processor_s(pid) - used
                if number >= 0:
                    found[way].append((num_tokens / wall, 1000 * used / num_tokens))
            assert texts["streams"] == texts["batch"], "a stream says something else"
    for way, figures in found.items():
        rates, used_ms = zip(*figures, strict=True)
        print(f"{way:8} {median(rates):8.0f} tokens/s {median(used_ms):8.3f} ms a token")
    ratios = [one / other for (one, _), (other, _) in zip(*found.values(), strict=True)]
    print(f"streams over batch: {median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")


def percentiles(gaps: list[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(gaps, q)), 1) for q in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engines")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--turn", type=int, help="tokens of an agent's prompt")
    parser.add_argument("--streams", type=int, help="answers at once, against generate_batch")
    parser.add_argument("--tokens", type=int, default=128, help="of each of those answers")
    parser.add_argument("--plain", action="store_true", help="those answers without drafts")
    args = parser.parse_args()
    if args.streams:
        streamed(args.engines, args.streams, args.tokens, args.repeats, plain=args.plain)
        return
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
