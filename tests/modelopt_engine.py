"""Drafts of a tiny Llama: one whose loss ModelOpt computes, one of our own, and one of a model that
ModelOpt converted. Called by `tests.modelopt_made`, in a process that has ModelOpt."""

from __future__ import annotations

from pathlib import Path

from tests import toys
from tests.modelopt_training import LAYERS

KEYS = ("training.max_steps=2", "training.save_steps=1", "training.bf16=false")


def main(out: Path) -> None:
    import modelopt.torch.speculative as mtsp
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from edgespec.training.eagle3_convert import write_draft
    from tests.unit.training.conftest import write_chats
    from tests.unit.training.test_train import run

    base = toys.make_base(out / "base", "llama", layers=8)
    chats = write_chats(out / "chats.jsonl")
    for engine in ("edgespec", "modelopt"):
        run(base, chats, out / engine, "eagle3", *KEYS, f"training.engine={engine}")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rope = {"rope_scaling": {"rope_type": "default", "rope_theta": 10000.0}}
    layers = LAYERS | rope | {"num_hidden_layers": 2, "rms_norm_eps": 1e-6}
    eagle = {"eagle_use_torch_compile": False, "eagle_architecture_config": layers}
    mtsp.convert(model, [("eagle", eagle)])
    write_draft(model, str(base), out / "python")
    save_file({"fc": model.eagle_module.fc.weight.detach()}, out / "fc.safetensors")
