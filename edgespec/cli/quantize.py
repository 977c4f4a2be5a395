"""`edgespec quantize`: parses the flags, runs `edgespec.quantize`, and prints its check.

Knows flags and words. Knows nothing of formats.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from edgespec.cli import environment
from edgespec.cli.exit_codes import INTERRUPTED
from edgespec.cli.flags import EdgeCommand, EdgeGroup
from edgespec.cli.paths import DIRECTORY, MODEL
from edgespec.cli.progress import Bars
from edgespec.cli.signals import Terminated, exit_code
from edgespec.cli.terminal import json_text, say
from edgespec.compat.edgellm import FLAGS
from edgespec.quantization.schemes import MADE, TARGETS

if TYPE_CHECKING:
    from edgespec.artifacts.manifest import QuantizeCheck
    from edgespec.quantize.llm import Options, Quantized
    from edgespec.quantize.modelopt import Log

HEADS = ("fp8", "int4_awq", "nvfp4", "mxfp8", "int8_sq")  # the plan refuses the last one by name
ALIASES = {"--text-dataset": "--calib-data"}


class QuantizeSteps(Bars):
    """Progress bars in steps. They hold the real stderr, which `modelopt.captured` replaces."""

    def __init__(self) -> None:
        super().__init__()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        console = Console(file=sys.stderr)
        self.progress = Progress(
            *columns,
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
            redirect_stdout=False,
            redirect_stderr=False,
            speed_estimate_period=3600,  # a layer may take a minute
        )


def common(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the flags of both commands, in the order of --help."""
    for option in reversed(
        (
            click.option(
                "--lm-head-quantization",
                type=click.Choice(HEADS),
                help="Format of lm_head; default: not quantized.",
            ),
            click.option(
                "--exclude",
                multiple=True,
                metavar="GLOB",
                help="Linears that are not quantized, such as '*.down_proj'.",
            ),
            click.option(
                "--calib-data",
                type=MODEL,
                metavar="FILE",
                envvar=environment.CALIB_DATA,
                show_envvar=True,
                help=(
                    'Text, or JSONL with "messages", "text" or "turns"; or cnn_dailymail or'
                    " wikitext from the hub. Default: a text that comes with edgespec."
                ),
            ),
            click.option(
                "--num-samples",
                type=click.IntRange(1),
                help="Calibration samples. Default: 16 on a CPU, 512 on CUDA.",
            ),
            click.option(
                "--calib-seq-len",
                type=click.IntRange(16),
                help="Tokens per sample. Default: 256 on a CPU, 512 on CUDA.",
            ),
            click.option(
                "--device",
                type=click.Choice(("cpu", "cuda")),
                default="cpu",
                envvar=environment.DEVICE,
                show_envvar=True,
                help="Where calibration runs.",
            ),
            click.option(
                "--target",
                type=click.Choice(tuple(TARGETS)),
                envvar=environment.TARGET,
                show_envvar=True,
                help="Reject formats that this device cannot run.",
            ),
            click.option(
                "--allow-pickle",
                is_flag=True,
                help="Also read pytorch_model.bin, with weights_only.",
            ),
            click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON."),
        )
    ):
        function = option(function)
    return function


def quantization(text: str, *, required: bool = True) -> Callable[..., Any]:
    """The flag --quantization, whose help is `text`."""
    return click.option("--quantization", type=click.Choice(MADE), required=required, help=text)


@click.group("quantize", cls=EdgeGroup)
def command() -> None:
    """Quantize a checkpoint with NVIDIA ModelOpt, without a GPU, and check the result."""


@command.command("llm", cls=EdgeCommand, aliases=ALIASES, missing=FLAGS["quantize llm"])
@click.option(
    "--model-dir", required=True, type=MODEL, metavar="MODEL", help="A directory or a hub id."
)
@click.option(
    "--output-dir",
    required=True,
    metavar="DIR",
    type=DIRECTORY,
    help="Where the quantized checkpoint goes.",
)
@quantization(
    "Format of the decoder's Linears; not needed with --visual-quantization.", required=False
)
@common
@click.option(
    "--kv-cache-quantization", type=click.Choice(("fp8",)), help="Scales for an FP8 cache."
)
@click.option(
    "--visual-quantization",
    type=click.Choice(("fp8",)),
    help="Format of the image encoder's Linears; default: not quantized.",
)
@click.option(
    "--image-dataset",
    type=DIRECTORY,
    metavar="DIR",
    help="Images that calibrate the image encoder. Default: a few that are drawn.",
)
def llm(
    model_dir: str,
    output_dir: Path,
    as_json: bool,
    kv_cache_quantization: str | None,
    **flags: Any,
) -> None:
    """Quantize a base model.

    The result is a Hugging Face directory in ModelOpt's layout. Its weights are read back and
    compared with the original over held-out text; a broken result is rejected and removed.

    Memory holds one layer at a time, and the largest tensor. The same command resumes a stopped
    run: finished layers are kept in .DIR.quantize beside the output. mxfp8 has no calibration and
    starts over.

    \b
    edgespec quantize llm --model-dir Qwen/Qwen3-0.6B --quantization fp8 --output-dir qwen3-fp8
    """
    from edgespec.quantize.llm import quantize_llm

    options = options_of(flags, fp8_cache=kv_cache_quantization == "fp8")
    show(
        lambda bars, log: quantize_llm(model_dir, output_dir, options, bars, log),
        output_dir,
        as_json,
    )


@command.command("draft", cls=EdgeCommand, aliases=ALIASES, missing=FLAGS["quantize draft"])
@click.option(
    "--base-model-dir",
    required=True,
    type=MODEL,
    metavar="BASE",
    help="The base that the draft was trained for.",
)
@click.option(
    "--draft-model-dir", required=True, type=MODEL, metavar="DRAFT", help="A directory or a hub id."
)
@click.option(
    "--output-dir",
    required=True,
    metavar="DIR",
    type=DIRECTORY,
    help="Where the quantized checkpoint goes.",
)
@quantization("Format of the Linears.")
@common
@click.option("--kv-cache-quantization", type=click.Choice(("fp8",)), hidden=True)
def draft(
    base_model_dir: str,
    draft_model_dir: str,
    output_dir: Path,
    as_json: bool,
    kv_cache_quantization: str | None,
    **flags: Any,
) -> None:
    """Quantize an EAGLE-1, EAGLE-3, DFlash, JetSpec or DSpark draft.

    It is calibrated on the hidden states of its base, with the next token (EAGLE) or a block of mask
    tokens (the others). fc, the embedding, the vocabulary map and DSpark's heads are not quantized.
    With --lm-head-quantization, a draft that shares the lm_head of its base gets a quantized copy,
    unless it is an EAGLE-3 draft.

    \b
    edgespec quantize draft --base-model-dir Qwen/Qwen3-8B --draft-model-dir Tengyunw/qwen3_8b_eagle3 \\
      --quantization fp8 --output-dir qwen3-draft-fp8
    """
    from edgespec.quantize.draft import quantize_draft

    options = options_of(flags, fp8_cache=kv_cache_quantization == "fp8")

    def run(bars: Bars, log: Log) -> Quantized:
        return quantize_draft(base_model_dir, draft_model_dir, output_dir, options, bars, log)

    show(run, output_dir, as_json)


def options_of(flags: dict[str, Any], *, fp8_cache: bool = False) -> Options:
    """Returns the options of the parsed flags."""
    from edgespec.quantize.llm import Options

    return Options(**flags, fp8_cache=fp8_cache)


def show(run: Callable[[Bars, Log], Quantized], out: Path, as_json: bool) -> None:
    """Runs the quantization with progress bars and prints the result; with --debug also the log."""
    from edgespec.quantize.modelopt import Log
    from edgespec.quantize.work import resume_hint

    log = Log()
    try:
        with QuantizeSteps() as bars:
            result = run(bars, log)
    except (KeyboardInterrupt, Terminated) as stop:
        if not (hint := resume_hint(out)):
            raise
        say(f"interrupted: {hint}", err=True)
        by_ctrl_c = isinstance(stop, KeyboardInterrupt)
        raise click.exceptions.Exit(
            INTERRUPTED if by_ctrl_c else exit_code(signal.SIGTERM)
        ) from None
    finally:
        if (click.get_current_context().obj or {}).get("debug"):
            say(log.getvalue(), err=True)
    if as_json:
        shown = {
            "directory": str(result.directory),
            "notes": result.notes,
            "manifest": result.manifest.to_dict(),
        }
        click.echo(json_text(shown))
        return
    for line in table(result):
        say(line)


def table(result: Quantized) -> list[str]:
    """Returns the lines of the summary."""
    manifest = result.manifest
    size, visual = manifest.size_bytes, manifest.visual
    lines = [f"{manifest.request.quantization}: {result.directory} ({size / 1e6:.1f} MB)"]
    if manifest.check is not None:
        lines += check_lines(manifest.check)
    if visual is not None:
        images = f"{visual.num_images} image{'s' * (visual.num_images > 1)}"
        close = f"cosine {visual.rows_cosine:.4f} of its rows"
        worst = f"weights off by at most {visual.max_weight_error:.4f}"
        lines.append(f"  images      fp8 encoder, {images}: {close}, {worst}")
    return lines + [f"  {note}" for note in result.notes]


def check_lines(check: QuantizeCheck) -> list[str]:
    """The lines of the check of a text decoder."""
    agreement = f"top-1 agreement {check.top1_agreement:.1%} of {check.num_tokens} tokens"
    stats = f"cosine {check.logits_cosine:.4f}, KL {check.logits_kl:.4f} nats, {agreement}"
    lines = [f"  logits      {stats}"]
    before, after = check.perplexity_before, check.perplexity_after
    if before is not None and after is not None:
        change = after / before - 1
        lines.append(f"  perplexity  {before:.3f} before, {after:.3f} after ({change:+.2%})")
    worst = max(check.weight_errors, key=check.weight_errors.__getitem__)
    lines.append(f"  weights     relative error at most {check.max_weight_error:.4f} ({worst})")
    return lines
