"""Train a draft model for the demo base: a Qwen3 of 1.6 M parameters with the same tokenizer.

Knows how such a draft is distilled: on the base's own answers and on the Python standard library it
learns the base's distribution, token by token. Knows nothing of engines; text, tokenizer and the
training loop are those of `train_demo_model.py`.

    python scripts/train_demo_draft_model.py --out build/demo-draft-model            # under ten minutes
    python scripts/train_demo_draft_model.py --out build/demo-draft-model --measure  # only measure
    python scripts/train_demo_draft_model.py --out /tmp/tiny --smoke                 # a minute

    edgespec run recipes/demo/base --draft build/demo-draft-model --prompt 'def area(radius):'
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from demo_base import DEMO_BASE, note_base
from draft_training import flags, library, own_chats, replaced
from train_demo_model import (
    ChatBatches,
    console,
    conversations,
    fit,
    functions_of,
    prompts_of,
)
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from edgespec.training.acceptance import Answer, counted
from edgespec.training.acceptance import greedy as greedy_answers
from edgespec.training.data import Question
from edgespec.training.losses import token_losses

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Size:
    """Shapes and step counts of one run; tokens per step = batch * seq_len."""

    hidden: int = 192
    intermediate: int = 512
    layers: int = 2
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 64
    seq_len: int = 256
    batch: int = 16
    steps: int = 480
    answers: int = 512
    new_tokens: int = 96


SMOKE = Size(
    hidden=32,
    intermediate=64,
    layers=1,
    heads=1,
    head_dim=32,
    seq_len=48,
    batch=2,
    steps=12,
    answers=4,
    new_tokens=8,
)


def make_draft(size: Size, base: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Returns an untrained draft with the vocabulary, the positions and the ends of its base."""
    config = Qwen3Config(
        vocab_size=base.config.vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=base.config.max_position_embeddings,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        eos_token_id=base.config.eos_token_id,
        bos_token_id=None,
        pad_token_id=base.config.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def distillation(
    base: Qwen3ForCausalLM, draft: Qwen3ForCausalLM, ids: torch.Tensor
) -> torch.Tensor:
    """Returns the cross-entropy of the draft against the base's distribution, over ids [B, T]."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        theirs = base(ids).logits.float()
    with torch.autocast("cpu", torch.bfloat16):
        mine = draft(ids).logits.float()
    return token_losses("kl", mine, theirs, ids).mean()


def train_draft(
    base: Qwen3ForCausalLM, batches: ChatBatches, size: Size
) -> tuple[Qwen3ForCausalLM, list[float]]:
    """Trains a draft; returns it with its loss at each step."""
    draft, losses = make_draft(size, base), list[float]()

    def loss_of_step(step: int) -> torch.Tensor:
        loss = distillation(base, draft, batches.next(0))
        losses.append(loss.item())
        return loss

    fit("draft", draft, size.steps, 4e-3, loss_of_step)
    return draft.eval(), losses


@torch.no_grad()
def greedy(draft: Qwen3ForCausalLM, tokens: list[int], steps: int) -> list[int]:
    """Returns the draft's greedy continuation of `tokens`."""
    for _ in range(steps):
        tokens = [*tokens, int(draft(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[-steps:]


def measure_draft(
    base: Qwen3ForCausalLM, draft: Qwen3ForCausalLM, prompts: list[list[int]], steps: int, new: int
) -> dict:
    """Returns the acceptance statistics of greedy chains of `steps` drafts."""

    def drafts(answer: Answer) -> list[list[int]]:
        ends = range(answer.prompt_len + 1, len(answer.ids))
        return [greedy(draft, [*answer.ids[:end]], steps) for end in ends]

    stops = base.generation_config.eos_token_id
    answering = greedy_answers(base, new, stops if isinstance(stops, list) else [stops], "cpu")
    pairs = enumerate(zip(prompts, answering([Question((*p,), []) for p in prompts]), strict=True))
    answers = [
        Answer((*prompt, *out), len(prompt), place=(number, 0))
        for number, (prompt, out) in pairs
        if len(out) > 1
    ]
    found = counted(answers, drafts)
    return {
        "prompts": len(prompts),
        "tokens": found.num_tokens,
        "steps": found.num_steps,
        "acceptance_length": round(found.length, 3),
        "per_position": [round(share, 3) for share in found.per_position],
    }


def save(draft: Qwen3ForCausalLM, base: Qwen3ForCausalLM, path: Path) -> None:
    """Writes the draft, with the ends of its base."""
    draft.generation_config.eos_token_id = base.generation_config.eos_token_id
    draft.generation_config.pad_token_id = base.generation_config.pad_token_id
    with replaced(path) as part:
        draft.to(torch.bfloat16).save_pretrained(part)
        for name in TOKENIZER_FILES:
            shutil.copyfile(DEMO_BASE / name, part / name)
        note_base(part)


def load(path: Path) -> Qwen3ForCausalLM:
    """Returns a model in float32."""
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def train(
    out: Path, tokenizer: PreTrainedTokenizerFast, modules: list[Path], size: Size, seed: int
) -> None:
    """Trains a draft and writes it."""
    base = load(DEMO_BASE)
    pairs = functions_of(modules)
    chats = conversations(tokenizer, pairs)
    answers = own_chats(base, tokenizer, modules, size, seed)
    # A third of what the draft sees are the base's own answers.
    order = np.random.default_rng(seed).permutation(len(chats))[: 2 * len(answers)]
    rows = answers + [chats[i] for i in order]
    console.print(f"{len(rows)} conversations, {sum(map(len, rows)) / 1e6:.2f} M tokens")
    draft, losses = train_draft(base, ChatBatches(rows, size, seed + 1), size)
    save(draft, base, out)
    parameters = sum(p.numel() for p in draft.parameters())
    console.print(
        f"wrote {out}: {parameters / 1e6:.2f} M parameters, loss {losses[0]:.3f} at first,"
        f" {np.mean(losses[-10:]):.3f} at last"
    )


def main() -> None:
    """Trains or measures the draft model."""
    parser = flags(__doc__, "draft", prompts=32, tokens=96)
    parser.add_argument("--steps", type=int, default=3, help="drafts in a chain")
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    torch.manual_seed(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_BASE)
    training, held = library(smoke=args.smoke)
    if not args.measure:
        train(args.out, tokenizer, training, size, args.seed)
    if args.prompts:
        prompts = prompts_of(held, tokenizer, 0, args.prompts)
        found = measure_draft(load(DEMO_BASE), load(args.out), prompts, args.steps, args.tokens)
        print(json.dumps(found))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
