"""ModelOpt's own way: a whole model of transformers, calibrated in one go and exported by its
public function.

What quantize/layerwise.py must reproduce. Knows nothing of edgespec.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

PRESETS = {
    "fp8": "FP8_DEFAULT_CFG",
    "int4_awq": "INT4_AWQ_CFG",
    "int8_sq": "INT8_SMOOTHQUANT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "mxfp8": "MXFP8_DEFAULT_CFG",
}


def export(
    base: Path,
    out: Path,
    name: str,
    batches: Sequence[Any],
    *,
    head: bool = False,
    fp8_cache: bool = False,
    disabled: Sequence[str] = (),
) -> None:
    """Quantize `base` as ModelOpt's guide says, with norms left alone as they are in edgespec."""
    with (
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
        warnings.catch_warnings(),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint, unified_export_hf
        from transformers import AutoModelForCausalLM

        config: dict[str, Any] = copy.deepcopy(getattr(mtq, PRESETS[name]))
        entries = config["quant_cfg"]
        if head:
            both = ("*weight_quantizer", "*input_quantizer")
            on = [
                entry
                for entry in entries
                if entry.get("quantizer_name") in both and entry.get("cfg")
            ]
            entries += [
                entry | {"quantizer_name": f"*lm_head.{entry['quantizer_name'][1:]}"}
                for entry in on
            ]
        if fp8_cache:
            entries += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        entries += [{"quantizer_name": f"{module}.*", "enable": False} for module in disabled]

        def forward_loop(model: Any) -> None:
            for batch in batches:
                model(input_ids=torch.tensor(batch), use_cache=False)

        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto").eval()
        mtq.quantize(model, config, forward_loop)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(
                unified_export_hf, "fuse_prequant_layernorm", lambda *args, **kwargs: None
            )
            export_hf_checkpoint(model, export_dir=out)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in directory.glob("*.safetensors")
        for name, tensor in tensors_of_file(file).items()
    }


def tensors_of_file(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names that only one has, and those whose type, shape or bytes are not the same."""
    apart = sorted(ours.keys() ^ theirs.keys())
    for name in sorted(ours.keys() & theirs.keys()):
        one, other = ours[name], theirs[name]
        same = (one.dtype, one.shape) == (other.dtype, other.shape)
        if not same or not torch.equal(
            one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
        ):
            apart.append(name)
    return apart
