"""Measures export, build, load, steps and batches on a checkpoint of Qwen3-0.6B's shape.

    python scripts/benchmark.py                 # everything, medians of 5; needs 12 GB of disk under --work
    python scripts/benchmark.py --only export   # or: build, steps, batches, start

Weights are random: speeds and sizes are representative, text and acceptance are not. Prints one
JSON object with every run, the medians and a description of the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from edgespec import PLAIN, SamplingParams
from edgespec.benchmark.synthetic import Dial, SyntheticDrafter, Truth, synthetic
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import GenerationRequest, Response
from edgespec.runtime.trees.tree import DraftPlan

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB = (
    1024,
    3072,
    28,
    16,
    8,
    128,
    151936,
    32000,
)
Config = dict[str, Any]
BASE_CONFIG: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "eos_token_id": 151645,
    "use_sliding_window": False,
}
DRAFT_CONFIG: Config = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFT_VOCAB,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


def layer(prefix: str, wide: int, config: Config) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a decoder layer's tensors by name; q, k and v read `wide` inputs."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[key] * HEAD_DIM for key in ("num_attention_heads", "num_key_value_heads"))
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, wide),
        f"{prefix}.self_attn.k_proj.weight": (kv, wide),
        f"{prefix}.self_attn.v_proj.weight": (kv, wide),
        f"{prefix}.self_attn.o_proj.weight": (hidden, q),
        f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}.mlp.up_proj.weight": (inner, hidden),
        f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def base_tensors(config: Config = BASE_CONFIG) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the base's tensors by name."""
    hidden = config["hidden_size"]
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        tensors |= layer(f"model.layers.{i}", hidden, config)
        norms = ("q_norm", "k_norm")
        tensors |= {f"model.layers.{i}.self_attn.{norm}.weight": (HEAD_DIM,) for norm in norms}
    return tensors


def draft_tensors(config: Config = DRAFT_CONFIG) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the EAGLE-3 draft's tensors by name."""
    hidden = config["hidden_size"]
    rest = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    return rest | layer("midlayer", 2 * hidden, config) | {"lm_head.weight": (DRAFT_VOCAB, hidden)}


def write_checkpoint(
    path: Path, config: dict[str, object], tensors: dict[str, tuple[int, ...]]
) -> None:
    """Writes random bfloat16 weights, one tensor at a time; norms are ones."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    extra = {"d2t": vocabulary_map()} if "draft_vocab_size" in config else {}
    for name, array in extra.items():
        header[name] = {
            "dtype": "I64",
            "shape": array.shape,
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            one = len(shape) == 1
            values = (
                np.ones(shape, np.float32) if one else rng.standard_normal(shape, np.float32) * 0.02
            )
            file.write(values.astype(ml_dtypes.bfloat16).tobytes())
        for array in extra.values():
            file.write(array.tobytes())


def vocabulary_map() -> np.ndarray:
    """Returns d2t offsets of a sorted random draft vocabulary that begins with the 256 bytes."""
    rest = np.random.default_rng(2).choice(np.arange(256, VOCAB), DRAFT_VOCAB - 256, replace=False)
    used = np.concatenate([np.arange(256), np.sort(rest)])
    return (used - np.arange(DRAFT_VOCAB)).astype(np.int64)


def write_checkpoints(work: Path, base: Config = BASE_CONFIG, draft: Config = DRAFT_CONFIG) -> None:
    """Writes the checkpoints of base and draft."""
    write_checkpoint(work / "base", base, base_tensors(base))
    write_tokenizer(work / "base")
    write_checkpoint(work / "draft", draft, draft_tensors(draft))


def write_tokenizer(path: Path) -> None:
    """Writes a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")


def measured(args: list[str]) -> dict[str, float]:
    """Returns wall and CPU seconds and peak memory of one edgespec command in its own process."""
    before = time.monotonic()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "edgespec.cli.main", *args], stdout=log, stderr=log
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            log.seek(0)
            raise SystemExit(f"edgespec {' '.join(args)} failed:\n{log.read().decode()}")
    wall = time.monotonic() - before
    return {
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_gb": usage.ru_maxrss * 1024 / 1e9,
    }


def medians(runs: list[dict[str, float]]) -> dict[str, object]:
    """Returns the runs and the median of each value."""
    return {
        "median": {key: round(statistics.median(r[key] for r in runs), 4) for key in runs[0]},
        "runs": runs,
    }


def bench_export(work: Path, runs: int) -> dict[str, object]:
    """Returns the time and memory of exporting the base."""
    out, found = work / "export", []
    for _ in range(runs):
        shutil.rmtree(out, ignore_errors=True)
        found.append(
            measured(["export", str(work / "base"), str(out), "--eagle-base", "--no-golden"])
        )
    return medians(found)


def bench_build(work: Path) -> dict[str, object]:
    """Builds base and draft once. Returns times, memory and sizes on disk."""
    engines, batched = work / "engines", work / "engines-8"
    for directory in (engines, batched):
        shutil.rmtree(directory, ignore_errors=True)
    for name, args in (
        ("base", ["--eagle-base"]),
        ("draft", ["--base-model-dir", str(work / "base")]),
    ):
        shutil.rmtree(work / f"onnx-{name}", ignore_errors=True)
        measured(["export", str(work / name), str(work / f"onnx-{name}"), *args])
    found: dict[str, object] = {}
    for name in ("base", "draft"):
        onnx = str(work / f"onnx-{name}" / "llm")
        found[name] = measured(["build", "--onnx-dir", onnx, "--engine-dir", str(engines)])
        measured(
            ["build", "--onnx-dir", onnx, "--engine-dir", str(batched), "--max-batch-size", "8"]
        )
    found["engine_dir_gb"] = sum(f.stat().st_size for f in engines.iterdir()) / 1e9
    return found


def bench_steps(work: Path, tokens: int) -> dict[str, object]:
    """Returns the host time per step of the default chain, a large tree and plain decoding."""
    began = time.monotonic()
    with Engine(work / "engines", spec_decode=True) as engine:
        out: dict[str, object] = {"load_s": time.monotonic() - began}
        out["after_load_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        prompt = list(np.random.default_rng(1).integers(0, 256, 128))
        plans = {
            "plain": PLAIN,
            "chain 1/3/4": engine.plan(1, 3, 4),
            "tree 10/6/60": engine.plan(10, 6, 60),
        }
        for label, plan in plans.items():
            sampling = SamplingParams(temperature=0, max_generate_length=tokens)
            response = engine.generate(prompt, sampling, plan)
            times, steps = response.metrics.stages, response.metrics.steps
            total = times.draft + times.verify + times.commit
            # The prefill's host time is that of one call; the steps carry the rest.
            host = times.host
            out[label] = {
                "steps": steps,
                "step_ms": 1000 * total / steps,
                "host_ms": 1000 * host / steps,
                "host_share": host / total,
                "stages_ms": {
                    name: 1000 * getattr(times, name) / steps
                    for name in ("draft", "verify", "commit")
                },
            }
        out["peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return out


def dialled(
    engine: Engine, right: dict[tuple[int, ...], list[int]], rate: float
) -> SyntheticDrafter:
    """Returns the engine's drafter with a given acceptance: a draft is right at `rate` where its parent is;
    `right` are the plain answers by prompt."""
    truths = {
        prompt: Truth.of(tokens, 0, number) for number, (prompt, tokens) in enumerate(right.items())
    }
    assert engine.drafter is not None
    vocab_size = engine.config.component.vocab_size
    return synthetic(engine.drafter, Dial((rate,)), truths, vocab_size)


def bench_batches(work: Path, tokens: int, runs: int) -> dict[str, object]:
    """Returns tokens/s of 8 requests in batches of 1, 4 and 8, with and without drafts.

    The runs alternate, and drafts are the default chain. Prompts have 64 to 120 tokens, and prefill
    counts. `for 1` is the engine built for one sequence, `for 8` the one built for eight. The
    random draft is never right: its acceptance is dialled to 0.7 per token, at its full cost.
    """
    found: dict[str, list[float]] = {}
    for _ in range(runs):
        for label, engines, batches in (
            ("for 1", "engines", (1,)),
            ("for 8", "engines-8", (1, 4, 8)),
        ):
            with Engine(work / engines, spec_decode=True) as engine:
                for batch in batches:
                    plain, truth = throughput(engine, batch, None, tokens)
                    engine.session.drafter = dialled(engine, truth, rate=0.7)
                    drafted, _ = throughput(engine, batch, engine.plan(1, 3, 4), tokens)
                    engine.session.drafter = engine.drafter
                    found.setdefault(f"{label}, batch {batch}, plain", []).append(plain)
                    found.setdefault(f"{label}, batch {batch}, chain 1/3/4 at 0.7", []).append(
                        drafted
                    )
    return {
        name: {"tokens_per_s": round(statistics.median(rates), 2), "runs": rates}
        for name, rates in found.items()
    }


def throughput(
    engine: Engine, batch: int, plan: DraftPlan | None, tokens: int
) -> tuple[float, dict[tuple[int, ...], list[int]]]:
    """Returns tokens/s over 8 requests, prefill included, and the response to each prompt."""
    rng = np.random.default_rng(1)
    sampling = SamplingParams(temperature=0, max_generate_length=tokens)
    jobs = [
        GenerationRequest(rng.integers(0, 256, 64 + 8 * i).tolist(), sampling, plan)
        for i in range(8)
    ]
    began = time.perf_counter()
    answers = [
        event for _, event in engine.run_queue(deque(jobs), batch) if isinstance(event, Response)
    ]
    made = sum(len(answer.token_ids) for answer in answers)
    return made / (time.perf_counter() - began), {tuple(a.prompt_ids): a.token_ids for a in answers}


def bench_start(runs: int) -> dict[str, object]:
    """Returns the time and memory of `edgespec --help`."""
    return medians([measured(["--help"]) for _ in range(runs)])


def main() -> None:
    """Runs the benchmarks and prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "edgespec-benchmark"
    )
    parser.add_argument(
        "--only", choices=("export", "build", "steps", "batches", "start"), action="append"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    wanted = args.only or ["start", "export", "build", "steps", "batches"]
    if not (args.work / "base").is_dir() and set(wanted) != {"start"}:
        # In a process of its own: a child inherits its parent's peak memory, and this one's must
        # stay small.
        maker = multiprocessing.get_context("spawn").Process(
            target=write_checkpoints, args=(args.work,)
        )
        maker.start()
        maker.join()
    result: dict[str, object] = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "arch": platform.machine()}
    }
    if "start" in wanted:
        result["help"] = bench_start(args.runs)
    if "export" in wanted:
        result["export"] = bench_export(args.work, args.runs)
    if "build" in wanted or (
        {"steps", "batches"} & set(wanted) and not (args.work / "engines-8").is_dir()
    ):
        result["build"] = bench_build(args.work)
    if "steps" in wanted:
        result["steps"] = bench_steps(args.work, args.tokens)
    if "batches" in wanted:
        result["batches"] = bench_batches(args.work, args.tokens // 2, min(args.runs, 3))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
