"""Train a tiny Qwen3.5 hybrid with an MTP head: what `make demo METHOD=mtp` speculates with.

Knows how such a checkpoint lies on disk: transformers' `Qwen3_5ForCausalLM`, and the head's `mtp.*`
tensors at the root beside it. Knows nothing of engines; text and tokenizer are those of
`train_demo_model.py`.

    python scripts/train_demo_mtp.py --out build/demo-mtp            # under ten minutes on two cores
    python scripts/train_demo_mtp.py --out build/demo-mtp --measure  # only measure what is there
    python scripts/train_demo_mtp.py --out /tmp/tiny --smoke         # a minute, to see that it runs

The head reads the base's last hidden state after its final norm and the next token, and predicts
the token after that. For further tokens its own normed output replaces the hidden state; training
unrolls it in the same way.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from demo_base import DEMO_BASE
from draft_cycle import measure
from draft_training import flags, library, own_chats, replaced
from safetensors.torch import load_file, save_file
from torch import nn
from train_demo_model import (
    STEP_DECAY,
    ChatBatches,
    console,
    conversations,
    fit,
    functions_of,
    prompts_of,
    rotate,
    train_base,
)
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from edgespec.modules.layers import MLP

# The torch delta rule runs row by row inside a chunk: 16 rows are twice as fast as its default 64
DELTA_CHUNK = 16


@dataclass(frozen=True)
class Size:
    """Shapes and step counts of one run; tokens per step = batch * seq_len."""

    hidden: int = 256
    intermediate: int = 640
    layers: int = 8  # three gated delta nets, then one full attention, twice
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rotary: float = 0.25
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 32
    seq_len: int = 256
    batch: int = 16
    head_batch: int = 8
    base_steps: int = 250
    head_steps: int = 130
    answers: int = 512
    new_tokens: int = 96
    unroll: int = 3


SMOKE = Size(
    hidden=64,
    intermediate=128,
    layers=4,
    heads=2,
    kv_heads=1,
    head_dim=32,
    linear_key_heads=1,
    linear_value_heads=2,
    linear_head_dim=16,
    seq_len=64,
    batch=2,
    head_batch=2,
    base_steps=3,
    head_steps=3,
    answers=4,
    new_tokens=8,
)


# ---- the base


def make_base(size: Size, vocab: int, eos: int) -> Qwen3_5ForCausalLM:
    """Returns an untrained Qwen3.5 hybrid."""
    pairs = int(size.head_dim * size.rotary) // 2
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": size.rotary,
        "mrope_interleaved": True,
        "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
    }
    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        linear_num_key_heads=size.linear_key_heads,
        linear_num_value_heads=size.linear_value_heads,
        linear_key_head_dim=size.linear_head_dim,
        linear_value_head_dim=size.linear_head_dim,
        max_position_embeddings=4096,
        rope_parameters=rope,
        tie_word_embeddings=True,
        eos_token_id=eos,
        bos_token_id=None,
        pad_token_id=0,
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
    )
    return with_short_chunks(Qwen3_5ForCausalLM(config))


def with_short_chunks(model: Qwen3_5ForCausalLM) -> Qwen3_5ForCausalLM:
    """Sets a short chunk size of the torch delta rule and returns the model."""
    short = functools.partial(torch_chunk_gated_delta_rule, chunk_size=DELTA_CHUNK)
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.linear_attn.chunk_gated_delta_rule = short
    return model


# ---- the head


class Norm(nn.Module):
    """Qwen3.5's RMSNorm: the weight is an offset from one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the normalized x."""
        x32 = x.float()
        return (
            x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)
        ).to(x.dtype)


class Attention(nn.Module):
    """Full attention with an output gate: q_proj has each head's query, then its gate."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.theta = config.rope_parameters["rope_theta"]
        self.rotary = int(self.width * config.rope_parameters["partial_rotary_factor"])
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, config.hidden_size, bias=False)
        self.q_norm, self.k_norm = (
            Norm(self.width, config.rms_norm_eps),
            Norm(self.width, config.rms_norm_eps),
        )

    def place(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # [B, heads, T, D]
        """Returns x [B, heads, T, D] with RoPE on the first `rotary` dimensions."""
        turned, kept = x.split([self.rotary, self.width - self.rotary], -1)
        return torch.cat([rotate(turned, positions, self.theta), kept], -1)

    def project(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns query, key and value [B, heads, T, D], and the gate [B, T, heads * D]."""
        both = self.q_proj(x).unflatten(-1, (self.heads, 2 * self.width))
        q, gate = both.chunk(2, -1)
        k, v = (p(x).unflatten(-1, (self.kv_heads, self.width)) for p in (self.k_proj, self.v_proj))
        q = self.place(self.q_norm(q).transpose(1, 2), positions)
        k = self.place(self.k_norm(k).transpose(1, 2), positions)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.transpose(1, 2).repeat_interleave(repeats, 1)
        return q, k, v, gate.flatten(-2)


class Layer(nn.Module):
    """The decoder layer of the head."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, bias=False)


class MTP(nn.Module):
    """Qwen3.5's MTP head. Parameter names are those of the checkpoint below `mtp.`."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Norm(width, eps), Norm(width, eps)
        self.layers = nn.ModuleList([Layer(config)])
        self.norm = Norm(width, eps)

    def unroll(self, hidden: torch.Tensor, embeds: list[torch.Tensor]) -> list[torch.Tensor]:
        """Normed output [B, T, H] of each unrolled step; the base's head makes logits of it.

        Chain i starts at the base's normed hidden state of position i. Its step k reads
        embeds[k][:, i] (token i + 1 + k) and its own output before, at rotary position i + k, and
        sees slots 0..i and its own earlier steps.
        """
        layer, outs, keys, values = self.layers[0], [], [], []
        width = hidden.shape[1]
        hide = torch.full((width, width), float("-inf")).triu(1)
        for step, embed in enumerate(embeds):
            x = self.fc(
                torch.cat([self.pre_fc_norm_embedding(embed), self.pre_fc_norm_hidden(hidden)], -1)
            )
            at = (torch.arange(width) + step).expand(len(x), -1)
            q, k, v, gate = layer.self_attn.project(layer.input_layernorm(x), at)
            keys.append(k)
            values.append(v)
            scores = [(q @ keys[0].transpose(-1, -2)).float() + hide]
            scores += [(q * own).sum(-1, keepdim=True).float() for own in keys[1:]]
            weights = (torch.cat(scores, -1) / math.sqrt(q.shape[-1])).softmax(-1).to(q.dtype)
            mixed = weights[..., :width] @ values[0]
            for i, own in enumerate(values[1:]):
                mixed = mixed + weights[..., width + i : width + i + 1] * own
            x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(-2) * gate.sigmoid())
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = self.norm(x)
            outs.append(hidden)
        return outs


def make_head(base: Qwen3_5ForCausalLM) -> MTP:
    """Returns a head initialized with the base's last layer and norm."""
    head = MTP(base.config)
    head.layers[0].load_state_dict(base.model.layers[-1].state_dict())
    head.norm.load_state_dict(base.model.norm.state_dict())
    return head


def train_head(base: Qwen3_5ForCausalLM, batches: ChatBatches, size: Size) -> MTP:
    """Trains and returns the head."""
    head, table = make_head(base), base.get_input_embeddings().weight.detach()

    def loss_of_step(step: int) -> torch.Tensor:
        ids, width = batches.next(size.unroll), size.seq_len
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = base.model(ids).last_hidden_state
            target = (hidden @ table.T).float().softmax(-1)
        embeds = [table[ids[:, 1 + k : width + k]] for k in range(size.unroll)]
        total = torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            outs = head.unroll(hidden[:, : width - 1], embeds)
            logits = [out @ table.T for out in outs]
        for k, mine in enumerate(logits):
            nll = F.cross_entropy(
                mine.float().flatten(0, 1), target[:, 1 + k : width + k].flatten(0, 1)
            )
            total = total + STEP_DECAY**k * nll
        return total

    fit("head", head, size.head_steps, 2e-3, loss_of_step)
    return head.eval()


# ---- measuring


@torch.no_grad()
def chain(
    base: Qwen3_5ForCausalLM, head: MTP, hidden: torch.Tensor, tokens: list[int], steps: int
) -> list[int]:
    """Returns greedy drafts after `tokens` (t_1 .. t_n).

    `hidden` [1, n, H] holds the hidden state before each token.
    """
    table = base.get_input_embeddings().weight
    for _ in range(steps):
        out = head.unroll(hidden, [table[torch.tensor([tokens])]])[0][:, -1:]
        tokens = [*tokens, int((out @ table.T).argmax())]
        hidden = torch.cat([hidden, out], 1)
    return tokens[-steps:]


def measure_head(
    base: Qwen3_5ForCausalLM, head: MTP, prompts: list[list[int]], steps: int, new: int
) -> dict:
    """Returns the acceptance statistics of greedy chains of `steps` drafts."""

    def states(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = base.model(torch.tensor([ids])).last_hidden_state
        return hidden, base.lm_head(hidden)[0]

    def drafts(hidden: torch.Tensor, ids: list[int], pending: int) -> list[int]:
        return chain(base, head, hidden, [*ids[1:], pending], steps)

    return measure(base, states, drafts, prompts, new)


# ---- files


def save(
    base: Qwen3_5ForCausalLM,
    head: MTP,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    eos: list[int],
) -> None:
    """Writes the checkpoint."""
    base.generation_config.eos_token_id = eos
    base.generation_config.pad_token_id = 0
    with replaced(path) as part:
        base.to(torch.bfloat16).save_pretrained(part)
        tokenizer.save_pretrained(part)
        tensors = load_file(part / "model.safetensors")
        tensors |= {
            f"mtp.{name}": value.detach().to(torch.bfloat16).contiguous()
            for name, value in head.state_dict().items()
        }
        save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})


def load(path: Path) -> tuple[Qwen3_5ForCausalLM, MTP]:
    """Returns the base and the head of a checkpoint."""
    base = with_short_chunks(Qwen3_5ForCausalLM.from_pretrained(path, dtype=torch.float32)).eval()
    tensors = load_file(path / "model.safetensors")
    head = MTP(base.config)
    head.load_state_dict(
        {n.removeprefix("mtp."): t for n, t in tensors.items() if n.startswith("mtp.")}
    )
    return base, head.eval()


def train(
    out: Path, tokenizer: PreTrainedTokenizerFast, modules: list[Path], size: Size, seed: int
) -> None:
    """Trains base and head, and writes the checkpoint."""
    end, eos = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    pairs = functions_of(modules)
    chats = conversations(tokenizer, pairs)
    base = make_base(size, len(tokenizer), eos)
    console.print(f"{len(pairs)} functions, {sum(map(len, chats)) / 1e6:.2f} M tokens")
    train_base("base", base, ChatBatches(chats, size, seed), size.base_steps, 3e-3)
    # What is stored is bfloat16; the head learns from what is stored.
    base.load_state_dict({k: v.to(torch.bfloat16).float() for k, v in base.state_dict().items()})
    answers = own_chats(base, tokenizer, modules, size, seed)
    some = [
        chats[i] for i in np.random.default_rng(seed).permutation(len(chats))[: len(answers) // 2]
    ]
    rows = ChatBatches(answers + some, replace(size, batch=size.head_batch), seed + 1)
    head = train_head(base, rows, size)
    save(base, head, tokenizer, out, [eos, end])
    console.print(f"wrote {out}")


def main() -> None:
    """Trains or measures the demo model."""
    parser = flags(__doc__, "checkpoint", prompts=32, tokens=96)
    parser.add_argument("--steps", type=int, default=3, help="drafts in a chain")
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    torch.manual_seed(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_BASE)
    training, held = library(smoke=args.smoke)
    if not args.measure:
        train(args.out, tokenizer, training, size, args.seed)
    if args.prompts:
        base, head = load(args.out)
        prompts = prompts_of(held, tokenizer, 0, args.prompts)
        print(json.dumps(measure_head(base, head, prompts, args.steps, args.tokens)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
