"""How far graphs that are lowered for TensorRT stand from golden outputs, and which planted faults
the bounds of `edgespec/backends/tensorrt/accuracy.py` find: the tables of docs/tensorrt.md.

    python scripts/measure_accuracy.py               # all rows, with the packages for development
    python scripts/measure_accuracy.py hybrid fp8    # those whose name has one of these words
    python scripts/measure_accuracy.py --faults      # the faults instead

Exports of random weights of several seeds, widths and depths are lowered and run on the CPU, where
each value is rounded to the compute type. TensorRT is not needed, and not asked.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from edgespec.backends.tensorrt.accuracy import accuracy_of
from edgespec.backends.tensorrt.target import Compute, Dialect
from edgespec.export.components import ExportOptions
from tests import made, shared, toys
from tests.parity.tensorrt_graphs import DRAFTS, ROWS, canonical
from tests.tensorrt_accuracy import FAULTS, Distance, Export, distance, runner_of

ROOT = Path(__file__).resolve().parents[1]
COMPUTES: tuple[Compute, ...] = ("float16", "bfloat16")
SCHEMES = (
    *("fp8", "int8_sq", "mxfp8", "nvfp4", "w4a8_awq", "fp8_token"),
    *("int4_awq", "int8_wo", "fp8_block", "w4a16_nvfp4"),
)
DEPTHS = {2: (0, 1, 2), 8: (0,), 24: (4,)}  # layers of quantized checkpoints, and their seeds


@dataclass(frozen=True)
class Kind:
    """Exports that one bound is for, by a name of each."""

    name: str
    exports: Callable[[], Iterator[tuple[str, Export]]]
    schemes: tuple[str, ...] = ()
    recurrent: bool = False


def base(make: Callable[..., Path], **keys: Any) -> Export:
    """A base of random weights, exported once a run."""
    path = shared.made_once((make.__name__, keys), lambda out: make(out / "base", **keys)) / "base"
    return Export(made.exported(path, ExportOptions()) / "llm")


def dense() -> Iterator[tuple[str, Export]]:
    for name in (name for name in ROWS if name not in DRAFTS and "qwen3_5" not in name):
        yield name, Export(canonical(name, golden=True).onnx_dir)
    for seed in range(4):
        yield f"7 layers, seed {seed}", base(toys.make_base, layers=7, seed=seed)
        wide = {"hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1024}
        yield (
            f"4 layers of 512, seed {seed}",
            base(toys.make_base, family="qwen3", layers=4, seed=seed, **wide),
        )
    yield "24 layers", base(toys.make_base, layers=24)
    yield "36 layers of 128", base(toys.make_base, family="qwen3", layers=36, hidden=128)


def drafts() -> Iterator[tuple[str, Export]]:
    for name in DRAFTS:
        yield name, Export(canonical(name, golden=True).onnx_dir)


def hybrid() -> Iterator[tuple[str, Export]]:
    for seed in range(4):
        for hidden in (64, 128):
            name = f"4 layers of {hidden}, seed {seed}"
            yield name, base(toys.make_qwen3_5, hidden=hidden, seed=seed)
    for layers in (12, 24):
        yield f"{layers} layers", base(toys.make_qwen3_5, layers=layers)


def quantized(scheme: str) -> Callable[[], Iterator[tuple[str, Export]]]:
    """Bases that ModelOpt quantized."""

    def exports() -> Iterator[tuple[str, Export]]:
        for layers, seeds in DEPTHS.items():
            for seed in seeds:
                yield f"{layers} layers, seed {seed}", quantized_export(scheme, layers, seed)

    return exports


def quantized_export(scheme: str, layers: int, seed: int) -> Export:
    def make(out: Path) -> None:
        command = [sys.executable, "-m", "tests.modelopt_exports", str(out), str(seed), str(layers)]
        subprocess.run([*command, scheme], cwd=ROOT, check=True, capture_output=True)
        toy = toys.make_base(out / "toy", "llama", layers=2)
        shutil.copy(toy / "tokenizer.json", out / scheme)

    path = shared.made_once(("quantized", scheme, layers, seed), make) / scheme
    (onnx_dir,) = made.exported(path, ExportOptions()).iterdir()
    return Export(onnx_dir)


KINDS = (
    Kind("dense", dense),
    Kind("draft", drafts),
    Kind("hybrid", hybrid, recurrent=True),
    *(Kind(scheme, quantized(scheme), (scheme,)) for scheme in SCHEMES),
)


def measure(kind: Kind) -> None:
    """Print a row for each compute type: the worst of all exports, and the bound."""
    worst = dict.fromkeys(COMPUTES, Distance())
    count = 0
    for name, export in kind.exports():
        count += 1
        for compute in COMPUTES:
            found = distance(export, runner_of(export, Dialect.NATIVE, compute))
            worst[compute] |= found
            told = f"{kind.name}, {name}, {compute}: {found}"
            print(told, file=sys.stderr, flush=True)
    for compute, found in worst.items():
        spec = accuracy_of(kind.schemes, compute, recurrent=kind.recurrent)
        scale = "-" if spec.max_scale is None else f"{spec.max_scale:.2g}"
        print(
            f"| {kind.name} | {compute} | {count} | {found.rms:.1e} | {found.angle:.1e} |"
            f" {found.scale:.1e} | {spec.min_cosine} | {scale} |",
            flush=True,
        )


def plant(kind: Kind) -> None:
    """Print which faults the bounds of a kind find, on its first export."""
    _, export = next(kind.exports())
    for compute in COMPUTES:
        spec = accuracy_of(kind.schemes, compute, recurrent=kind.recurrent)
        said = []
        for fault in FAULTS.values():
            found = distance(export, fault.planted(export, compute))
            said.append(f"{found.refused_by(spec) or 'no'} ({found.angle:.0e}, {found.scale:.0e})")
        print(f"| {kind.name} | {compute} | {' | '.join(said)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="rows whose name has one of these words")
    parser.add_argument("--faults", action="store_true", help="plant faults instead")
    args = parser.parse_args()
    kinds = [k for k in KINDS if not args.words or any(word in k.name for word in args.words)]
    columns = (
        *("graphs", "compute", "exports", "RMS error", "1 - cosine", "size off by"),
        *("least cosine", "size may be off by"),
    )
    if args.faults:
        columns = ("graphs", "compute", *FAULTS)
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for kind in kinds:
        (plant if args.faults else measure)(kind)


if __name__ == "__main__":
    main()
