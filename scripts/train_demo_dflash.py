"""Train a DFlash draft for the demo base: a small block drafter in the layout that z-lab publishes.

Knows how the draft committed under `recipes/demo/dflash_draft` was made, and measures it with the
plain cycle of draft and verify. Knows nothing of engines; what all block drafts have in common is
in `block_training.py`.

    python scripts/train_demo_dflash.py --out recipes/demo/dflash_draft            # about half an hour on one core
    python scripts/train_demo_dflash.py --out recipes/demo/dflash_draft --measure  # only measure what is there
    python scripts/train_demo_dflash.py --out /tmp/tiny --smoke                    # a minute, to see that it runs

Slot k predicts the token k places after the anchor, and sees the whole block. Near slots weigh more
in the loss (arXiv 2602.06036).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from block_training import GAMMA, SMOKE, BlockDraft, Blocks, Size, run


class DFlash(BlockDraft):
    """The published DFlash draft."""

    architecture = "DFlashDraftModel"

    def loss(self, blocks: Blocks) -> torch.Tensor:
        """Cross-entropy with the base's own answer."""
        nll = F.cross_entropy(
            blocks.logits.float().flatten(0, 2), blocks.wanted.flatten(), reduction="none"
        )
        return blocks.mean(nll, torch.exp(-torch.arange(self.size.block - 1) / GAMMA))

    def keys(self, mask_id: int) -> dict[str, Any]:
        """The section that z-lab publishes."""
        layers = list(self.size.aux_layers)
        return {"dflash_config": {"mask_token_id": mask_id, "target_layer_ids": layers}}


if __name__ == "__main__":
    run(DFlash, __doc__, Size(), SMOKE)
