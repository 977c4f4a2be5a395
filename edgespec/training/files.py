"""A draft's files: config.json and the tensors under the names of its layout. Knows no method."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from edgespec.checkpoint.files import Checkpoint

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """What a draft's directory holds beside what is trained: `names` are own name -> name on disk
    of what it stores, `beside` the tensors that stay as they are, such as d2t; `weights` is the
    file of both."""

    config: Mapping[str, Any]
    names: Mapping[str, str]
    beside: Mapping[str, torch.Tensor]
    weights: str = "model.safetensors"

    def write(self, directory: Path, own: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Writes a draft's state to a directory that is not there yet, or not whole."""
        directory.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: own[key].detach().to("cpu", dtype).contiguous()
            for key, name in self.names.items()
            if key in own
        }
        save_file({**tensors, **self.beside}, directory / self.weights, metadata={"format": "pt"})
        text = json.dumps(self.config, indent=2) + "\n"
        (directory / CONFIG).write_text(text, encoding="utf-8")

    def read(self, directory: Path, module: nn.Module) -> None:
        """Gives a module the weights of a directory that `write` wrote."""
        tensors = load_file(directory / self.weights)
        found = {key: tensors[name] for key, name in self.names.items() if name in tensors}
        load(module, {key: tensor for key, tensor in found.items() if key in module.state_dict()})


def load(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Gives a module all of its weights but those that it shares with the base."""
    missing, unexpected = module.load_state_dict(dict(tensors), strict=False)
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert not unexpected, unexpected
    assert not trained & {*missing}, missing


def tensor_of(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor of a checkpoint; floating ones in float32."""
    array = checkpoint.read(name)
    floating = array.dtype.kind not in "iub"
    return torch.from_numpy(array.astype(np.float32) if floating else array.copy())
