"""The quantization settings of a checkpoint: the layout on disk, and the scheme of each module.

Knows the JSON of ModelOpt, AutoAWQ, GPTQ, DeepSeek's fp8 and compressed-tensors, and what
checkpoint/gguf writes. Knows no tensors: if the settings do not list the quantized modules,
layouts.py detects them by their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from edgespec.config.fields import Fields
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.quantization.schemes import SCHEMES, Scheme, scheme_of_algo

# How names of an image encoder begin: in newer files, and in older ones. transformers 4.52 to 4.57
# has modules of the first and writes tensors of the second, so that settings may have either
VISION_PREFIXES = ("model.visual.", "visual.")

Layout = Literal["modelopt", "awq", "gptq", "fp8", "compressed-tensors", "gguf"]
KvCache = Literal["fp8", "nvfp4"]


@dataclass(frozen=True, slots=True)
class SchemeRule:
    """The scheme of a module's weight."""

    scheme: Scheme
    group_size: int | None = None  # weights along in per scale; None: not declared, or one per row


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantization settings of one checkpoint."""

    layout: Layout
    # Patterns of module names with their rule; the first match counts
    groups: tuple[tuple[tuple[str, ...], SchemeRule], ...]
    excluded: tuple[str, ...]  # patterns of modules that are not quantized
    kv_cache: KvCache | None
    source: str  # the file, for messages
    zero_offset: int = 0  # GPTQ's first format stores zero points minus one
    tensors_decide: bool = False  # a module without quantized tensors is not quantized

    def rule(self, module: str) -> SchemeRule | None:
        """Returns the rule of a Linear such as model.layers.0.mlp.up_proj; None: not quantized."""
        names = names_of(module)
        if any(matches(pattern, name) for pattern in self.excluded for name in names):
            return None
        for patterns, rule in self.groups:
            if any(matches(pattern, name) for pattern in patterns for name in names):
                return rule
        return None


def names_of(module: str) -> tuple[str, ...]:
    """The names under which settings may list a module: more than one for an image encoder's."""
    own = next((p for p in VISION_PREFIXES if module.startswith(p)), None)
    if own is None:
        return (module,)
    return tuple(f"{prefix}{module.removeprefix(own)}" for prefix in VISION_PREFIXES)


def matches(pattern: str, module: str) -> bool:
    """Returns whether a pattern matches a module's name.

    A pattern is a name (which matches its submodules too), a glob as ModelOpt writes it, or `re:`
    and a regular expression for the start of the name.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")


def quantization_of(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None = None,
    source: str = "config.json",
) -> Quantization | None:
    """Returns the settings in config.json and hf_quant_config.json; None: not quantized.

    `source` is the path of config.json for messages. Raises UnsupportedModel for unsupported
    methods and algorithms, and CheckpointError for contradictory or malformed settings.
    """
    embedded = next(
        (
            _Settings(config, source).section(key)
            for key in _SECTIONS
            if config.get(key) not in (None, {})
        ),
        None,
    )
    beside = None
    if hf_quant_config is not None:
        file = _Settings(hf_quant_config, _BESIDE)
        beside = None if file.get("quantization") is None else file.section("quantization")
    if beside is None and embedded is None:
        return None
    method = "modelopt" if embedded is None else _method(embedded)
    if method == "modelopt":
        return _modelopt(embedded, beside)
    assert embedded is not None
    if beside is not None and beside.get("quant_algo"):
        raise CheckpointError(
            f"{embedded.source} declares {method!r}, {beside.source} ModelOpt's"
            f" {beside.get('quant_algo')!r}.",
            "Remove the file that does not belong to these weights.",
        )
    if method not in _METHODS:
        raise UnsupportedModel(
            f"{embedded.source}: quantized with the method {method!r}, which this version does not"
            " read.",
            f"It reads {', '.join(('modelopt', *_METHODS))}. Give the original checkpoint.",
        )
    return _METHODS[method](embedded)


_SECTIONS = ("quantization_config", "compression_config")
_BESIDE = "hf_quant_config.json"


class _Settings(Fields):
    """A JSON object of settings; errors name it."""

    def section(self, key: str) -> _Settings:
        return _Settings(super().section(key).raw, f"{self.source} ({key})")

    def optional_section(self, key: str) -> _Settings:
        return _Settings({}, self.source) if self.get(key) is None else self.section(key)

    def text(self, key: str, default: str = "") -> str:
        return super().text(key) or default

    def names(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
            raise self.wrong(key, "a list of names")
        for name in value:
            if name.startswith("re:"):
                self._check_expression(key, name)
        return tuple(value)

    def _check_expression(self, key: str, name: str) -> None:
        try:
            re.compile(name[3:])
        except re.error as error:
            raise CheckpointError(
                f"{self.source}: '{key}' has {name!r}, which is not a regular expression: {error}."
            ) from error

    def group_size(self) -> int | None:
        """None is one scale per row, written as -1 or, by ModelOpt, as 0."""
        value = self.get("group_size")
        if value is None or (type(value) is int and value in (-1, 0)):
            return None
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.wrong("group_size", "a positive integer")
        return value

    def need(self, key: str, value: Any, *allowed: Any) -> None:
        """Raises UnsupportedModel that names the key unless its value is one of `allowed`."""
        if value not in allowed:
            wanted = " or ".join(repr(item) for item in allowed)
            raise UnsupportedModel(
                f"{self.source}: '{key}' is {value!r}; this version reads {wanted}.",
                "Give another checkpoint.",
            )


def _method(embedded: _Settings) -> str:
    """Old files of ModelOpt declare only the algorithm."""
    return embedded.text(
        "quant_method", "modelopt" if embedded.get("quant_algo") else "a method without a name"
    )


# ModelOpt


def _modelopt(embedded: _Settings | None, beside: _Settings | None) -> Quantization | None:
    """hf_quant_config.json has more settings (group sizes); it must agree with config.json."""
    settings = beside or embedded
    assert settings is not None
    if beside is not None and embedded is not None and _algo(beside) != _algo(embedded):
        raise CheckpointError(
            f"{beside.source} declares {_algo(beside) or 'nothing'}, {embedded.source}"
            f" {_algo(embedded) or 'nothing'}.",
            "Remove the file that does not belong to these weights.",
        )
    algo = _algo(settings)
    kv_cache = _kv_cache(beside, embedded)
    if algo is None and kv_cache is None:
        return None
    groups: tuple[tuple[tuple[str, ...], SchemeRule], ...] = ()
    if algo == "MIXED_PRECISION":
        groups = _mixed(settings)
    elif algo is not None:
        groups = ((("*",), _algo_rule(settings, algo, settings.source)),)
    excluded = settings.names("exclude_modules") or settings.names("ignore")
    # Those of scaled embeddings do not name them.
    excluded = (*excluded, _EMBEDDING)
    return Quantization("modelopt", groups, excluded, kv_cache, settings.source)


def _algo(settings: _Settings) -> str | None:
    return settings.text("quant_algo") or None


def _algo_rule(settings: _Settings, algo: str, where: str) -> SchemeRule:
    if settings.flag("has_zero_point", False):
        raise UnsupportedModel(
            f"{where}: {algo} with zero points, which ModelOpt 0.47 does not write."
        )
    return SchemeRule(scheme_of_algo(algo, where), settings.group_size())


def _mixed(settings: _Settings) -> tuple[tuple[tuple[str, ...], SchemeRule], ...]:
    """Groups layers by their rule."""
    layers = settings.section("quantized_layers")
    by_rule: dict[SchemeRule, list[str]] = {}
    for name in layers.raw:
        layer = layers.section(name)
        rule = _algo_rule(layer, _algo(layer) or "no algorithm", f"{settings.source}, layer {name}")
        by_rule.setdefault(rule, []).append(name)
    return tuple((tuple(names), rule) for rule, names in by_rule.items())


def _kv_cache(beside: _Settings | None, embedded: _Settings | None) -> KvCache | None:
    """hf_quant_config.json names an algorithm; config.json has {num_bits, type} or a name."""
    if beside is not None and beside.get("kv_cache_quant_algo") is not None:
        return _kv_algo(beside, "kv_cache_quant_algo")
    if embedded is None or embedded.get("kv_cache_scheme") is None:
        return None
    if isinstance(embedded.get("kv_cache_scheme"), str):
        return _kv_algo(embedded, "kv_cache_scheme")
    return _kv_scheme(embedded)


def _kv_algo(settings: _Settings, key: str) -> KvCache:
    algo = settings.text(key)
    settings.need(key, algo, "FP8", "NVFP4")
    return "fp8" if algo == "FP8" else "nvfp4"


def _kv_scheme(settings: _Settings) -> KvCache | None:
    if settings.get("kv_cache_scheme") is None:
        return None
    cache = settings.section("kv_cache_scheme")
    cache.need("num_bits", cache.get("num_bits"), 8)
    cache.need("type", cache.get("type"), "float")
    cache.need("dynamic", cache.flag("dynamic", False), False)
    cache.need("strategy", cache.text("strategy", "tensor"), "tensor")
    return "fp8"


# Hub layouts


def _awq(settings: _Settings) -> Quantization:
    settings.need("bits", settings.get("bits") or settings.get("w_bit"), 4)
    settings.need(
        "version", settings.text("version", settings.text("format", "gemm")).lower(), "gemm"
    )
    settings.need("backend", settings.text("backend", "autoawq"), "autoawq", "auto")
    settings.need("zero_point", settings.flag("zero_point", True), True)
    return _by_tensors("awq", SchemeRule(SCHEMES["int4_wo"], settings.group_size()), settings)


def _gptq(settings: _Settings) -> Quantization:
    bits = settings.get("bits")
    settings.need("bits", bits, 4, 8)
    form = settings.text("checkpoint_format", "gptq")
    settings.need("checkpoint_format", form, "gptq", "gptq_v2")
    settings.need("is_marlin_format", settings.flag("is_marlin_format", False), False)
    dynamic = settings.optional_section("dynamic")
    for pattern in dynamic.raw:
        if not pattern.startswith("-:"):  # "-:" is an exclusion, which the tensors show as well
            raise UnsupportedModel(
                f"{settings.source}: GPTQ with separate settings for {pattern!r} ('dynamic')."
            )
    rule = SchemeRule(SCHEMES[f"int{bits}_wo"], settings.group_size())
    return _by_tensors("gptq", rule, settings, zero_offset=1 if form == "gptq" else 0)


def _fp8(settings: _Settings) -> Quantization:
    """The fp8 of DeepSeek and Qwen: squares of 128 by 128, dynamic activation scales."""
    settings.need("fmt", settings.text("fmt", "e4m3"), "e4m3")
    settings.need("weight_block_size", settings.get("weight_block_size"), [128, 128])
    settings.need("activation_scheme", settings.text("activation_scheme", "dynamic"), "dynamic")
    return _by_tensors("fp8", SchemeRule(SCHEMES["fp8_block"], 128), settings)


def _by_tensors(
    layout: Layout, rule: SchemeRule, settings: _Settings, zero_offset: int = 0
) -> Quantization:
    groups = ((("*",), rule),)
    return Quantization(layout, groups, (), None, settings.source, zero_offset, tensors_decide=True)


def _gguf(settings: _Settings) -> Quantization:
    """Written by checkpoint/gguf; the tensors' names say their types."""
    return _by_tensors("gguf", SchemeRule(SCHEMES["int8_wo"]), settings)


# compressed-tensors


def _compressed(settings: _Settings) -> Quantization:
    sparsity = settings.optional_section("sparsity_config")
    if sparsity.raw:
        sparsity.need("format", sparsity.text("format", "dense"), "dense")
    groups = settings.section("config_groups")
    form = settings.text("format")
    rules = [_compressed_group(groups.section(name), form) for name in groups.raw]
    rules.sort(key=lambda group: "*" in group[0])  # modules by name come before all Linears
    ignored = (*settings.names("ignore"), _EMBEDDING)
    return Quantization(
        "compressed-tensors", tuple(rules), ignored, _kv_scheme(settings), settings.source
    )


_EMBEDDING = "re:.*embed_tokens$"  # not a Linear, but the weight of a tied lm_head


def _compressed_group(group: _Settings, form: str) -> tuple[tuple[str, ...], SchemeRule]:
    form = group.text("format", form)
    group.need(
        "format", form, "pack-quantized", "float-quantized", "int-quantized", "naive-quantized"
    )
    if group.get("output_activations") is not None:
        raise UnsupportedModel(f"{group.source}: quantized outputs (output_activations).")
    weights, inputs = group.section("weights"), group.optional_section("input_activations")
    weights.need("num_bits", weights.get("num_bits"), 4, 8)
    kind = (
        weights.text("type"),
        weights.get("num_bits"),
        form == "pack-quantized",
        "none" if group.get("input_activations") is None else _inputs(inputs),
    )
    if kind not in _COMPRESSED:
        type_name, bits, _, activations = kind
        raise UnsupportedModel(
            f"{group.source}: {form} weights of {bits} bits ({type_name}) with activations"
            f" {activations!r}, which this version does not read."
        )
    weights.need("strategy", weights.text("strategy"), "tensor", "channel", "group", "block")
    squares = weights.text("strategy") == "block"
    if squares and weights.text("type") == "float":
        weights.need("block_structure", weights.get("block_structure"), [128, 128], "128x128")
        return _targets(group), SchemeRule(SCHEMES["fp8_block"], 128)
    return _targets(group), SchemeRule(SCHEMES[_COMPRESSED[kind]], weights.group_size())


# type, bits, packed, activations -> scheme
_COMPRESSED: dict[tuple[str, Any, bool, str], str] = {
    ("int", 4, True, "none"): "int4_wo",
    ("int", 8, True, "none"): "int8_wo",
    ("int", 8, False, "none"): "int8_wo",
    ("int", 8, False, "static tensor"): "int8_sq",
    ("int", 8, False, "dynamic token"): "int8_token",
    ("float", 8, False, "static tensor"): "fp8",
    ("float", 8, False, "dynamic token"): "fp8_token",
    ("float", 8, False, "dynamic block"): "fp8_block",
}


def _inputs(inputs: _Settings) -> str:
    """Returns the activations in the words of the scheme table, or as declared."""
    inputs.need("num_bits", inputs.get("num_bits"), 8)
    inputs.need("symmetric", inputs.flag("symmetric", True), True)
    dynamic, strategy = inputs.flag("dynamic", False), inputs.text("strategy", "tensor")
    declared = f"{'dynamic' if dynamic else 'static'} {strategy}"
    return "dynamic block" if declared == "dynamic group" else declared


def _targets(group: _Settings) -> tuple[str, ...]:
    return tuple("*" if name == "Linear" else name for name in group.names("targets"))


_METHODS: dict[str, Callable[[_Settings], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gguf": _gguf,
}
