"""NVIDIA ModelOpt 0.47 behind one door: its import, its configurations, calibration, export, and its noise.

Nothing else in edgespec knows ModelOpt. Private names of it that are used here: `unified_export_hf.
fuse_prequant_layernorm` (made a no-op, because folding smoothing scales into norms is silently wrong for norms of
(1 + w) and where an unquantised layer shares the norm), and for drafts, which its public export does not take,
`_process_quantized_modules`, `get_quant_config`, `postprocess_state_dict` and `convert_hf_quant_config_format`.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from edgespec import bundle
from edgespec.errors import BuildError, EnvironmentProblem, MissingDependency
from edgespec.quantize.plan import HEAD, Plan
from edgespec.schemes import Scheme

SUPPORTED = "0.47."
INSTALL = "pip install 'edgespec[quantize]'"
_SEARCH = 12  # AWQ looks at eleven strengths of smoothing in its second pass, which takes about as often as long


class Log(io.StringIO):
    """What ModelOpt, transformers and torch said."""


@contextmanager
def captured(log: Log) -> Iterator[None]:
    """stdout, stderr and warnings of strangers go to the log."""
    with redirect_stdout(log), redirect_stderr(log), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            log.writelines(dict.fromkeys(f"{entry.category.__name__}: {entry.message}\n" for entry in caught))


def check_installed() -> None:
    """Refuse before any work where a package is missing or of another version."""
    for package in ("torch", "transformers", "accelerate", "requests"):
        if bundle.installed_version(package) is None:
            raise MissingDependency(f"quantize needs {package}, which is not installed.", INSTALL)
    installed = bundle.installed_version("nvidia-modelopt")
    if installed is None:
        raise MissingDependency("quantize needs nvidia-modelopt, which is not installed.", INSTALL)
    if not installed.startswith(SUPPORTED):
        raise EnvironmentProblem(
            f"nvidia-modelopt {installed} is installed; this version of edgespec works with {SUPPORTED}x.", INSTALL
        )


def check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem("--device cuda: torch finds no CUDA device here.", "Leave --device out: cpu works.")


def start(log: Log) -> None:
    """Import ModelOpt, which takes seconds and is noisy."""
    with captured(log):
        import modelopt.torch.quantization  # noqa: F401
        from modelopt.torch.export import unified_export_hf
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if not hasattr(unified_export_hf, "fuse_prequant_layernorm"):
        raise EnvironmentProblem("this ModelOpt lacks fuse_prequant_layernorm, which must be switched off.", INSTALL)


def configuration(plan: Plan) -> dict[str, Any]:
    """ModelOpt's configuration of a plan: the preset of the body, the head's quantizers, and what is left out."""
    import modelopt.torch.quantization as mtq

    config: dict[str, Any] = copy.deepcopy(getattr(mtq, plan.body.preset))
    entries = config["quant_cfg"]
    if plan.head is not None:
        entries += [{"quantizer_name": f"*{HEAD}.{name[1:]}", **cfg} for name, cfg in quantizers(mtq, plan.head)]
    if plan.fp8_cache:
        entries += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
    entries += [{"quantizer_name": f"{name}.*", "enable": False} for name in plan.left_out]
    return config


def quantizers(mtq: Any, scheme: Scheme) -> list[tuple[str, dict[str, Any]]]:
    """The quantizers of weights and inputs that a preset switches on."""
    both = ("*weight_quantizer", "*input_quantizer")
    return [
        (entry["quantizer_name"], {"cfg": copy.deepcopy(entry["cfg"])})
        for entry in getattr(mtq, scheme.preset)["quant_cfg"]
        if entry.get("quantizer_name") in both and entry.get("cfg")
    ]


def steps(plan: Plan, num_windows: int) -> int:
    """What `calibrate` will advance by."""
    return num_windows * (1 + _SEARCH if plan.body.name == "int4_awq" else 1)


def calibrate(
    model: Any, plan: Plan, inputs: Sequence[Any], call: Callable[[Any, Any], object], advance: Callable[[int], None],
    log: Log,
) -> None:  # fmt: skip
    """Run the inputs through the model as often as the algorithm asks; its Linears have their quantizers after that."""
    passes = 0

    def forward_loop(model: Any) -> None:
        nonlocal passes
        passes += 1
        for one in inputs:
            call(model, one)
            advance(1 if passes == 1 else _SEARCH)

    with captured(log):
        import modelopt.torch.quantization as mtq
        import torch

        with torch.no_grad():
            mtq.quantize(model, configuration(plan), forward_loop)


def export(model: Any, directory: Path, extra: dict[str, Any], log: Log) -> None:
    """ModelOpt's own export: safetensors (in shards of 10 GB), config.json and hf_quant_config.json."""
    with captured(log), norms_left_alone():
        import torch
        from modelopt.torch.export import export_hf_checkpoint

        try:
            with torch.inference_mode():
                export_hf_checkpoint(model, export_dir=directory, extra_state_dict=extra or None)
        except OSError:
            raise
        except Exception as error:
            last = str(error).strip().partition("\n")[0]
            raise BuildError(
                f"ModelOpt could not write the quantised model: {type(error).__name__}: {last}",
                "edgespec --debug shows what it said. Try another scheme for the layer it names.",
            ) from error


def pack(module: Any, log: Log) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A calibrated module of ours, packed in place: its tensors, hf_quant_config.json and quantization_config."""
    with captured(log):
        import torch
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
        from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict
        from modelopt.torch.export.unified_export_hf import _process_quantized_modules

        with torch.inference_mode():
            beside = get_quant_config(module)
            _process_quantized_modules(module, next(module.parameters()).dtype)
            state = postprocess_state_dict(module.state_dict(), 448.0, None)
        return state, beside, convert_hf_quant_config_format(beside)


@contextmanager
def norms_left_alone() -> Iterator[None]:
    from modelopt.torch.export import unified_export_hf

    kept = unified_export_hf.fuse_prequant_layernorm
    unified_export_hf.fuse_prequant_layernorm = lambda *args, **kwargs: None
    try:
        yield
    finally:
        unified_export_hf.fuse_prequant_layernorm = kept
