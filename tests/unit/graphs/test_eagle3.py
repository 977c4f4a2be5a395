"""Under which names a draft's tensors stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from edgespec.checkpoint.files import Checkpoint
from edgespec.graphs.eagle3 import stored_names

OWN = "layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "stored"),
    [
        ("layers.0.mlp.up_proj.weight", OWN),
        ("midlayer.mlp.up_proj.weight", "midlayer.mlp.up_proj.weight"),
        ("model.midlayer.mlp.up_proj.weight_packed", "model.midlayer.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.qweight", "model.layers.0.mlp.up_proj.weight"),
        ("norm.weight", OWN),  # nowhere: it is missed under its own name
    ],
)
def test_a_linear_is_found_under_every_prefix_and_in_every_layout(
    tmp_path: Path, tensor: str, stored: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({tensor: torch.zeros(1)}, tmp_path / "model.safetensors")
    assert stored_names({OWN: (8, 8)}, Checkpoint(tmp_path)) == {OWN: stored}
