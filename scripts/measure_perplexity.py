"""Measures how far low-bit engines of the demo base are from float32, on kernels of our own and on
ONNX Runtime's, over the same codes.

    python scripts/measure_perplexity.py [--functions 96] [--rows 256]

The text is functions of held-out modules of the standard library, which training never saw (see
train_demo_model.py; run it with the Python that trained). Per engine: perplexity, the mean
Kullback-Leibler divergence of its next-token probabilities from those of float32 in nats, by how
much that is more than on ONNX Runtime's kernels (with the standard error), and how often its most
probable token is the same. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from demo_pairs import BASE
from numpy.typing import NDArray
from train_demo_model import functions_of, stdlib_files

import edgespec
from edgespec.backends.build import build
from edgespec.backends.ort.native.library import kernels
from edgespec.backends.ort.options import FP32, KERNELS, ONNX_RUNTIME, WeightFormat
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export
from edgespec.prompts import Message
from edgespec.runtime.engine import Engine

FORMATS = (("int4", 32), ("int4", 128), ("int8", 128), ("int8", 0))
REFERENCE = ("fp32", None, ONNX_RUNTIME)
MAX_TOKENS = 384
LIMITS = Limits(max_input_len=MAX_TOKENS, max_kv_cache_capacity=MAX_TOKENS)
LogProbs = NDArray[np.float64]  # [tokens, vocabulary]
Text = tuple[list[int], list[int]]  # tokens before, and those that are scored


@dataclass
class Scores:
    """What was measured of an engine, a value for each token."""

    losses: list[NDArray[np.float64]] = field(default_factory=list)
    divergences: list[NDArray[np.float64]] = field(default_factory=list)
    same: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, found: LogProbs, wanted: LogProbs, targets: Sequence[int]) -> None:
        """Adds the tokens of a text; `wanted` are the log-probabilities of float32."""
        self.losses.append(-found[np.arange(len(targets)), targets])
        self.divergences.append((np.exp(wanted) * (wanted - found)).sum(-1))
        self.same.append(found.argmax(-1) == wanted.argmax(-1))

    def row(self, other: Scores) -> dict[str, Any]:
        """What is printed; beside the divergence by how much it is more than that of another engine
        for the same tokens, and the standard error of that difference."""
        more = np.concatenate(self.divergences) - np.concatenate(other.divergences)
        return {
            "perplexity": round(float(np.exp(np.concatenate(self.losses).mean())), 4),
            "kl": round(float(np.concatenate(self.divergences).mean()), 6),
            "kl_more": [round(float(v), 6) for v in (more.mean(), more.std() / len(more) ** 0.5)],
            "top_1": round(float(np.concatenate(self.same).mean()), 4),
        }


def texts(engine: Engine, count: int) -> Iterator[Text]:
    """Yields held-out functions: what stands before a body, and the body."""
    _, held = stdlib_files()
    functions = functions_of(held)
    for i in np.random.default_rng(2).permutation(len(functions))[:count]:
        head, body = functions[i]
        before = engine.encode([Message("user", head)])
        after = engine.tokenizer.encode(body)[: MAX_TOKENS - len(before)]
        if len(after) > 1:
            yield before, after


def log_probs(engine: Engine, text: Text, rows: int) -> LogProbs:
    """The log-probabilities of the tokens of a body, read so many tokens at a time."""
    before, after = text
    ids, places = np.array([*before, *after], np.int64), len(before) - 1
    engine.session.restart()
    engine.base.reset(0)
    found = []
    for start in range(0, len(ids), rows):
        part = ids[start : start + rows]
        (result,) = engine.base.extend([engine.base.causal(0, part, np.arange(len(part)))])
        found.append(result.logits.rows().astype(np.float64).reshape(len(part), -1))
    logits = np.concatenate(found)[places:-1]
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits


def main() -> None:
    """Measures, and prints the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", type=int, default=96)
    parser.add_argument("--rows", type=int, default=256, help="tokens that a call reads")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        work = Path(name)
        export(str(BASE), work / "onnx", ExportOptions())

        def opened(label: str, options: WeightFormat) -> Engine:
            build(work / "onnx" / "llm", work / label, LIMITS, options=options)
            return stack.enter_context(edgespec.load(work / label, prefix_cache_bytes=0))

        exact = opened("fp32", FP32)
        engines: dict[tuple[Any, ...], Engine] = {
            (scheme, block, whose): opened(
                f"{scheme}-{block}-{whose}", WeightFormat(scheme, block, kernels=whose)
            )
            for scheme, block in FORMATS
            for whose in KERNELS
        }
        scores = {key: Scores() for key in (REFERENCE, *engines)}
        for number, text in enumerate(texts(exact, args.functions), start=1):
            wanted = log_probs(exact, text, args.rows)
            for key, score in scores.items():
                found = log_probs(engines[key], text, args.rows) if key in engines else wanted
                score.add(found, wanted, text[1])
            print(f"{number} functions", end="\r", file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = [
        {
            "weights": scheme,
            "block": block,
            "kernels": whose,
            **score.row(scores[scheme, block, ONNX_RUNTIME]),
        }
        for (scheme, block, whose), score in scores.items()
    ]
    tokens = sum(len(losses) for losses in scores[REFERENCE].losses)
    about = {"level": kernels().level, "tokens": tokens, "rows_of_a_call": args.rows}
    print(json.dumps(about | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
