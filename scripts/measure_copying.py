"""Measures suffix drafts on work that copies, on a checkpoint of Qwen3-0.6B's shape in INT4.

    python scripts/measure_copying.py                            # medians of 3 alternating runs
    python scripts/measure_copying.py --model recipes/demo/base --only new --runs 1 --drafter ngram

The weights are random, so the answer is forced to a recorded text: whatever the base computes, the
token that it draws is that of the text. Drafts and their verification are paid for in full. The
texts are this repository's own, a word or a sign a token:

- edit: a source file, written again with a line changed here and there
- quotes: new sentences between passages of the prompt
- records: JSON objects of records that stand in the prompt as a table
- half: spans of 8 to 40 tokens, every other one copied: half of the tokens
- prose: another document, of which nothing is copied on purpose
- new: no token twice

`copied` is the share of the answer's tokens that lie in a span of at least 8 which stands in the
prompt. Prints one JSON object: per work the speed over plain decoding (`over_plain`, by the time
from the first token to the last; `cpu_over_plain`, by processor time, prefill included, for a
machine that is not idle), the acceptance length and every run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
from numpy.typing import NDArray

from edgespec import PLAIN, SamplingParams
from edgespec.backends.call import Logits
from edgespec.runtime.batch import Batch
from edgespec.runtime.engine import Engine, Plan
from edgespec.runtime.loop.generation import Response
from edgespec.runtime.sampling.sampler import Sampler

REPOSITORY = Path(__file__).resolve().parents[1]
WORDS = re.compile(r" ?\w+| ?[^\w\s]|\s+")
FIRST_ID = 256  # below are a byte-level tokenizer's bytes and special tokens
LEAST_SPAN = 8  # tokens in a row that count as copied


class Vocabulary:
    """Words as tokens, each with the space before it, in the order in which they come."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ids: dict[str, int] = {}

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text. SystemExit where the model has too few of them."""
        found = [self.ids.setdefault(word, len(self.ids)) for word in WORDS.findall(text)]
        if FIRST_ID + len(self.ids) > self.size:
            raise SystemExit(f"the texts have more words than the model's {self.size} tokens")
        return [FIRST_ID + token for token in found]

    def unused(self, count: int) -> list[int]:
        """Tokens that no text has."""
        first = FIRST_ID + len(self.ids)
        return list(range(first, min(self.size, first + count)))


@dataclass(frozen=True)
class Work:
    """A prompt and the answer that is recorded for it."""

    prompt: list[int]
    answer: list[int]

    @property
    def copied(self) -> float:
        """The share of the answer in spans that stand in the prompt."""
        spans = {
            tuple(self.prompt[i : i + LEAST_SPAN]) for i in range(len(self.prompt) - LEAST_SPAN + 1)
        }
        covered = set[int]()
        for i in range(len(self.answer) - LEAST_SPAN + 1):
            if tuple(self.answer[i : i + LEAST_SPAN]) in spans:
                covered |= set(range(i, i + LEAST_SPAN))
        return len(covered) / len(self.answer)


def read(name: str) -> str:
    """A file of this repository."""
    return (REPOSITORY / name).read_text(encoding="utf-8")


def edit(words: Vocabulary, context: int, tokens: int) -> Work:
    """Each eighth line is replaced by one of another file."""
    lines = read("edgespec/runtime/trees/tree.py").splitlines(keepends=True)
    other = [
        line
        for line in read("edgespec/artifacts/manifest.py").splitlines(keepends=True)
        if line.strip()
    ]
    prompt = words.tokens("".join(lines))[:context]
    changed = [other[i] if i % 8 == 5 else line for i, line in enumerate(lines)]
    return Work(prompt, words.tokens("".join(changed))[:tokens])


def quotes(words: Vocabulary, context: int, tokens: int) -> Work:
    """New sentences and passages by turns."""
    prompt = words.tokens(read("docs/architecture.md"))[:context]
    new = [words.tokens(part) for part in re.split(r"(?<=[.:]) ", read("docs/quantization.md"))]
    new = [part for part in new if 8 <= len(part) <= 40]
    rng, answer = np.random.default_rng(1), list[int]()
    for sentence in new * 20:
        first = int(rng.integers(0, max(1, len(prompt) - 40)))
        answer += [*sentence, *prompt[first : first + len(sentence)]]
    return Work(prompt, answer[:tokens])


def records(words: Vocabulary, context: int, tokens: int) -> Work:
    """A table of names, kinds and sizes, then the same as JSON."""
    rng = np.random.default_rng(2)
    names = sorted(set(re.findall(r"[a-z_]{5,}", read("edgespec/contract.py"))))
    rows = [
        (f"{a} {b} {c}", rng.choice(["open", "closed", "waiting"]), int(rng.integers(10, 9999)))
        for a, b, c in (rng.choice(names, 3) for _ in range(200))
    ]
    table = "".join(f"{name} | {kind} | {size}\n" for name, kind, size in rows)
    objects = "".join(
        f'{{"name": "{name}", "state": "{kind}", "size": {size}}},\n' for name, kind, size in rows
    )
    return Work(words.tokens(table)[:context], words.tokens(objects)[:tokens])


def half(words: Vocabulary, context: int, tokens: int) -> Work:
    """Spans of the prompt and of another text, of the same lengths."""
    prompt = words.tokens(read("docs/architecture.md"))[:context]
    new = words.tokens(read("docs/requests.md"))
    rng, answer, at = np.random.default_rng(3), list[int](), 0
    while len(answer) < tokens:
        size = int(rng.integers(8, 41))
        first = int(rng.integers(0, max(1, len(prompt) - size)))
        answer += [*prompt[first : first + size], *new[at : at + size]]
        at += size
    return Work(prompt, answer[:tokens])


def prose(words: Vocabulary, context: int, tokens: int) -> Work:
    """A document after another one."""
    prompt = words.tokens(read("docs/architecture.md"))[:context]
    return Work(prompt, words.tokens(read("docs/requests.md"))[:tokens])


def new(words: Vocabulary, context: int, tokens: int) -> Work:
    """Tokens that occur once."""
    fresh = words.unused(context + tokens)
    return Work(fresh[:context], fresh[context : context + tokens])


WORKS: dict[str, Callable[[Vocabulary, int, int], Work]] = {
    "edit": edit,
    "quotes": quotes,
    "records": records,
    "half": half,
    "prose": prose,
    "new": new,
}


@dataclass(frozen=True)
class Forced:
    """A sampler that draws a recorded text, and pays for drawing."""

    real: Sampler
    text: Sequence[int]  # prompt and answer

    def pick(self, logits: NDArray[np.float32], before: Sequence[int]) -> int:
        """The text's token after `before`."""
        self.real.pick(logits, before)
        return self.text[len(before)]

    def pick_from(self, logits: Logits, row: int, before: Sequence[int]) -> int:
        """The same from a row of logits, which may be where the engine is."""
        self.real.pick_from(logits, row, before)
        return self.text[len(before)]


def answered(engine: Engine, work: Work, plan: Plan) -> tuple[Response, float]:
    """The response to a prompt, forced to its recorded answer, and the processor time that it took,
    prefill included, in seconds."""
    sampling = SamplingParams(temperature=0, max_generate_length=len(work.answer))
    handle = engine.prepare(engine.request(work.prompt, sampling, plan))
    handle.sampler = Forced(handle.sampler, [*work.prompt, *work.answer])  # type: ignore[assignment]
    began = time.process_time()
    (response,) = Batch([lambda: handle], return_exceptions=False).run(engine.driver)
    assert response.token_ids == work.answer
    return response, time.process_time() - began


def measured(engine: Engine, work: Work, runs: int) -> dict[str, Any]:
    """Plain and drafted runs by turns; every other time the drafted one comes first."""
    rows: list[dict[str, float]] = []
    answered(engine, work, PLAIN)  # the first run reads the weights
    for number in range(runs):
        order: list[Plan] = [PLAIN, None] if number % 2 == 0 else [None, PLAIN]
        found = {plan is PLAIN: answered(engine, work, plan) for plan in order}
        (plain, plain_cpu_s), (drafted, cpu_s) = found[True], found[False]
        assert drafted.metrics.acceptance_length is not None
        rows.append(
            {
                "plain_tokens_per_s": plain.metrics.tokens_per_s or 0.0,
                "tokens_per_s": drafted.metrics.tokens_per_s or 0.0,
                "over_plain": plain.metrics.decode_s / drafted.metrics.decode_s,
                "cpu_over_plain": plain_cpu_s / cpu_s,
                "acceptance_length": drafted.metrics.acceptance_length,
                "rows_per_pass": 1 + float(np.mean(drafted.metrics.per_step_drafted)),
                "proposal_ms": 1e3 * drafted.metrics.stages.draft / drafted.metrics.steps,
            }
        )
    medians = {key: round(statistics.median(row[key] for row in rows), 4) for key in rows[0]}
    return {"copied": round(work.copied, 3), **medians, "runs": rows}


def engines_of(model: Path | None, work: Path, context: int, tokens: int, weights: str) -> Path:
    """The engine directory, made where it is not there yet."""
    capacity = context + tokens + 64
    engines = work / f"engines-{weights}-{capacity}"
    if engines.is_dir():
        return engines
    if model is None:
        model = work / "base"
        if not model.is_dir():
            benchmark.write_checkpoint(model, benchmark.BASE_CONFIG, benchmark.base_tensors())
            benchmark.write_tokenizer(model)
    shutil.rmtree(work / "onnx-llm", ignore_errors=True)
    benchmark.measured(["export", str(model), str(work / "onnx-llm"), "--no-golden"])
    room = ["--max-input-len", str(context), "--max-kv-cache-capacity", str(capacity)]
    onnx, making = str(work / "onnx-llm" / "llm"), work / "engines-making"
    shutil.rmtree(making, ignore_errors=True)
    words = ["--onnx-dir", onnx, "--engine-dir", str(making), "--weights", weights]
    benchmark.measured(["build", *words, *room])
    return making.rename(engines)


def main() -> None:
    """Makes the engine, measures each work and prints one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, default=Path(tempfile.gettempdir()) / "edgespec-copying"
    )
    parser.add_argument("--model", type=Path, help="a checkpoint instead of random weights")
    parser.add_argument("--weights", default="int4", help="of the engine, as edgespec build has it")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--only", choices=sorted(WORKS), action="append")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt, at most")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    path = engines_of(args.model, args.work, args.context, args.tokens, args.weights)
    found: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg(), "arch": platform.machine()},
        "model": str(args.model or "random weights of Qwen3-0.6B's shape"),
        "weights": args.weights,
        "drafter": args.drafter,
    }
    with Engine(path, drafter=args.drafter, prefix_cache_bytes=0) as engine:
        engine.stop_ids = frozenset()
        size = engine.config.component.vocab_size
        for name in args.only or WORKS:
            work = WORKS[name](Vocabulary(size), args.context, args.tokens)
            found[name] = measured(engine, work, args.runs)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
