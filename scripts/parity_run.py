"""Compares speculative with plain decoding, token by token, over many requests of a demo pair.

    python scripts/parity_run.py --tokens 50000
    python scripts/parity_run.py --tokens 50000 --method dflash
    python scripts/parity_run.py --tokens 50000 --method mtp    # after make demo METHOD=mtp
    python scripts/parity_run.py --tokens 50000 --method suffix

A draft that is trained on demand must be there: see demo_pairs.py.

Plain decoding runs one sequence at a time on an engine built for one; speculative decoding runs in
batches, with chains and trees in turn and prefix reuse, on an engine built for eight. The rounds
cover every sampling parameter. Only two candidates within the margin of the engine explain a
difference: 1e-5 of the warped, noised score in float32, what `build` measured with recurrent layers.
Prints one JSON object; exits with 1 for an unexplained difference.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import replace
from pathlib import Path

from demo_pairs import PAIRS
from measure_demo import prompts

from edgespec.prompts import SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import GenerationRequest, Response
from edgespec.runtime.requests.lossless_check import first_difference

BATCH = 8
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.95),
    SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05),
    SamplingParams(
        temperature=1.3, top_k=20, top_p=0.9, repetition_penalty=1.1, logit_bias={10: 2.0, 32: -1.0}
    ),
)


def served(
    engine: Engine, jobs: list[GenerationRequest], batch_size: int
) -> dict[GenerationRequest, Response]:
    """Returns the response of each request."""
    found = {
        job: event
        for job, event in engine.run_queue(deque(jobs), batch_size)
        if isinstance(event, Response)
    }
    assert len(found) == len(jobs)
    return found


def main() -> None:
    """Compares outputs until there are enough tokens.

    Exits with 1 for an unexplained difference.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=50_000, help="tokens to compare, at least")
    parser.add_argument("--method", choices=PAIRS, default="eagle3", help="the demo pair")
    parser.add_argument("--prompts", type=int, default=32, help="prompts a round")
    parser.add_argument("--length", type=int, default=160, help="tokens an answer, at most")
    args = parser.parse_args()
    pair = PAIRS[args.method]
    if (missing := pair.missing()) is not None:
        parser.error(f"{missing} is not there: train it first")
    counts, margins, began = Counter[str](), [], time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        one, eight = (pair.make(Path(work), size, str(size)) for size in (1, BATCH))
        drafter = None if pair.drafter is None else {"drafter": pair.drafter}
        with (
            Engine(one, spec_decode=False) as plain_engine,
            Engine(eight, spec_decode=True, **(drafter or {})) as engine,
        ):
            ids = [engine.encode([message]) for message in prompts(args.prompts)]
            for seed, (sampling, sizes) in enumerate(
                itertools.cycle(itertools.product(SAMPLINGS, pair.plans.values()))
            ):
                if counts["tokens"] >= args.tokens:
                    break
                wanted = replace(sampling, seed=seed, max_generate_length=args.length)
                plan = engine.plan(*sizes)
                # A third of the batch decodes without drafts, and prefixes are cached for the next
                # round
                jobs = [
                    GenerationRequest(p, wanted, None if i % 3 == 2 else plan, keep=len(p) // 2)
                    for i, p in enumerate(ids)
                ]
                drafted = served(engine, jobs, BATCH)
                plain = served(plain_engine, [GenerationRequest(p, wanted) for p in ids], 1)
                by_prompt = {tuple(r.prompt_ids): r for r in plain.values()}
                for job, found in drafted.items():
                    reference = by_prompt[tuple(job.prompt_ids)]
                    counts["requests"] += 1
                    counts["tokens"] += len(reference.token_ids)
                    counts["drafts accepted"] += sum(found.metrics.per_step_accepted)
                    counts["reused prompt tokens"] += found.metrics.reused_tokens
                    difference = first_difference(plain_engine, reference, found, wanted)
                    if difference is not None:
                        counts["explained" if difference.explained else "unexplained"] += 1
                        margins.append(difference.apart)
                counts["rounds"] += 1
                print(json.dumps(counts), file=sys.stderr, flush=True)
    print(
        json.dumps(
            counts | {"margins": margins, "seconds": round(time.monotonic() - began, 1)}, indent=2
        )
    )
    sys.exit(bool(counts["unexplained"]))


if __name__ == "__main__":
    main()
