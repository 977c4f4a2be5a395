"""Train an EAGLE-1 draft for the demo base: one decoder layer in the layout that SafeAILab publishes.

Knows how such a draft is made on demand (none is committed), and measures it with the plain cycle
of draft and verify. Knows nothing of engines; text, base and tokenizer are those of
`train_demo_model.py`.

    python scripts/train_demo_eagle1.py --out /tmp/eagle1            # about half an hour on two cores
    python scripts/train_demo_eagle1.py --out /tmp/eagle1 --measure  # only measure what is there
    python scripts/train_demo_eagle1.py --out /tmp/tiny --smoke      # a minute, to see that it runs

The draft reads the base's state after its last norm and the next token, and says the next state: the
loss is smooth L1 between the two and cross-entropy through the base's lm_head (arXiv 2401.15077,
section 3.2). Further steps are unrolled over its own states (arXiv 2408.15766), each weighing less.
"""

from __future__ import annotations

import json
import math
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
    STEP_DECAY,
    ChatBatches,
    console,
    fit,
    prompts_of,
    rotate,
)
from transformers import Qwen3ForCausalLM

from edgespec.modules.layers import MLP, RMSNorm

CLASSIFICATION = 0.1  # weight of the cross-entropy beside the regression, as published
EPS = 1e-6


@dataclass(frozen=True)
class Size:
    """Shapes and step counts of one run; the width is the base's."""

    hidden: int = 256
    intermediate: int = 704
    heads: int = 4
    kv_heads: int = 4
    seq_len: int = 384
    batch: int = 8
    steps: int = 1200
    answers: int = 2048
    new_tokens: int = 160
    unroll: int = 3


SMOKE = Size(
    intermediate=64, heads=2, kv_heads=2, seq_len=48, batch=2, steps=12, answers=4, new_tokens=16
)


# ---- the draft


class Attention(nn.Module):
    """Attention of the one layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads = size.heads, size.kv_heads
        self.dim = size.hidden // size.heads
        self.q_proj = nn.Linear(size.hidden, size.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(size.heads * self.dim, size.hidden, bias=False)

    def project(self, x: torch.Tensor, at: torch.Tensor, theta: float) -> tuple[torch.Tensor, ...]:
        """Query, key and value [B, heads, T, D] at positions [B, T]."""
        split = lambda y, n: y.unflatten(-1, (n, self.dim)).transpose(1, 2)  # noqa: E731
        repeats = self.heads // self.kv_heads
        q, k = split(self.q_proj(x), self.heads), split(self.k_proj(x), self.kv_heads)
        v = split(self.v_proj(x), self.kv_heads).repeat_interleave(repeats, 1)
        return rotate(q, at, theta), rotate(k, at, theta).repeat_interleave(repeats, 1), v


class Layer(nn.Module):
    """A Llama layer without a norm before its attention."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(size), MLP(size.hidden, size.intermediate, bias=False)
        self.post_attention_layernorm = RMSNorm(size.hidden, EPS)


class Eagle1(nn.Module):
    """The published EAGLE-1 draft. Parameter names are those of the checkpoint.

    Embedding and lm_head are the base's.
    """

    def __init__(self, size: Size, theta: float = 10000.0) -> None:
        super().__init__()
        self.size, self.theta = size, theta
        self.fc = nn.Linear(2 * size.hidden, size.hidden)
        self.layers = nn.ModuleList([Layer(size)])

    def unroll(self, states: torch.Tensor, embeds: list[torch.Tensor]) -> list[torch.Tensor]:
        """The states [B, T, H] that each unrolled step says.

        Chain i starts at the base's state of position i; its step k reads embeds[k][:, i] (token
        i+1+k) at rotary position i+k and sees the true rows 0..i and its own earlier steps.
        """
        (layer,), said, keys, values = self.layers, [], [], []
        width = states.shape[1]
        hide = torch.full((width, width), float("-inf")).triu(1)
        for step, embed in enumerate(embeds):
            x = self.fc(torch.cat([embed, states], -1))
            at = torch.arange(width)[None] + step
            q, k, v = layer.self_attn.project(x, at, self.theta)
            keys.append(k)
            values.append(v)
            scale = 1 / math.sqrt(layer.self_attn.dim)
            scores = [(q @ keys[0].transpose(-1, -2)).float() * scale + hide]
            scores += [((q * own).sum(-1, keepdim=True)).float() * scale for own in keys[1:]]
            weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
            mixed = weights[..., :width] @ values[0]
            for i, own in enumerate(values[1:]):
                mixed = mixed + weights[..., width + i : width + i + 1] * own
            x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(-2))
            states = x + layer.mlp(layer.post_attention_layernorm(x))
            said.append(states)
        return said


# ---- training


def train(base: Qwen3ForCausalLM, batches: ChatBatches, size: Size) -> tuple[Eagle1, list[float]]:
    """Trains the draft; returns it with the loss of each step."""
    draft, losses = Eagle1(size), list[float]()
    table = base.get_input_embeddings().weight.detach()
    head = base.lm_head.weight.detach()

    def loss_of_step(step: int) -> torch.Tensor:
        ids = batches.next(size.unroll + 1)
        width = size.seq_len
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            out = base(ids, output_hidden_states=True)
        final = out.hidden_states[-1].float()
        embeds = [table[ids[:, 1 + k : 1 + k + width]] for k in range(size.unroll)]
        with torch.autocast("cpu", torch.bfloat16):
            said = draft.unroll(final[:, :width], embeds)
            logits = [states @ head.T for states in said]
        total = torch.zeros(())
        for k, (states, mine) in enumerate(zip(said, logits, strict=True)):
            wanted = final[:, 1 + k : 1 + k + width]
            theirs = out.logits[:, 1 + k : 1 + k + width].float().softmax(-1)
            regression = F.smooth_l1_loss(states.float(), wanted)
            nll = -(theirs * mine.float().log_softmax(-1)).sum(-1).mean()
            total = total + STEP_DECAY**k * (regression + CLASSIFICATION * nll)
        losses.append(total.item())
        return total

    fit("draft", draft, size.steps, 3e-3, loss_of_step)
    return draft.eval(), losses


# ---- measuring


def measure_draft(
    base: Qwen3ForCausalLM, draft: Eagle1, prompts: list[list[int]], new: int, steps: int
) -> dict:
    """Returns the acceptance statistics of greedy chains of so many drafts."""
    table, head = base.get_input_embeddings().weight, base.lm_head.weight

    def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        out = base(torch.tensor([ids]), output_hidden_states=True)
        return out.hidden_states[-1], out.logits[0]

    def drafts(final: torch.Tensor, ids: list[int], pending: int) -> list[int]:
        tokens, rows = [*ids[1:], pending], final
        for _ in range(steps):
            (said,) = draft.unroll(rows, [table[torch.tensor([tokens])]])
            tokens.append(int((said[0, -1] @ head.T).argmax()))
            rows = torch.cat([rows, said[:, -1:]], 1)
        return tokens[len(ids) :]

    return measure(base, states, drafts, prompts, new)


# ---- files


def save_draft(draft: Eagle1, base: Qwen3ForCausalLM, path: Path) -> None:
    """Writes the draft in the layout of SafeAILab, with a copy of the base's embedding."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in draft.state_dict().items()}
    embedding = base.get_input_embeddings().weight.detach()
    tensors["embed_tokens.weight"] = embedding.to(torch.bfloat16).clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    size = draft.size
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": True,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": base.config.vocab_size,
        "rms_norm_eps": EPS,
        "rope_theta": draft.theta,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_draft(path: Path) -> Eagle1:
    """Returns the draft of a directory."""
    raw = json.loads((path / "config.json").read_text())
    size = Size(
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
    )
    draft = Eagle1(size, raw["rope_theta"])
    tensors = load_file(path / "model.safetensors")
    del tensors["embed_tokens.weight"]
    draft.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return draft.eval()


def main() -> None:
    """Trains or measures the draft."""
    parser = flags(__doc__, "draft", prompts=64, tokens=128)
    parser.add_argument("--base", type=Path, default=DEMO_BASE)
    parser.add_argument("--steps", type=int, help="training steps, instead of the size's own")
    parser.add_argument(
        "--draft-steps", type=int, default=5, help="drafts a chain, to measure with"
    )
    args = parser.parse_args()
    torch.manual_seed(args.seed)

    base, tokenizer = open_base(args.base)
    size = replace(SMOKE if args.smoke else Size(), hidden=base.config.hidden_size)
    size = size if args.steps is None else replace(size, steps=args.steps)
    training, held = library(smoke=args.smoke)
    report: dict[str, object] = {}
    if not args.measure:
        chats = own_chats(base, tokenizer, training, size, args.seed)
        draft, losses = train(base, ChatBatches(chats, size, args.seed), size)
        save_draft(draft, base, args.out)
        note_base(args.out, args.base)
        console.print(f"wrote {args.out}")
        report["loss"] = first_and_last(losses)
    if args.prompts:
        prompts = prompts_of(held, tokenizer, 0, args.prompts)
        draft = load_draft(args.out)
        report |= measure_draft(base, draft, prompts, args.tokens, args.draft_steps)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
