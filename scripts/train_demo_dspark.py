"""Train a DSpark draft for the demo base: a block drafter with two small heads, in the layout of
DeepSpec, by which its authors publish it.

Knows how such a draft is made on demand (none is committed), and measures it with the plain cycle
of draft and verify. Knows nothing of engines; what all block drafts have in common is in
`block_training.py`.

    python scripts/train_demo_dspark.py --out build/demo-dspark            # about half an hour on one core
    python scripts/train_demo_dspark.py --out build/demo-dspark --measure  # only measure what is there
    python scripts/train_demo_dspark.py --out /tmp/tiny --smoke            # a minute, to see that it runs

The layers are DFlash's, and slot k predicts the token behind its own, so that the anchor's slot
drafts too. The Markov head adds to a slot's logits what the token before makes likely: in training
the true one. Draft and base are compared by cross-entropy with the answer and by the distance
between their distributions; the confidence head learns the part that is common to both, which is
how probably a drawn token is accepted. Near slots weigh more (arXiv 2607.05147).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from block_training import GAMMA, SMOKE, BlockDraft, Blocks, Size, run
from torch import nn
from transformers import Qwen3ForCausalLM

RANK = 64  # of the Markov head; published drafts of 151936 tokens have 256
BLOCK = 7  # as published: as many drafts as a DFlash block of 8 has
CROSS_ENTROPY, DISTANCE, CONFIDENCE = 0.1, 0.9, 1.0  # weights of the terms, as published
INIT_STD = 0.02  # of the heads' weights, as of Qwen3's


class MarkovHead(nn.Module):
    """Logits [..., V] that the token before makes likely: a table of low rank."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = (
            nn.Embedding(vocab, rank),
            nn.Linear(rank, vocab, bias=False),
        )
        for layer in (self.markov_w1, self.markov_w2):
            nn.init.normal_(layer.weight, std=INIT_STD)

    def forward(self, before: torch.Tensor) -> torch.Tensor:
        """What is added to the logits behind the tokens `before` [...]."""
        return self.markov_w2(self.markov_w1(before))


class ConfidenceHead(nn.Module):
    """How probably a token is accepted, as a logit [...], from states and embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)
        nn.init.normal_(self.proj.weight, std=INIT_STD)
        nn.init.zeros_(self.proj.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logit [...] of inputs [..., H + rank]."""
        return self.proj(x).squeeze(-1)


class DSpark(BlockDraft):
    """The published DSpark draft with a vanilla Markov head."""

    first_slot = 0
    architecture = "Qwen3DSparkModel"
    stores_shared = True

    def __init__(self, size: Size, base: Qwen3ForCausalLM) -> None:
        super().__init__(size, base)
        self.markov_head = MarkovHead(base.config.vocab_size, RANK)
        self.confidence_head = ConfidenceHead(size.hidden + RANK)

    def loss(self, blocks: Blocks) -> torch.Tensor:
        """The three terms; the confidences do not move what they are to predict."""
        weight = torch.exp(-torch.arange(self.size.block) / GAMMA)
        embedded = self.markov_head.markov_w1(blocks.before)
        with torch.autocast("cpu", torch.bfloat16):
            said = blocks.logits + self.markov_head(blocks.before)
            confidence = self.confidence_head(torch.cat([blocks.states, embedded], -1))
        said = said.float()
        nll = F.cross_entropy(said.flatten(0, 2), blocks.wanted.flatten(), reduction="none")
        distance = (said.softmax(-1) - blocks.probabilities()).abs().sum(-1)
        accepted = (1 - distance.detach() / 2).clamp(0, 1)
        surprise = F.binary_cross_entropy_with_logits(
            confidence.float(), accepted, reduction="none"
        )
        return (
            CROSS_ENTROPY * blocks.mean(nll, weight)
            + DISTANCE * blocks.mean(distance, weight)
            + CONFIDENCE * blocks.mean(surprise, weight)
        )

    def chain(self, states: torch.Tensor, logits: torch.Tensor, anchor: int) -> list[int]:
        """The whole block from left to right, each token behind the drafted one before."""
        del states
        tokens = [anchor]
        for said in logits:
            tokens.append(int((said + self.markov_head(torch.tensor(tokens[-1]))).argmax()))
        return tokens[1:]

    def keys(self, mask_id: int) -> dict[str, Any]:
        """The keys that DeepSpec publishes."""
        return {
            "mask_token_id": mask_id,
            "target_layer_ids": list(self.size.aux_layers),
            "num_anchors": self.size.anchors,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }


if __name__ == "__main__":
    run(DSpark, __doc__, Size(block=BLOCK), replace(SMOKE, block=BLOCK))
