"""Train a tiny Qwen3.5 hybrid, whose MTP head is trained afterwards: what `make demo METHOD=mtp`
speculates with.

Knows how such a base lies on disk: transformers' `Qwen3_5ForCausalLM`. Knows nothing of heads and
engines; text and tokenizer are those of `train_demo_model.py`.

    python scripts/train_demo_mtp.py --out build/demo-mtp/base       # five minutes on two cores
    python scripts/demo_answers.py --base build/demo-mtp/base --library --answers 512 --tokens 96 \\
        --out build/demo-mtp/chats.jsonl
    edgespec train recipes/training/demo_mtp.yaml
    python scripts/train_demo_mtp.py --out /tmp/tiny --smoke         # a minute, to see that it runs
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_base import DEMO_BASE
from draft_training import library, replaced
from train_demo_model import ChatBatches, console, conversations, functions_of, train_base
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

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
    base_steps: int = 250


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
    base_steps=3,
)


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
    )
    return with_short_chunks(Qwen3_5ForCausalLM(config))


def with_short_chunks(model: Qwen3_5ForCausalLM) -> Qwen3_5ForCausalLM:
    """Sets a short chunk size of the torch delta rule and returns the model."""
    short = functools.partial(torch_chunk_gated_delta_rule, chunk_size=DELTA_CHUNK)
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.linear_attn.chunk_gated_delta_rule = short
    return model


def main() -> None:
    """Trains the base."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="one that is there is replaced")
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to test the script itself")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    size = SMOKE if args.smoke else Size()
    torch.manual_seed(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_BASE)
    end, eos = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    pairs = functions_of(library(smoke=args.smoke)[0])
    chats = conversations(tokenizer, pairs)
    base = make_base(size, len(tokenizer), eos)
    console.print(f"{len(pairs)} functions, {sum(map(len, chats)) / 1e6:.2f} M tokens")
    train_base("base", base, ChatBatches(chats, size, args.seed), size.base_steps, 3e-3)
    base.generation_config.eos_token_id = [eos, end]
    base.generation_config.pad_token_id = 0
    with replaced(args.out) as part:
        base.to(torch.bfloat16).save_pretrained(part)
        tokenizer.save_pretrained(part)
    console.print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
