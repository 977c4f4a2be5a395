"""Write the conversations that the demo's drafts are trained on: prompts of the standard library,
and what the demo base itself answers to them.

Knows text and tokenizer of the demo base. Knows nothing of drafts: `edgespec train` reads the file.

    python scripts/demo_answers.py --out chats.jsonl                  # a quarter of an hour
    python scripts/demo_answers.py --out chats.jsonl --answers 40     # a minute, to see that it runs

With --library, half of the conversations are the library's own, with its own answers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from demo_base import DEMO_BASE
from demo_text import KINDS
from draft_training import SHARES, library, mixed_prompts, open_base
from train_demo_model import as_chat, console, own_answers

BEFORE, BEHIND = as_chat("\n").split("\n", 2)[0] + "\n", "<|im_end|>\n<|im_start|>assistant\n"


def conversation(prompt: str, answer: str) -> str:
    """A line of JSONL."""
    turns = {"user": prompt, "assistant": answer}
    return json.dumps({"messages": [{"role": r, "content": text} for r, text in turns.items()]})


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
    torch.manual_seed(args.seed)
    base, tokenizer = open_base(args.base)
    training, _ = library(smoke=args.answers < 100)
    prompts = mixed_prompts(training, tokenizer, args.seed, args.answers)
    lines = [
        conversation(tokenizer.decode(prompt).removeprefix(BEFORE).removesuffix(BEHIND), text)
        for prompt, answer in own_answers(base, prompts, args.tokens)
        if (text := tokenizer.decode(answer, skip_special_tokens=True)).strip()
    ]
    rng = np.random.default_rng(args.seed)
    for kind in SHARES.keys() - {"random"} if args.library else ():
        pairs = [pair for path in training for pair in KINDS[kind](path)]
        some = rng.permutation(len(pairs))[: round(SHARES[kind] * args.answers)]
        lines += [conversation(*pairs[i]) for i in some]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    console.print(f"wrote {len(lines)} conversations to {args.out}")


if __name__ == "__main__":
    main()
