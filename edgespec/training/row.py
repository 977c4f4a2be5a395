"""What training asks of a drafting method: the row in its module, and what it gives it. Knows
no method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig, ModelConfig
from edgespec.config.values import Shapes
from edgespec.training.data import Row, Rows
from edgespec.training.ranks import ALONE, Ranks
from edgespec.training.recipe import TrainRecipe
from edgespec.training.table import TRAINABLE

if TYPE_CHECKING:
    import torch

Batch = Mapping[str, Any]  # see data.Batches; what `sample` adds too
Loss = Callable[[Any, "Task", Batch], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """What a new draft's config.json takes from its base. `raw` is config.json's text section."""

    checkpoint: Checkpoint
    config: ModelConfig
    raw: Mapping[str, Any]
    tokenizer: Any


@dataclass(slots=True)
class Task:
    """One training: the base, which is never changed, and how the draft reads it.

    Where states were dumped, the base has no layers: `given` are those of the batch, and targets
    are the last states, or so many logits as `num_top` says and, behind them, their ids.
    """

    recipe: TrainRecipe
    config: DraftConfig
    base: Any  # transformers' model
    table: torch.Tensor  # embedding that the draft reads, [V, H]
    aux_layers: tuple[int, ...]  # hidden_states indices; (): it reads the last state
    draft_ids: torch.Tensor | None = None  # [Vd]: tokens of a smaller draft vocabulary, ascending
    device: Any = "cpu"
    ranks: Ranks = ALONE  # whose `mean` makes of local counts what a loss is divided by
    num_top: int = 0
    given: tuple[torch.Tensor, torch.Tensor] | None = None

    def of(self, batch: Batch) -> tuple[Task, Batch]:
        """The task of one batch, and what of it is no dumped state."""
        if "targets" not in batch:
            return self, batch
        rest = dict(batch)
        return replace(self, given=(rest.pop("aux"), rest.pop("targets"))), rest

    def cast(self, *, measuring: bool = False) -> Any:
        """What base and draft compute in: bfloat16 where the recipe says so. They are measured in
        float32, unless the base is in halves."""
        import torch

        halves = self.base.lm_head.weight.dtype != torch.float32
        enabled = halves or (self.recipe["training.bf16"] and not measuring)
        kind = torch.device(self.device).type
        return torch.autocast(kind, torch.bfloat16, enabled=enabled)

    def states(self, ids: Any, batch: Batch | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What the draft reads of the base [B, S, k * Ht], and its last state [B, S, H], of ids
        [B, S]; of a dump its targets [B, S, ...] in the place of the latter. `batch` has what the
        base reads of images."""
        if self.given is not None:
            return self.given
        from edgespec.modules.base_model import hidden_states

        given = {}
        if batch is not None and "positions" in batch:
            images = {key: batch[key] for key in ("pixel_values", "image_grid_thw") if key in batch}
            given = {"position_ids": batch["positions"], **images}
        return hidden_states(self.base, self.aux_layers, ids, **given)

    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """The base's logits [N, V] in float32 of its last states [N, H], or of a dump's targets:
        what is not among the best is as good as impossible."""
        import torch

        if self.num_top:
            values, ids = final[:, : self.num_top], final[:, self.num_top :]
            least = torch.finfo(torch.float32).min
            whole = values.new_full((len(values), self.base.lm_head.weight.shape[0]), least)
            whole.scatter_(-1, ids.long(), values)
            return whole

        from edgespec.modules.base_model import logits_of

        with torch.no_grad():
            return logits_of(self.base, final).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRow:
    """`config` makes a new draft's config.json, of the base's sizes, and `shapes` its tensors by
    their names on disk, in the file `weights`. `parse` is the draft's configuration by both, and by
    a name for messages; None: that of the method's format. `names` is a draft under the names that
    will be written, and own name -> that name; `new_names` is the latter of a new draft, where they
    differ.

    `module` is the draft as a torch module, and `begin` gives a new one its first weights: (module,
    transformers' base, its checkpoint, its configuration); None: it takes the base's head, or its
    last norm where they share that. `sample` draws what a batch has beside its rows, `loss` is what
    a step minimizes: (module, task, batch). `drafts` are the greedy drafts [S - 1 - p, K] behind
    each token of a text from p on but the last, the first of them for the token's successor:
    (module, task, the base's hidden states [1, S, k * Ht], ids [1, S], p). `check` raises
    RequestError or UnsupportedModel where a draft cannot be trained on such rows. With `images` the
    data may have some: then batches, and as an argument `drafts`, have `positions` [3, B, S].
    `modelopt` is the loss of a draft as ModelOpt computes it, where it can: (module, task).
    """

    config: Callable[[BaseFacts, TrainRecipe], dict[str, Any]]
    shapes: Callable[[Mapping[str, Any]], Shapes]
    names: Callable[[Checkpoint, DraftConfig], tuple[Checkpoint, dict[str, str]]]
    module: Callable[[DraftConfig], Any]
    loss: Loss
    drafts: Callable[..., torch.Tensor]
    parse: Callable[[Mapping[str, Any], Shapes, str], DraftConfig] | None = None
    sample: (
        Callable[[TrainRecipe, np.random.Generator, Sequence[Row]], Mapping[str, NDArray[Any]]]
        | None
    ) = None
    images: bool = False
    check: Callable[[DraftConfig, Rows], None] = lambda config, rows: None
    modelopt: Callable[[Any, Task], Loss] | None = None
    begin: Callable[[Any, Any, Checkpoint, ModelConfig], None] | None = None
    new_names: Callable[[DraftConfig], dict[str, str]] | None = None
    weights: str = "model.safetensors"


def row_of(method: str) -> TrainRow:
    """What is asked of a method. Imports torch."""
    row = import_module(TRAINABLE[method].module).ROW
    assert isinstance(row, TrainRow)
    return row
