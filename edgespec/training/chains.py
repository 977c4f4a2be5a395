"""How drafts are trained that go on from their own states: by the training-time test (arXiv
2503.01840, section 3.2). Knows no method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from edgespec.modules.unrolled import Unrolled
from edgespec.training.losses import token_losses
from edgespec.training.row import Batch, Task

Tensor = torch.Tensor
# Losses [N] by tokens, the draft's states [N, H] and the base's that they stand for -> losses [N]
WithStates = Callable[[Tensor, Tensor, Tensor], Tensor]


def loss(draft: Any, task: Task, batch: Batch, with_states: WithStates | None = None) -> Tensor:
    """The sum over unrolled steps, each weighing less than the one before, of the mean loss of what
    is learned and the draft's vocabulary has."""
    ids, predicts = batch["ids"], batch["predicts"]
    aux, final = task.states(ids, batch)
    wanted = predicts.clone()
    wanted[:, 0] = False  # no chain predicts what follows the first token
    if task.recipe.loss == "ce":  # and the text does not say what follows its last
        wanted[torch.arange(len(ids), device=ids.device), batch["lengths"] - 1] = False
    tokens, logits = ids.roll(-1, 1)[wanted], task.logits(final[wanted])  # [N], [N, V]
    if task.draft_ids is not None:
        known, tokens = in_draft(task, logits, tokens)
        logits = logits[:, task.draft_ids][known]
        tokens = tokens[known]
        wanted[wanted.clone()] = known
    # A draft that distils states reads the last one: a dump may have logits in place of `final`
    given = aux[wanted]
    place = torch.zeros_like(ids)
    place[wanted] = torch.arange(len(logits), device=ids.device)
    positions = batch["positions"][..., :-1] if "positions" in batch else None
    unrolled, total = Unrolled(draft, aux[:, :-1], positions), logits.new_zeros(())
    num_steps = min(task.recipe.section("ttt_steps"), ids.shape[1] - 1)
    counts = torch.stack([wanted[:, 1 + step :].sum() for step in range(num_steps)])
    counts = task.ranks.mean(counts.float()).clamp_min(1e-6)
    for step in range(num_steps):
        states = unrolled.step(task.table[ids[:, 1 + step :]])
        learned = wanted[:, 1 + step :]
        rows = place[:, 1 + step :][learned]
        each = token_losses(
            task.recipe.loss, draft.lm_head(states[learned]).float(), logits[rows], tokens[rows]
        )
        if with_states is not None:
            each = with_states(each, unrolled.state[learned].float(), given[rows].float())
        decay: float = task.recipe.section("loss_decay_factor") ** step
        total = total + decay * each.sum() / counts[step]
    return total


def in_draft(task: Task, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Which of N tokens the draft's vocabulary has, by what the base says or, of the text's own, by
    the text; and their places in it."""
    assert task.draft_ids is not None
    places = torch.full((logits.shape[-1],), -1, device=logits.device)
    places[task.draft_ids] = torch.arange(len(task.draft_ids), device=logits.device)
    named = tokens if task.recipe.loss == "ce" else logits.argmax(-1)
    return places[named] >= 0, places[tokens]


def drafts(
    draft: Any, task: Task, aux: Tensor, ids: Tensor, first: int, positions: Tensor | None = None
) -> Tensor:
    """Greedy chains behind each token, all at once."""
    positions = None if positions is None else positions[..., :-1]
    unrolled, said, found = Unrolled(draft, aux[:, :-1], positions), ids[:, 1:], []
    for _ in range(task.recipe["validation.max_draft_len"]):
        said = draft.lm_head(unrolled.step(task.table[said])).argmax(-1)
        said = said if task.draft_ids is None else task.draft_ids[said]
        found.append(said[0, first - 1 :])
    return torch.stack(found, dim=-1)
