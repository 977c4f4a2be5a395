"""What weight formats of edgespec and of llama.cpp cost and take: bits, KL, perplexity, milliseconds.

    python scripts/peers/frontier.py --model CHECKPOINT --json FILE --engine int4=ENGINES ...
        --gguf Q4_K_M=FILE.gguf ... --program llama_cpp_pass [--functions 96] [--tokens 1024]
    python scripts/peers/frontier.py --json FILE --time --runs 5      # of the rows that FILE has

One program measures both engines on the same windows of ids, beside the same checkpoint in float32 in
PyTorch: `kl` as the engine runs, `kl_weights` of the dequantized weights alone, again in PyTorch, nats
a token. llama.cpp's formats are dequantized by gguf-py. The text is the held-out part of edgespec's own, or, of
the demo base, functions of the standard library that training never saw. `bits` are those of all matrices as stored, and
`ms_per_token` is processor time of one thread behind 128 tokens, engines in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from compare import bound, parsed, turns
from environment import HERE
from llama_cpp_peer import PASS, ask, start_pass
from numpy.typing import NDArray

from edgespec.prompts.shipped_text import held_out_text

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
WINDOW = 512
CONTEXT, TOKENS = 128, 48


class Reference:
    """A checkpoint in float32, and its distributions after each token of some windows."""

    def __init__(self, checkpoint: Path, text: str, tokens: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        ids = AutoTokenizer.from_pretrained(checkpoint)(text, add_special_tokens=False)["input_ids"]
        count = min(len(ids), tokens) // WINDOW
        self.windows: Ids = np.array(ids[: count * WINDOW]).reshape(count, WINDOW)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self.logits = self.of(self.model)

    def of(self, model: Any) -> list[Floats]:
        """The logits [N, V] of a model for each window, without those of its last token."""
        import torch

        with torch.no_grad():
            return [model(torch.tensor(row[None])).logits[0, :-1].numpy() for row in self.windows]

    def figures(self, logits: Iterator[Floats] | list[Floats]) -> dict[str, float]:
        """How far others are from the reference."""
        kl, losses, same = [], [], []
        for row, wanted, found in zip(self.windows, self.logits, logits, strict=True):
            before, after = log_softmax(wanted), log_softmax(found[:, : wanted.shape[1]])
            kl.append((np.exp(before) * (before - after)).sum(-1))
            losses.append(-after[np.arange(len(after)), row[1:]])
            same.append(before.argmax(-1) == after.argmax(-1))
        each = np.concatenate(kl)
        return {
            "kl": float(each.mean()),
            "kl_error": float(each.std() / len(each) ** 0.5),
            "perplexity": float(np.exp(np.concatenate(losses).mean())),
            "top1": float(np.concatenate(same).mean()),
        }


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    """The log-probabilities [N, V]."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


# ---- edgespec


def engine_row(reference: Reference, engine_dir: Path) -> dict[str, Any]:
    """The figures of an engine of edgespec."""
    import torch

    weights, bits = weights_of(engine_dir)
    kept = {name: t.clone() for name, t in reference.model.state_dict().items() if name in weights}
    changed = {name: torch.from_numpy(weights[name]) for name in kept}
    reference.model.load_state_dict(changed, strict=False)
    alone = reference.figures(reference.of(reference.model))
    reference.model.load_state_dict(kept, strict=False)
    found = reference.figures(as_run(engine_dir, reference.windows))
    return {"bits": bits, **found, "kl_weights": alone["kl"]}


def as_run(engine_dir: Path, windows: Ids) -> Iterator[Floats]:
    """The engine's logits for each window."""
    from edgespec.backends.engine_dir import finished_engines
    from edgespec.runtime.measuring.quantization_loss import engine_logits

    role = next(iter(finished_engines(engine_dir).engines))
    parts: list[list[Floats]] = [[] for _ in windows]
    for number, _, logits in engine_logits(engine_dir, role, windows):
        parts[number].append(logits)
    return (np.concatenate(part) for part in parts)


def weights_of(engine_dir: Path) -> tuple[dict[str, Floats], float]:
    """The dequantized weights [out, in] of an engine by their names in the checkpoint, and the bits
    that a weight takes on average."""
    import onnx
    from onnx.helper import get_attribute_value

    from edgespec.backends.ort.native.layout import WeightLayout

    (path,) = (file for file in engine_dir.glob("*.onnx"))
    graph = onnx.load(path, load_external_data=False).graph
    stored = {one.name: {e.key: e.value for e in one.external_data} for one in graph.initializer}
    found, size, count = {}, 0, 0
    for node in graph.node:
        names = [name for name in node.input if name.endswith("/packed")]
        fields = {a.name: get_attribute_value(a) for a in node.attribute}
        outs = np.atleast_1d(fields.get("N", 0))
        for i, (name, out) in enumerate(zip(names, outs, strict=False)):
            layout = WeightLayout(
                fields["bits"],
                fields["block_size"],
                fields["K"],
                int(out),
                fields.get("scales", b"float32").decode(),
                fields.get("super_block", 1),
                fields.get("codebook", b"").decode(),
                fields.get("global_scales", [1.0] * len(names))[i],
            )
            where = stored[name]
            offset = int(where.get("offset", 0))
            file = np.memmap(engine_dir / where["location"], np.uint8, "r", offset)
            rows = layout.rows(file[: layout.num_bytes], np.arange(int(out)))
            found[name.removesuffix("/packed")] = np.ascontiguousarray(rows)
            size, count = size + layout.num_bytes, count + rows.size
    return found, 8 * size / count


# ---- llama.cpp


def gguf_row(reference: Reference, file: Path, program: Path) -> dict[str, Any]:
    """The figures of a GGUF file on llama.cpp."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    matrices = [t for t in gguf.GGUFReader(file).tensors if len(t.shape) > 1]
    bits = 8 * sum(t.n_bytes for t in matrices) / sum(int(t.n_elements) for t in matrices)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=reference.model.config, dtype=torch.float32
    )
    alone = reference.figures(reference.of(model.eval()))
    del model
    with tempfile.TemporaryDirectory() as room, start_pass(program, file, 2) as running:
        assert running.stdout
        assert running.stdin
        running.stdout.readline()
        found = []
        for row in reference.windows:
            out = Path(room) / "logits"
            ask(running, 0, WINDOW, row.tolist(), str(out))
            found.append(np.fromfile(out, np.float32).reshape(WINDOW, -1)[:-1])
        running.stdin.close()
    return {"bits": bits, **reference.figures(found), "kl_weights": alone["kl"]}


# ---- rows


def functions(count: int) -> str:
    """Held-out functions, as the demo base was trained on others."""
    sys.path.insert(0, str(HERE.parent))
    from train_demo_model import as_chat, functions_of, stdlib_files

    found = functions_of(stdlib_files()[1])
    order = np.random.default_rng(2).permutation(len(found))[:count]
    return "".join(as_chat(*found[i]) for i in order)


def named(words: list[str]) -> list[tuple[str, Path]]:
    """The names and paths of NAME=PATH words."""
    pairs = [word.partition("=") for word in words]
    return [(name, Path(path).absolute()) for name, _, path in pairs]


def measure_accuracy(args: argparse.Namespace) -> None:
    """Writes the rows, replacing those of the same engine and format."""
    text = functions(args.functions) if args.functions else held_out_text()
    reference = Reference(args.model, text, args.tokens)
    own = reference.figures(reference.logits)["perplexity"]
    print(f"float32: {reference.windows.shape}, perplexity {own:.4f}", file=sys.stderr)
    todo = [("edgespec", *pair) for pair in named(args.engine)]
    todo += [("llama.cpp", *pair) for pair in named(args.gguf)]
    rows = json.loads(args.json.read_text())["rows"] if args.json.is_file() else []
    for engine, form, path in todo:
        if engine == "edgespec":
            found = engine_row(reference, path)
        else:
            found = gguf_row(reference, path, args.program)
        found = {key: round(value, 5) for key, value in found.items()}
        row = {"engine": engine, "format": form, **found, "path": str(path)}
        rows = [old for old in rows if (old["engine"], old["format"]) != (engine, form)] + [row]
        print(json.dumps(row), file=sys.stderr, flush=True)
        about = {"model": args.model.name, "tokens": int(reference.windows.size), "perplexity": own}
        args.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def measure_time(args: argparse.Namespace) -> None:
    """Adds milliseconds a token to the rows."""
    found = json.loads(args.json.read_text())
    flags = ["--contexts", str(CONTEXT), "--tokens", str(TOKENS)]
    times: dict[int, list[float]] = {number: [] for number in range(len(found["rows"]))}
    for _, name in turns([str(number) for number in times], args.runs):
        row = found["rows"][int(name)]
        command = [sys.executable, str(HERE / "edgespec_peer.py"), row["path"]]
        if row["engine"] == "llama.cpp":
            peer = str(HERE / "llama_cpp_peer.py")
            command = [sys.executable, peer, str(args.program), row["path"]]
        decode = parsed(bound([*command, *flags], 1))["contexts"][str(CONTEXT)]["decode"]
        times[int(name)].append(1000 * decode["cpu_s"] / decode["steps"])
    for number, row in enumerate(found["rows"]):
        row["ms_per_token"] = round(statistics.median(times[number]), 3)
    found["load"] = round(os.getloadavg()[0], 1)
    args.json.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Measures accuracy, or time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--engine", nargs="+", default=[], metavar="FORMAT=DIR")
    parser.add_argument("--gguf", nargs="+", default=[], metavar="FORMAT=FILE")
    parser.add_argument("--program", type=Path, default=Path(PASS))
    parser.add_argument("--functions", type=int, default=0, help="the text of the demo base")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    (measure_time if args.time else measure_accuracy)(args)


if __name__ == "__main__":
    main()
