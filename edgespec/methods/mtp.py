"""Multi-token prediction (MTP): the head that a Qwen3.5 checkpoint brings along (arXiv 2404.19737).

Knows the method's row. Its head stands in the base's checkpoint, so there is no draft to detect.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgespec.config.values import ModelConfig
from edgespec.errors import counted
from edgespec.methods.base import Method

NAME = "mtp"


def base_rows(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """The head that a base's config.json declares."""
    if count := config.mtp_layers:
        yield "MTP head", f"{counted(count, 'layer')}, by config.json"


METHOD = Method(
    name=NAME,
    title="MTP",
    draft_title="an MTP head",
    aliases=("nextn",),
    weights_in="base_checkpoint",
    base_output="final_hidden_state",
    export_params={"mtp": True},
    component="mtp_draft",
    proposes="chain",
    default_layers="the state after the last norm",
    base_rows=base_rows,
)
