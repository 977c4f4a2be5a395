"""Measures demo pairs on functions of held-out modules of the standard library, which training
never saw.

    python scripts/measure_demo.py --engine-dir demo-out/engines --prompts 64
    python scripts/measure_demo.py --method eagle3 --method suffix     # builds the engines itself

Several pairs are measured one after the other; those that are trained on demand must be there, see
demo_pairs.py.

Prints acceptance for chains and trees, greedy and sampled, beside plain decoding in the same run,
and whether every answer equals the plain one. The hold-out is that of `train_demo_model.py`; run it
with the Python that trained.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from demo_pairs import PAIRS
from train_demo_model import functions_of, stdlib_files

import edgespec
from edgespec.prompts import Message, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.generation import Response
from edgespec.runtime.lossless_check import first_difference
from edgespec.runtime.metrics import Pooled
from edgespec.runtime.tree import DraftPlan


def prompts(count: int) -> list[Message]:
    """Returns `count` prompts from held-out modules, in random but fixed order."""
    _, held = stdlib_files()
    heads = [head for head, _ in functions_of(held)]
    order = np.random.default_rng(0).permutation(len(heads))[:count]
    return [Message("user", heads[i]) for i in order]


def run(
    engine: Engine, messages: list[Message], sampling: SamplingParams, plan: DraftPlan
) -> tuple[list[Response], list[Response]]:
    """Generates for each prompt without and with drafts, alternating. Returns both lists."""
    plain, found = [], []
    for message in messages:
        ids = engine.encode([message])
        plain.append(engine.plainly(ids, sampling))
        found.append(engine.generate(ids, sampling, plan))
    return plain, found


def measured(
    engine: Engine, messages: list[Message], sampling: SamplingParams
) -> Iterator[dict[str, object]]:
    """Yields one row per plan of the engine's method."""
    method = engine.method
    assert method is not None
    for name, sizes in PAIRS[method].plans.items():
        plain, found = run(engine, messages, sampling, engine.plan(*sizes))
        pairs = zip(plain, found, strict=True)
        differing = [d for p, s in pairs if (d := first_difference(engine, p, s, sampling))]
        pool, base = Pooled([r.metrics for r in found]), Pooled([r.metrics for r in plain])
        yield {
            "method": method,
            "temperature": sampling.temperature,
            "plan": name,
            "tokens": pool.decode_tokens,
            "acceptance_length": round(pool.acceptance_length or 0, 3),
            "per_position": [round(r, 3) for r in pool.per_position_acceptance],
            "base_passes_per_token": round(pool.steps / pool.decode_tokens, 3),
            "base_passes_saved": round(1 - pool.steps / base.steps, 3),
            "speed_over_plain": round(pool.tokens_per_s / base.tokens_per_s, 3),
            "differences": len(differing),
            "explained_by_rounding": sum(d.explained for d in differing),
        }


def main() -> None:
    """Prints one JSON object per row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine-dir", type=Path, action="append", default=[])
    parser.add_argument("--method", choices=PAIRS, action="append", default=[], help="build it")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, action="append", help="default: 0 and 0.7")
    args = parser.parse_args()
    messages = prompts(args.prompts)
    with tempfile.TemporaryDirectory() as work:
        dirs: list[tuple[Path, str | None]] = [(path, None) for path in args.engine_dir]
        for method in args.method:
            pair = PAIRS[method]
            if (missing := pair.missing()) is not None:
                parser.error(f"{missing} is not there: train it first")
            dirs.append((pair.make(Path(work, method), 1), pair.drafter))
        for path, drafter in dirs:
            with edgespec.load(path, spec_decode=True, drafter=drafter) as engine:
                for temperature in args.temperature or (0.0, 0.7):
                    sampling = SamplingParams(
                        temperature, top_p=0.95, top_k=50, seed=1, max_generate_length=args.tokens
                    )
                    for row in measured(engine, messages, sampling):
                        print(json.dumps(row), flush=True)
    print(json.dumps({"python": platform.python_version(), "prompts": len(messages)}))


if __name__ == "__main__":
    main()
