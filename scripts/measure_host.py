"""Measures what decoding costs beside the engines: Python's share of plain steps, of steps with
drafts, and of their parts.

    python scripts/measure_host.py ENGINE_DIR [--plan 1/3/4] [--plan 1/1/8] [--prompts 6]

One thread and its processor time: `host` is all of it but ONNX Runtime's own run. Medians of single
steps, in microseconds. Answers with drafts and without alternate, and must be the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from measure_pass import on_one_thread

import edgespec
from edgespec.backends.ort.runner import OrtRunner
from edgespec.prompts import Message, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.scheduler import Scheduler
from edgespec.runtime.loop.session import Session
from edgespec.runtime.trees.tree import PLAIN

REPOSITORY = Path(__file__).resolve().parents[1]
PARTS = ("draft", "verify", "commit", "observe")
FEW = 8  # first steps of an answer that are left out: their sizes are new
Plans = dict[str, Any]


class Clock:
    """Nanoseconds of this thread inside ONNX Runtime, and of each call of what is watched: whole
    and inside."""

    def __init__(self) -> None:
        self.inside, self.calls = 0, 0
        self.found: dict[str, list[tuple[int, int]]] = defaultdict(list)

    def watch(self, owner: type, method: str, name: Callable[[Any], str]) -> None:
        """Let each call of a method be timed, under a name that its object has."""
        function = getattr(owner, method)

        def timed(own: Any, *args: Any) -> Any:
            inside, began = self.inside, time.thread_time_ns()
            result = function(own, *args)
            spent = time.thread_time_ns() - began
            self.found[name(own)].append((spent, self.inside - inside))
            return result

        setattr(owner, method, timed)

    def watch_engines(self) -> None:
        """Let each run of ONNX Runtime be timed."""
        function = ort.InferenceSession.run_with_iobinding

        def run(own: Any, binding: Any, *args: Any) -> Any:
            began = time.thread_time_ns()
            function(own, binding, *args)
            self.inside += time.thread_time_ns() - began
            self.calls += 1

        ort.InferenceSession.run_with_iobinding = run


def figures(found: dict[str, list[tuple[int, int]]]) -> dict[str, dict[str, float]]:
    """Medians in microseconds, by what was watched."""
    out = {}
    for name, calls in ((name, calls) for name, calls in found.items() if calls):
        whole, inside = np.array(calls[FEW:] or calls).T / 1e3
        out[name] = {
            "host_us": round(float(np.median(whole - inside)), 1),
            "engine_us": round(float(np.median(inside)), 1),
            "calls": len(calls),
        }
    return out


def measured(engine: Engine, plans: Plans, prompts: list[list[int]], tokens: int) -> Any:
    """For each plan, and without one, the figures of its steps."""
    clock = Clock()
    roles = {id(engine.base.runner): "base run"}
    clock.watch_engines()
    clock.watch(OrtRunner, "run", lambda own: roles.get(id(own), "draft run"))
    clock.watch(Scheduler, "step", lambda own: "step")
    for part in PARTS:
        clock.watch(Session, part, lambda own, part=part: part)  # type: ignore[misc]
    sampling = SamplingParams(temperature=0.0, max_generate_length=tokens)
    kept: dict[str, dict[str, list[tuple[int, int]]]] = {name: defaultdict(list) for name in plans}
    answers: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        for name, plan in plans.items():
            clock.found = defaultdict(list)
            answer = engine.generate(prompt, sampling, plan).token_ids
            for watched, calls in clock.found.items():
                kept[name][watched] += calls[1:]  # without prefill
            assert answers.setdefault(number, answer) == answer, "drafts changed an answer"
    return {name: figures(found) for name, found in kept.items()}


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine_dir", type=Path)
    parser.add_argument("--plan", action="append", default=[], help="top-k/step/verify size")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    on_one_thread()
    asked = json.loads((REPOSITORY / "recipes/demo/input.json").read_text())["requests"]
    with edgespec.load(args.engine_dir, spec_decode=True) as engine:
        plans: Plans = {"plain": PLAIN}
        for sizes in args.plan:
            plans[sizes] = engine.plan(*map(int, sizes.split("/")))
        texts = [request["messages"][-1]["content"] for request in asked]
        prompts = [
            engine.encode([Message("user", texts[i % len(texts)])]) for i in range(args.prompts)
        ]
        found = measured(engine, plans, prompts, args.tokens)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for name, rows in found.items():
        print(name)
        for watched in sorted(rows):
            print(f"  {watched:10}", *(f"{key} {value}" for key, value in rows[watched].items()))


if __name__ == "__main__":
    main()
