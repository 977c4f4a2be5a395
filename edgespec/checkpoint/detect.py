"""What a checkpoint is: a base model, an EAGLE-3 or DFlash draft, or something that this version
refuses by name.

Knows the signs by which published kinds are told apart, compares tensors with what a graph expects,
and reads the draft's vocabulary map. Knows no graphs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.checkpoint.files import Checkpoint, TensorInfo, some_of
from edgespec.checkpoint.layouts import (
    is_quantized,
    kv_scale_names,
    logical_shapes,
    read_quantization,
    rule_at,
    stored_shape,
    tensor_names,
)
from edgespec.checkpoint.quantization import Quantization
from edgespec.config import ModelConfig, Shapes
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families import family_names, family_of, parse_eos, parse_model_config, with_eos
from edgespec.methods.dflash import DFlashConfig, parse_dflash_config
from edgespec.methods.eagle3 import Eagle3Config, parse_eagle3_config

_FLOATS = ("float32", "float16", "bfloat16")


def detect(checkpoint: Checkpoint) -> ModelConfig | Eagle3Config | DFlashConfig:
    """The checkpoint's configuration; the base's dtype is that of its tensors, its ends those of
    both configs.

    Raises UnsupportedModel for kinds that are recognised and not supported, CheckpointError for
    broken ones.
    """
    config, source = checkpoint.config, str(checkpoint.path / "config.json")
    _refuse_other_speculators(config, source)
    for kind in _KINDS:
        if kind.recognises(config, checkpoint):
            if kind.parse is None:
                raise UnsupportedModel(
                    f"{checkpoint.path} is {kind.name}, which this version does not do.",
                    _supported(),
                )
            return kind.parse(
                config, logical_shapes(checkpoint, read_quantization(checkpoint)), source
            )
    read_quantization(checkpoint)
    model = parse_model_config(config, source)
    if model.tied_head and is_quantized(
        checkpoint, "lm_head"
    ):  # ModelOpt leaves the flag of the source as it was
        model = replace(model, tied_head=False)
    ends = (
        *model.eos_token_ids,
        *parse_eos(checkpoint.generation_config or {}, "generation_config.json"),
    )
    return replace(with_eos(model, ends), dtype=_stored_dtype(checkpoint) or model.dtype)


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    ignorable: Collection[str] = (),
    quantization: Quantization | None = None,
) -> None:
    """Compare the checkpoint's tensors with `expected` (name -> shape, floating point); `ignorable`
    may be there too.

    A Linear that is quantised is expected by its `weight`, and has instead the tensors of its
    layout. Raises one CheckpointError that names all that is missing, unknown, misshapen or of
    another type (five of each).
    """
    found = checkpoint.tensors
    linears = _quantised_linears(expected, checkpoint, quantization)
    plain = {name: shape for name, shape in expected.items() if name not in linears}
    parts = {part for name in linears for part in tensor_names(checkpoint, _module(name))}
    scales = (
        kv_scale_names(checkpoint) if quantization is not None and quantization.kv_cache else ()
    )
    known = {*plain, *parts, *scales, *ignorable}
    both = [found[name] for name in plain if name in found]
    complaints = {
        "missing": [name for name in plain if name not in found],
        "not part of this model": [name for name in found if name not in known],
        "of another shape": [
            *(
                _misshapen(info.name, info.shape, plain)
                for info in both
                if info.shape != tuple(plain[info.name])
            ),
            *(
                _misshapen(name, shape, expected)
                for name, shape in linears.items()
                if shape != expected[name]
            ),
        ],
        "of another type than float32, float16 or bfloat16": [
            f"{info.name} {info.dtype}" for info in both if info.dtype not in _FLOATS
        ],
    }
    lines = [
        f"{what} ({len(names)}): {some_of(names)}" for what, names in complaints.items() if names
    ]
    if lines:
        raise CheckpointError(
            f"the tensors of {checkpoint.path} are not those of its config.json."
            f" {'; '.join(lines)}.",
            "Check that config.json and weights belong together, or download the checkpoint again.",
        )


def _quantised_linears(
    expected: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
    quantization: Quantization | None,
) -> dict[str, tuple[int, int]]:
    """Weight -> [out, in] of the Linears that are quantised; embeddings are read row by row and
    never are."""
    if quantization is None:
        return {}
    modules = [
        _module(name)
        for name, shape in expected.items()
        if len(shape) == 2 and "embed_tokens" not in name
    ]
    quantised = [
        module for module in modules if rule_at(checkpoint, quantization, module) is not None
    ]
    if quantization.groups and not quantised:
        raise CheckpointError(
            f"{quantization.source} says that the weights are quantised ({quantization.layout});"
            f" none of {checkpoint.path} is.",
            "Download settings and weights again, or give the original checkpoint.",
        )
    return {
        f"{module}.weight": stored_shape(checkpoint, quantization, module) for module in quantised
    }


def _module(weight: str) -> str:
    return weight.removesuffix(".weight")


def _misshapen(name: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]) -> str:
    return f"{name} {list(shape)} instead of {list(expected[name])}"


def read_d2t(
    checkpoint: Checkpoint, config: Eagle3Config | DFlashConfig
) -> NDArray[np.int64] | None:
    """Offsets [draft_vocab_size]: target id = draft id + offset. None where the draft has the
    base's vocabulary.

    A table of absolute ids is recognised and converted; a missing table is made from t2d. Raises
    CheckpointError for tables that point outside the vocabulary, name a token twice or can be read
    in two ways.
    """
    names = {name.removeprefix("model."): name for name in checkpoint.tensors}
    used = _read_t2d(checkpoint, names["t2d"], config) if "t2d" in names else None
    draft_ids = np.arange(config.draft_vocab_size, dtype=np.int64)
    if "d2t" in names:
        table = _read_table(checkpoint, names["d2t"], config)
        return _target_ids(table, draft_ids, used, config, checkpoint) - draft_ids
    if config.draft_vocab_size == config.vocab_size:
        return None
    if used is None:
        raise CheckpointError(
            f"{checkpoint.path} has {config.draft_vocab_size} draft tokens of {config.vocab_size}"
            " and neither d2t nor t2d, which tell their ids.",
            "Download the draft again, or add the d2t table that it was trained with.",
        )
    _check_t2d_count(used, config, checkpoint)
    return np.flatnonzero(used) - draft_ids


# Kinds of checkpoints


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str  # as it follows "this is"
    recognises: Callable[[Mapping[str, Any], Checkpoint], bool]
    parse: Callable[[Mapping[str, Any], Shapes, str], Eagle3Config | DFlashConfig] | None = None


_BLOCK_DRAFTS = ("dflash", "dspark", "dflare", "domino", "jetspec")


def _is_speculators_eagle3(config: Mapping[str, Any], _: Checkpoint) -> bool:
    return config.get("speculators_model_type") == "eagle3"


def _is_dflash(config: Mapping[str, Any], _: Checkpoint) -> bool:
    """Its relatives are recognised as well: its parser refuses them by their names."""
    if (
        config.get("dflash_config") is not None
        or config.get("speculators_model_type") in _BLOCK_DRAFTS
    ):
        return True
    names = [name.lower() for name in _architectures(config) if isinstance(name, str)]
    return any(word in name for name in names for word in _BLOCK_DRAFTS)


def _is_medusa(config: Mapping[str, Any], _: Checkpoint) -> bool:
    return "medusa_num_heads" in config or "medusa" in config


def _is_eagle3(config: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    eagle = config.get("eagle_config")
    if isinstance(eagle, Mapping):
        return eagle.get("use_aux_hidden_state") is not False
    shapes = _shapes(checkpoint)
    return "fc.weight" in shapes and any(name.endswith(".hidden_norm.weight") for name in shapes)


def _is_eagle1(config: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    if isinstance(config.get("eagle_config"), Mapping):
        return True  # the EAGLE-3 ones are gone by now
    shapes, hidden = _shapes(checkpoint), config.get("hidden_size")
    if not isinstance(hidden, int) or shapes.get("fc.weight") != (hidden, 2 * hidden):
        return False
    return (
        "layers.0.self_attn.q_proj.weight" in shapes
        and "layers.0.input_layernorm.weight" not in shapes
    )


def _is_qwen_next(config: Mapping[str, Any], _: Checkpoint) -> bool:
    return config.get("model_type") == "qwen3_next" or "Qwen3NextForCausalLM" in _architectures(
        config
    )


def _is_qwen_experts(config: Mapping[str, Any], _: Checkpoint) -> bool:
    names = [config.get("model_type"), *_architectures(config)]
    return any(
        isinstance(name, str) and name.lower().startswith(("qwen3_5_moe", "qwen3_5moe"))
        for name in names
    )


def _is_other_mtp(config: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    """A family whose head is known is a base like another: the head is left out, or exported
    beside it."""
    family = family_of(config)
    if family is not None and family.mtp_layers is not None:
        return False
    text = config.get("text_config")
    places = (config, text) if isinstance(text, Mapping) else (config,)
    if any(place.get("mtp_num_hidden_layers") for place in places):
        return True
    return any(name.startswith("mtp.") for name in checkpoint.tensors)


def _is_deepseek_mtp(config: Mapping[str, Any], checkpoint: Checkpoint) -> bool:
    if not config.get("num_nextn_predict_layers"):
        return False
    return any(
        re.fullmatch(r"model\.layers\.\d+\.eh_proj\.weight", name) for name in checkpoint.tensors
    )


def _is_vision_language(config: Mapping[str, Any], _: Checkpoint) -> bool:
    """A family whose text part is known is a base like another."""
    family = family_of(config)
    if family is not None and family.text_key:
        return False
    return bool(config.get("vision_config") or config.get("visual"))


# The first that recognises a checkpoint decides; what none recognises is a plain causal language
# model. Medusa comes before the kinds that need a look at the tensors, because its heads are often
# pickled.
_KINDS = (
    _Kind("an EAGLE-3 draft", _is_speculators_eagle3, parse_eagle3_config),
    _Kind("a DFlash draft", _is_dflash, parse_dflash_config),
    _Kind("a set of Medusa heads", _is_medusa),
    _Kind("an EAGLE-3 draft", _is_eagle3, parse_eagle3_config),
    _Kind("an EAGLE-1 or EAGLE-2 draft", _is_eagle1),
    _Kind("a Qwen3-Next model", _is_qwen_next),
    _Kind("a Qwen3.5 mixture of experts", _is_qwen_experts),
    _Kind("a model with a multi-token prediction (MTP) head, and not Qwen3.5", _is_other_mtp),
    _Kind("a DeepSeek or GLM model with multi-token prediction (MTP) layers", _is_deepseek_mtp),
    _Kind("a vision-language model", _is_vision_language),
)


def _supported() -> str:
    return f"This version takes {family_names()} base models, EAGLE-3 and DFlash drafts."


def _refuse_other_speculators(config: Mapping[str, Any], source: str) -> None:
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3" and not (isinstance(kind, str) and kind.startswith(_BLOCK_DRAFTS)):
        raise UnsupportedModel(f"{source}: a speculators draft of the type {kind!r}.", _supported())


def _architectures(config: Mapping[str, Any]) -> list[Any]:
    names = config.get("architectures")
    return names if isinstance(names, list) else []


def _shapes(checkpoint: Checkpoint) -> Shapes:
    """Shapes by name; some drafts have everything under `model.`, which changes nothing."""
    return {name.removeprefix("model."): info.shape for name, info in checkpoint.tensors.items()}


def _stored_dtype(checkpoint: Checkpoint) -> str | None:
    """The floating type that holds most bytes: what the weights are, whatever config.json says.
    Scales are none."""
    sizes: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        if info.dtype in _FLOATS and info.name.endswith((".weight", ".bias")):
            sizes[info.dtype] += info.num_bytes
    return max(sizes, key=sizes.__getitem__, default=None)


# The draft's vocabulary


def _read_table(
    checkpoint: Checkpoint, name: str, config: Eagle3Config | DFlashConfig
) -> NDArray[np.int64]:
    _check_map(checkpoint, checkpoint.tensors[name], (config.draft_vocab_size,), ("int64", "int32"))
    return checkpoint.read(name).astype(np.int64)


def _read_t2d(
    checkpoint: Checkpoint, name: str, config: Eagle3Config | DFlashConfig
) -> NDArray[np.bool_]:
    """Which of the base's tokens the draft knows: bool [vocab_size]."""
    _check_map(
        checkpoint,
        checkpoint.tensors[name],
        (config.vocab_size,),
        ("bool", "uint8", "int8", "int32", "int64"),
    )
    return checkpoint.read(name).astype(np.bool_)


def _check_map(
    checkpoint: Checkpoint, info: TensorInfo, shape: tuple[int, ...], dtypes: tuple[str, ...]
) -> None:
    if info.shape != shape or info.dtype not in dtypes:
        raise CheckpointError(
            f"{info.name} of {checkpoint.path} is {info.dtype} {list(info.shape)}; "
            f"expected {dtypes[0]} {list(shape)} by its config.json."
        )


def _target_ids(
    table: NDArray[np.int64],
    draft_ids: NDArray[np.int64],
    used: NDArray[np.bool_] | None,
    config: Eagle3Config | DFlashConfig,
    checkpoint: Checkpoint,
) -> NDArray[np.int64]:
    """The base's id of each draft token, by whichever of the two readings of d2t holds."""
    if used is not None:
        _check_t2d_count(used, config, checkpoint)
    offset, absolute = draft_ids + table, table
    wrong_offset = _fault(offset, used, config.vocab_size)
    wrong_absolute = _fault(absolute, used, config.vocab_size)
    if wrong_offset is None and wrong_absolute is None and not np.array_equal(offset, absolute):
        raise CheckpointError(
            f"d2t of {checkpoint.path} can be read as offsets and as ids: as offsets, draft token 0"
            f" is {offset[0]} and the last {offset[-1]}; as ids, {absolute[0]} and {absolute[-1]}.",
            "Add the t2d tensor, which tells the two apart, or write d2t as offsets of a sorted"
            " vocabulary.",
        )
    if wrong_offset is None:
        return offset
    if wrong_absolute is None:
        return absolute
    raise CheckpointError(
        f"d2t of {checkpoint.path} is broken. Read as offsets: {wrong_offset}. Read as ids:"
        f" {wrong_absolute}.",
        "Download the draft again; its config.json must tell the vocab_size of the base it was"
        " trained for.",
    )


def _fault(ids: NDArray[np.int64], used: NDArray[np.bool_] | None, vocab_size: int) -> str | None:
    """What is wrong with a reading, at the first offending index; None if nothing is."""
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if outside.size:
        return f"entry {outside[0]} leads to token {ids[outside[0]]}, outside 0..{vocab_size - 1}"
    _, first = np.unique(ids, return_index=True)
    if first.size < ids.size:
        again = int(np.setdiff1d(np.arange(ids.size), first)[0])
        before = int(np.flatnonzero(ids == ids[again])[0])
        return f"entries {before} and {again} both lead to token {ids[again]}"
    if used is not None and not used[ids].all():
        stray = int(np.flatnonzero(~used[ids])[0])
        return f"entry {stray} leads to token {ids[stray]}, which t2d does not mark"
    return None


def _check_t2d_count(
    used: NDArray[np.bool_], config: Eagle3Config | DFlashConfig, checkpoint: Checkpoint
) -> None:
    if int(used.sum()) != config.draft_vocab_size:
        raise CheckpointError(
            f"t2d of {checkpoint.path} marks {int(used.sum())} tokens; its config.json tells of a"
            f" draft_vocab_size of {config.draft_vocab_size}."
        )
