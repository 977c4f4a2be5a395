"""Compares int4 decoding of Qwen3-0.6B's shape with llama.cpp (Q4_0) and onnxruntime-genai (int4),
plain, batch 1.

    python scripts/benchmark.py --only build                # makes WORK/base and WORK/onnx-base
    for block in 128 32; do edgespec build --onnx-dir WORK/onnx-base/llm --engine-dir WORK/engines-int4-$block \\
      --weights int4 --weight-block $block --max-input-len 2048 --max-kv-cache-capacity 2304; done
    pip install llama-cpp-python==0.3.36 gguf==0.19.0       # builds for the machine at hand: about ten minutes
    python -m venv peer && peer/bin/pip install onnxruntime-genai==0.18.0   # its onnxruntime replaces the -gpu build
    python -m onnxruntime_genai.models.builder -i WORK/base -o WORK/genai-int4 -p int4 -e cpu   # where torch is, too
    python scripts/benchmark_peers.py --genai-python peer/bin/python --runs 5

All have the same random weights, prompts (128 and 2048 tokens), and 64 greedy tokens after each.
Every run is a process of its own; engines take turns. Prints one JSON object: medians, ratios to
ours pair by pair, each run, memory and disk. WORK is --work, by default edgespec-benchmark in the
system's directory for temporary files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTEXTS = (128, 2048)
CAPACITY, TOKENS = 2304, 64


def peak_mb() -> float:
    """Returns the peak memory of this process in MiB; a child's ru_maxrss begins at its parent's."""
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 1024


def prompt_of(length: int) -> list[int]:
    """Returns ids of a prompt for the byte-level tokenizer, the same for all engines."""
    state, ids = 1, []
    for _ in range(length):
        state = (state * 1103515245 + 12345) % 2**31
        ids.append(state // 65536 % 256)
    return ids


# ---- one engine in this process


def run_ours(directory: Path) -> dict[str, Any]:
    """Measures edgespec in this process."""
    import edgespec
    from edgespec import SamplingParams

    began, found = time.perf_counter(), {}
    with edgespec.load(directory, spec_decode=False) as engine:
        found["load_s"] = time.perf_counter() - began
        for context in CONTEXTS:
            stamps, sampling = [], SamplingParams(temperature=0, max_generate_length=TOKENS)
            began = time.perf_counter()
            for _ in engine.stream(prompt_of(context), sampling):
                stamps.append(time.perf_counter())
            found[str(context)] = rates(began, stamps, context)
    return found


def run_llama(path: Path, *, kept: bool) -> dict[str, Any]:
    """Measures llama.cpp in this process; `kept` reads prompts from saved states."""
    from llama_cpp import Llama

    began, found = time.perf_counter(), {}
    model = Llama(
        str(path),
        n_ctx=CAPACITY,
        n_batch=512,
        n_threads=os.cpu_count(),
        n_threads_batch=os.cpu_count(),
        flash_attn=True,
        verbose=False,
    )
    found["load_s"] = time.perf_counter() - began
    for context in CONTEXTS:
        model.reset()
        stamps = []
        began = time.perf_counter()
        if kept:
            read_state(model, state_of(path, context), context)
            token = 0
        else:
            model.eval(prompt_of(context))
            token = model.sample(temp=0.0, repeat_penalty=1.0)
        while len(stamps) < TOKENS:
            stamps.append(time.perf_counter())
            model.eval([token])
            token = model.sample(temp=0.0, repeat_penalty=1.0)
        found[str(context)] = rates(began, stamps, context)
        if kept:
            del found[str(context)]["prefill_tokens_per_s"]
    return found


def state_of(path: Path, context: int) -> Path:
    """Returns the path of the saved state of a prompt."""
    return path.with_suffix(f".{context}.state")


def keep_states(path: Path) -> None:
    """Runs the prompts token by token and saves the states.

    For CPUs on which llama.cpp's kernels for several rows crash.
    """
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=CAPACITY, n_threads=os.cpu_count(), flash_attn=True, verbose=False
    )
    for context in CONTEXTS:
        model.reset()
        for token in prompt_of(context):
            model.eval([token])
        ids = (llama_cpp.llama_token * context)(*prompt_of(context))
        part = path.with_suffix(".part")
        assert llama_cpp.llama_state_save_file(model.ctx, str(part).encode(), ids, context)
        part.rename(state_of(path, context))


def read_state(model: Any, kept: Path, context: int) -> None:
    """Loads a saved state into a model of llama.cpp."""
    import ctypes

    import llama_cpp

    ids, count = (llama_cpp.llama_token * context)(), ctypes.c_size_t()
    assert llama_cpp.llama_state_load_file(
        model.ctx, str(kept).encode(), ids, context, ctypes.byref(count)
    )
    model.n_tokens = count.value
    assert count.value == context


def run_genai(directory: Path) -> dict[str, Any]:
    """Measures onnxruntime-genai in this process."""
    import onnxruntime_genai as genai

    began, found = time.perf_counter(), {}
    model = genai.Model(str(directory))
    found["load_s"] = time.perf_counter() - began
    for context in CONTEXTS:
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=context + TOKENS + 1, do_sample=False)
        stamps = []
        began = time.perf_counter()
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt_of(context))
        while len(stamps) < TOKENS:
            generator.generate_next_token()
            stamps.append(time.perf_counter())
        found[str(context)] = rates(began, stamps, context)
    return found


def rates(began: float, stamps: list[float], context: int) -> dict[str, float]:
    """Returns prefill tokens/s up to the first token, and decode tokens/s after it."""
    return {
        "prefill_tokens_per_s": context / (stamps[0] - began),
        "decode_tokens_per_s": (len(stamps) - 1) / (stamps[-1] - stamps[0]),
    }


ENGINES = {"ours": run_ours, "genai": run_genai}


# ---- making the peers' files


def write_gguf(base: Path, path: Path) -> None:
    """Writes Q4_0 matrices, the tied embedding included, and float32 norms.

    This is what `llama-quantize --pure` writes.
    """
    import gguf
    import numpy as np
    from gguf.quants import quantize

    from edgespec.checkpoint.files import open_checkpoint

    checkpoint = open_checkpoint(str(base))
    config = checkpoint.config
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{i}>" for i in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["<0> <1>"])
    writer.add_eos_token_id(config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name in checkpoint.tensors:
        array = checkpoint.read(name).astype(np.float32)
        new = names.get_name(name, try_suffixes=(".weight",))
        if array.ndim == 1:
            writer.add_tensor(new, array)
        else:
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(new, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def size_mb(path: Path) -> float:
    """Returns the size of a file or of the files in a directory in MB."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files) / 1e6


# ---- taking turns


def measured(python: str, engine: str, path: Path, flags: list[str]) -> dict[str, Any]:
    """Runs one measurement in its own process and returns its values."""
    command = [python, str(Path(__file__).resolve()), "--one", engine, str(path), *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{engine} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def summary(runs: dict[str, list[dict[str, Any]]], baseline: str) -> dict[str, Any]:
    """Returns medians per engine, and the ratio of the baseline's decode rate to theirs per run."""
    result: dict[str, Any] = {}
    for name, found in runs.items():
        row: dict[str, Any] = {
            key: median(run[key] for run in found) for key in ("load_s", "peak_mb")
        }
        for context in map(str, CONTEXTS):
            row[context] = {
                key: median(run[context][key] for run in found) for key in found[0][context]
            }
            if name != baseline:
                ratios = [
                    ours[context]["decode_tokens_per_s"] / other[context]["decode_tokens_per_s"]
                    for ours, other in zip(runs[baseline], found, strict=True)
                ]
                row[context][f"{baseline} / this, decode"] = median(ratios)
        result[name] = row
    return result


def median(values: Any) -> float:
    """Returns the rounded median."""
    return round(statistics.median(values), 3)


def main() -> None:
    """Runs the measurements in alternation and prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "edgespec-benchmark"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--llama-python", default=sys.executable, help="a Python that has llama_cpp and gguf"
    )
    parser.add_argument("--genai-python", help="a Python that has onnxruntime_genai")
    parser.add_argument(
        "--llama-one-by-one",
        action="store_true",
        help="feed llama.cpp its prompts token by token, once; its prefill is not measured then",
    )
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("--gguf", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keep-states", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, path = args.one
        found = (
            run_llama(Path(path), kept=args.llama_one_by_one)
            if name == "llama"
            else ENGINES[name](Path(path))
        )
        print(json.dumps(found | {"peak_mb": peak_mb()}))
        return
    if args.gguf:
        write_gguf(*args.gguf)
        return
    if args.keep_states:
        keep_states(args.keep_states)
        return
    work: Path = args.work
    engines = {
        f"ours block {block}": ("ours", sys.executable, work / f"engines-int4-{block}")
        for block in (128, 32)
    }
    if not (work / "base").is_dir():
        parser.error(f"{work / 'base'} is not there: --help says how it is made")
    gguf = work / "q4_0.gguf"
    if not gguf.is_file():
        subprocess.run(
            [args.llama_python, __file__, "--gguf", str(work / "base"), str(gguf)], check=True
        )
    if args.llama_one_by_one and not state_of(gguf, CONTEXTS[-1]).is_file():
        subprocess.run([args.llama_python, __file__, "--keep-states", str(gguf)], check=True)
    engines["llama.cpp Q4_0"] = ("llama", args.llama_python, gguf)
    if args.genai_python:
        engines["onnxruntime-genai int4"] = ("genai", args.genai_python, work / "genai-int4")
    for _, _, path in engines.values():
        if not path.exists():
            parser.error(f"{path} is not there: --help says how it is made")
    flags = ["--llama-one-by-one"] if args.llama_one_by_one else []
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for _ in range(args.runs):
        for name, (engine, python, path) in engines.items():
            runs[name].append(measured(python, engine, path, flags))
    result = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "arch": platform.machine()},
        "disk_mb": {name: round(size_mb(path), 1) for name, (_, _, path) in engines.items()},
        "median": summary(runs, "ours block 128"),
        "runs": runs,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
