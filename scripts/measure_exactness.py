"""Counts where speculative decoding differs from plain decoding of the same engine: on the demo
pairs, built for kernels of our own.

    python scripts/measure_exactness.py mt_bench.jsonl humaneval.jsonl
    python scripts/measure_exactness.py mt_bench.jsonl --format int4-128 --method eagle3
    python scripts/measure_exactness.py mt_bench.jsonl --gguf Q4_K.gguf --method eagle3

The files have a prompt a line: the first of `turns`, or `prompt`. Each is answered greedily and
sampled (temperature 1 over the whole vocabulary, and 0.8 with top-k and top-p): plainly, then with
each draft plan alone, in chunks of a prompt, behind the KV rows that an earlier answer left, and in
batches of 8 with plans that differ from request to request. An answer differs where a token, a
piece of text, the reason of its end, or a bit of a log-probability does. With --gguf the base's
weights are those of GGUF files (scripts/gguf_types.py); of files of numbers the engine is float32,
whose log-probabilities are not compared. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
from demo_pairs import PAIRS, Pair

import edgespec
from edgespec.backends.ort.native.library import kernels
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.errors import counted
from edgespec.prompts import Message, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.metrics import Pooled
from edgespec.runtime.trees.tree import PLAIN, DraftPlan, Plain

FORMATS = {
    "int4-128": WeightFormat("int4", 128, kernels=NATIVE),
    "int4-32": WeightFormat("int4", 32, kernels=NATIVE),
    "int8-128": WeightFormat("int8", 128, kernels=NATIVE),
    "int8-0": WeightFormat("int8", 0, kernels=NATIVE),
    "int4-128-fp16-cache": WeightFormat("int4", 128, kernels=NATIVE, kv_cache_dtype="fp16"),
    "int4-32-int8-cache": WeightFormat("int4", 32, kernels=NATIVE, kv_cache_dtype="int8"),
}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(temperature=1.0, top_k=0, top_p=1.0),
    "temperature 0.8": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}
AS_STORED = WeightFormat(kernels=NATIVE)
BATCH = 8
CHUNK = 7  # tokens of a prompt that a call reads, instead of 256
NUM_LOGPROBS = 5  # their normalization depends on every bit of the logits
MAX_PROMPT = 384


@dataclass(frozen=True)
class Job:
    """A prompt, how its answer is sampled, and the plain answer."""

    prompt: list[int]
    sampling: SamplingParams
    plain: Response

    def behind(self, count: int) -> Job:
        """The rest of the answer, behind its first tokens: noise depends on the position alone."""
        rest = replace(self.plain, token_ids=self.plain.token_ids[count:], text="")
        rest = replace(rest, logprobs=self.plain.logprobs[count:])
        length = self.sampling.max_generate_length - count
        sampling = replace(self.sampling, max_generate_length=length)
        return Job(self.prompt + self.plain.token_ids[:count], sampling, rest)


@dataclass(frozen=True)
class Run:
    """Answers to jobs, and how many of them differ from the plain ones."""

    name: str
    jobs: Sequence[Job]
    answers: Sequence[Response]

    def row(self, *, bits: bool) -> dict[str, Any]:
        """What is printed of it."""
        pairs = zip(self.jobs, self.answers, strict=True)
        differing = [d for job, answer in pairs if (d := difference(job.plain, answer, bits=bits))]
        pool = Pooled([answer.metrics for answer in self.answers])
        return {
            "run": self.name,
            "answers": len(self.answers),
            "tokens": sum(len(answer.token_ids) for answer in self.answers),
            "acceptance_length": round(pool.acceptance_length or 1, 2),
            "reused_prompt_tokens": sum(answer.metrics.reused_tokens for answer in self.answers),
            "differences": len(differing),
            "first_differences": differing[:3],
        }


def difference(plain: Response, answer: Response, *, bits: bool) -> str | None:
    """In what an answer differs from the plain one; None where in nothing. The text of a rest of an
    answer is not compared, as it begins within a word."""
    if answer.token_ids != plain.token_ids:
        both = zip(plain.token_ids, answer.token_ids, strict=False)
        same = next((i for i, (a, b) in enumerate(both) if a != b), None)
        return "length" if same is None else f"token {same} of {len(plain.token_ids)}"
    if answer.finish_reason != plain.finish_reason:
        return f"finish reason {answer.finish_reason} instead of {plain.finish_reason}"
    if plain.text and answer.text != plain.text:
        return "text"
    assert len(plain.logprobs) == len(plain.token_ids)
    both_probs = zip(plain.logprobs, answer.logprobs, strict=True)
    other = next((i for i, (a, b) in enumerate(both_probs) if a != b), None)
    return None if other is None or not bits else f"log-probabilities of token {other}"


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """The prompts of JSONL files."""
    rows = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]


def plain_jobs(engine: Engine, prompts: Sequence[str], length: int) -> list[Job]:
    """Every prompt with one of the samplings after the other, answered plainly, each alone."""
    jobs = []
    for number, text in enumerate(prompts):
        ids = engine.encode([Message("user", text)])[:MAX_PROMPT]
        sampling = [*SAMPLINGS.values()][number % len(SAMPLINGS)]
        sampling = replace(
            sampling, seed=number, max_generate_length=length, num_logprobs=NUM_LOGPROBS
        )
        jobs.append(Job(ids, sampling, engine.plainly(ids, sampling)))
    return jobs


def alone(engine: Engine, jobs: Sequence[Job], plan: DraftPlan | Plain) -> list[Response]:
    """The answers to jobs one after the other."""
    return [engine.generate(job.prompt, job.sampling, plan) for job in jobs]


def batched(engine: Engine, jobs: Sequence[Job], plans: Sequence[Any]) -> list[Response]:
    """The answers to jobs that run together, whose plans take turns."""
    return engine.generate_batch(
        [job.prompt for job in jobs],
        [job.sampling for job in jobs],
        [plans[i % len(plans)] for i in range(len(jobs))],
    )


def runs(engine: Engine, jobs: Sequence[Job], plans: dict[str, DraftPlan]) -> Iterator[Run]:
    """All runs of an engine that keeps no prefixes."""
    for name, plan in plans.items():
        yield Run(f"{name}, alone", jobs, alone(engine, jobs, plan))
    yield Run(f"plain, batch of {BATCH}", jobs, batched(engine, jobs, [PLAIN]))
    for name, plan in plans.items():
        yield Run(f"{name}, batch of {BATCH}", jobs, batched(engine, jobs, [plan]))
    mixed = [*plans.values(), PLAIN]
    yield Run(f"mixed plans, batch of {BATCH}", jobs, batched(engine, jobs, mixed))
    with read_in_chunks(engine):
        yield Run(f"plain, prompt in chunks of {CHUNK}", jobs, alone(engine, jobs, PLAIN))
        yield Run(f"mixed plans, batch, chunks of {CHUNK}", jobs, batched(engine, jobs, mixed))


@contextmanager
def read_in_chunks(engine: Engine) -> Iterator[None]:
    """Within the block a call reads a few tokens of a prompt."""
    runner, usual = engine.base.runner, engine.base.prefill_chunk
    runner.prefill_chunk = CHUNK
    yield
    runner.prefill_chunk = usual


def reusing_runs(engine: Engine, jobs: Sequence[Job], plans: dict[str, DraftPlan]) -> Iterator[Run]:
    """Runs of an engine that keeps the rows of what it answered: each answer is kept, and half of
    it is then part of a prompt. The batch finds what the last of these runs kept."""
    halves = [job.behind(len(job.plain.token_ids) // 2) for job in jobs]
    for name, plan in {"plain": PLAIN, **plans}.items():
        engine.forget_prefixes()
        again = []
        for job, half in zip(jobs, halves, strict=True):
            engine.generate(job.prompt, job.sampling, plan, keep=True)
            again.append(engine.generate(half.prompt, half.sampling, plan))
        yield Run(f"{name}, behind a kept answer", halves, again)
    mixed = [*plans.values(), PLAIN]
    yield Run("mixed plans, batch, behind kept answers", halves, batched(engine, halves, mixed))


def measured(
    directory: Path, drafter: str | None, prompts: Sequence[str], length: int, sizes: Any
) -> Iterator[dict[str, Any]]:
    """Yields a row for each run of a pair of engines."""

    def opened(make: Callable[..., Iterator[Run]], **options: Any) -> Iterator[Run]:
        with edgespec.load(directory, spec_decode=True, drafter=drafter, **options) as engine:
            plans = {name: engine.plan(*size) for name, size in sizes.items()}
            yield from make(engine, jobs, plans)

    jobs: list[Job] = []
    with edgespec.load(directory, spec_decode=True, drafter=drafter, prefix_cache_bytes=0) as plain:
        about = {"scheme": plain.config.weights.scheme, "bitwise": plain.config.weights.is_bitwise}
        jobs = plain_jobs(plain, prompts, length)
    for make, options in ((runs, {"prefix_cache_bytes": 0}), (reusing_runs, {})):
        for run in opened(make, **options):
            yield about | run.row(bits=about["bitwise"])


def limit_threads(count: int) -> None:
    """Lets every session that is opened from now on have so many threads."""

    class Limited(ort.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.intra_op_num_threads = count

    ort.SessionOptions = Limited


def totals(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Answers, tokens and differences of each format, of each method, and of all."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        for name in (row["format"], row["method"], "all"):
            total = found.setdefault(name, {"answers": 0, "tokens": 0, "differences": 0})
            for key in total:
                total[key] += row[key]
    return found


def asked(
    pair: Pair, formats: Sequence[str], files: Sequence[Path] | None
) -> Iterator[tuple[str, Pair, WeightFormat]]:
    """What is built of a pair, by a name."""
    if files is None:
        yield from ((name, pair, FORMATS[name]) for name in formats)
    else:
        yield from ((file.stem, pair.on(file.resolve()), AS_STORED) for file in files)


def main() -> None:
    """Measures, and prints the rows and the totals; exits with 1 where anything differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, nargs="+", help="JSONL files")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--format", choices=FORMATS, action="append", help="default: all")
    chosen.add_argument("--gguf", type=Path, nargs="+", help="files with other weights of the base")
    parser.add_argument("--method", choices=PAIRS, action="append", help="default: all there are")
    parser.add_argument("--num-prompts", type=int, default=48, help="of all files, evenly taken")
    parser.add_argument("--length", type=int, default=96, help="tokens of an answer at most")
    parser.add_argument("--threads", type=int, help="of a session; default: ONNX Runtime's")
    args = parser.parse_args()
    if args.threads:
        limit_threads(args.threads)
    texts = read_prompts(args.prompts)
    texts = texts[:: max(1, len(texts) // args.num_prompts)][: args.num_prompts]
    methods = args.method or [name for name, pair in PAIRS.items() if pair.missing() is None]
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for method in methods:
            pair = PAIRS[method]
            if (missing := pair.missing()) is not None:
                parser.error(f"{missing} is not there: train it first")
            for name, of, options in asked(pair, args.format or FORMATS, args.gguf):
                room = Path(work, method) if of is pair else Path(work, method, name)
                engines = of.make(room, BATCH, f"{name}-engines", options)
                for row in measured(engines, pair.drafter, texts, args.length, pair.plans):
                    row = {"method": method, "format": name, **row}
                    rows.append(row)
                    differing = counted(row["differences"], "difference")
                    said = f"{method}, {name}, {row['run']}: {row['tokens']} tokens, {differing}"
                    print(said, file=sys.stderr, flush=True)
                shutil.rmtree(engines)
    found = {
        "machine": platform.processor() or platform.machine(),
        "level": kernels().level,
        "rows": rows,
        "totals": totals(rows),
    }
    print(json.dumps(found, indent=1))
    sys.exit(any(row["differences"] for row in rows))


if __name__ == "__main__":
    main()
