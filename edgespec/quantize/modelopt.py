"""The interface to NVIDIA ModelOpt 0.47: import, configuration, calibration, packing, and its log.

Nothing else in edgespec knows ModelOpt. Its public export takes complete models; this file runs the
same steps for one layer with functions that are not public: `collect_shared_input_modules`,
`_fuse_shared_input_modules` (without folding smoothing into norms, which is silently wrong for
norms of (1 + w) and where an unquantized layer shares the norm), `_process_quantized_modules`,
`get_quant_config`, `postprocess_state_dict` and `convert_hf_quant_config_format`.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from edgespec.artifacts import provenance
from edgespec.errors import BuildError, EnvironmentProblem, MissingDependency, command
from edgespec.quantization.schemes import Scheme
from edgespec.quantize.base import HEAD
from edgespec.quantize.plan import QuantizationPlan

SUPPORTED = "0.47."
INSTALL = "pip install 'edgespec[quantize]'"
# hf_quant_config.json, and the section quantization_config of config.json
Settings = tuple[dict[str, Any], dict[str, Any]]
_PRIVATE = (
    "collect_shared_input_modules",
    "_fuse_shared_input_modules",
    "_process_quantized_modules",
)


class Log(io.StringIO):
    """The output of ModelOpt, transformers and torch."""


@contextmanager
def captured(log: Log) -> Iterator[None]:
    """Redirects stdout, stderr and warnings of other packages to the log."""
    with redirect_stdout(log), redirect_stderr(log), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            log.writelines(
                dict.fromkeys(f"{entry.category.__name__}: {entry.message}\n" for entry in caught)
            )


def check_installed() -> None:
    """Raises MissingDependency for a missing package, EnvironmentProblem for another version."""
    for package in ("torch", "transformers", "accelerate", "requests"):
        if provenance.installed_version(package) is None:
            raise MissingDependency(f"quantize needs {package}, which is not installed.", INSTALL)
    installed = provenance.installed_version("nvidia-modelopt")
    if installed is None:
        raise MissingDependency("quantize needs nvidia-modelopt, which is not installed.", INSTALL)
    if not installed.startswith(SUPPORTED):
        raise EnvironmentProblem(
            f"nvidia-modelopt {installed} is installed; this version of edgespec works with"
            f" {SUPPORTED}x.",
            INSTALL,
        )


def check_device(device: str) -> None:
    """Raises EnvironmentProblem for "cuda" without a CUDA device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentProblem(
            "`device` cuda: torch finds no CUDA device here.", "Omit `device`: cpu works."
        )


def start(log: Log) -> None:
    """Imports ModelOpt, which takes seconds and prints a lot.

    Raises EnvironmentProblem for a version without the functions that `pack` needs.
    """
    with captured(log):
        import modelopt.torch.quantization  # noqa: F401
        from modelopt.torch.export import unified_export_hf
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if lacking := [name for name in _PRIVATE if not hasattr(unified_export_hf, name)]:
        raise EnvironmentProblem(f"this ModelOpt lacks {', '.join(lacking)}.", INSTALL)


def configuration(plan: QuantizationPlan, left_out: Sequence[str]) -> dict[str, Any]:
    """Returns ModelOpt's configuration of a plan.

    It consists of the preset of the body, the quantizers of lm_head and of the KV cache, and the
    Linears that are not quantized.
    """
    import modelopt.torch.quantization as mtq

    config: dict[str, Any] = copy.deepcopy(getattr(mtq, plan.body.preset))
    entries = config["quant_cfg"]
    if plan.head is not None:
        entries += [
            {"quantizer_name": f"*{HEAD}.{name[1:]}", **cfg}
            for name, cfg in quantizers(mtq, plan.head)
        ]
    if plan.fp8_cache:
        entries += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        # MXFP8 needs no data, the scales of the KV cache do
        config["algorithm"] = config["algorithm"] or "max"
    entries += [{"quantizer_name": f"{name}.*", "enable": False} for name in left_out]
    return config


def quantizers(mtq: Any, scheme: Scheme) -> list[tuple[str, dict[str, Any]]]:
    """Returns the weight and input quantizers that a preset enables."""
    both = ("*weight_quantizer", "*input_quantizer")
    return [
        (entry["quantizer_name"], {"cfg": copy.deepcopy(entry["cfg"])})
        for entry in getattr(mtq, scheme.preset)["quant_cfg"]
        if entry.get("quantizer_name") in both and entry.get("cfg")
    ]


def insert_quantizers(
    model: Any, plan: QuantizationPlan, left_out: Sequence[str], log: Log
) -> Settings:
    """Inserts quantizers into a model without weights. Returns the settings on disk."""
    with captured(log):
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
        from modelopt.torch.export.quant_utils import get_quant_config

        mtq.quantize(model, configuration(plan, left_out) | {"algorithm": None})
        beside = get_quant_config(model)
        return beside, convert_hf_quant_config_format(beside)


def renamed(settings: Any, name_of: Callable[[str], str]) -> Any:
    """Returns settings with `name_of` applied to every string, keys included."""
    if isinstance(settings, dict):
        return {name_of(key): renamed(value, name_of) for key, value in settings.items()}
    if isinstance(settings, list):
        return [renamed(value, name_of) for value in settings]
    return name_of(settings) if isinstance(settings, str) else settings


def leave_out(settings: Settings, names: Sequence[str]) -> None:
    """Adds modules that no quantizer was asked for to those that both forms of the settings leave
    out."""
    beside, inside = settings
    for section, key in ((beside["quantization"], "exclude_modules"), (inside, "ignore")):
        if key in section:
            section[key] += [name for name in names if name not in section[key]]


def steps(plan: QuantizationPlan, num_inputs: int) -> int:
    """Returns the number of steps that `calibrate` reports for a number of inputs."""
    return num_inputs * sum(plan.body.passes)


def calibrate(
    module: Any,
    plan: QuantizationPlan,
    inputs: Sequence[Any],
    call: Callable[[Any], object],
    advance: Callable[[int], None],
    log: Log,
) -> None:
    """Runs the inputs through a module with quantizers, as often as the algorithm requires."""
    passes = 0

    def forward_loop(module: Any) -> None:
        nonlocal passes
        cost = plan.body.passes[min(passes, len(plan.body.passes) - 1)]
        passes += 1
        for item in inputs:
            call(item)
            advance(cost)

    with captured(log):
        import modelopt.torch.quantization as mtq
        import torch

        with torch.no_grad():
            mtq.calibrate(module, configuration(plan, ())["algorithm"], forward_loop)


@contextmanager
def quantizers_off(module: Any) -> Iterator[None]:
    """Disables all quantizers of the module within the block."""
    import modelopt.torch.quantization as mtq

    with mtq.set_quantizer_by_cfg_context(module, [{"quantizer_name": "*", "enable": False}]):
        yield


def pack(module: Any, probe: Callable[[], object], dtype: Any, log: Log) -> dict[str, Any]:
    """Packs a calibrated module in place as ModelOpt's export does. Returns its tensors by name.

    `probe` runs the module once: Linears that read the same input get common scales. Raises
    BuildError if ModelOpt fails.
    """
    with captured(log):
        import torch
        from modelopt.torch.export import unified_export_hf as exporter
        from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict

        try:
            with torch.inference_mode():
                shared, _ = exporter.collect_shared_input_modules(module, probe)
                exporter._fuse_shared_input_modules(module, shared)
                cache = get_quant_config(module)["quantization"]["kv_cache_quant_algo"]
                exporter._process_quantized_modules(module, dtype)
                packed: Mapping[str, Any] = postprocess_state_dict(
                    module.state_dict(), 448.0, cache
                )
        except (
            AssertionError,
            AttributeError,
            NotImplementedError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            last = str(error).strip().partition("\n")[0]
            raise BuildError(
                f"ModelOpt could not pack the quantized weights: {type(error).__name__}: {last}",
                f"{command(debug=True)} shows its output. Try another scheme.",
            ) from error
        return {name: tensor.cpu() for name, tensor in packed.items()}
