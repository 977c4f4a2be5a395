"""The tables of layouts in which drafts are written, and of how the tensors of a method's drafts
are found under our own names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgespec.checkpoint.files import Checkpoint
from edgespec.graphs import block_draft, eagle1, eagle3, medusa
from edgespec.layouts import deepspec, modelopt, sglang, speculators, z_lab
from edgespec.layouts import eagle as eagle_layout
from edgespec.layouts import medusa as medusa_layout
from edgespec.layouts.draft import Layout
from edgespec.methods import dflash, dspark

LAYOUTS: dict[str, Layout] = {
    modelopt.NAME: modelopt.LAYOUT,
    speculators.NAME: speculators.LAYOUT,
    sglang.NAME: sglang.LAYOUT,
    eagle_layout.NAME: eagle_layout.LAYOUT,
    z_lab.NAME: z_lab.LAYOUT,
    deepspec.NAME: deepspec.LAYOUT,
    medusa_layout.NAME: medusa_layout.LAYOUT,
}

# By method: the draft under names in here, and own name -> that name
NAMED: Mapping[str, Callable[[Checkpoint, Any], tuple[Checkpoint, dict[str, str]]]] = {
    eagle3.NAME: eagle3.named_tensors,
    eagle1.NAME: eagle1.named_tensors,
    dflash.NAME: block_draft.named_tensors,
    dspark.NAME: block_draft.named_tensors,
    medusa.NAME: lambda checkpoint, config: (checkpoint, medusa.named_tensors(checkpoint, config)),
}
