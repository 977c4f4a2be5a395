"""Muon for the inner matrices beside AdamW for all else, and how the learning rate goes. Knows
parameters, and no drafts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from edgespec.training.recipe import TrainRecipe

DECAY_FROM = 0.6  # of the way; warmup_stable_decay
BETAS = (0.9, 0.95)


def optimizer_of(module: nn.Module, recipe: TrainRecipe) -> torch.optim.Optimizer:
    """The optimizer of a draft's trained parameters. Weight decay is of the inner matrices."""
    lr, decay = recipe["training.learning_rate"], recipe["training.weight_decay"]
    if recipe["training.optim"] == "muon":
        return muon(module, lr, decay)
    inner, outer = inner_and_outer(module)
    groups = [{"params": inner, "weight_decay": decay}, {"params": outer, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS)


def muon(module: nn.Module, lr: float, decay: float) -> Together:
    """Muon beside AdamW, for all trained parameters of a module."""
    inner, outer = inner_and_outer(module)
    return Together(
        torch.optim.Muon(
            inner, lr=lr, momentum=0.95, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(outer, lr=lr, betas=BETAS, weight_decay=0.0),
    )


def inner_and_outer(module: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained inner matrices, and all other trained parameters."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    inner = [p for n, p in named if p.ndim == 2 and not of_tokens(n)]
    return inner, [p for _, p in named if not any(p is other for other in inner)]


def of_tokens(name: str) -> bool:
    """Whether a matrix has a row a token: an embedding, or a head."""
    return any("embed" in part or part.endswith("head") for part in name.split("."))


class Together(torch.optim.Optimizer):
    """Several optimizers as one, each of its own parameters."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([p for part in parts for g in part.param_groups for p in g["params"]], {})
        self.share_groups()

    def share_groups(self) -> None:
        """Learning rates are set in the groups of the parts."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        assert closure is None
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """The states of the parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.share_groups()


def rate(kind: str, done: float, warmup: float, step: float) -> float:
    """The factor of the learning rate of a step that is the share `step` of a run, behind the share
    `done`. In the first `warmup` of the run it rises."""
    up = min(1.0, (done + step) / warmup) if warmup else 1.0
    left = 1 - max(0.0, done - warmup) / (1 - warmup)
    down = {
        "constant": 1.0,
        "linear": left,
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "warmup_stable_decay": min(1.0, (1 - done) / (1 - DECAY_FROM)),
    }
    return up * down[kind]


def schedule_of(
    optimizer: torch.optim.Optimizer,
    kind: str,
    warmup: float,
    done: Callable[[int], float],
    step: float,
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of an optimizer; `done` is the share of the run that is over before a step, and
    `step` that of one."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda number: rate(kind, done(number), warmup, step)
    )
