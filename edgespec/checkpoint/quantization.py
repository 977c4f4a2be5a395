"""What a checkpoint's JSON says of its quantization: the layout on disk, and which scheme each
module has.

Knows the spellings of ModelOpt, AutoAWQ, GPTQ, DeepSeek's fp8 and compressed-tensors. Knows no
tensors: where a hub layout leaves open which modules are quantized, layouts.py asks the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.schemes import SCHEMES, Scheme, scheme_of_algo

Layout = Literal["modelopt", "awq", "gptq", "fp8", "compressed-tensors"]
KvCache = Literal["fp8", "nvfp4"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a module's weight is to be. `group_size` counts weights along in; None: not told, or the
    whole row."""

    scheme: Scheme
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """The settings of one checkpoint. `source` names the file in errors."""

    layout: Layout
    groups: tuple[
        tuple[tuple[str, ...], Rule], ...
    ]  # patterns of module names, and what these are; the first counts
    excluded: tuple[str, ...]  # patterns of modules that stay as they are
    kv_cache: KvCache | None
    source: str
    zero_offset: int = 0  # GPTQ's first format stores its zero points less one
    tensors_decide: bool = False  # a module without quantized tensors is simply not quantized

    def rule(self, module: str) -> Rule | None:
        """What the settings say of a Linear such as model.layers.0.mlp.up_proj; None: it is not
        quantized."""
        if any(matches(pattern, module) for pattern in self.excluded):
            return None
        for patterns, rule in self.groups:
            if any(matches(pattern, module) for pattern in patterns):
                return rule
        return None


def matches(pattern: str, module: str) -> bool:
    """A name (its submodules too), a glob as ModelOpt writes it, or `re:` and a regular expression
    from the start."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern) or module.startswith(f"{pattern}.")


def quantization_of(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None = None,
    source: str = "config.json",
) -> Quantization | None:
    """The settings in config.json and, where there is one, hf_quant_config.json; None: nothing is
    quantized.

    Raises UnsupportedModel for methods and algorithms that are not read, CheckpointError for
    settings that contradict each other or are not of the form that their writers use.
    """
    embedded = next(
        (
            _Settings(config[key], f"{source} ({key})")
            for key in _SECTIONS
            if config.get(key) not in (None, {})
        ),
        None,
    )
    beside = None
    if hf_quant_config is not None:
        beside = _Settings(hf_quant_config, _BESIDE).optional_section("quantization")
    if beside is None and embedded is None:
        return None
    method = "modelopt" if embedded is None else _method(embedded)
    if method == "modelopt":
        return _modelopt(embedded, beside)
    assert embedded is not None
    if beside is not None and beside.get("quant_algo"):
        raise CheckpointError(
            f"{embedded.source} tells of {method!r}, {beside.source} of ModelOpt's"
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


@dataclass(frozen=True, slots=True)
class _Settings:
    """A JSON object with its name; null reads as missing."""

    raw: Any
    source: str

    def __post_init__(self) -> None:
        if not isinstance(self.raw, Mapping):
            raise CheckpointError(
                f"{self.source} is not an object.", "Correct the file, or download it again."
            )

    def get(self, key: str) -> Any:
        return self.raw.get(key)

    def wrong(self, key: str, wanted: str) -> CheckpointError:
        value = repr(self.get(key))
        value = value if len(value) <= 80 else f"{value[:77]}..."
        return CheckpointError(
            f"{self.source}: '{key}' is {value}, not {wanted}.",
            "Correct the file, or download the checkpoint again.",
        )

    def optional_section(self, key: str) -> _Settings | None:
        value = self.get(key)
        return None if value is None else _Settings(value, f"{self.source} ({key})")

    def section(self, key: str) -> _Settings:
        if self.get(key) is None:
            raise self.wrong(key, "an object")
        return _Settings(self.get(key), f"{self.source} ({key})")

    def text(self, key: str, default: str = "") -> str:
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value or default

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return default if value is None else value

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
                f"{self.source}: '{key}' has {name!r}, no regular expression: {error}."
            ) from error

    def group_size(self) -> int | None:
        """-1 and, in ModelOpt's files, 0 mean the whole row."""
        value = self.get("group_size")
        if value is None or (type(value) is int and value in (-1, 0)):
            return None
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.wrong("group_size", "a positive whole number")
        return value

    def need(self, key: str, value: Any, *allowed: Any) -> None:
        """Refuse what this version does not read, by name."""
        if value not in allowed:
            wanted = " or ".join(repr(item) for item in allowed)
            raise UnsupportedModel(
                f"{self.source}: '{key}' is {value!r}; this version reads {wanted}.",
                "Give another checkpoint.",
            )


def _method(embedded: _Settings) -> str:
    """Old files of ModelOpt do not name the method, but the algorithm."""
    return embedded.text(
        "quant_method", "modelopt" if embedded.get("quant_algo") else "a method without a name"
    )


# ModelOpt


def _modelopt(embedded: _Settings | None, beside: _Settings | None) -> Quantization | None:
    """The file beside config.json tells more (group sizes); where both are there they must
    agree."""
    settings = beside or embedded
    assert settings is not None
    if beside is not None and embedded is not None and _algo(beside) != _algo(embedded):
        raise CheckpointError(
            f"{beside.source} says {_algo(beside) or 'nothing'} and {embedded.source}"
            f" {_algo(embedded) or 'nothing'}.",
            "Remove the file that does not belong to these weights.",
        )
    algo = _algo(settings)
    kv_cache = _kv_cache(beside, embedded)
    if algo is None and kv_cache is None:
        return None
    groups: tuple[tuple[tuple[str, ...], Rule], ...] = ()
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


def _algo_rule(settings: _Settings, algo: str, where: str) -> Rule:
    if settings.flag("has_zero_point", False):
        raise UnsupportedModel(
            f"{where}: {algo} with zero points, which ModelOpt 0.47 does not write."
        )
    return Rule(scheme_of_algo(algo, where), settings.group_size())


def _mixed(settings: _Settings) -> tuple[tuple[tuple[str, ...], Rule], ...]:
    """Layers by name; those that are alike are one group."""
    layers = settings.section("quantized_layers")
    alike: dict[Rule, list[str]] = {}
    for name in layers.raw:
        layer = layers.section(name)
        rule = _algo_rule(layer, _algo(layer) or "no algorithm", f"{settings.source}, layer {name}")
        alike.setdefault(rule, []).append(name)
    return tuple((tuple(names), rule) for rule, names in alike.items())


def _kv_cache(beside: _Settings | None, embedded: _Settings | None) -> KvCache | None:
    """hf_quant_config names an algorithm; config.json has {num_bits, type} for fp8 and a plain name
    for others."""
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
    cache = settings.optional_section("kv_cache_scheme")
    if cache is None:
        return None
    cache.need("num_bits", cache.get("num_bits"), 8)
    cache.need("type", cache.get("type"), "float")
    cache.need("dynamic", cache.flag("dynamic", False), False)
    cache.need("strategy", cache.text("strategy", "tensor"), "tensor")
    return "fp8"


# Layouts of the hub


def _awq(settings: _Settings) -> Quantization:
    settings.need("bits", settings.get("bits") or settings.get("w_bit"), 4)
    settings.need(
        "version", settings.text("version", settings.text("format", "gemm")).lower(), "gemm"
    )
    settings.need("backend", settings.text("backend", "autoawq"), "autoawq", "auto")
    settings.need("zero_point", settings.flag("zero_point", True), True)
    return _by_tensors("awq", Rule(SCHEMES["int4_wo"], settings.group_size()), settings)


def _gptq(settings: _Settings) -> Quantization:
    bits = settings.get("bits")
    settings.need("bits", bits, 4, 8)
    form = settings.text("checkpoint_format", "gptq")
    settings.need("checkpoint_format", form, "gptq", "gptq_v2")
    settings.need("is_marlin_format", settings.flag("is_marlin_format", False), False)
    dynamic = settings.optional_section("dynamic")
    for pattern in dynamic.raw if dynamic is not None else ():
        if not pattern.startswith("-:"):  # these are left out, which the tensors tell as well
            raise UnsupportedModel(
                f"{settings.source}: GPTQ with settings of its own for {pattern!r} ('dynamic')."
            )
    rule = Rule(SCHEMES[f"int{bits}_wo"], settings.group_size())
    return _by_tensors("gptq", rule, settings, zero_offset=1 if form == "gptq" else 0)


def _fp8(settings: _Settings) -> Quantization:
    """DeepSeek's and Qwen's own: squares of 128 by 128, activations scaled as they come."""
    settings.need("fmt", settings.text("fmt", "e4m3"), "e4m3")
    settings.need("weight_block_size", settings.get("weight_block_size"), [128, 128])
    settings.need("activation_scheme", settings.text("activation_scheme", "dynamic"), "dynamic")
    return _by_tensors("fp8", Rule(SCHEMES["fp8_block"], 128), settings)


def _by_tensors(
    layout: Layout, rule: Rule, settings: _Settings, zero_offset: int = 0
) -> Quantization:
    groups = ((("*",), rule),)
    return Quantization(layout, groups, (), None, settings.source, zero_offset, tensors_decide=True)


# compressed-tensors


def _compressed(settings: _Settings) -> Quantization:
    sparsity = settings.optional_section("sparsity_config")
    if sparsity is not None and sparsity.raw:
        sparsity.need("format", sparsity.text("format", "dense"), "dense")
    groups = settings.section("config_groups")
    form = settings.text("format")
    found = [_compressed_group(groups.section(name), form) for name in groups.raw]
    found.sort(key=lambda group: "*" in group[0])  # modules by name come before all Linears
    ignored = (*settings.names("ignore"), _EMBEDDING)
    return Quantization(
        "compressed-tensors", tuple(found), ignored, _kv_scheme(settings), settings.source
    )


_EMBEDDING = "re:.*embed_tokens$"  # no Linear, but a tied head is read from it


def _compressed_group(group: _Settings, form: str) -> tuple[tuple[str, ...], Rule]:
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
        _inputs(inputs),
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
        return _targets(group), Rule(SCHEMES["fp8_block"], 128)
    return _targets(group), Rule(SCHEMES[_COMPRESSED[kind]], weights.group_size())


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


def _inputs(inputs: _Settings | None) -> str:
    """Activations in the words of the table of schemes, or as written."""
    if inputs is None:
        return "none"
    inputs.need("num_bits", inputs.get("num_bits"), 8)
    inputs.need("symmetric", inputs.flag("symmetric", True), True)
    dynamic, strategy = inputs.flag("dynamic", False), inputs.text("strategy", "tensor")
    said = f"{'dynamic' if dynamic else 'static'} {strategy}"
    return "dynamic block" if said == "dynamic group" else said


def _targets(group: _Settings) -> tuple[str, ...]:
    return tuple("*" if name == "Linear" else name for name in group.names("targets"))


_METHODS: dict[str, Callable[[_Settings], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
}
