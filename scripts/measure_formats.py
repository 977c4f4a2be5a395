"""The demo pair in every weight format: sizes, perplexity through the engine, acceptance, and
whether drafts change it.

    python scripts/measure_formats.py --out formats-out

Quantizes, exports, builds and measures one format after the other. The values of each are in
OUT/FORMAT.json: a stopped run resumes from these files; remove one to measure its format again.
Prints the table of docs/quantization.md; OUT/formats.json has the same values. The text is from
held-out modules of the standard library, see train_demo_model.py; run it with the Python that
trained.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from train_demo_model import functions_of, stdlib_files

import edgespec
from edgespec.artifacts import json_files, provenance
from edgespec.backends.manifest import EngineManifest
from edgespec.cli.main import run
from edgespec.contract import Role
from edgespec.prompts import Message, SamplingParams
from edgespec.runtime.engine import Engine
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.loop.metrics import Pooled
from edgespec.runtime.requests.lossless_check import Difference, first_difference
from edgespec.runtime.trees.tree import PLAIN

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "demo"
PLAN = (1, 4, 5)  # top-k, step, verify size
TEMPERATURES = (0.0, 0.7)
LIMITS = ("--max-input-len", "512", "--max-kv-cache-capacity", "1024")
Pair = tuple[str, str]  # head and body of a function
Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Format:
    """A weight format with its options of `quantize` on the host or of `build` on the device."""

    name: str
    quantize: tuple[str, ...] = ()
    build: tuple[str, ...] = ()


FORMATS = (
    Format("bf16 weights, float32 engine"),
    Format("fp8", ("--quantization", "fp8")),
    Format("int8_sq", ("--quantization", "int8_sq")),
    Format("mxfp8", ("--quantization", "mxfp8")),
    Format("nvfp4", ("--quantization", "nvfp4")),
    # down_proj has 704 inputs, which is no multiple of the block of 128
    Format("int4_awq", ("--quantization", "int4_awq", "--exclude", "*.down_proj")),
    Format("build int8, by row", build=("--weights", "int8", "--weight-block", "0")),
    Format("build int8, block 128", build=("--weights", "int8")),
    Format("build int4, block 32", build=("--weights", "int4", "--weight-block", "32")),
    Format("build int4, block 128", build=("--weights", "int4")),
)


# Texts


def pairs(paths: list[Path], count: int, seed: int) -> list[Pair]:
    """Returns `count` functions of the modules as (signature with docstring, body)."""
    found = functions_of(paths)
    order = np.random.default_rng(seed).permutation(len(found))[:count]
    return [found[i] for i in order]


def write_calibration(path: Path, training: list[Path], count: int) -> None:
    """Writes chat conversations from some of the training modules as JSONL."""
    rows = [
        {"messages": [{"role": "user", "content": head}, {"role": "assistant", "content": body}]}
        for head, body in pairs(training[::16], count, seed=1)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# Making


def call(*args: str | Path) -> None:
    """Runs one edgespec command without output. Exits if it fails."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = run([str(arg) for arg in args])
    if code:
        sys.exit(f"edgespec {' '.join(map(str, args))}: exit code {code}")


def make(form: Format, work: Path, calibration: Path) -> dict[str, Path]:
    """Returns checkpoints and engine directories with the plain and with the quantized draft."""
    base, draft = RECIPE / "base", RECIPE / "draft"
    found = {"base": base, "draft": draft}
    if form.quantize:
        data = ("--calib-data", calibration, "--num-samples", "16")
        found = {"base": work / "base", "draft": work / "draft"}
        call(
            "quantize",
            "llm",
            "--model-dir",
            base,
            "--output-dir",
            found["base"],
            *form.quantize,
            *data,
        )
        both = ("--base-model-dir", base, "--draft-model-dir", draft)
        call("quantize", "draft", *both, "--output-dir", found["draft"], *form.quantize, *data)
    onnx = work / "onnx"
    call("export", found["base"], onnx / "base", "--eagle-base")
    call("export", draft, onnx / "plain", "--base-model-dir", base)
    call("export", found["draft"], onnx / "draft", "--base-model-dir", base)
    for engines, component, flags in (("plain", "plain", ()), ("same", "draft", form.build)):
        found[engines] = work / engines
        call(
            "build",
            "--onnx-dir",
            onnx / "base" / "llm",
            "--engine-dir",
            found[engines],
            *LIMITS,
            *form.build,
        )
        call(
            "build",
            "--onnx-dir",
            onnx / component / "llm",
            "--engine-dir",
            found[engines],
            *LIMITS,
            *flags,
        )
    return found


# Measuring


def scored(engine: Engine, text: list[Pair]) -> tuple[float, np.ndarray[Any, Any]]:
    """Returns the engine's perplexity of the bodies, and its top-1 token at each position.

    The text is one pass, so that activations are quantized as in prefill.
    """
    loss, choices = 0.0, []
    for head, body in text:
        prompt = engine.encode([Message("user", head)])
        ids = np.array([*prompt, *engine.tokenizer.encode(body)], np.int64)[:512]
        engine.session.restart()
        engine.base.reset(0)
        places = np.arange(len(prompt) - 1, len(ids) - 1)
        (result,) = engine.base.extend([engine.base.causal(0, ids, places)])
        logits = result.logits.rows().astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        targets = ids[len(prompt) :]
        loss += float(
            (np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(targets)), targets]).sum()
        )
        choices.append(logits.argmax(-1))
    every = np.concatenate(choices)
    return float(np.exp(loss / len(every))), every


def samplings(tokens: int) -> dict[str, SamplingParams]:
    """Returns greedy and sampled parameters by temperature."""
    return {
        str(temperature): SamplingParams(
            temperature, top_p=0.95, top_k=50, seed=1, max_generate_length=tokens
        )
        for temperature in TEMPERATURES
    }


def answered(
    engine: Engine, prompts: list[Pair], sampling: SamplingParams, sizes: Sizes | None
) -> list[Response]:
    """Returns the responses to all prompts, with drafts if `sizes` is given."""
    plan = engine.plan(*sizes) if sizes else PLAIN
    return [engine.generate([Message("user", head)], sampling, plan) for head, _ in prompts]


def drafted(
    engine: Engine, prompts: list[Pair], tokens: int, plain: dict[str, list[Response]]
) -> dict[str, Any]:
    """Returns acceptance and differences from the plain responses of the same base."""
    stats: dict[str, Any] = {}
    for temperature, sampling in samplings(tokens).items():
        found = answered(engine, prompts, sampling, PLAN)
        twins = zip(plain[temperature], found, strict=True)
        differing = [
            difference for p, s in twins if (difference := first_difference(engine, p, s, sampling))
        ]
        pool = Pooled([response.metrics for response in found])
        stats[temperature] = {
            "acceptance_length": pool.acceptance_length,
            "per_position_acceptance": pool.per_position_acceptance,
            "num_answers": len(found),
            "tokens": pool.completion_tokens,
            **differences(differing, engine),
        }
    return stats


def differences(found: list[Difference], engine: Engine) -> dict[str, Any]:
    """Returns the number of differences and the largest margin."""
    return {
        "answers_that_differ": len(found),
        "unexplained": sum(not d.explained for d in found),
        "largest_margin": max((d.apart for d in found), default=0.0),
        "stated_margin": engine.rounding,
    }


def measure(
    form: Format, made: dict[str, Path], text: list[Pair], prompts: list[Pair], tokens: int
) -> dict[str, Any]:
    """Returns all values of one format."""
    plain: dict[str, list[Response]] = {}
    row: dict[str, Any] = {"format": form.name, "quantize": form.quantize, "build": form.build}
    for role in ("base", "draft"):
        row[f"{role}_checkpoint_bytes"] = sum(
            file.stat().st_size for file in made[role].glob("*.safetensors")
        )
        entry = EngineManifest.read(made["same"]).engines[Role(role)]
        row[f"{role}_engine_bytes"] = entry.size_bytes
    for draft in ("plain", "same"):
        with edgespec.load(made[draft], spec_decode=True) as engine:
            engine.stop_ids = frozenset()
            if draft == "plain":
                row["weights"] = engine.config.weights.to_dict()
                row["perplexity"], choices = scored(engine, text)
                row["choices"] = choices.tolist()
                plain = {
                    name: answered(engine, prompts, sampling, None)
                    for name, sampling in samplings(tokens).items()
                }
            unchanged = draft == "same" and not (form.quantize or form.build)
            row[f"{draft}_draft"] = (
                row["plain_draft"] if unchanged else drafted(engine, prompts, tokens, plain)
            )
    return row


# The table


def machine() -> dict[str, Any]:
    """Returns the CPU and the versions that the values depend on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in info.read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {
            name: provenance.installed_version(name)
            for name in ("onnxruntime-gpu", "nvidia-modelopt", "torch")
        },
    }


HEAD = (
    "| format | checkpoint | engine | perplexity | top-1 agreement | greedy, plain draft |"
    " greedy, draft alike | 0.7, plain draft | 0.7, draft alike | answers that differ | largest"
    " margin / stated |\n|---|---|---|---|---|---|---|---|---|---|---|\n"
)


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the values as a Markdown table."""
    first = rows[0]
    return HEAD + "".join(f"| {' | '.join(cells(row, first))} |\n" for row in rows)


def cells(row: dict[str, Any], first: dict[str, Any]) -> list[str]:
    """Returns the cells of one row; sizes are base + draft."""
    ratio = row["perplexity"] / first["perplexity"] - 1
    same = np.mean(np.array(row["choices"]) == np.array(first["choices"]))
    runs = [row[f"{draft}_draft"][str(t)] for t in TEMPERATURES for draft in ("plain", "same")]
    differing, beyond = (
        sum(run[key] for run in runs) for key in ("answers_that_differ", "unexplained")
    )

    def size(what):
        return f"{row[f'base_{what}_bytes'] / 1e6:.1f} + {row[f'draft_{what}_bytes'] / 1e6:.1f}"

    return [
        row["format"],
        size("checkpoint"),
        size("engine"),
        f"{row['perplexity']:.3f} ({ratio:+.1%})",
        f"{same:.1%}",
        *(f"{run['acceptance_length']:.2f}" for run in runs),
        f"{differing} of {sum(run['num_answers'] for run in runs)}"
        + (f", {beyond} UNEXPLAINED" if beyond else ""),
        f"{max(run['largest_margin'] for run in runs):.2g} / {runs[0]['stated_margin']:.2g}",
    ]


def main() -> None:
    """Measures all formats, and writes the JSON files and the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="directory for results, checkpoints and engines"
    )
    parser.add_argument("--prompts", type=int, default=16, help="functions that are continued")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument(
        "--text", type=int, default=48, help="functions that are scored for perplexity"
    )
    parser.add_argument(
        "--formats", default="", help="only those whose name contains one of these, by commas"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    training, held = stdlib_files()
    text, prompts = pairs(held, args.text, seed=2), pairs(held, args.prompts, seed=0)
    calibration = args.out / "calibration.jsonl"
    write_calibration(calibration, training, 64)
    wanted = [part for part in args.formats.split(",") if part]
    setting = {"prompts": args.prompts, "tokens": args.tokens, "text": args.text, **machine()}
    rows = []
    for number, form in enumerate(FORMATS):
        if number and wanted and not any(part in form.name for part in wanted):
            continue
        rows.append(kept_or_measured(form, args.out, setting, text, prompts, calibration))
    json_files.write_json(args.out / "formats.json", {"setting": setting, "rows": rows})
    print(table(rows))
    print(json.dumps(setting))


def kept_or_measured(
    form: Format,
    out: Path,
    setting: dict[str, Any],
    text: list[Pair],
    prompts: list[Pair],
    calibration: Path,
) -> dict[str, Any]:
    """Returns the values of an earlier run with the same settings, or measures them."""
    path = out / f"{form.name.replace(',', '').replace(' ', '_')}.json"
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if kept["setting"] == setting:
            return kept
    work, began = out / "work", time.monotonic()
    shutil.rmtree(work, ignore_errors=True)
    row = measure(form, make(form, work, calibration), text, prompts, setting["tokens"])
    row |= {"setting": setting, "seconds": round(time.monotonic() - began, 1)}
    json_files.write_json(path, row)
    shutil.rmtree(work)
    print(f"{form.name}: {row['seconds']} s", file=sys.stderr)
    return row


if __name__ == "__main__":
    main()
