"""What weight formats of edgespec and of llama.cpp cost and take: bits, KL, perplexity, milliseconds.

    python scripts/peers/frontier.py --name NAME --model CHECKPOINT --json FILE --engine int4=ENGINES
        --gguf Q4_K_M=FILE.gguf --program llama_cpp_pass [--functions 96] [--tokens 1024] [--time]
    python scripts/peers/frontier.py --json docs/frontier.json --page docs/performance.md

One program measures both engines on the same windows of ids, beside the same checkpoint in float32 in
PyTorch: `kl` as the engine runs, `kl_weights` of the dequantized weights alone, again in PyTorch, nats a
token. Of other engines it takes the weights alone, from rounding.py. llama.cpp's formats are dequantized by gguf-py. The text is the held-out part of edgespec's own, or, of
the demo base, functions of the standard library that training never saw. `bits` are those of all matrices as stored, and
`ms_per_token` is processor time of one thread behind 128 tokens, engines in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from compare import bound, parsed, turns
from environment import HERE
from llama_cpp_peer import PASS, ask, start_pass
from numpy.typing import NDArray
from table import NOTHING, lines, replaced

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
    state = reference.model.state_dict()
    changed = {key_of(name, state): torch.from_numpy(weight) for name, weight in weights.items()}
    kept = {name: state[name].clone() for name in changed}
    reference.model.load_state_dict(changed, strict=False)
    alone = reference.figures(reference.of(reference.model))
    reference.model.load_state_dict(kept, strict=False)
    found = reference.figures(as_run(engine_dir, reference.windows))
    return {"bits": bits, **found, "kl_weights": alone["kl"]}


def key_of(name: str, keys: Iterable[str]) -> str:
    """The checkpoint's name of a weight; of exports that were quantized before the engine has a
    node's, such as layers.0/attn/q_proj."""
    if "/" not in name and name != "lm_head":
        return name
    layer, last = name.split("/")[0], name.split("/")[-1]
    ends = [key for key in keys if f".{key}".endswith(f".{last}.weight")]
    (key,) = (key for key in ends if layer == last or f".{layer}." in key)
    return key


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


# ---- other engines, whose weights alone are compared


def rounded_row(reference: Reference, file: Path) -> dict[str, Any]:
    """The divergence of the matrices in a file of rounding.py."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(file, "pt") as opened:
        bits = float(opened.metadata()["bits"])
    state = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    reference.model.load_state_dict(load_file(file), strict=False)
    found = reference.figures(reference.of(reference.model))
    reference.model.load_state_dict(state)
    return {"bits": bits, "kl_weights": found.pop("kl")} | found


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


def asked(args: argparse.Namespace) -> list[tuple[str, str, Path]]:
    """The engine, the format and the path of what is measured."""
    ours, theirs = named(args.engine), named(args.gguf)
    others = [(*name.split(","), path) for name, path in named(args.rounded)]
    return [
        *(("edgespec", *pair) for pair in ours),
        *(("llama.cpp", *pair) for pair in theirs),
        *others,
    ]


def measure_accuracy(args: argparse.Namespace) -> None:
    """Writes the rows, replacing those of the same engine and format."""
    text = functions(args.functions) if args.functions else held_out_text()
    reference = Reference(args.model, text, args.tokens)
    own = reference.figures(reference.logits)["perplexity"]
    kept = json.loads(args.json.read_text()) if args.json.is_file() else {}
    rows = kept.get(args.name, {"rows": []})["rows"]
    for engine, form, path in asked(args):
        if engine == "edgespec":
            found = engine_row(reference, path)
        elif engine == "llama.cpp":
            found = gguf_row(reference, path, args.program)
        else:
            found = rounded_row(reference, path)
        row = {"engine": engine, "format": form} | {k: round(v, 5) for k, v in found.items()}
        rows = [old for old in rows if (old["engine"], old["format"]) != (engine, form)] + [row]
        print(json.dumps(row), file=sys.stderr, flush=True)
        about = {"tokens": int(reference.windows.size), "perplexity": round(own, 4), "rows": rows}
        args.json.write_text(json.dumps(kept | {args.name: about}, indent=1) + "\n")


def measure_time(args: argparse.Namespace) -> None:
    """Adds milliseconds a token to the rows."""
    kept = json.loads(args.json.read_text())
    flags = ["--contexts", str(CONTEXT), "--tokens", str(TOKENS)]
    todo = asked(args)
    times: list[list[float]] = [[] for _ in todo]
    for _, number in turns(list(map(str, range(len(todo)))), args.runs):
        engine, _, path = todo[int(number)]
        peer = [HERE / "edgespec_peer.py", path]
        if engine == "llama.cpp":
            peer = [HERE / "llama_cpp_peer.py", args.program, path]
        command = [sys.executable, *map(str, peer), *flags]
        decode = parsed(bound(command, 1))["contexts"][str(CONTEXT)]["decode"]
        times[int(number)].append(1000 * decode["cpu_s"] / decode["steps"])
    for (engine, form, _), found in zip(todo, times, strict=True):
        for row in kept[args.name]["rows"]:
            if (row["engine"], row["format"]) == (engine, form):
                row["ms_per_token"] = round(statistics.median(found), 2)
    args.json.write_text(json.dumps(kept, indent=1) + "\n")


def write_table(args: argparse.Namespace) -> None:
    """Writes the tables of all models into a page, each between its marks."""
    page = args.page.read_text()
    for name, found in json.loads(args.json.read_text()).items():
        rows = [
            [
                f"{row['engine']}, {row['format']}",
                f"{row['bits']:.2f}",
                f"{row['kl_weights']:.4f}",
                f"{row['kl']:.4f} ± {row['kl_error']:.4f}" if "kl" in row else NOTHING,
                f"{row['perplexity']:.2f} ({100 * (row['perplexity'] / found['perplexity'] - 1):+.1f} %)",
                f"{row['top1']:.3f}",
                f"{row['ms_per_token']:.1f}" if "ms_per_token" in row else NOTHING,
            ]
            for row in sorted(found["rows"], key=lambda row: row["bits"])
        ]
        heads = ["bits a weight", "KL of the weights", "KL as run", "perplexity", "top-1"]
        about = f"{found['tokens']} tokens, perplexity {found['perplexity']:.2f} in float32."
        table = lines([*heads, "ms a token"], rows)
        page = replaced(page, f"weight formats of {name}", f"{table}\n\n{about}\n")
    args.page.write_text(page)


def main() -> None:
    """Measures accuracy, or time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--name", help="of the model, the key in --json")
    parser.add_argument("--engine", nargs="+", default=[], metavar="FORMAT=DIR")
    parser.add_argument("--gguf", nargs="+", default=[], metavar="FORMAT=FILE")
    parser.add_argument("--rounded", nargs="+", default=[], metavar="ENGINE,FORMAT=FILE")
    parser.add_argument("--program", type=Path, default=Path(PASS))
    parser.add_argument("--functions", type=int, default=0, help="the text of the demo base")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--page", type=Path, help="write the tables of --json into this page")
    args = parser.parse_args()
    if args.page:
        write_table(args)
    else:
        (measure_time if args.time else measure_accuracy)(args)


if __name__ == "__main__":
    main()
