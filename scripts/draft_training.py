"""What the scripts that train a draft for the demo base have in common: their flags, the chats that
they train on, and what they report.

Knows text, base and tokenizer of `train_demo_model.py`. Knows no kind of draft.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from demo_base import DEMO_BASE
from demo_text import messages
from train_demo_model import MAX_PROMPT, as_chat, own_answers, stdlib_files
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


class Answers(Protocol):
    """How many answers of the base a run trains on, and how long they are."""

    @property
    def answers(self) -> int: ...

    @property
    def new_tokens(self) -> int: ...


# What the prompts are that a draft learns the base's answers to.
SHARES = {"functions": 0.55, "prose": 0.12, "random": 0.09, "repetitive": 0.12, "chat": 0.12}
SMOKE_PROMPTS, SMOKE_TOKENS = 2, 8  # of a measurement that only shows that it runs


class Flags(argparse.ArgumentParser):
    """Flags of which --smoke changes the defaults of the measurement too."""

    def __init__(self, *, prompts: int, tokens: int, **settings: Any) -> None:
        super().__init__(**settings)
        self.prompts, self.tokens = prompts, tokens

    def parse_args(self, *args: Any, **kwargs: Any) -> argparse.Namespace:  # type: ignore[override]
        """The flags, with what is measured where they do not say so."""
        found = super().parse_args(*args, **kwargs)
        if found.prompts is None:
            found.prompts = SMOKE_PROMPTS if found.smoke else self.prompts
        if found.tokens is None:
            found.tokens = SMOKE_TOKENS if found.smoke else self.tokens
        return found


def flags(description: str | None, what: str, prompts: int, tokens: int) -> argparse.ArgumentParser:
    """The flags of a script that trains or measures `what`, with the defaults of a measurement."""
    parser = Flags(
        prompts=prompts,
        tokens=tokens,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    place = f"directory of the {what}; one that is there is replaced"
    parser.add_argument("--out", type=Path, required=True, help=place)
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to test the script itself")
    parser.add_argument(
        "--measure", action="store_true", help=f"measure the {what} in OUT and train nothing"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        help=f"held-out prompts to measure with, 0: not at all (default: {prompts})",
    )
    parser.add_argument("--tokens", type=int, help=f"of each answer (default: {tokens})")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def library(*, smoke: bool) -> tuple[list[Path], list[Path]]:
    """The modules to train on, few of them for toy sizes, and those that are held out."""
    training, held = stdlib_files()
    return training[:20] if smoke else training, held


def open_base(path: Path = DEMO_BASE) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A base in float32 and its tokenizer."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return base, PreTrainedTokenizerFast.from_pretrained(path)


def mixed_prompts(
    files: Sequence[Path], tokenizer: PreTrainedTokenizerFast, seed: int, count: int
) -> list[list[int]]:
    """About `count` prompts of all kinds of text, as token ids; overlong ones are skipped."""
    found = []
    for kind, share in SHARES.items():
        some = (tokenizer(as_chat(text)).input_ids for text in messages(kind, [*files], seed=seed))
        short = (ids for ids in some if len(ids) <= MAX_PROMPT)
        found += list(islice(short, max(1, round(share * count))))
    return found


def own_chats(
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    training: Sequence[Path],
    size: Answers,
    seed: int,
) -> list[list[int]]:
    """Prompts made of the modules, each with the base's own answer, as token ids."""
    prompts = mixed_prompts(training, tokenizer, seed, size.answers)
    return [prompt + answer for prompt, answer in own_answers(base, prompts, size.new_tokens)]


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A directory beside `path` to write to, which takes its place in the end: what stands there is
    always complete."""
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    yield part
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    part.rename(path)
