"""Measures what a proposal of the drafters without an engine costs at a long context.

    python scripts/measure_drafter.py                       # 32768 tokens of context, 500 steps
    python scripts/measure_drafter.py --context 4096 --json

The text is this repository's own, a word or a sign a token, half of the answer copied from the
prompt. `step` is one proposal with the observation of what was accepted, `prompt` the reading of the
whole prompt, `bytes` what the drafter holds of it. Prints medians and the 99th percentile.
"""

from __future__ import annotations

import argparse
import json
import re
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.runtime.drafters.base import Drafter, DraftRequest, Observation
from edgespec.runtime.drafters.ngram import NgramDrafter, NgramOptions
from edgespec.runtime.drafters.suffix import SuffixDrafter, SuffixOptions
from edgespec.runtime.trees.tree import DraftPlan, DraftTree

REPOSITORY = Path(__file__).resolve().parents[1]
WORDS = re.compile(r" ?\w+| ?[^\w\s]|\s+")
ROW_COST = 0.18  # of INT4 weights in blocks
PLANS = {"ngram": DraftPlan(1, 3, 4), "suffix": DraftPlan(4, 32, 60)}
SPAN = 24  # tokens that are copied, or new, in a row


def drafters() -> dict[str, Drafter]:
    """New drafters, by the names of their methods."""
    pooled = SuffixOptions(enable_global_pool=True)
    return {
        "ngram": NgramDrafter(NgramOptions()),
        "suffix": SuffixDrafter(SuffixOptions(), ROW_COST),
        "suffix with the pool": SuffixDrafter(pooled, ROW_COST),
    }


def words_of(paths: Sequence[Path]) -> list[int]:
    """The texts of files as tokens: each word, with the space before it, is one."""
    ids: dict[str, int] = {}
    found = (word for path in paths for word in WORDS.findall(path.read_text(encoding="utf-8")))
    return [ids.setdefault(word, len(ids)) for word in found]


def sample(context: int, steps: int) -> tuple[list[int], list[int]]:
    """A prompt of `context` tokens, and an answer of which every other span is copied from it."""
    files = sorted((REPOSITORY / "edgespec").rglob("*.py"))
    text = words_of(files)
    prompt, rest = text[:context], text[context:]
    rng, answer = np.random.default_rng(0), list[int]()
    while len(answer) < 8 * steps:  # a step may take in several
        first = int(rng.integers(0, len(prompt) - SPAN))
        answer += prompt[first : first + SPAN]
        first = int(rng.integers(0, len(rest) - SPAN))
        answer += rest[first : first + SPAN]
    return prompt, answer


def accepted(tree: DraftTree, coming: Sequence[int]) -> int:
    """How many drafts of a tree are what comes."""
    node = 0
    for count, token in enumerate(coming):
        child = tree.child(node, token)
        if child is None:
            return count
        node = child
    return len(coming)


def measured(
    drafter: Drafter, plan: DraftPlan, prompt: list[int], answer: list[int], steps: int
) -> dict[str, Any]:
    """Times in milliseconds, and what was drafted and accepted."""
    tracemalloc.start()
    began = time.perf_counter()
    drafter.begin(0, prompt, 0)
    drafter.observe([Observation(0, None, np.array(answer[:1], np.int64))])
    drafter.propose([DraftRequest(0, answer[0], plan)])
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    drafter.reset(0)
    began = time.perf_counter()
    drafter.begin(0, [*prompt[1:], prompt[0]], 0)
    drafter.observe([Observation(0, None, np.array(answer[:1], np.int64))])
    drafter.propose([DraftRequest(0, answer[0], plan)])
    read_s = time.perf_counter() - began
    at, times, drafted, right = 1, [], 0, 0
    for _ in range(steps):
        began = time.perf_counter()
        (tree,) = drafter.propose([DraftRequest(0, answer[at - 1], plan)])
        proposed_s = time.perf_counter() - began
        count = accepted(tree, answer[at:])
        item = Observation(0, None, np.array(answer[at : at + count + 1], np.int64))
        began = time.perf_counter()
        drafter.observe([item])
        times.append(proposed_s + time.perf_counter() - began)
        at, drafted, right = at + count + 1, drafted + len(tree) - 1, right + count
    return {
        "step_ms": round(1e3 * float(np.median(times)), 4),
        "step_ms_p99": round(1e3 * float(np.quantile(times, 0.99)), 4),
        "prompt_ms": round(1e3 * read_s, 1),
        "bytes_per_token": round(size / len(prompt)),
        "drafted_per_step": round(drafted / steps, 2),
        "acceptance_length": round(1 + right / steps, 3),
    }


def main() -> None:
    """Measures each drafter and prints a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    prompt, answer = sample(args.context, args.steps)
    found = {
        name: measured(drafter, PLANS[name.split()[0]], prompt, answer, args.steps)
        for name, drafter in drafters().items()
    }
    if args.json:
        print(json.dumps({"context": len(prompt), "steps": args.steps, **found}, indent=2))
        return
    print(f"{len(prompt)} tokens of context, {args.steps} steps")
    for name, figures in found.items():
        print(f"  {name:22}" + ", ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
