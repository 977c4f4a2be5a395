"""An EAGLE-3 draft's loss as NVIDIA ModelOpt computes it: its converted model, around our weights.

Loop, checkpoints, measuring and files stay as they are, so that nothing of what ModelOpt 0.47 does
to an exported draft (YaRN, other sizes and stop tokens) happens. Its first layer norms the state by
`input_layernorm` and then by `hidden_norm`, engines by `hidden_norm` alone: the former stays one,
under which both are the same.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch

from edgespec.errors import UnsupportedModel
from edgespec.modules.eagle3 import Eagle3
from edgespec.training.row import Batch, Loss, Task

Tensor = torch.Tensor


def modelopt_loss(draft: Eagle3, task: Task) -> Loss:
    """The loss of a draft, whose weights ModelOpt's model of `task.base` has from now on. Raises
    UnsupportedModel for a draft of a form that it does not train."""
    import modelopt.torch.speculative as mtsp

    refuse_other_forms(draft, task)
    first: Any = draft.layers[0]
    torch.nn.init.ones_(first.input_layernorm.weight).requires_grad_(False)
    section = task.recipe.section
    eagle = {
        "eagle_decoder_type": "llama",
        "eagle_use_torch_compile": False,
        "eagle_architecture_config": architecture(draft, task),
        "eagle_ttt_steps": section("ttt_steps"),
        "eagle_loss_decay_factor": section("loss_decay_factor"),
        "eagle_self_logit_distillation": section("self_logit_distillation"),
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it found
        mtsp.convert(task.base, [("eagle", eagle)])
    share(draft, task.base.eagle_module, task)
    task.base.training = True  # of the whole alone: its parts stay as they are when they answer
    return loss


def refuse_other_forms(draft: Eagle3, task: Task) -> None:
    """Raises UnsupportedModel for what ModelOpt's draft does not have."""
    config = draft.draft_config
    others = {
        "norm_before_residual": config.norm_before_residual,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "rope_scaling": config.decoder.rope.kind != "default",
        "a loss other than kl": task.recipe.loss != "kl",
    }
    if given := [name for name, has in others.items() if has]:
        raise UnsupportedModel(
            f"ModelOpt trains no draft with {', '.join(given)}.",
            "Write edgespec as training.engine, or leave it out.",
        )


def architecture(draft: Eagle3, task: Task) -> dict[str, Any]:
    """The draft's sizes in ModelOpt's words; hidden and vocabulary size it takes of the base."""
    config, decoder = draft.draft_config, draft.draft_config.decoder
    theta = decoder.rope.theta
    return {
        "num_hidden_layers": decoder.num_layers,
        "intermediate_size": decoder.intermediate_size,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "rms_norm_eps": decoder.norm.eps,
        "rope_theta": theta,
        "rope_scaling": {"rope_type": "default", "rope_theta": theta},
        "draft_vocab_size": config.draft_vocab_size,
        "has_lm_head": True,
        "use_last_layernorm": True,
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in task.aux_layers],
    }


def share(draft: Eagle3, module: Any, task: Task) -> None:
    """Gives ModelOpt's module the parameters of a draft, which have the same names."""
    own = dict(draft.named_parameters())
    for name, parameter in [*module.named_parameters()]:
        assert own[name].shape == parameter.shape, name
        parent, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(parent), leaf, own.pop(name))
    assert not own, own.keys()
    if task.draft_ids is not None:
        places = torch.arange(len(task.draft_ids), device=task.draft_ids.device)
        module.d2t.copy_(task.draft_ids - places)


def loss(draft: Eagle3, task: Task, batch: Batch) -> Tensor:
    """ModelOpt's loss of a batch: of several processes the mean of each one's own."""
    ids = batch["ids"]
    task.base._cached_attn_blk_masks.clear()  # 0.47 keeps those of the first batch's length
    inside = torch.arange(ids.shape[1], device=ids.device) < batch["lengths"][:, None]
    found: Tensor = task.base(
        input_ids=ids,
        attention_mask=inside.long(),
        loss_mask=(batch["predicts"] & inside).long(),
    ).loss
    return found
