"""A slow and plain second opinion on DSpark's heads in torch, written from the description of the
method (arXiv 2607.05147): the Markov walk, the confidences and the length that they allow.

The layers are those of `dflash_reference`. Shares no line with edgespec.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.parity.dflash_reference import DFlashReference

MODELOPT = {"markov_w1", "markov_w2", "gate_proj", "joint_proj"}


@dataclass(frozen=True)
class Drafted:
    """Of a block, slot by slot: the base's ids, the logits that each is the best of, and how
    probably it is accepted, 1 without the head."""

    tokens: list[int]
    logits: list[torch.Tensor]
    confidences: list[float]

    def kept(self, threshold: float) -> list[int]:
        """The tokens before the first that is less probable than the threshold."""
        kept = []
        for token, confidence in zip(self.tokens, self.confidences, strict=True):
            if confidence < threshold:
                break
            kept.append(token)
        return kept


class DSparkReference(DFlashReference):
    """A draft read from its directory. `first_slot` 0: the anchor's slot drafts too."""

    def __init__(self, draft_path: str | Path, base_path: str | Path) -> None:
        super().__init__(draft_path, base_path)
        raw: dict[str, Any] = json.loads((Path(draft_path) / "config.json").read_text())
        inner = raw.get("dflash_config") or {}
        place = inner if "markov_rank" in inner else raw
        self.kind, self.rank = place["markov_head_type"], place["markov_rank"]
        self.first_slot = 0
        if place.get("shift_label", True) is False or raw.get("sample_from_anchor") is False:
            self.first_slot = 1
        heads = {}
        for stored, tensor in self.weights.items():
            name = stored.removeprefix("logit_head.")
            if name.split(".")[0] in MODELOPT:
                name = f"markov_head.{name}"
            if name.startswith(("markov_head.", "confidence_")):
                heads[name.replace("confidence_proj", "confidence_head.proj")] = tensor
        self.small = heads

    @torch.no_grad()
    def draft(self, features: torch.Tensor, pending: int, drafts: int) -> Drafted:
        """`drafts` tokens behind the features [n, k*H] of positions 0 to n-1."""
        states = self.states(features, pending, drafts + self.first_slot)[self.first_slot :]
        found, memory, before = Drafted([], [], []), torch.zeros(self.rank), pending
        for state in states:
            logits = state @ self.lm_head.T
            embedding = torch.zeros(0)
            if self.rank:
                embedding = self.small["markov_head.markov_w1.weight"][before]
                bias, memory = self.bias(embedding, state, memory)
                logits = logits + bias
            found.logits.append(logits)
            found.confidences.append(self.confidence(state, embedding))
            before = int(self.d2t[int(logits.argmax())])
            found.tokens.append(before)
        return found

    def bias(
        self, embedding: torch.Tensor, state: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.small["markov_head.markov_w2.weight"]
        if self.kind == "vanilla":
            return out @ embedding, memory
        if self.kind == "gated":
            gate = self.head("gate_proj", torch.cat([state, embedding])).sigmoid()
            return out @ (gate * embedding), memory
        z = self.head("joint_proj", torch.cat([memory, embedding, state]))
        gate, candidate, output = z.split(self.rank)
        memory = gate.sigmoid() * memory + (1 - gate.sigmoid()) * candidate.tanh()
        return out @ output.tanh(), memory

    def head(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.small[f"markov_head.{name}.{part}"] for part in ("weight", "bias"))
        return F.linear(x, weight, bias)

    def confidence(self, state: torch.Tensor, embedding: torch.Tensor) -> float:
        weight = self.small.get("confidence_head.proj.weight")
        if weight is None:
            return 1.0
        x = torch.cat([state, embedding]) if weight.shape[1] > len(state) else state
        return float(F.linear(x, weight, self.small["confidence_head.proj.bias"]).sigmoid())
