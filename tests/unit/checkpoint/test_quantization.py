"""Claims about checkpoint/quantization.py: what settings say, as their writers write them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from edgespec.checkpoint.quantization import Quantization, matches, quantization_of
from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel

UP = "model.layers.0.mlp.up_proj"


def beside(algo: str | None, **more: Any) -> dict[str, Any]:
    """hf_quant_config.json as ModelOpt 0.47 writes it."""
    quantization = {
        "quant_algo": algo,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.visual*"],
    }
    return {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": quantization | more,
    }


def embedded(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method} | more}


def compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, form: str, **more: Any
) -> dict[str, Any]:
    group = {
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
    }
    keys = {"config_groups": {"group_0": group}, "format": form, "ignore": ["lm_head"]}
    return embedded("compressed-tensors", **keys | more)


def of(config: dict[str, Any], settings: dict[str, Any] | None = None) -> Quantization:
    found = quantization_of(config, settings)
    assert found is not None
    return found


def rule_name(quantization: Quantization, module: str = UP) -> str | None:
    rule = quantization.rule(module)
    return None if rule is None else rule.scheme.name


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_nothing_said_means_nothing_quantized(config: dict[str, Any]) -> None:
    assert quantization_of(config) is None
    assert quantization_of(config, beside(None)) is None


@pytest.mark.parametrize(
    ("pattern", "module", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", False),
        ("model.visual", "model.visual.blocks.0.attn.qkv", True),
        ("model.visual", "model.visual_proj", False),
        ("model.visual*", "model.visual_proj", True),
        ("visual*", "model.visual", False),
        ("*.mlp.gate", "model.layers.3.mlp.gate", True),
        ("*.mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("re:.*gate$", "model.layers.3.mlp.gate", True),
        ("re:gate$", "model.layers.3.mlp.gate", False),
    ],
)
def test_patterns_of_modules(pattern: str, module: str, fits: bool) -> None:
    assert matches(pattern, module) is fits


def test_modelopts_file_beside_the_config_says_all() -> None:
    found = of({}, beside("W4A16_AWQ", group_size=128, kv_cache_quant_algo="FP8"))
    assert (found.layout, found.kv_cache, found.tensors_decide) == ("modelopt", "fp8", False)
    rule = found.rule(UP)
    assert rule is not None
    assert (rule.scheme.name, rule.group_size) == ("int4_awq", 128)
    assert found.rule("lm_head") is None
    assert found.rule("model.visual_tower.fc") is None
    assert rule_name(of({}, beside("FP8", exclude_modules=[])), "lm_head") == "fp8"


def test_config_alone_is_enough() -> None:
    scheme = {"dynamic": False, "num_bits": 8, "type": "float"}
    found = of(embedded("modelopt", quant_algo="FP8", ignore=["lm_head"], kv_cache_scheme=scheme))
    assert (rule_name(found), rule_name(found, "lm_head"), found.kv_cache) == ("fp8", None, "fp8")
    assert of(embedded("modelopt", quant_algo="NVFP4", kv_cache_scheme="NVFP4")).kv_cache == "nvfp4"
    old = of({"quantization_config": {"quant_algo": "mxfp8"}})  # old files name no method
    assert rule_name(old) == "mxfp8"


def test_a_quantized_cache_alone_leaves_the_weights() -> None:
    found = of({}, beside(None, kv_cache_quant_algo="FP8"))
    assert (found.kv_cache, found.rule(UP)) == ("fp8", None)


def test_mixed_precision_goes_by_name() -> None:
    layers = {
        UP: {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
    }
    found = of({}, {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}})
    assert [rule_name(found, name) for name in (*layers, "lm_head")] == ["nvfp4", "fp8", None]
    layers[UP] = {"quant_algo": "NVFP4_SVD"}
    with pytest.raises(UnsupportedModel, match=f"layer {UP}: quantized with 'NVFP4_SVD'"):
        quantization_of(
            {}, {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
        )


PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


@pytest.mark.parametrize(
    ("config", "name", "group_size"),
    [
        (embedded("awq", bits=4, group_size=128, zero_point=True, version="gemm"), "int4_wo", 128),
        (embedded("awq", bits=4, group_size=-1, zero_point=True, version="GEMM"), "int4_wo", None),
        (embedded("gptq", bits=4, group_size=32, desc_act=True, sym=True), "int4_wo", 32),
        (embedded("gptq", bits=8, group_size=-1), "int8_wo", None),
        (embedded("gptq", bits=4, group_size=128, dynamic={"-:.*visual.*": {}}), "int4_wo", 128),
        (
            embedded("fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic"),
            "fp8_block",
            128,
        ),
        (compressed(PACKED, None, "pack-quantized"), "int4_wo", 128),
        (
            compressed(
                PACKED | {"num_bits": 8, "strategy": "channel", "group_size": None},
                None,
                "pack-quantized",
            ),
            "int8_wo",
            None,
        ),
        (compressed(FLOAT, TOKEN, "float-quantized"), "fp8_token", None),
        (
            compressed(
                FLOAT | {"strategy": "tensor"},
                TOKEN | {"dynamic": False, "strategy": "tensor"},
                "float-quantized",
            ),
            "fp8",
            None,
        ),
        (
            compressed(
                FLOAT | {"strategy": "block", "block_structure": [128, 128]},
                TOKEN | {"strategy": "group", "group_size": 128},
                "float-quantized",
            ),
            "fp8_block",
            128,
        ),
        (compressed(INT8, TOKEN | {"type": "int"}, "int-quantized"), "int8_token", None),
        (compressed(INT8, None, "naive-quantized"), "int8_wo", None),
    ],
)
def test_hub_layouts_are_known(config: dict[str, Any], name: str, group_size: int | None) -> None:
    rule = of(config).rule(UP)
    assert rule is not None
    assert (rule.scheme.name, rule.group_size) == (name, group_size)


def test_linears_of_compressed_tensors_leave_out_the_embedding_of_a_tied_head() -> None:
    found = of(compressed(INT8, TOKEN | {"type": "int"}, "int-quantized"))
    names = ("model.embed_tokens", "lm_head", UP)
    assert [rule_name(found, name) for name in names] == [None, None, "int8_token"]


def test_compressed_groups_by_name_come_before_all_linears() -> None:
    groups = {
        "group_0": {"weights": FLOAT, "input_activations": TOKEN, "targets": ["Linear"]},
        "group_1": {"weights": PACKED, "targets": ["re:.*up_proj"], "format": "pack-quantized"},
    }
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    keys = {
        "config_groups": groups,
        "format": "float-quantized",
        "ignore": ["re:.*head"],
        "kv_cache_scheme": cache,
    }
    found = of(embedded("compressed-tensors", **keys))
    assert [rule_name(found, name) for name in (UP, "model.layers.0.mlp.down_proj", "lm_head")] == [
        "int4_wo",
        "fp8_token",
        None,
    ]
    assert found.kv_cache == "fp8"


def test_gptqs_first_format_is_the_default() -> None:
    assert of(embedded("gptq", bits=4)).zero_offset == 1
    assert of(embedded("gptq", bits=4, checkpoint_format="gptq")).zero_offset == 1
    assert of(embedded("gptq", bits=4, checkpoint_format="gptq_v2")).zero_offset == 0


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (embedded("bitsandbytes", load_in_4bit=True), None, "method 'bitsandbytes'"),
        ({"quantization_config": {"bits": 4}}, None, "a method without a name"),
        ({}, beside("NVFP4_AWQ"), "quantized with 'NVFP4_AWQ'"),
        ({}, beside("mxfp4"), "quantized with 'mxfp4'"),
        ({}, beside("W4A16_AWQ", has_zero_point=True), "zero points"),
        ({}, beside("FP8", kv_cache_quant_algo="INT8"), "'kv_cache_quant_algo' is 'INT8'"),
        (embedded("awq", bits=4, version="gemv"), None, "'version' is 'gemv'"),
        (embedded("awq", bits=3, version="gemm"), None, "'bits' is 3"),
        (embedded("awq", bits=4, zero_point=False), None, "'zero_point' is False"),
        (embedded("gptq", bits=3), None, "'bits' is 3"),
        (embedded("gptq", bits=4, checkpoint_format="marlin"), None, "'marlin'"),
        (embedded("gptq", bits=4, dynamic={"+:.*mlp.*": {"bits": 8}}), None, "'dynamic'"),
        (embedded("fp8", weight_block_size=[64, 64]), None, "weight_block_size"),
        (
            embedded("fp8", weight_block_size=[128, 128], activation_scheme="static"),
            None,
            "activation_scheme",
        ),
        (compressed(PACKED, None, "marlin-24"), None, "'marlin-24'"),
        (
            compressed(PACKED | {"type": "float"}, None, "nvfp4-pack-quantized"),
            None,
            "nvfp4-pack-quantized",
        ),
        (compressed(PACKED, TOKEN, "pack-quantized"), None, "activations 'dynamic token'"),
        (compressed(PACKED | {"num_bits": 3}, None, "pack-quantized"), None, "'num_bits' is 3"),
        (compressed(FLOAT, None, "float-quantized"), None, "activations 'none'"),
        (
            compressed(INT8, TOKEN | {"symmetric": False}, "int-quantized"),
            None,
            "'symmetric' is False",
        ),
        (
            compressed(
                FLOAT, TOKEN, "float-quantized", sparsity_config={"format": "sparse-24-bitmask"}
            ),
            None,
            "sparse",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(config: Any, settings: Any, said: str) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        quantization_of(config, settings)


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        (embedded("modelopt", quant_algo="FP8"), beside("NVFP4"), "declares NVFP4, .* FP8"),
        (embedded("awq", bits=4), beside("FP8"), "declares 'awq'"),
        ({"quantization_config": "fp8"}, None, "not an object"),
        ({}, {"quantization": ["FP8"]}, "not an object"),
        ({}, beside(8), "'quant_algo' is 8, not a text"),
        ({}, beside("W4A16_AWQ", group_size="128"), "'group_size' is '128'"),
        ({}, beside("W4A16_AWQ", group_size=True), "'group_size' is True"),
        ({}, beside("FP8", exclude_modules="lm_head"), "not a list of names"),
        ({}, beside("FP8", exclude_modules=["re:("]), "not a regular expression"),
        ({}, beside("MIXED_PRECISION"), "'quantized_layers' is missing"),
        ({}, beside("MIXED_PRECISION", quantized_layers={UP: "FP8"}), "not an object"),
        (
            embedded("compressed-tensors", format="pack-quantized"),
            None,
            "'config_groups'",
        ),
    ],
)
def test_settings_that_are_not_of_their_writers_form_are_refused(
    config: Any, settings: Any, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        quantization_of(config, settings)


ODD = [None, 0, -1, 1.5, True, "x", "", [], [1], {}, {"a": 1}, [[]]]


@pytest.mark.parametrize(
    "config",
    [
        embedded(
            "modelopt",
            quant_algo="FP8",
            ignore=["x"],
            kv_cache_scheme={"num_bits": 8, "type": "float"},
        ),
        embedded("awq", bits=4, group_size=128, zero_point=True, version="gemm", backend="autoawq"),
        embedded(
            "gptq",
            bits=4,
            group_size=128,
            checkpoint_format="gptq",
            dynamic={},
            is_marlin_format=False,
        ),
        embedded("fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic"),
        compressed(
            PACKED, None, "pack-quantized", kv_cache_scheme={"num_bits": 8, "type": "float"}
        ),
        compressed(FLOAT, TOKEN, "float-quantized"),
    ],
)
def test_any_odd_value_is_taken_or_refused_but_never_a_crash(config: dict[str, Any]) -> None:
    section = config["quantization_config"]
    containers = [section, *section.get("config_groups", {}).values()]
    containers += [
        group[inner] for group in containers[1:] for inner in ("weights", "input_activations")
    ]
    for container in filter(None, containers):
        for key, kept in list(container.items()):
            for value in ODD:
                container[key] = value
                with suppress(EdgeSpecError):
                    quantization_of(config)
            container[key] = kept
