"""Train a JetSpec draft for the demo base: a causal block drafter in the layout that hao-ai-lab
publishes.

Knows how such a draft is made on demand (none is committed), and measures it with the plain cycle
of draft and verify. Knows nothing of engines; what all block drafts have in common is in
`block_training.py`.

    python scripts/train_demo_jetspec.py --out build/demo-jetspec            # about half an hour on one core
    python scripts/train_demo_jetspec.py --out build/demo-jetspec --measure  # only measure what is there
    python scripts/train_demo_jetspec.py --out /tmp/tiny --smoke             # a minute, to see that it runs

The layers are DFlash's, but a row of the block sees the rows before it and none behind. The loss is
the forward KL divergence from the base's own distribution of each drafted token, all slots weighing
the same, at temperature 1 (arXiv 2606.18394, section 2.3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from block_training import SMOKE, BlockDraft, Blocks, Size, run


class JetSpec(BlockDraft):
    """The published JetSpec draft: DFlash's tensors, and a causal head."""

    is_causal = True
    architecture = "DFlashDraftModel"

    def loss(self, blocks: Blocks) -> torch.Tensor:
        """Forward KL divergence from the base's distribution."""
        mine = blocks.logits.float().log_softmax(-1)
        each = F.kl_div(mine, blocks.probabilities(), reduction="none").sum(-1)
        return blocks.mean(each, torch.ones(self.size.block - 1))

    def keys(self, mask_id: int) -> dict[str, Any]:
        """DFlash's section, which says that the head is causal."""
        inner = {
            "mask_token_id": mask_id,
            "target_layer_ids": list(self.size.aux_layers),
            "causal_head": True,
        }
        return {"dflash_config": inner}


if __name__ == "__main__":
    run(JetSpec, __doc__, Size(), SMOKE)
