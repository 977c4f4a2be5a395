"""What configurations say of decoder layers, in the spellings that families share: heads, biases,
activation and windows.

Each function reads a few keys and checks them. Knows no family: what a family leaves unsaid comes
in as arguments.
"""

from __future__ import annotations

from typing import Any, Literal

from edgespec.config.fields import Fields, is_int
from edgespec.config.values import Activation, ExpertsSpec, LayerSpec
from edgespec.errors import CheckpointError, UnsupportedModel

# Which layers slide where `layer_types` does not say it. all: every layer, if there is a window;
# late: those from max_window_layers on, with use_sliding_window
WindowRule = Literal["none", "all", "late"]
DEFAULT_WINDOW = 4096  # transformers' for Mistral, Qwen2 and Qwen3
_ACTIVATIONS: dict[str | None, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def num_layers_of(fields: Fields) -> int:
    """`num_hidden_layers`. Raises CheckpointError for numbers that no decoder has."""
    return fields.size("num_hidden_layers")


def heads_of(
    fields: Fields, head_dim: int | None = None, *, needs_kv_heads: bool = True
) -> tuple[int, int, int]:
    """num_heads, num_kv_heads, head_dim; `head_dim` is that of a file that does not say it (None:
    hidden_size / num_attention_heads).

    Without `needs_kv_heads` a missing num_key_value_heads means as many as there are query heads.
    """
    num_heads = fields.size("num_attention_heads")
    lacks_kv_heads = "num_key_value_heads" not in fields.raw and needs_kv_heads
    num_kv_heads = fields.size("num_key_value_heads", None if lacks_kv_heads else num_heads)
    head_dim = fields.get("head_dim") or head_dim
    if head_dim is None:
        check_divides(
            fields, "num_attention_heads", num_heads, "hidden_size", fields.size("hidden_size")
        )
        head_dim = fields.size("hidden_size") // num_heads
    check_divides(fields, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    return num_heads, num_kv_heads, even_head_dim(fields, fields.size("head_dim", head_dim))


def check_divides(fields: Fields, part: str, count: int, whole: str, size: int) -> None:
    """Raises CheckpointError unless `size` is a multiple of `count`; the other two are names."""
    if size % count:
        raise CheckpointError(
            f"{fields.source}: {whole} {size} is not a multiple of {part} {count}."
        )


def even_head_dim(fields: Fields, head_dim: int) -> int:
    """The head_dim itself. Raises CheckpointError for an odd one."""
    if head_dim % 2:
        raise CheckpointError(
            f"{fields.source}: head_dim is {head_dim}; rotary embeddings need an even one."
        )
    return head_dim


def activation_of(
    fields: Fields, key: str = "hidden_act", wanted: Activation = "silu"
) -> Activation:
    """The activation between gate and up. Raises UnsupportedModel for another than `wanted`, which
    a missing key means."""
    name = fields.text(key)
    if name is not None and _ACTIVATIONS.get(name) != wanted:
        names = [known for known, own in _ACTIVATIONS.items() if own == wanted]
        raise UnsupportedModel(
            f"{fields.source}: {key} {name!r}; this version knows {names[0]} only."
        )
    return wanted


def experts_of(fields: Fields, *, normalized: bool, shared_size: int = 0) -> ExpertsSpec:
    """How many experts a layer has, and how many of them a row takes. Raises CheckpointError where
    there are fewer than a row takes."""
    key = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    if fields.get(key) is None:
        raise fields.missing("num_experts")
    count, per_token = fields.size(key), fields.size("num_experts_per_tok")
    if per_token > count:
        raise CheckpointError(
            f"{fields.source}: num_experts_per_tok {per_token} is more than {key} {count}."
        )
    return ExpertsSpec(count, per_token, normalized, shared_size)


def windows_of(
    fields: Fields, rule: WindowRule, num_layers: int, default: int | None = DEFAULT_WINDOW
) -> tuple[int | None, ...]:
    """Each layer's window in tokens, the own one included; None: it sees everything.

    `default` is the window of a file that does not say it. Raises UnsupportedModel for kinds of
    layers beside full and sliding attention, CheckpointError where the keys contradict each other.
    """
    window = _window_size(fields, rule, default)
    kinds = layer_types(fields, rule, num_layers, window)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModel(
            f"{fields.source}: layer_types has {', '.join(unknown)}; this version knows"
            " full_attention and sliding_attention here."
        )
    slides = "sliding_attention" in kinds
    if slides != (window is not None) and (slides or rule == "all"):
        raise CheckpointError(
            f"{fields.source} contradicts itself: layer_types says {kinds[0]}, "
            f"but the sliding window in force is {window}."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window_size(fields: Fields, rule: WindowRule, default: int | None) -> int | None:
    if rule == "none" or (rule == "late" and not fields.flag("use_sliding_window", False)):
        return None
    if fields.get("sliding_window") is None and ("sliding_window" in fields.raw or default is None):
        return None
    return fields.size("sliding_window", default)


def layer_types(fields: Fields, rule: WindowRule, num_layers: int, window: int | None) -> list[str]:
    """Each layer's kind: `layer_types`, or what the rule makes of the window in force."""
    named = fields.get("layer_types")
    if named is not None:
        return named_layers(fields, named, num_layers)
    first = 0 if rule == "all" else fields.raw.get("max_window_layers", 28)
    if not is_int(first) or first < 0:
        raise fields.wrong("max_window_layers", "a number of layers")
    return [
        "sliding_attention" if window is not None and i >= first else "full_attention"
        for i in range(num_layers)
    ]


def named_layers(fields: Fields, named: Any, num_layers: int) -> list[str]:
    """`layer_types` as a list of at least `num_layers` names, cut to them."""
    if (
        not isinstance(named, list)
        or not all(isinstance(kind, str) for kind in named)
        or len(named) < num_layers
    ):
        raise fields.wrong("layer_types", f"a list of {num_layers} names")
    return named[:num_layers]


def repeated(layer: LayerSpec, num_layers: int) -> tuple[LayerSpec, ...]:
    """So many layers of one form."""
    return (layer,) * num_layers
