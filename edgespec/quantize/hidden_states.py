"""The hidden states of a base that a draft reads, from transformers' model. Knows no method."""

from __future__ import annotations

from typing import Any


def aux_hidden_states(base: Any, aux_layers: tuple[int, ...], ids: Any) -> Any:
    """The base's residual stream at its aux layers (hidden_states indices), ids [1, S] -> [S, k *
    Ht]."""
    import torch

    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Any:
        def hook(module: object, given: object, output: Any) -> None:
            seen[layer] = (output[0] if isinstance(output, tuple) else output)[0]

        return hook

    stack = getattr(base.model, "language_model", base.model)
    hooks = [stack.layers[layer - 1].register_forward_hook(keep(layer)) for layer in aux_layers]
    try:
        with torch.no_grad():
            base.model(input_ids=ids, use_cache=False)
    finally:
        for handle in hooks:
            handle.remove()
    return torch.cat([seen[layer] for layer in aux_layers], dim=-1)


def final_hidden_state(base: Any, ids: Any) -> Any:
    """The base's state after its last norm, ids [1, S] -> [S, H]."""
    import torch

    with torch.no_grad():
        return base.model(input_ids=ids, use_cache=False).last_hidden_state[0]
