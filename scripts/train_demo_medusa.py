"""Train Medusa heads for the demo base, in the layout that FasterDecoding publishes.

Knows how such heads are made on demand (none are committed), and measures them with the plain cycle
of draft and verify. Knows nothing of engines; text, base and tokenizer are those of
`train_demo_model.py`.

    python scripts/train_demo_medusa.py --out build/demo-medusa            # a quarter of an hour on two cores
    python scripts/train_demo_medusa.py --out build/demo-medusa --measure  # only measure what is there
    python scripts/train_demo_medusa.py --out /tmp/tiny --smoke            # a minute, to see that it runs

Head i reads the base's state after its last norm and says the token i + 2 places behind it; the base
stays as it is (Medusa-1, arXiv 2401.10774, section 2.2.1). The residual block begins as the identity
and the matrix behind it as the base's lm_head, so that training begins where the base is. Later
heads weigh less.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_base import DEMO_BASE, note_base
from draft_cycle import measure
from draft_training import first_and_last, flags, library, open_base, own_chats
from safetensors.torch import load_file, save_file
from torch import nn
from train_demo_model import (
    ChatBatches,
    console,
    fit,
    prompts_of,
)
from transformers import Qwen3ForCausalLM

HEAD_DECAY = 0.8  # head i weighs HEAD_DECAY**i, as published
WEIGHTS = "medusa_lm_head.safetensors"


@dataclass(frozen=True)
class Size:
    """Shapes and step counts of one run; width and vocabulary are the base's."""

    heads: int = 4
    seq_len: int = 384
    batch: int = 8
    steps: int = 1200
    answers: int = 2048
    new_tokens: int = 160


SMOKE = Size(heads=2, seq_len=48, batch=2, steps=12, answers=4, new_tokens=16)


# ---- the heads


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity at first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The state of the head [..., H]."""
        return x + F.silu(self.linear(x))


class Heads(nn.ModuleList):
    """The published heads. Parameter names are those of the checkpoint: {head}.{place}..."""

    def __init__(self, heads: int, lm_head: torch.Tensor) -> None:
        vocab, width = lm_head.shape
        made = [
            nn.Sequential(ResBlock(width), nn.Linear(width, vocab, bias=False))
            for _ in range(heads)
        ]
        super().__init__(made)
        for head in made:
            head[1].weight.data.copy_(lm_head)


# ---- training


def train(base: Qwen3ForCausalLM, batches: ChatBatches, size: Size) -> tuple[Heads, list[float]]:
    """Trains the heads; returns them with the loss of each step."""
    heads, losses = Heads(size.heads, base.lm_head.weight.detach()), list[float]()
    weights = [HEAD_DECAY**i for i in range(size.heads)]

    def loss_of_step(step: int) -> torch.Tensor:
        ids = batches.next(size.heads + 1)
        width = size.seq_len
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            states = base.model(ids[:, :width]).last_hidden_state
        total = torch.zeros(())
        for i, (head, weight) in enumerate(zip(heads, weights, strict=True)):
            with torch.autocast("cpu", torch.bfloat16):
                logits = head(states)
            wanted = ids[:, 2 + i : 2 + i + width]
            got = logits[:, : wanted.shape[1]].float()
            total = total + weight * F.cross_entropy(got.flatten(0, 1), wanted.flatten())
        losses.append(total.item() / sum(weights))
        return total

    fit("heads", heads, size.steps, 3e-3, loss_of_step)
    return heads.eval(), losses


# ---- measuring


def measure_heads(base: Qwen3ForCausalLM, heads: Heads, prompts: list[list[int]], new: int) -> dict:
    """Returns the acceptance statistics of greedy chains, one draft a head."""

    def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        found = base.model(torch.tensor([ids])).last_hidden_state
        return found, base.lm_head(found)[0]

    def drafts(final: torch.Tensor, ids: list[int], pending: int) -> list[int]:
        del ids, pending
        return [int(head(final[0, -1]).argmax()) for head in heads]

    return measure(base, states, drafts, prompts, new)


# ---- files


def save_heads(heads: Heads, path: Path) -> None:
    """Writes the heads in the layout of FasterDecoding."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in heads.state_dict().items()}
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    config = {"medusa_num_heads": len(heads), "medusa_num_layers": 1, "version": "1"}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_heads(path: Path, base: Qwen3ForCausalLM) -> Heads:
    """Returns the heads of a directory."""
    tensors = load_file(path / WEIGHTS)
    count = 1 + max(int(name.split(".")[0]) for name in tensors)
    heads = Heads(count, base.lm_head.weight.detach())
    heads.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return heads.eval()


def main() -> None:
    """Trains or measures the heads."""
    parser = flags(__doc__, "heads", prompts=64, tokens=128)
    parser.add_argument("--base", type=Path, default=DEMO_BASE)
    parser.add_argument("--steps", type=int, help="training steps, instead of the size's own")
    parser.add_argument("--heads", type=int, help="heads, instead of the size's own")
    args = parser.parse_args()
    sizes = SMOKE if args.smoke else Size()
    size = replace(sizes, steps=args.steps or sizes.steps, heads=args.heads or sizes.heads)
    torch.manual_seed(args.seed)

    base, tokenizer = open_base(args.base)
    training, held = library(smoke=args.smoke)
    report: dict[str, object] = {}
    if not args.measure:
        chats = own_chats(base, tokenizer, training, size, args.seed)
        heads, losses = train(base, ChatBatches(chats, size, args.seed), size)
        save_heads(heads, args.out)
        note_base(args.out, args.base)
        console.print(f"wrote {args.out}")
        report["loss"] = first_and_last(losses)
    if args.prompts:
        prompts = prompts_of(held, tokenizer, 0, args.prompts)
        report |= measure_heads(base, load_heads(args.out, base), prompts, args.tokens)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
