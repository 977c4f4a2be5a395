"""`edgespec export-draft`: strings into values, then `layouts.write` does the work."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from edgespec.cli.flags import EdgeCommand
from edgespec.cli.paths import DIRECTORY, MODEL
from edgespec.cli.terminal import json_text, say

FORMATS = ("modelopt", "speculators", "sglang", "eagle", "z-lab", "deepspec", "medusa")


@click.command("export-draft", cls=EdgeCommand, aliases={"--verifier": "--base-model-dir"})
@click.argument("draft", metavar="DRAFT", type=MODEL)
@click.argument("out", metavar="OUT", type=DIRECTORY)
@click.option("--format", "layout", type=click.Choice(FORMATS), required=True, help="The layout.")
@click.option(
    "--base-model-dir",
    type=MODEL,
    metavar="BASE",
    help="The base, which speculators calls the verifier.  [default: what the draft records]",
)
@click.option("--allow-pickle", is_flag=True, help="Also read pickled weights, with weights_only.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    draft: str,
    out: Path,
    layout: str,
    base_model_dir: str | None,
    allow_pickle: bool,
    as_json: bool,
) -> None:
    """Write DRAFT, of any layout that edgespec reads, in the layout of another program: config.json
    and weights, for vLLM (speculators), SGLang, TensorRT-LLM (modelopt) or its authors' own code.

    Weights keep their bytes under other names. RoPE is what the draft was trained with, ends of
    texts are those of the base. What a layout cannot say is refused, and what is written is read
    back.

    \b
    edgespec export-draft draft draft-vllm --format speculators --verifier Qwen/Qwen3-0.6B
    """
    from edgespec.cli.progress import Bars
    from edgespec.layouts.write import export_draft

    with Bars() as bars:
        done = export_draft(
            draft, out, layout, base_model_dir, allow_pickle=allow_pickle, progress=bars
        )
    if as_json:
        click.echo(json_text(asdict(done) | {"directory": str(done.directory)}))
    else:
        size = f"{done.num_tensors} tensors, {done.num_bytes / 1e6:.1f} MB"
        say(f"{done.directory}: {done.method} in the layout {layout}, {size}")
