"""DFlash drafts and relatives that NVIDIA ModelOpt itself makes and writes: `python -m
tests.modelopt_drafts BASE OUT`.

A process of its own, because importing ModelOpt takes seconds and patches transformers. Beside
`plain` stands `reference.safetensors`: features that went into ModelOpt's own module, and the
logits that came out. Knows nothing of edgespec.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
}
BLOCK, CONTEXT, MASK, PENDING = 4, 9, 3, 17
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windowed": {"dflash_swa_window_size": 16},
    "causal": {"dflash_draft_attention": "causal"},
    "stretched": {
        "dflash_export_rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "sinks": {"dflash_attention_sink": True},
    "dspark": {"dflash_architecture_config": {"projector_type": "dspark", "markov_rank": 8}},
    "dspark-rnn": {
        "dflash_architecture_config": {
            "projector_type": "dspark",
            "markov_rank": 8,
            "markov_head_type": "rnn",
            "use_confidence_head": True,
        }
    },
    "domino": {
        "dflash_architecture_config": {
            "projector_type": "domino",
            "emb_dim": 8,
            "gru_hidden_dim": 8,
        }
    },
}


def main(base: Path, out: Path) -> None:
    import modelopt.torch.speculative as mtsp
    import torch
    from modelopt.torch.export.plugins import hf_spec_export
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    exporters: dict[str, Any] = {
        "dspark": hf_spec_export.DSparkExporter,
        "dspark-rnn": hf_spec_export.DSparkExporter,
        "domino": hf_spec_export.DominoExporter,
    }
    for name, options in DRAFTS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        # Its module asks the base for `rope_theta`, which transformers 5 keeps elsewhere, and would
        # rotate by 10000; its exporter writes the base's.
        rope = {"rope_parameters": dict(model.config.rope_parameters)}
        layers = LAYERS | rope | options.get("dflash_architecture_config", {})
        usual = {
            "dflash_block_size": BLOCK,
            "dflash_mask_token_id": MASK,
            "dflash_use_torch_compile": False,
        }
        mtsp.convert(model, [("dflash", usual | options | {"dflash_architecture_config": layers})])
        for key, parameter in model.dflash_module.named_parameters():
            if "norm" in key:
                torch.nn.init.uniform_(parameter, 0.5, 2.0)
            elif parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        exporters.get(name, hf_spec_export.DFlashExporter)(model).export(out / name)
        if name == "plain" or "dspark" in name:
            save_reference(model, out / name)


def save_reference(model: Any, path: Path) -> None:
    """One block behind CONTEXT tokens: features [S, k*H] and the pending token in, logits [B, V] of
    the base's head. Where the module has DSpark's heads, the logits are those of its walk, and the
    confidences are with them."""
    import torch
    from safetensors.torch import save_file

    module = model.dflash_module.eval()
    ids = torch.tensor([[PENDING, *[MASK] * (BLOCK - 1)]])
    features = 20 * torch.randn(
        1, CONTEXT, module.fc.in_features, generator=torch.Generator().manual_seed(1)
    )
    positions = torch.arange(CONTEXT + BLOCK)[None]
    with torch.inference_mode():
        states = module(model.model.embed_tokens(ids), features, positions)
        logits, found = model.lm_head(states), {"features": features[0]}
        if hasattr(module, "markov_step"):
            found |= walked(module, states, logits)
    save_file(found | {"logits": logits[0].contiguous()}, path / "reference.safetensors")


def walked(module: Any, states: Any, logits: Any) -> dict[str, Any]:
    """The tokens and confidences of a block; what the Markov head adds goes into `logits`."""
    import torch

    before, memory, tokens, confidences = torch.tensor([PENDING]), None, [], []
    for slot in range(BLOCK):
        bias, memory = module.markov_step(before, states[:, slot], memory)
        logits[:, slot] += bias
        if module.use_confidence_head:
            of_slot = module.compute_confidence_logits(before[:, None], states[:, slot : slot + 1])
            confidences.append(of_slot.sigmoid().flatten())
        before = logits[:, slot].argmax(-1)
        tokens.append(before)
    found = {"tokens": torch.cat(tokens)}
    return found | ({"confidences": torch.cat(confidences)} if confidences else {})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
