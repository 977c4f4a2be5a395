"""A draft of any layout as values, and a draft of one layout as it is written. Knows no layout, and
no method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import UnsupportedModel
from edgespec.methods import METHODS

# Keys of a draft's layers in Hugging Face's words, which layouts have alike
LAYER_KEYS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "initializer_range"),
    *("attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("layer_types", "pad_token_id"),
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft and its base. `names` are own name -> name in `checkpoint`; `raw` is the section of
    config.json that describes its layers, `top` the whole; `aux_layers` are hidden_states indices.
    """

    checkpoint: Checkpoint
    config: DraftConfig
    names: Mapping[str, str]
    top: Mapping[str, Any]
    raw: Mapping[str, Any]
    d2t: NDArray[np.int64] | None
    base: ModelConfig
    base_raw: Mapping[str, Any]
    base_name: str
    aux_layers: tuple[int, ...]

    @property
    def outputs(self) -> list[int]:
        """The aux layers as layer outputs, which count from 0."""
        return [layer - 1 for layer in self.aux_layers]

    @property
    def dtype(self) -> str:
        """The type of its weights."""
        return self.checkpoint.tensors[next(iter(self.names.values()))].dtype

    def layer_keys(self) -> dict[str, Any]:
        """The keys of its layers: sizes as they are, RoPE as it was read, the ends of the base."""
        decoder, raw = self.config.decoder, self.raw
        keys = {key: raw[key] for key in LAYER_KEYS if raw.get(key) is not None}
        sizes = {
            "num_hidden_layers": decoder.num_layers,
            "num_key_value_heads": decoder.num_kv_heads,
            "head_dim": decoder.head_dim,
            "vocab_size": self.config.vocab_size,
            "max_position_embeddings": raw.get("max_position_embeddings", self.base.max_position),
        }
        return {
            "attention_bias": False,
            **keys,
            **sizes,
            **rope_keys(raw, decoder.rope.theta),
            **self.ends(),
            "tie_word_embeddings": False,
        }

    def ends(self) -> dict[str, Any]:
        """The base's own tokens that begin and end texts."""
        eos = self.base_raw.get("eos_token_id", [*self.base.eos_token_ids])
        return {"bos_token_id": self.base.bos_token_id, "eos_token_id": eos}

    def maps(self, *, used: bool) -> dict[str, NDArray[Any]]:
        """Its vocabulary map as offsets, and with `used` the mask over the base's tokens; nothing
        where it has the base's vocabulary."""
        if self.d2t is None:
            return {}
        mask = np.zeros(self.config.vocab_size, np.bool_)
        mask[self.d2t + np.arange(len(self.d2t))] = True
        return {"d2t": self.d2t, **({"t2d": mask} if used else {})}

    def refuse(self, layout: str, **unusual: bool) -> None:
        """Raises UnsupportedModel where one of the facts, by its name, is true: a reader of the
        layout would take it for another draft."""
        named = next((name for name, there in unusual.items() if there), None)
        if named is not None:
            raise UnsupportedModel(
                f"the layout {layout} cannot say that a draft has {named.replace('_', ' ')}.",
                "Choose `format` speculators, which can.",
            )


def rope_keys(raw: Mapping[str, Any], theta: float) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, also of a config.json that has both in `rope_parameters`."""
    both = raw.get("rope_parameters")
    if not isinstance(both, Mapping):
        return {"rope_theta": theta, "rope_scaling": raw.get("rope_scaling")}
    scaling = {key: value for key, value in both.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default" and len(scaling) <= 1
    return {"rope_theta": theta, "rope_scaling": None if plain else scaling}


@dataclass(frozen=True, slots=True)
class Written:
    """A draft in a layout: its config.json, own name -> name in the file, and arrays beside."""

    config: Mapping[str, Any]
    names: Mapping[str, str]
    beside: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    file: str = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A row of LAYOUTS: who reads it, and by the name of a method how a draft of it is written."""

    readers: str
    methods: Mapping[str, Callable[[Draft], Written]]

    def written(self, draft: Draft, name: str) -> Written:
        """A draft in this layout. Raises UnsupportedModel for a method that it does not have, and
        for drafts that it cannot describe."""
        method = draft.config.method
        if method not in self.methods:
            titles = ", ".join(METHODS[known].title for known in self.methods)
            raise UnsupportedModel(
                f"the layout {name} is of {titles}; this is {METHODS[method].draft_title}.",
                "Choose another `format`.",
            )
        return self.methods[method](draft)
