"""What a recipe for an EAGLE-3 draft says: ModelOpt's section `eagle`. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import command
from edgespec.training.keys import (
    KEYS_,
    MEASURED,
    NUMBER,
    OFFLINE,
    SWITCH,
    WHOLE,
    Fixed,
    Idle,
    Key,
    Trainable,
)

LORA = Idle("it belongs to eagle_base_lora, which is off")


def exports(base: str, draft: Path) -> list[tuple[str, str]]:
    """The commands that export the pair, and what to build of each."""
    return [
        (command("export", base, "onnx/base", eagle_base=True), "onnx/base/llm"),
        (command("export", draft, "onnx/draft", base_model_dir=base), "onnx/draft/llm"),
    ]


TRAINABLE = Trainable(
    recipe_type="speculative_eagle",
    section="eagle",
    module="edgespec.training.eagle3",
    keys={
        "eagle.eagle_ttt_steps": Key(WHOLE, 4, least=1, most=32),
        "eagle.eagle_loss_decay_factor": Key(NUMBER, 0.8, least=0, most=1),
        "eagle.eagle_self_logit_distillation": Key(SWITCH, True),
        "eagle.eagle_architecture_config": Key(KEYS_, {}),
        "eagle.eagle_decoder_type": Fixed("drafts have llama's layers here", ("llama",)),
        "eagle.eagle_mix_hidden_states": Fixed("chains are unrolled over their own states alone"),
        "eagle.eagle_freeze_base_model": Fixed("the base is never trained", (True,)),
        "eagle.eagle_hidden_state_distillation": Fixed("it is the loss of EAGLE-1"),
        "eagle.eagle_reuse_base_decoder": Fixed("ModelOpt ignores it for Hugging Face's models"),
        "eagle.eagle_offline": OFFLINE,
        "eagle.eagle_base_lora": Fixed("the base is never trained"),
        "eagle.eagle_base_lora_rank": LORA,
        "eagle.eagle_base_lora_alpha": LORA,
        "eagle.eagle_base_lora_target_modules": LORA,
        "eagle.eagle_base_lora_preservation_loss_weight": LORA,
        "eagle.eagle_base_lora_warmup_steps": LORA,
        "eagle.eagle_base_lora_start_layer": LORA,
        "eagle.eagle_base_lora_logits_detach_prob": LORA,
        "eagle.eagle_use_torch_compile": Idle("nothing is compiled"),
        "eagle.eagle_report_acc": Idle(MEASURED),
        "eagle.eagle_enable_nvtx": Idle("nothing is traced"),
        "eagle.eagle_export_rope_scaling": Idle(
            "a draft is exported with the RoPE it learned; rope_scaling in"
            " eagle_architecture_config stretches both"
        ),
    },
    exports=exports,
)
