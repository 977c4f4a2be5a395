"""Measures demo pairs on text of held-out modules of the standard library, which training never saw.

    python scripts/measure_demo.py --engine-dir demo-out/engines --prompts 64
    python scripts/measure_demo.py --method eagle3 --method suffix     # builds the engines itself
    python scripts/measure_demo.py --method eagle3 --sets --temperature 0 --prompts 6 --repeats 4

Several pairs are measured one after the other; those that are trained on demand must be there, see
demo_pairs.py. `--sets` measures five kinds of prompts instead of functions alone, see demo_text.py.

Prints acceptance for what the engine drafts by itself ("own") and for fixed chains and trees,
greedy and sampled, beside plain decoding in the same run, and whether every answer equals the plain
one. Plain and speculative answers take turns; with `--repeats` each step counts with the median of
its times. The hold-out is that of `train_demo_model.py`; run it with the Python that trained.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from demo_pairs import PAIRS
from demo_text import KINDS
from demo_text import messages as texts
from train_demo_model import functions_of, stdlib_files

import edgespec
import edgespec.backends.ort.runner as runners
from edgespec import PLAIN
from edgespec.backends.ort.session import session_options
from edgespec.prompts import Message, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.metrics import Pooled
from edgespec.runtime.requests.lossless_check import first_difference
from edgespec.runtime.trees.tree import DraftPlan

OWN = "own"  # the engine's own plan, without sizes


def prompts(count: int) -> list[Message]:
    """Returns `count` functions of held-out modules, in random but fixed order."""
    _, held = stdlib_files()
    heads = [head for head, _ in functions_of(held)]
    order = np.random.default_rng(0).permutation(len(heads))[:count]
    return [Message("user", heads[i]) for i in order]


def prompt_set(kind: str, count: int) -> list[Message]:
    """Returns `count` prompts of a kind from held-out modules."""
    if kind == "functions":
        return prompts(count)
    _, held = stdlib_files()
    return [Message("user", text) for text in texts(kind, held, count)]


@dataclass
class Timed:
    """The same answer to a prompt, several times; `cpu_s` is this process's, prefill included."""

    responses: list[Response] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def decode_s(self) -> float:
        """Seconds of decoding, each step with the median of its times."""
        steps = [response.metrics.per_step_s for response in self.responses]
        return float(np.median(np.array(steps), 0).sum())


def run(
    engine: Engine,
    messages: Sequence[Message],
    sampling: SamplingParams,
    plan: DraftPlan | None,
    repeats: int,
) -> tuple[list[Timed], list[Timed]]:
    """Generates for each prompt without and with drafts, in turn. Returns both lists."""
    plain, found = ([Timed() for _ in messages] for _ in range(2))
    for repeat in range(repeats):
        for number, message in enumerate(messages):
            ids = engine.encode([message])
            turns = [(plain[number], PLAIN), (found[number], plan)]
            for timed, of in turns if (number + repeat) % 2 == 0 else turns[::-1]:
                began = time.process_time()
                timed.responses.append(engine.generate(ids, sampling, of))
                timed.cpu_s.append(time.process_time() - began)
    return plain, found


def measured(
    engine: Engine,
    messages: Sequence[Message],
    sampling: SamplingParams,
    policies: Sequence[str],
    repeats: int,
) -> Iterator[dict[str, object]]:
    """Yields one row per plan of the engine's method."""
    method = engine.method
    assert method is not None
    plans: dict[str, DraftPlan | None] = {}
    if OWN in policies:
        plans[OWN] = None
    if "fixed" in policies:
        plans |= {name: engine.plan(*sizes) for name, sizes in PAIRS[method].plans.items()}
    for name, plan in plans.items():
        plain, found = run(engine, messages, sampling, plan, repeats)
        firsts = [(p.responses[0], s.responses[0]) for p, s in zip(plain, found, strict=True)]
        differing = [d for p, s in firsts if (d := first_difference(engine, p, s, sampling))]
        pool, base = Pooled([s.metrics for _, s in firsts]), Pooled([p.metrics for p, _ in firsts])
        seconds, plain_seconds = (sum(t.decode_s for t in some) for some in (found, plain))
        cpu, plain_cpu = (sum(float(np.median(t.cpu_s)) for t in some) for some in (found, plain))
        tokens, plain_tokens = pool.decode_tokens, base.decode_tokens
        yield {
            "method": method,
            "temperature": sampling.temperature,
            "plan": name,
            "tokens": tokens,
            "acceptance_length": round(pool.acceptance_length or 0, 3),
            "per_position": [round(r, 3) for r in pool.per_position_acceptance],
            "base_passes_per_token": round(pool.steps / tokens, 3),
            "base_passes_saved": round(1 - pool.steps / base.steps, 3),
            "plain_ms_per_token": round(1000 * plain_seconds / plain_tokens, 3),
            "speed_over_plain": round((tokens / seconds) / (plain_tokens / plain_seconds), 3),
            "processor_time_over_plain": round((tokens / cpu) / (plain_tokens / plain_cpu), 3),
            "differences": len(differing),
            "explained_by_rounding": sum(d.explained for d in differing),
        }


def with_threads(count: int) -> None:
    """Lets every session that is opened have so many threads."""

    def options() -> object:
        made = session_options()
        made.intra_op_num_threads = count
        return made

    runners.session_options = options  # type: ignore[assignment]


def main() -> None:
    """Prints one JSON object per row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-dir", type=Path, action="append", default=[])
    parser.add_argument("--method", choices=PAIRS, action="append", default=[], help="build it")
    parser.add_argument("--sets", action="store_true", help="five kinds of prompts, not functions")
    parser.add_argument("--set", choices=KINDS, action="append", default=[], help="one of the five")
    parser.add_argument("--prompts", type=int, default=64, help="of each set (default: 64)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 0.7")
    parser.add_argument("--repeats", type=int, default=1, help="of each answer (default: 1)")
    parser.add_argument("--threads", type=int, help="of an engine (default: as many as cores)")
    parser.add_argument(
        "--policy",
        choices=(OWN, "fixed"),
        action="append",
        help="what the engine drafts by itself, or the plans of demo_pairs.py (default: both)",
    )
    args = parser.parse_args()
    if args.threads is not None:
        with_threads(args.threads)
    kinds = args.set or (list(KINDS) if args.sets else ["functions"])
    sets = {kind: prompt_set(kind, args.prompts) for kind in kinds}
    with tempfile.TemporaryDirectory() as work:
        dirs: list[tuple[Path, str | None]] = [(path, None) for path in args.engine_dir]
        for method in args.method:
            pair = PAIRS[method]
            if (missing := pair.missing()) is not None:
                parser.error(f"{missing} is not there: train it first")
            dirs.append((pair.make(Path(work, method), 1), pair.drafter))
        for path, drafter in dirs:
            with edgespec.load(path, spec_decode=True, drafter=drafter) as engine:
                for kind, messages in sets.items():
                    for temperature in args.temperature or (0.0, 0.7):
                        sampling = SamplingParams(
                            temperature,
                            top_p=0.95,
                            top_k=50,
                            seed=1,
                            max_generate_length=args.tokens,
                        )
                        policies = args.policy or (OWN, "fixed")
                        for row in measured(engine, messages, sampling, policies, args.repeats):
                            print(json.dumps({"set": kind, **row}), flush=True)
    print(json.dumps({"python": platform.python_version(), "prompts": args.prompts}))


if __name__ == "__main__":
    main()
