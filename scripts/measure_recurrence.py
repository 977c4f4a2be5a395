"""Measures passes of a hybrid of Qwen3.5-0.8B's shape: recurrent layers as GatedDeltaNet, the same
layers as the export has them, and a whole engine on ONNX Runtime's kernels.

    python scripts/measure_recurrence.py [--layers 8] [--weights int4] [--block 128] [--rows 1 4 8 64 512] [--runs 7]

One process, sessions of one thread, its processor time, the engines alternating; of each the least of several runs,
in ms, behind 128 tokens; each call takes in what the one before left, up to 64 rows. Three of four
layers are recurrent. Weights are random, and the vocabulary is small. Before, each engine is
compared with the golden outputs, and our own is proven bitwise.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import onnxruntime as ort
from benchmark import write_tokenizer
from benchmark_hybrid import SHAPE

from edgespec.backends.build import build
from edgespec.backends.engine_dir import open_engine
from edgespec.backends.made_calls import made_call
from edgespec.backends.ort import lowering
from edgespec.backends.ort import runner as ort_runner
from edgespec.backends.ort.backend import OrtBackend
from edgespec.backends.ort.native.library import kernels as kernels_in_use
from edgespec.backends.ort.options import NATIVE, ONNX_RUNTIME, WeightFormat
from edgespec.backends.ort.runner import OrtRunner
from edgespec.backends.ort.session import session_options
from edgespec.contract import Limits, Role
from edgespec.export.components import ExportOptions, export

CONTEXT, VOCAB, MOST_PENDING = 128, 32768, 64


def write_checkpoint(path: Path, layers: int) -> None:
    """Writes a checkpoint with random weights."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    shape = {**SHAPE, "num_hidden_layers": layers, "vocab_size": VOCAB}
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape)).save_pretrained(path)
    torch.set_default_dtype(torch.float32)
    write_tokenizer(path)


@contextmanager
def recurrent_layers_as_exported() -> Iterator[None]:
    """Builds leave recurrent layers as they are."""
    with mock.patch.object(lowering, "take_delta_nets"):
        yield


def one_thread() -> ort.SessionOptions:
    """The options of every session, and no threads beside the one that runs it."""
    options = session_options()
    options.intra_op_num_threads = 1
    return options


class Subject:
    """An open engine behind a text."""

    def __init__(self, directory: Path) -> None:
        config, _ = open_engine(directory, Role.LLM)
        backend = OrtBackend()
        with mock.patch.object(ort_runner, "session_options", one_thread):
            self.runner = backend.open(directory, config, backend.open_device())
        assert isinstance(self.runner, OrtRunner)
        for start in range(0, CONTEXT, MOST_PENDING):
            self.run(start, MOST_PENDING)
            self.keep(start, MOST_PENDING)
        self.text = self.runner.read_rows(0, CONTEXT)

    def run(self, start: int, rows: int) -> float:
        """Processor time of a pass, in ms."""
        call = made_call(self.runner.contract, 0, start, rows)
        began = time.thread_time_ns()
        self.runner.run(call)
        return (time.thread_time_ns() - began) / 1e6

    def keep(self, start: int, rows: int) -> None:
        self.runner.keep_rows(0, start + np.arange(rows), start)

    def behind(self, rows: int) -> float:
        """The time of a pass of some rows that takes in as many as a pass before left."""
        pending = min(rows, MOST_PENDING)
        self.runner.write_rows(0, self.text)
        self.run(CONTEXT, pending)
        self.keep(CONTEXT, pending)
        return self.run(CONTEXT + pending, rows)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--weights", default="int4", choices=("fp32", "int8", "int4"))
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 64, 512])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--work", type=Path, help="where the checkpoint is kept")
    args = parser.parse_args()
    limits = Limits(max_input_len=1024, max_kv_cache_capacity=1024)
    with tempfile.TemporaryDirectory() as made:
        work = args.work or Path(made)
        onnx = work / f"hybrid-{args.layers}"
        if not onnx.is_dir():
            write_checkpoint(work / "checkpoint", args.layers)
            export(str(work / "checkpoint"), onnx, ExportOptions())
        engines = {}
        for name, kernels in (
            ("own", NATIVE),
            ("as exported", NATIVE),
            ("ONNX Runtime", ONNX_RUNTIME),
        ):
            form = WeightFormat(args.weights, args.block, kernels=kernels)
            directory = Path(made) / name.replace(" ", "-")
            if name == "as exported":
                with recurrent_layers_as_exported():
                    built = build(onnx / "llm", directory, limits, options=form)
            else:
                built = build(onnx / "llm", directory, limits, options=form)
            print(f"{name}: margin {built.weights.rounding}", flush=True)
            engines[name] = Subject(directory)
        print(f"level {kernels_in_use().level}")
        print("rows", *(f"{name:>14}" for name in engines))
        for rows in args.rows:
            least = dict.fromkeys(engines, float("inf"))
            for _ in range(args.runs):
                for name, subject in engines.items():
                    least[name] = min(least[name], subject.behind(rows))
            print(f"{rows:4}", *(f"{value:14.2f}" for value in least.values()), flush=True)


if __name__ == "__main__":
    main()
