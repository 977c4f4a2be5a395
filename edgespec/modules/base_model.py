"""The base as transformers' model, and the hidden states of it that drafts read. Knows no method,
and no files but what transformers reads of a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor


def is_text_model(config: Any) -> bool:
    """Whether transformers has a text model of this configuration."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING


def model_class(config: Any) -> Any:
    """The class that makes a model of a configuration: of text alone, or with images."""
    import transformers

    if is_text_model(config):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def load_base(path: Path, device: Any, dtype: Any = "auto", *, images: bool = False) -> Any:
    """The model of a directory on `device`, in eval mode and by default the checkpoint's type; of
    some that read images too, transformers has the text alone, unless `images` are asked for."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    kind = AutoModelForImageTextToText if images else model_class(config)
    model: Any = kind.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    return model.eval().to(device)


def load_ends(path: Path, device: Any, dtype: Any = "auto") -> Any:
    """The same model without its layers: embedding, last norm and lm_head are all that is read."""
    from transformers import AutoConfig
    from transformers.utils import logging

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None) is not None:
        text.layer_types = []
    shown = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # else: what is not read
    try:
        model: Any = model_class(config).from_pretrained(
            path, config=config, dtype=dtype, trust_remote_code=False
        )
    finally:
        logging.set_verbosity(shown)
    return model.eval().to(device)


@torch.no_grad()
def hidden_states(
    base: Any, aux_layers: tuple[int, ...], ids: Tensor, **given: Tensor
) -> tuple[Tensor, Tensor]:
    """The base's residual stream [B, S, k * Ht] at its aux layers (hidden_states indices), and its
    state [B, S, H] after the last norm, for ids [B, S]. Without aux layers both are that state.
    `given` is what the model takes of images, and their positions."""
    seen: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: object, given: object, output: Any) -> None:
            seen[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    stack = getattr(base.model, "language_model", base.model)
    hooks = [stack.layers[layer - 1].register_forward_hook(keep(layer)) for layer in aux_layers]
    try:
        final = base.model(input_ids=ids, use_cache=False, **given).last_hidden_state
    finally:
        for handle in hooks:
            handle.remove()
    aux = [seen[layer] for layer in aux_layers]
    return torch.cat(aux, dim=-1) if aux else final, final


def aux_hidden_states(base: Any, aux_layers: tuple[int, ...], ids: Tensor) -> Tensor:
    """The aux hidden states of one text: ids [1, S] -> [S, k * Ht]."""
    return hidden_states(base, aux_layers, ids)[0][0]


@torch.no_grad()
def final_hidden_state(base: Any, ids: Tensor) -> Tensor:
    """The base's state after its last norm, ids [1, S] -> [S, H]."""
    return base.model(input_ids=ids, use_cache=False).last_hidden_state[0]  # type: ignore[no-any-return]


def logits_of(base: Any, final: Tensor) -> Tensor:
    """The base's logits [..., V] of its states [..., H] after the last norm."""
    logits: Tensor = base.lm_head(final)
    cap = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)
