"""Losses and gradients of drafts that NVIDIA ModelOpt trains, with the weights and the batch that
they are of: `tests.modelopt_made` calls it, in a process of its own. Knows nothing of edgespec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAYERS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
BLOCK, MASK, LENGTH, ANCHORS = 4, 3, 24, [[2, 7, 15], [4, 9, 20]]
LEARNED = [0] * 6 + [1] * 14 + [0] * 4  # of the first text; of the second all is
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": {"eagle_ttt_steps": 3, "eagle_loss_decay_factor": 0.9},
    "dpace": {"dflash_loss_objective": "dpace", "dflash_dpace_alpha": 0.5},
    "decay": {
        "dflash_loss_objective": "decay",
        "dflash_loss_decay_factor": 4.0,
        "dflash_self_logit_distillation": False,
    },
    "medusa": {"medusa_num_heads": 3, "medusa_num_layers": 2},
}


def main(base: Path, out: Path) -> None:
    import modelopt.torch.speculative as mtsp
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    for name, options in DRAFTS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        rope = {"rope_parameters": dict(model.config.rope_parameters)}
        ids = torch.randint(4, 250, (2, LENGTH))
        mask = torch.tensor([LEARNED, [1] * LENGTH])
        if name == "eagle3":
            theta = model.config.rope_parameters["rope_theta"]
            rope = {"rope_scaling": {"rope_type": "default", "rope_theta": theta}}
            layers = LAYERS | rope | {"num_hidden_layers": 1, "rms_norm_eps": 1e-6}
            usual = {"eagle_use_torch_compile": False, "eagle_architecture_config": layers}
            mtsp.convert(model, [("eagle", usual | options)])
            module = model.eagle_module
        elif name == "medusa":
            mtsp.convert(model, [("medusa", options)])
            module = model.medusa_heads
        else:
            layers = LAYERS | rope | {"num_hidden_layers": 2}
            usual = {
                "dflash_block_size": BLOCK,
                "dflash_mask_token_id": MASK,
                "dflash_use_torch_compile": False,
                "dflash_architecture_config": layers,
            }
            mtsp.convert(model, [("dflash", usual | options)])
            module = model.dflash_module
            anchors = torch.tensor(ANCHORS)
            fixed = anchors, torch.ones_like(anchors) > 0
            model._sample_anchor_positions = lambda *_, fixed=fixed: fixed
        for key, parameter in module.named_parameters():
            scale = 1.0 if key.endswith("norm.weight") else 0.0
            torch.nn.init.normal_(parameter, scale, 0.1)
        if name == "eagle3":
            # ModelOpt 0.47 norms the state by it before hidden_norm does, and no engine does so
            torch.nn.init.ones_(module.layers[0].input_layernorm.weight)
        model.train()
        learned = {"loss_mask": mask}
        if name == "medusa":  # as its collator makes them: of the token behind
            labels = torch.where(mask > 0, ids, -100)[:, 1:]
            learned = {"labels": torch.nn.functional.pad(labels, (0, 1), value=-100)}
        loss = model(input_ids=ids, **learned).loss
        loss.backward()
        tensors = {"ids": ids, "mask": mask, "loss": loss.detach().reshape(1)}
        if name == "eagle3":
            tensors["outputs"] = torch.tensor(model.eagle_config.eagle_aux_hidden_state_layer_ids)
        elif name != "medusa":
            tensors["outputs"] = torch.tensor(list(model.target_layer_ids))
        for key, parameter in module.named_parameters():
            tensors[f"weight.{key}"] = parameter.detach().contiguous()
            if parameter.grad is not None:
                tensors[f"grad.{key}"] = parameter.grad.contiguous()
        save_file(tensors, out / f"{name}.safetensors")
