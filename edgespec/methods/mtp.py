"""Multi-token prediction (MTP): the head that a Qwen3.5 checkpoint brings along (arXiv 2404.19737).

Knows the method's row. Its head stands in the base's checkpoint, so there is no draft to detect.
"""

from __future__ import annotations

from edgespec.methods.base import Method

NAME = "mtp"
METHOD = Method(
    name=NAME,
    title="MTP",
    draft_title="an MTP head",
    aliases=("nextn",),
    weights_in="base_checkpoint",
    base_output="final_hidden_state",
    export_flag="--mtp",
    component="mtp_draft",
    proposes="chain",
)
