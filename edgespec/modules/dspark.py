"""A DSpark draft as a torch module (arXiv 2607.05147): a block draft, and the small heads behind
its layers, for many blocks at once.

Its parameters have the names of `checkpoint.block_draft.expected_tensors` and of `Heads.shapes`.
Knows nothing of files or quantization.
"""

from __future__ import annotations

import torch
from torch import nn

from edgespec.methods.dspark import DSparkConfig
from edgespec.modules.block_draft import BlockDraftModule

Tensor = torch.Tensor
INIT_STD = 0.02  # of new weights, as published drafts begin


class MarkovHead(nn.Module):
    """What the tokens before a slot make likely, in `rank` numbers that `markov_w2` reads."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.heads.markov_rank, config.decoder.hidden_size
        self.rank, self.kind = rank, config.heads.markov_kind
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        self.apply(begin)

    def read(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Blocks of D slots: embeddings [..., D, r] of the tokens before them, and their states
        [..., D, H] -> what markov_w2 reads, [..., D, r]."""
        memory, found = self.start(embeds), []
        for slot in range(embeds.shape[-2]):
            memory, read = self.step(memory, embeds[..., slot, :], states[..., slot, :])
            found.append(read)
        return torch.stack(found, dim=-2)

    def start(self, embeds: Tensor) -> Tensor:
        """The memory [..., r] before blocks of embeddings [..., D, r]."""
        return torch.zeros_like(embeds[..., 0, :])

    def step(self, memory: Tensor, embed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: the memory [..., r] of the slots before it, which only a recurrent head has,
        the embedding [..., r] and the state [..., H] -> the memory behind it, and what markov_w2
        reads [..., r]."""
        if self.kind == "vanilla":
            return memory, embed
        if self.kind == "gated":
            return memory, self.gate_proj(torch.cat([state, embed], dim=-1)).sigmoid() * embed
        joint = self.joint_proj(torch.cat([memory, embed, state], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        kept = gate.sigmoid()
        return kept * memory + (1 - kept) * candidate.tanh(), output.tanh()


class ConfidenceHead(nn.Module):
    """How probably a slot's token is accepted where those before it are."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.head_shapes["confidence_head.proj.weight"][1], 1)
        self.reads_markov = config.heads.confidence_reads_markov
        self.apply(begin)

    def forward(self, states: Tensor, embeds: Tensor | None) -> Tensor:
        """States [..., H], and embeddings [..., r] of the tokens before -> a logit [...]."""
        if self.reads_markov:
            assert embeds is not None
            states = torch.cat([states, embeds], dim=-1)
        return self.proj(states)[..., 0]  # type: ignore[no-any-return]


def begin(module: nn.Module) -> None:
    """The first weights of a head's layer."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class DSpark(BlockDraftModule):
    """The draft; a head that it has not is None."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        heads = config.heads
        self.markov_head = MarkovHead(config) if heads.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if heads.confidence else None

    def walk(self, states: Tensor, anchors: Tensor) -> Tensor:
        """The best tokens of blocks, slot by slot, each behind the one before it: states [A, D, H]
        and the tokens [A] that blocks begin with -> [A, D]."""
        logits: Tensor = self.lm_head(states)
        if self.markov_head is None:
            return logits.argmax(-1)
        head, tokens = self.markov_head, [anchors]
        memory = states.new_zeros(len(states), head.rank)
        for slot in range(states.shape[1]):
            memory, read = head.step(memory, head.markov_w1(tokens[-1]), states[:, slot])
            tokens.append((logits[:, slot] + head.markov_w2(read)).argmax(-1))
        return torch.stack(tokens[1:], dim=1)
