"""Measures whole passes of engines, the engines alternating, behind a context.

    python scripts/measure_pass.py ENGINE_DIR [ENGINE_DIR ...] [--rows 1 4 8 16 60]

One thread and its processor time; of each the least and the median of several runs. Beside them,
how many times as long the first engine takes, and how many one-row passes of its own each takes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

import edgespec.backends.ort.runner as runners
from edgespec.backends.engine_dir import finished_engines, open_engine
from edgespec.backends.made_calls import made_call
from edgespec.backends.ort.backend import OrtBackend
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.ort.session import session_options


def on_one_thread() -> None:
    """Let every session that is opened have one thread."""

    def options() -> object:
        made = session_options()
        made.intra_op_num_threads = 1
        return made

    runners.session_options = options  # type: ignore[assignment]


def opened(engine_dir: Path) -> OrtRunner:
    """A runner of the first engine of a directory."""
    role = next(iter(finished_engines(engine_dir).engines))
    config, _ = open_engine(engine_dir, role)
    backend = OrtBackend()
    return backend.open(engine_dir, config, backend.open_device())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine_dir", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 60])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    on_one_thread()
    engines = [opened(path) for path in args.engine_dir]
    for engine in engines:
        engine.run(made_call(engine.contract, 0, 0, args.context))
    first: list[float] = []
    for rows in args.rows:
        call = made_call(engines[0].contract, 0, args.context, rows, heads=rows)
        times = np.empty((args.runs + 1, len(engines)))
        for run in range(args.runs + 1):
            for i, engine in enumerate(engines):
                began = time.thread_time_ns()
                engine.run(call)
                times[run, i] = (time.thread_time_ns() - began) / 1e6
        least, median = times[1:].min(0), np.median(times[1:], 0)
        first = first or list(least)
        print(f"{rows:4} rows:", end="")
        for i, path in enumerate(args.engine_dir):
            shares = f"{least[0] / least[i]:.2f}, t/t(1) {least[i] / first[i]:.2f}"
            print(f"  {path.name} {least[i]:.2f} ms ({median[i]:.2f}), {shares};", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
