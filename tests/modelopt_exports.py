"""Checkpoints that NVIDIA ModelOpt itself quantises and writes, for tests: `python -m
tests.modelopt_exports OUT [SEED LAYERS NAME ...]`.

A process of its own, because importing ModelOpt takes seconds, patches transformers and is noisy.
Beside each export stands `reference.safetensors`: what ModelOpt says its weights are worth, by its
own fake quantisers or dequantisers; in `activations.safetensors`, hard values and what its formats
make of them. Those of the float32 source (llama) are exact; in bfloat16 (qwen3) ModelOpt divides by
scales in bfloat16 as it packs. Knows nothing of edgespec.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.05,
}
# export -> source, preset of ModelOpt, and what else is quantised
EXPORTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "fp8": ("qwen3", "FP8_DEFAULT_CFG", ()),
    "int4_awq": ("qwen3", "INT4_AWQ_CFG", ()),
    "int8_sq": ("qwen3", "INT8_SMOOTHQUANT_CFG", ()),
    "nvfp4": ("qwen3", "NVFP4_DEFAULT_CFG", ()),
    "mxfp8": ("qwen3", "MXFP8_DEFAULT_CFG", ()),
    "llama_int4_awq": ("llama", "INT4_AWQ_CFG", ("lm_head",)),
    "llama_int8_sq": ("llama", "INT8_SMOOTHQUANT_CFG", ("lm_head",)),
    "llama_fp8": ("llama", "FP8_DEFAULT_CFG", ("lm_head", "kv")),
    "llama_nvfp4": ("llama", "NVFP4_DEFAULT_CFG", ("lm_head",)),
    "int4_wo": ("llama", "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", ()),
    "int8_wo": ("llama", "INT8_WEIGHT_ONLY_CFG", ()),
    "w4a8_awq": ("llama", "W4A8_AWQ_BETA_CFG", ()),
    "w4a16_nvfp4": ("qwen3", "W4A16_NVFP4_CFG", ()),
    "fp8_block": ("llama", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", ()),
    "fp8_token": ("llama", "FP8_PER_CHANNEL_PER_TOKEN_CFG", ()),
    "mixed": ("qwen3", "FP8_DEFAULT_CFG", ("nvfp4_mlp",)),
    "qwen2_fp8": ("qwen2", "FP8_DEFAULT_CFG", ()),
    "qwen2_int8_sq": ("qwen2", "INT8_SMOOTHQUANT_CFG", ()),
}


def main(
    out: Path,
    names: Sequence[str] = tuple(EXPORTS),
    *,
    seed: int = 0,
    layers: int = SIZES["num_hidden_layers"],
) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint, unified_export_hf
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    # Folding smoothing scales into norms is wrong for norms of (1 + w); every Linear keeps its own
    # instead.
    unified_export_hf.fuse_prequant_layernorm = lambda *args, **kwargs: None
    dtypes = {"qwen3": "bfloat16", "llama": "float32", "qwen2": "float32"}
    sizes = SIZES | {"num_hidden_layers": layers}
    used = {EXPORTS[name][0] for name in names}
    sources = {
        family: make_source(family, out, dtype, sizes, seed)
        for family, dtype in dtypes.items()
        if family in used
    }
    dequantized: dict[str, Any] = {}
    resmooth = unified_export_hf.requantize_resmooth_fused_llm_layers

    def resmooth_and_look(model: Any) -> None:
        """The export itself averages the smoothing scales of Linears that share an input: look
        after that."""
        resmooth(model)
        dequantized.update(fake_quantised(model))

    for name in names:
        family, preset, more = EXPORTS[name]
        model = AutoModelForCausalLM.from_pretrained(sources[family], dtype="auto").eval()
        config = copy.deepcopy(getattr(mtq, preset))
        for what in more:
            config["quant_cfg"] += extra(mtq, what, config["quant_cfg"])
        ids = torch.randint(
            0, SIZES["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(1)
        )
        mtq.quantize(model, config, lambda model, ids=ids: model(ids))
        weights = {key: module.weight.detach().clone() for key, module in linears(model)}
        faked = name not in NEEDS_CUDA
        dequantized.clear()
        unified_export_hf.requantize_resmooth_fused_llm_layers = (
            resmooth_and_look if faked else resmooth
        )
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=out / name)
        save_reference(out / name, dequantized if faked else dequantised(out / name, weights))
    save_file(rounded_activations(), out / "activations.safetensors")


GLOBAL_SCALES = (1e-4, 0.0123, 3.0)  # of NVFP4


def rounded_activations() -> dict[str, Any]:
    """Rows that are hard to round as `x`, and rounded in each format: by the classes that pack
    weights, or, where a row has a scale, by the fake quantiser."""
    import torch
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
    from modelopt.torch.quantization.tensor_quant import fp8_eager

    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(16, 256, generator=generator)
    loud = torch.rand(normal.shape, generator=generator) < 0.02
    sizes = torch.exp2(torch.randint(-120, 100, normal.shape, generator=generator).float())
    steps = torch.randint(-24, 25, normal.shape, generator=generator) / 4
    silent = torch.where(torch.arange(256) % 64 < 32, 0.0, normal)
    x = torch.cat(
        [
            normal,
            torch.where(loud, normal * 300, normal),
            normal * sizes,
            steps,
            silent,
            normal * 1e-40,
        ]
    )
    found = {"x": x}
    for scale in GLOBAL_SCALES:
        double = torch.tensor(scale)
        packed, block_scales, _ = NVFP4QTensor.quantize(x.clone(), 16, None, double)
        found[f"nvfp4/{scale}"] = packed.dequantize(
            scale=block_scales, double_scale=double, block_sizes={-1: 16}
        )
    packed, exponents = MXFP8QTensor.quantize(x.clone())
    found["mxfp8"] = packed.dequantize(scale=exponents, block_sizes={-1: 32})
    found["fp8_token"] = fp8_eager(x, x.abs().amax(-1, keepdim=True))
    return {name: tensor.contiguous() for name, tensor in found.items()}


NEEDS_CUDA = ("nvfp4", "llama_nvfp4", "w4a16_nvfp4", "mxfp8", "mixed")  # to fake-quantise


def make_source(family: str, out: Path, dtype: str, sizes: dict[str, Any], seed: int) -> Path:
    """A random model: norms that differ per channel give smoothing something to do, and biases
    matter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    more = {"head_dim": 64} if family == "qwen3" else {}
    config = AutoConfig.for_model(family, **sizes, **more)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 2.0)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.to(getattr(torch, dtype)).save_pretrained(out / f"source_{family}")
    return out / f"source_{family}"


def extra(mtq: Any, what: str, preset: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if what == "kv":
        return list(copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"]))
    if what == "nvfp4_mlp":
        entries = [entry for entry in mtq.NVFP4_DEFAULT_CFG["quant_cfg"] if entry.get("cfg")]
        return [
            entry | {"quantizer_name": f"*mlp.{entry['quantizer_name']}"}
            for entry in copy.deepcopy(entries)
        ]
    wanted = ("*weight_quantizer", "*input_quantizer")
    entries = [
        entry for entry in preset if entry.get("quantizer_name") in wanted and entry.get("cfg")
    ]
    return [
        copy.deepcopy(entry) | {"quantizer_name": f"*{what}.{entry['quantizer_name'][1:]}"}
        for entry in entries
    ]


def linears(model: Any) -> list[tuple[str, Any]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "weight_quantizer")
    ]


def fake_quantised(model: Any) -> dict[str, Any]:
    return {
        name: module.weight_quantizer(module.weight.detach())
        for name, module in linears(model)
        if module.weight_quantizer.is_enabled
    }


def dequantised(path: Path, weights: dict[str, Any]) -> dict[str, Any]:
    """By the classes that pack them; the fake quantisers of these formats need CUDA."""
    import torch
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file

    stored, dequantized = load_file(path / "model.safetensors"), {}
    for name, weight in weights.items():
        values, scale = stored[f"{name}.weight"], stored.get(f"{name}.weight_scale")
        if scale is None or f"{name}.weight" not in stored:
            continue
        if values.dtype == torch.uint8:
            tensor = NVFP4QTensor(weight.shape, torch.float32, values)
            double = stored[f"{name}.weight_scale_2"]
            dequantized[name] = tensor.dequantize(
                scale=scale, double_scale=double, block_sizes={-1: 16}
            )
        elif scale.dtype == torch.uint8:
            tensor = MXFP8QTensor(weight.shape, torch.float32, values)
            dequantized[name] = tensor.dequantize(scale=scale, block_sizes={-1: 32})
        else:
            dequantized[name] = values.float() * scale
    return dequantized


def save_reference(path: Path, dequantized: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(
        {name: tensor.float().contiguous() for name, tensor in dequantized.items()},
        path / "reference.safetensors",
    )


if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(Path(sys.argv[1]), sys.argv[4:], seed=int(sys.argv[2]), layers=int(sys.argv[3]))
    else:
        main(Path(sys.argv[1]))
