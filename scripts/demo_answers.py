"""Write the conversations that the demo's drafts are trained on: prompts of the standard library,
and what the demo base itself answers to them.

Knows text and tokenizer of the demo base. Knows nothing of drafts: `edgespec train` reads the file.

    python scripts/demo_answers.py --out chats.jsonl                  # two minutes
    python scripts/demo_answers.py --out chats.jsonl --answers 40     # to see that it runs

The base answers greedily, as an engine of float32 with 16 sequences at a time. With --library, half of the conversations are the library's own, with its own answers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from demo_base import DEMO_BASE
from demo_text import KINDS
from draft_training import SHARES, library, mixed_prompts
from train_demo_model import MAX_PROMPT, as_chat, console
from transformers import PreTrainedTokenizerFast

import edgespec
from edgespec.backends.build import build
from edgespec.contract import Limits
from edgespec.export.components import ExportOptions, export

BEFORE, BEHIND = as_chat("\n").split("\n", 2)[0] + "\n", "<|im_end|>\n<|im_start|>assistant\n"


def conversation(prompt: str, answer: str) -> str:
    """A line of JSONL."""
    turns = {"user": prompt, "assistant": answer}
    return json.dumps({"messages": [{"role": r, "content": text} for r, text in turns.items()]})


def own_answers(base: Path, prompts: list[str], tokens: int) -> list[tuple[str, str]]:
    """What the base answers to prompts, each up to so many tokens."""
    sampling = edgespec.SamplingParams(temperature=0, max_generate_length=tokens)
    asked = [[edgespec.Message("user", prompt)] for prompt in prompts]
    with tempfile.TemporaryDirectory() as room:
        onnx, engines = Path(room) / "onnx", Path(room) / "engines"
        export(str(base), onnx, ExportOptions())
        build(onnx / "llm", engines, Limits(16, 2 * MAX_PROMPT, 2 * MAX_PROMPT + tokens))
        with edgespec.load(engines) as engine:
            found = engine.generate_batch(asked, sampling, edgespec.PLAIN)
    return [(prompt, answer.text) for prompt, answer in zip(prompts, found, strict=True)]


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base", type=Path, default=DEMO_BASE)
    parser.add_argument("--answers", type=int, default=1400)
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    parser.add_argument("--library", action="store_true", help="the library's own answers too")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.base)
    training, _ = library(smoke=args.answers < 100)
    rows = mixed_prompts(training, tokenizer, args.seed, args.answers)
    prompts = [tokenizer.decode(ids).removeprefix(BEFORE).removesuffix(BEHIND) for ids in rows]
    pairs = own_answers(args.base, prompts, args.tokens)
    lines = [conversation(*pair) for pair in pairs if pair[1].strip()]
    rng = np.random.default_rng(args.seed)
    for kind in SHARES.keys() - {"random"} if args.library else ():
        texts = [pair for path in training for pair in KINDS[kind](path)]
        some = rng.permutation(len(texts))[: round(SHARES[kind] * args.answers)]
        lines += [conversation(*texts[i]) for i in some]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print(f"wrote {len(lines)} conversations to {args.out}")


if __name__ == "__main__":
    main()
