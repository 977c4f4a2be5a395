"""The decoder of transformers, run with the weights of one layer in memory at a time.

Knows torch and transformers. The caller reads the weights, by their names on disk. Knows no
quantization.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgespec.checkpoint.names import STACK
from edgespec.checkpoint.source import some_of
from edgespec.checkpoint.writing import to_torch
from edgespec.errors import CheckpointError
from edgespec.quantize.base import EMBEDDING, HEAD, Base

Read = Callable[[str], Any]  # name on disk -> tensor
Shape = tuple[int, int]  # [B, S]


class TorchDecoder:
    """A decoder whose layers are empty until `loaded`. Hidden states are [B, S, H] on the host."""

    def __init__(self, base: Base, dtype: Any = None, device: str = "cpu") -> None:
        """`dtype` None uses the checkpoint's dtype.

        Raises CheckpointError if config.json and the tensors do not agree.
        """
        self.base, self.device = base, device
        self.model = skeleton(base, dtype)  # lm_head included
        self.model.model.rotary_emb.to(device)
        self.dtype = next(self.model.model.layers.parameters()).dtype
        self.calls: dict[Shape, list[dict[str, Any]]] = {}
        check_names(self)

    def embed(self, ids: Sequence[Sequence[int]]) -> Any:
        """Returns what the first layer reads for ids [B, S]: the embeddings [B, S, H], scaled where
        the model does so. Reads only the rows that are used."""
        import torch

        name = f"{self.base.stored(EMBEDDING)}.weight"
        needed, places = np.unique(np.asarray(ids), return_inverse=True)
        rows = np.concatenate(
            [self.base.checkpoint.read_rows(name, row, row + 1) for row in needed.tolist()]
        )
        scale = torch.tensor(self.base.embedding_scale, dtype=self.dtype)
        embedded = (to_torch(rows).to(self.dtype) * scale)[torch.from_numpy(places.reshape(-1))]
        return embedded.view(len(ids), len(ids[0]), -1)

    @contextmanager
    def loaded(self, i: int, read: Read) -> Iterator[Any]:
        """Loads layer i within the block, and frees its memory afterwards."""
        layer = self.model.model.layers[i]
        fill(layer, f"{STACK}.layers.{i}", self.base, read, self.device)
        try:
            yield layer
        finally:
            layer.to("meta")
            trim_heap()

    def run(self, i: int, layer: Any, state: Any) -> Any:
        """Returns the output [B, S, H] of layer i for the hidden states [B, S, H]."""
        given = self.given((state.shape[0], state.shape[1]))[i]
        output = layer(state.to(self.device), **given)
        return (output[0] if isinstance(output, tuple) else output).cpu()

    def finish(self, state: Any, read: Read) -> Any:
        """Returns the hidden states [B, S, H] after the final norm."""
        norm = self.model.model.norm
        fill(norm, f"{STACK}.norm", self.base, read, self.device)
        return norm(state.to(self.device)).cpu()

    def head_module(self, weight: Any) -> Any:
        """Returns a ModuleDict with lm_head under its name, which ModelOpt's patterns match."""
        import torch

        head = self.model.lm_head
        head.weight = torch.nn.Parameter(weight.to(self.device, self.dtype), requires_grad=False)
        return torch.nn.ModuleDict({HEAD: head})

    def free(self, i: int) -> None:
        """Removes layer i, whose packed weights are no longer needed."""
        import torch

        self.model.model.layers[i] = torch.nn.Identity()

    def given(self, shape: Shape) -> list[dict[str, Any]]:
        """Returns the keyword arguments of each layer for [B, S]: positions, RoPE, masks."""
        if shape not in self.calls:
            self.calls[shape] = recorded(self.model, shape, self.dtype, self.device)
        return self.calls[shape]


def trim_heap() -> None:
    """Returns freed heap memory to the system.

    glibc keeps freed blocks of many sizes: 50 MB per layer were measured.
    """
    # musl and macOS have no malloc_trim, and do not need it
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def skeleton(base: Base, dtype: Any) -> Any:
    """Returns the text model on the meta device; its buffers (RoPE frequencies) are real.

    Raises CheckpointError if transformers cannot build a model from config.json.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    from edgespec.modules.base_model import is_text_model, model_class

    path = base.checkpoint.path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        text = config.get_text_config()
        if dtype is None:
            dtype = text.dtype or config.dtype or getattr(torch, stored_dtype(base))
        with init_empty_weights(include_buffers=False):
            alone = is_text_model(text)
            make = model_class(text).from_config
            model: Any = make(text if alone else config, dtype=dtype, trust_remote_code=False)
            if not alone:
                model = text_part(model, text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"transformers cannot build a model from {path / 'config.json'}: {reason}"
        ) from error
    return model.eval()


def text_part(model: Any, config: Any) -> Any:
    """Returns the language model and lm_head of a vision-language model, under the names of a text
    model."""
    import torch

    class TextPart(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.lm_head, self.config = (
                model.model.language_model,
                model.lm_head,
                config,
            )

    return TextPart()


def stored_dtype(base: Base) -> str:
    """Returns the dtype of the stored embedding, such as "bfloat16"."""
    return base.checkpoint.tensors[f"{base.stored(EMBEDDING)}.weight"].dtype


def check_names(decoder: TorchDecoder) -> None:
    """Raises CheckpointError if a weight of the model is missing or has another shape on disk."""
    base, wrong = decoder.base, []
    for name, parameter in decoder.model.named_parameters():
        info, expected = base.checkpoint.tensors.get(base.stored(name)), tuple(parameter.shape)
        if name == f"{HEAD}.weight":
            continue
        if info is None:
            wrong.append(f"{base.stored(name)} (missing)")
        elif info.shape != expected:
            wrong.append(f"{base.stored(name)} ({list(info.shape)} instead of {list(expected)})")
    if wrong:
        raise CheckpointError(
            f"the tensors of {base.checkpoint.place} are not those of its config.json:"
            f" {some_of(wrong)}."
        )


def fill(module: Any, prefix: str, base: Base, read: Read, device: str) -> None:
    """Loads the weights of `module`, whose own name is `prefix`."""
    import torch

    for name, empty in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner) if owner else module
        value = read(base.stored(f"{prefix}.{name}")).to(device, empty.dtype)
        setattr(holder, last, torch.nn.Parameter(value, requires_grad=False))


def recorded(model: Any, shape: Shape, dtype: Any, device: str) -> list[dict[str, Any]]:
    """Returns the keyword arguments that the model passes to each of its layers for [B, S]."""
    import torch

    calls: list[dict[str, Any]] = []

    class Recorder(torch.nn.Module):
        def forward(self, state: Any, **given: Any) -> Any:
            calls.append(given)
            return state

    inner = model.model
    layers, norm = inner.layers, inner.norm
    inner.layers, inner.norm = torch.nn.ModuleList(Recorder() for _ in layers), torch.nn.Identity()
    try:
        state = torch.zeros(*shape, model.config.hidden_size, dtype=dtype, device=device)
        with torch.no_grad():
            inner(inputs_embeds=state, use_cache=False)
    finally:
        inner.layers, inner.norm = layers, norm
    return calls
