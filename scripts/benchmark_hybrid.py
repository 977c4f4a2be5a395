"""Measures steps, rollback and prefill on a checkpoint of Qwen3.5-0.8B's shape, beside
transformers.

    python scripts/benchmark_hybrid.py                    # all; needs 12 GB of disk under --work and 10 GB of memory
    python scripts/benchmark_hybrid.py --only steps       # or: prefill

Weights are random: speeds are representative, the text is not. Rounds alternate between the
subjects, and results are medians. `--weights` are those of `edgespec build`: fp32, int8, int8/0
(per channel), int4.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from benchmark import measured, write_tokenizer

from edgespec.runtime.engine import Engine

VOCAB, CONTEXT = 248320, 256
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}


def write_checkpoint(path: Path) -> None:
    """Writes a checkpoint with random weights."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE)).save_pretrained(path)
    torch.set_default_dtype(torch.float32)
    write_tokenizer(path)


def engine_of(work: Path, weights: str) -> Path:
    """Returns the engine of a base that emits aux hidden states; builds it at the first call."""
    path = work / f"hybrid-{weights.replace('/', '-')}"
    if not (path / "manifest.json").is_file():
        if not (work / "hybrid-onnx").is_dir():
            measured(["export", str(work / "hybrid"), str(work / "hybrid-onnx"), "--eagle-base"])
        kind, _, block = weights.partition("/")
        options = ["--weights", kind, *(["--weight-block", block] if block else [])]
        measured(
            [
                "build",
                "--onnx-dir",
                str(work / "hybrid-onnx" / "llm"),
                "--engine-dir",
                str(path),
                *options,
            ]
        )
    return path


def bench_steps(work: Path, weights: str, rounds: int) -> dict[str, object]:
    """Returns times of a base pass over a chain of rows and of the commit of some of them.

    The context has 256 tokens.
    """
    rng = np.random.default_rng(1)
    cases = [(1, 1), (4, 1), (4, 4), (8, 1), (8, 4), (8, 8), (16, 8)]
    passes: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    commits: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    with Engine(engine_of(work, weights), spec_decode=False) as engine:
        base = engine.base
        for start in range(0, CONTEXT, 64):
            del start
            base.extend([base.causal(0, rng.integers(0, 256, 64), np.array([63]))])
        for _ in range(rounds):
            for rows, kept in cases:
                part = base.causal(0, rng.integers(0, 256, rows), np.arange(rows))
                # the second call counts: it has as many pending rows as after any such step
                for _ in range(2):
                    part = base.causal(0, rng.integers(0, 256, rows), np.arange(rows))
                    began = time.perf_counter()
                    base.run([part])
                    ran = time.perf_counter()
                    base.commit(0, np.arange(kept))
                    done = time.perf_counter()
                passes[rows, kept].append(ran - began)
                commits[rows, kept].append(done - ran)
    decode = statistics.median(passes[1, 1]) + statistics.median(commits[1, 1])
    found: dict[str, object] = {"decode_ms": round(1000 * decode, 2)}
    for case in cases:
        run, commit = statistics.median(passes[case]), statistics.median(commits[case])
        found["verify {} keep {}".format(*case)] = {
            "step_ms": round(1000 * (run + commit), 2),
            "commit_ms": round(1000 * commit, 3),
            "commit_share": round(commit / (run + commit), 4),
            "to_decode": round((run + commit) / decode, 3),
        }
    return found


def bench_prefill(work: Path, weights: list[str], tokens: int, rounds: int) -> dict[str, object]:
    """Returns prefill tokens/s of each engine and of transformers, last logits included."""
    import torch
    from transformers import Qwen3_5ForCausalLM

    ids = np.random.default_rng(2).integers(0, 256, tokens)
    runs: dict[str, Callable[[], object]] = {}
    engines = {name: Engine(engine_of(work, name), spec_decode=False) for name in weights}

    def ours(engine: Engine) -> None:
        engine.base.reset(0)
        for start in range(0, tokens, 64):
            chunk = ids[start : start + 64]
            engine.base.extend([engine.base.causal(0, chunk, np.array([len(chunk) - 1]))])

    runs |= {f"edgespec {name}": lambda e=engine: ours(e) for name, engine in engines.items()}
    for dtype in (torch.float32, torch.bfloat16):
        model = Qwen3_5ForCausalLM.from_pretrained(work / "hybrid", dtype=dtype).eval()

        def theirs(model: Qwen3_5ForCausalLM = model) -> None:
            with torch.no_grad():
                model(torch.tensor(ids[None]), use_cache=True, logits_to_keep=1)

        runs[f"transformers {str(dtype).removeprefix('torch.')}"] = theirs
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):  # the first round warms up
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {
        name: {"tokens_per_s": round(tokens / statistics.median(t[1:]), 1), "s": t[1:]}
        for name, t in times.items()
    }


def main() -> None:
    """Runs the benchmarks and prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "edgespec-benchmark"
    )
    parser.add_argument("--only", choices=("steps", "prefill"), action="append")
    parser.add_argument(
        "--weights", action="append", help="of the engines; default: fp32, int8/0 and int4"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    weights = args.weights or ["fp32", "int8/0", "int4"]
    if not (args.work / "hybrid" / "tokenizer.json").is_file():
        shutil.rmtree(args.work / "hybrid", ignore_errors=True)
        write_checkpoint(args.work / "hybrid")
    result: dict[str, object] = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "arch": platform.machine()}
    }
    wanted = args.only or ["steps", "prefill"]
    if "steps" in wanted:
        result["steps"] = {name: bench_steps(args.work, name, args.rounds) for name in weights}
    if "prefill" in wanted:
        result["prefill"] = bench_prefill(args.work, weights, args.tokens, max(3, args.rounds // 3))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
