"""Measures what it gives that an lm_head finds what is asked of logits, on Qwen3-0.6B's shape.

    python scripts/measure_head.py [--layers 8] [--runs 9] [--work DIR]

Engines of a base and of two EAGLE-3 drafts (vocabularies of 32000 and of 151936) are built with and
without LowBitHead, int4 in blocks of 128. One process on one core, processor time, the two
alternating; the least of several runs. A pass counts what is asked of its logits: of the base the
best of the rows on a path of four, of a draft the best ten of each row. Weights are random.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import benchmark
import numpy as np

from edgespec import PLAIN, SamplingParams
from edgespec.backends.build import build
from edgespec.backends.call import Attention, Call, LaneAttention, Logits, Value
from edgespec.backends.host import HostStates
from edgespec.backends.ort import lowering
from edgespec.backends.ort.options import NATIVE, WeightFormat
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.registry import open_runner
from edgespec.contract import Limits, Role
from edgespec.export.components import ExportOptions, export
from edgespec.runtime.engine import Engine

VOCABS = (32000, 151936)  # of drafts
CONTEXT, PATH, TOP_K, TOKENS = 128, 4, 10, 64
LIMITS = Limits(max_input_len=256, max_kv_cache_capacity=512)
INT4 = WeightFormat("int4", 128, kernels=NATIVE)
FORMS = ("written", "searched")  # logits


def make(work: Path, layers: int) -> None:
    """Write checkpoints and build all engines: WORK/FORM-VOCAB has base and draft."""
    config = benchmark.BASE_CONFIG | {"num_hidden_layers": layers}
    benchmark.write_checkpoint(work / "base", config, benchmark.base_tensors(config))
    benchmark.write_tokenizer(work / "base")
    quick = ExportOptions(golden=False, base_for="eagle3")
    export(str(work / "base"), work / "onnx-base", quick)
    for vocab in VOCABS:
        benchmark.DRAFT_VOCAB = vocab
        config = benchmark.DRAFT_CONFIG | {"draft_vocab_size": vocab}
        draft, onnx = work / f"draft-{vocab}", work / f"onnx-{vocab}"
        benchmark.write_checkpoint(draft, config, benchmark.draft_tensors(config))
        export(str(draft), onnx, ExportOptions(golden=False, base_model_dir=str(work / "base")))
        for form in FORMS:
            with_or_without = searching() if form == FORMS[1] else not_searching()
            with with_or_without:
                for source in (work / "onnx-base", onnx):
                    build(source / "llm", work / f"{form}-{vocab}", LIMITS, options=INT4)


@contextmanager
def searching() -> Iterator[None]:
    """Builds as they are."""
    yield


@contextmanager
def not_searching() -> Iterator[None]:
    """Builds whose logits are all written."""
    kept = lowering.search_logits
    lowering.search_logits = lambda graph: None
    try:
        yield
    finally:
        lowering.search_logits = kept


def call_of(runner: OrtRunner, rows: int) -> Call:
    """Rows of a chain behind a context of zeros."""
    shape, random = runner.contract.shape, np.random.default_rng(rows)
    angles = random.standard_normal((1, rows, shape.rotary_dim // 2), np.float32)
    extras: dict[str, Value] = {}
    if shape.reads_hidden_states:
        width = shape.base_features
        extras["base_hidden"] = [HostStates(random.standard_normal((rows, width), np.float32))]
    return Call(
        random.standard_normal((1, rows, shape.hidden_size), np.float32),
        np.cos(angles),
        np.sin(angles),
        Attention([LaneAttention(CONTEXT, np.tri(rows, dtype=bool), CONTEXT + np.arange(rows))]),
        np.array([CONTEXT]),
        [np.arange(rows)],
        extras,
    )


def ask_path(logits: Logits) -> None:
    """What greedy verification asks."""
    for row in range(min(PATH, len(logits))):
        logits.best(row)


def ask_top(logits: Logits) -> None:
    """What a tree of drafts asks."""
    logits.finite()
    logits.top(TOP_K)


def ask_chain(logits: Logits) -> None:
    """What a chain of drafts asks."""
    logits.finite()
    logits.top(1)


def least(work: dict[str, Callable[[], None]], runs: int) -> dict[str, float]:
    """The least processor time of each, in ms; they alternate."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(runs):
        for name, run in work.items():
            began = time.process_time_ns()
            run()
            found[name].append((time.process_time_ns() - began) / 1e6)
    return {name: min(times) for name, times in found.items()}


def measure_passes(work: Path, role: Role, vocab: int, runs: int) -> None:
    """Print the time of passes of both forms."""
    runners = {form: open_runner(work / f"{form}-{vocab}", role)[0] for form in FORMS}
    name = "base" if role is Role.BASE else f"draft of {vocab}"
    cases = (
        [(rows, ask_path) for rows in (1, 8, 60)]
        if role is Role.BASE
        else [(1, ask_chain), (1, ask_top), (10, ask_top)]
    )
    for rows, ask in cases:
        calls = {form: call_of(runner, rows) for form, runner in runners.items()}

        def one(form: str, calls: dict[str, Call] = calls, ask: Callable = ask) -> None:
            ask(runners[form].run(calls[form])[0].logits)

        work_of = {form: lambda form=form, one=one: one(form) for form in FORMS}
        least(work_of, 3)
        times = least(work_of, runs)
        said = "  ".join(f"{form} {took:8.3f} ms" for form, took in times.items())
        print(f"{name}, {rows:2} rows, {ask.__name__:8}  {said}", flush=True)


def measure_steps(work: Path, vocab: int, runs: int) -> None:
    """Print the processor time of a whole greedy step of both forms."""
    prompt = np.random.default_rng(1).integers(0, 256, CONTEXT).tolist()
    sampling = SamplingParams(temperature=0, max_generate_length=TOKENS)
    engines = {form: Engine(work / f"{form}-{vocab}") for form in FORMS}
    for label in ("plain", "chain 1/3/4", "tree 10/6/60"):
        steps = {}

        def one(form: str, label: str = label, steps: dict[str, int] = steps) -> None:
            engine = engines[form]
            sizes = () if label == "plain" else map(int, label.split()[1].split("/"))
            plan = engine.plan(*sizes) if label != "plain" else PLAIN
            steps[form] = engine.generate(prompt, sampling, plan).metrics.steps

        work_of = {form: lambda form=form, one=one: one(form) for form in FORMS}
        times = least(work_of, runs)
        said = "  ".join(f"{form} {took / steps[form]:8.3f} ms" for form, took in times.items())
        print(f"a step, draft of {vocab}, {label:12}  {said}", flush=True)


def resident(directory: Path) -> None:
    """Print the resident memory that is no file's after passes of 60 rows."""
    runner = open_runner(directory, Role.BASE)[0]
    for rows in (1, 60, 60):
        ask_path(runner.run(call_of(runner, rows))[0].logits)
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(line for line in status if line.startswith("RssAnon")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--resident", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if args.resident:
        return resident(args.resident)
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        if not (work / f"{FORMS[1]}-{VOCABS[-1]}").is_dir():
            make(work, args.layers)
        measure_passes(work, Role.BASE, VOCABS[0], args.runs)
        for vocab in VOCABS:
            measure_passes(work, Role.DRAFT, vocab, args.runs)
        for vocab in VOCABS:
            measure_steps(work, vocab, max(3, args.runs // 3))
        for form in FORMS:
            print(form, end=": ", flush=True)
            path = str(work / f"{form}-{VOCABS[0]}")
            subprocess.run([sys.executable, __file__, "--resident", path], check=True)


if __name__ == "__main__":
    main()
