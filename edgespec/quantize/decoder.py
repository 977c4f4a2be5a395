"""transformers' own decoder with one layer in memory at a time: its layers, and what each is called
with.

Knows torch and transformers. Weights come from whoever calls, by their names on disk. Knows no
quantisation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgespec.checkpoint.files import some_of
from edgespec.checkpoint.names import STACK
from edgespec.errors import CheckpointError
from edgespec.quantize.base import EMBEDDING, HEAD, Base
from edgespec.quantize.tensors import to_torch

Read = Callable[[str], Any]  # a tensor by its name on disk
Shape = tuple[int, int]  # [B, S]


class Decoder:
    """Layers are empty until `loaded`; states are [B, S, H] on the host."""

    def __init__(self, base: Base, dtype: Any = None, device: str = "cpu") -> None:
        """`dtype` None: the checkpoint's own. Raises CheckpointError where config.json and tensors
        do not agree."""
        self.base, self.device = base, device
        self.model = skeleton(base, dtype)  # with its head
        self.model.model.rotary_emb.to(device)
        self.dtype = next(self.model.model.layers.parameters()).dtype
        self.calls: dict[Shape, list[dict[str, Any]]] = {}
        check_names(self)

    def embed(self, ids: Sequence[Sequence[int]]) -> Any:
        """What the first layer reads for ids [B, S]; only the rows that are used are read."""
        import torch

        name = f"{self.base.stored(EMBEDDING)}.weight"
        needed, places = np.unique(np.asarray(ids), return_inverse=True)
        rows = np.concatenate(
            [self.base.checkpoint.read_rows(name, row, row + 1) for row in needed.tolist()]
        )
        scale = torch.tensor(self.base.embedding_scale, dtype=self.dtype)
        scaled = to_torch(rows).to(self.dtype) * scale
        return scaled[torch.from_numpy(places.reshape(-1))].view(len(ids), len(ids[0]), -1)

    @contextmanager
    def loaded(self, i: int, read: Read) -> Iterator[Any]:
        layer = self.model.model.layers[i]
        fill(layer, f"{STACK}.layers.{i}", self.base, read, self.device)
        try:
            yield layer
        finally:
            layer.to("meta")
            give_back()

    def run(self, i: int, layer: Any, state: Any) -> Any:
        """What layer i makes of a state."""
        given = self.given((state.shape[0], state.shape[1]))[i]
        output = layer(state.to(self.device), **given)
        return (output[0] if isinstance(output, tuple) else output).cpu()

    def finish(self, state: Any, read: Read) -> Any:
        """The final norm."""
        norm = self.model.model.norm
        fill(norm, f"{STACK}.norm", self.base, read, self.device)
        return norm(state.to(self.device)).cpu()

    def holder_of_head(self, weight: Any) -> Any:
        """The head under its name, which ModelOpt's own lists of names go by."""
        import torch

        head = self.model.lm_head
        head.weight = torch.nn.Parameter(weight.to(self.device, self.dtype), requires_grad=False)
        return torch.nn.ModuleDict({HEAD: head})

    def forget(self, i: int) -> None:
        """A packed layer is of no more use."""
        import torch

        self.model.model.layers[i] = torch.nn.Identity()

    def given(self, shape: Shape) -> list[dict[str, Any]]:
        """What the model gives each of its layers beside the state: positions and masks."""
        if shape not in self.calls:
            self.calls[shape] = recorded(self.model, shape, self.dtype, self.device)
        return self.calls[shape]


def give_back() -> None:
    """glibc keeps what was freed in pieces of many sizes: 50 MB a layer were measured, and grow
    with each."""
    trim = getattr(
        ctypes.CDLL(None), "malloc_trim", None
    )  # musl and macOS have none, nor this habit
    if trim is not None:
        trim(0)


def skeleton(base: Base, dtype: Any) -> Any:
    """The text model without weights; its buffers (RoPE's frequencies) are real."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    path = base.checkpoint.path
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        text = config.get_text_config()
        if dtype is None:
            dtype = text.dtype or config.dtype or getattr(torch, stored_dtype(base))
        with init_empty_weights(include_buffers=False):
            make = AutoModelForCausalLM.from_config
            model: Any = make(text, dtype=dtype, trust_remote_code=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"transformers makes no model of {path / 'config.json'}: {reason}"
        ) from error
    return model.eval()


def stored_dtype(base: Base) -> str:
    return base.checkpoint.tensors[f"{base.stored(EMBEDDING)}.weight"].dtype


def check_names(decoder: Decoder) -> None:
    """Every weight of the model must be there, in its shape."""
    base, wrong = decoder.base, []
    for name, parameter in decoder.model.named_parameters():
        info = base.checkpoint.tensors.get(base.stored(name))
        if name != f"{HEAD}.weight" and (info is None or info.shape != tuple(parameter.shape)):
            found = (
                "missing"
                if info is None
                else f"{list(info.shape)} instead of {list(parameter.shape)}"
            )
            wrong.append(f"{base.stored(name)} ({found})")
    if wrong:
        raise CheckpointError(
            f"the tensors of {base.checkpoint.path} are not those of its config.json:"
            f" {some_of(wrong)}."
        )


def fill(module: Any, prefix: str, base: Base, read: Read, device: str) -> None:
    """Put weights into `module`, which stands at `prefix` in our names."""
    import torch

    for name, empty in list(module.named_parameters()):
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner) if owner else module
        value = read(base.stored(f"{prefix}.{name}")).to(device, empty.dtype)
        setattr(holder, last, torch.nn.Parameter(value, requires_grad=False))


def recorded(model: Any, shape: Shape, dtype: Any, device: str) -> list[dict[str, Any]]:
    """Run the model with layers that only take down what they are called with."""
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
