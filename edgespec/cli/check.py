"""`edgespec check`: `edgespec.pairing` looks, this shows a result a line or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.export import layer_list
from edgespec.cli.flags import EdgeCommand, refuse
from edgespec.cli.paths import FILE, MODEL
from edgespec.cli.terminal import json_text, say
from edgespec.errors import counted
from edgespec.methods import METHODS

if TYPE_CHECKING:
    from edgespec.pairing.check_result import PairReport

REFUSED = 3
ONE_GRAPH = "`tensorrt` checks the graph of one exported directory: give only that and `json`."
LEVEL_WIDTH, TOPIC_WIDTH = 9, 16


@click.command("check", cls=EdgeCommand)
@click.argument("base", metavar="BASE", type=MODEL)
@click.argument("draft", metavar="[DRAFT]", type=MODEL, required=False)
@click.option(
    "--mtp", is_flag=True, help="Check the base's own MTP head, the default without DRAFT."
)
@click.option(
    "--aux-layers",
    callback=layer_list,
    metavar="I,J,K",
    help="Aux layers as hidden_states indices, instead of the draft's own.",
)
@click.option(
    "--allow-pickle", is_flag=True, help="Also read pytorch_model.bin, with weights_only."
)
@click.option(
    "--probe", is_flag=True, help="If all fits, count how often both agree on a little text."
)
@click.option(
    "--probe-text",
    type=FILE,
    help="Text for --probe, instead of the shipped one.",
)
@click.option(
    "--probe-image",
    "probe_images",
    type=FILE,
    multiple=True,
    help="An image for --probe, where the text has the model's mark of one, or before it;"
    " may be given repeatedly.",
)
@click.option(
    "--against",
    metavar="OTHER",
    type=MODEL,
    help="For --probe: another quantization of BASE, with which the draft is asked as well.",
)
@click.option(
    "--tensorrt",
    metavar="VERSION",
    help="Check instead whether TensorRT's parser takes the graph of BASE, an exported directory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    base: str,
    draft: str | None,
    mtp: bool,
    aux_layers: tuple[int, ...] | None,
    allow_pickle: bool,
    probe: bool,
    probe_text: Path | None,
    probe_images: tuple[Path, ...],
    against: str | None,
    tensorrt: str | None,
    as_json: bool,
) -> int:
    """Say whether BASE and DRAFT belong together, without running them.

    Both are checkpoint directories, GGUF files or hub ids. A DRAFT that is a whole model is checked
    as a draft model: above all, token by token, whether both have one tokenizer. Without DRAFT, the
    base's own MTP head is checked.
    Each line is a result: ok, a warning (it runs and costs acceptance), or refused, with the
    remedy. The exit code is 3 where something is refused. JSON and headers are read, no weights;
    those of the base are hashed where edgespec quantize made the draft.

    With --probe the pair is run on a few hundred tokens, without engines and a layer at a time: how
    often the draft's first token is the base's next one, with the aux hidden states that the
    checkpoints declare and with others that are easily mistaken for them. A pair that agrees no more
    often than by chance is refused, and so are weights with NaN or Inf. It takes as long as reading
    all weights twice. With --probe-image the text has images before it, and the share without them
    stands beside; that takes twice as long.

    With --tensorrt the graph of BASE is held against the rules of NVIDIA's parser and builder, of
    TensorRT 10.13 to 11.4 (--tensorrt 10.13) or of TensorRT-RTX 1.4 to 1.7 (--tensorrt rtx-1.7). An
    export is lowered for that version first; any other directory with a model.onnx is checked as it
    is. It needs no TensorRT, and only TensorRT itself says that a graph runs.

    \b
    edgespec check Qwen3-8B Qwen3-8B-DFlash-b16
    edgespec check Qwen3-8B Qwen3-0.6B
    edgespec check Qwen3.5-4B --probe
    edgespec check Qwen3-8B qwen3-8b-eagle3 --probe --against Qwen3-8B-Q4_K_M.gguf
    edgespec check Qwen2.5-VL-7B-Instruct qwen2.5-vl-7b-eagle3 --probe --probe-image photo.jpg
    edgespec check out/llm --tensorrt 11.4
    """
    if tensorrt is not None:
        others = draft, mtp, aux_layers, allow_pickle, probe, probe_text, against, *probe_images
        refuse({ONE_GRAPH: any(others)})
        from edgespec.cli.parser_rules import show

        return show(Path(base), tensorrt, as_json=as_json)
    refuse(
        {
            "`mtp` checks the base's own head: leave DRAFT out, or `mtp`.": mtp and draft,
            "`aux_layers` belongs to a draft: give DRAFT as well.": aux_layers and not draft,
            "`probe_text` means nothing without --probe.": probe_text and not probe,
            "`probe_image` means nothing without --probe.": probe_images and not probe,
            "`against` means nothing without --probe.": against and not probe,
        }
    )
    from edgespec.cli.progress import Bars
    from edgespec.pairing.check import check

    with Bars() as bars:
        report = check(
            base,
            draft,
            aux_layers=aux_layers,
            allow_pickle=allow_pickle,
            probe_text=text_for(probe_text) if probe else None,
            probe_images=probe_images,
            against=against,
            progress=bars,
        )
    if as_json:
        counts = {"warnings": report.count("warning"), "refused": report.count("refused")}
        shown = {"base": base, "draft": draft, **asdict(report), **counts}
        click.echo(json_text(shown | {"speed": speed_of(report)}))
    else:
        for line in (*text_of(report), *speed_lines(report), summary(report)):
            say(line)
    return REFUSED if report.count("refused") else 0


def text_for(path: Path | None) -> str:
    """The text of --probe-text, or the shipped one. Raises RequestError."""
    from edgespec.pairing.probe_text import read_text

    return read_text(path)


def text_of(report: PairReport) -> list[str]:
    """The lines of a report: level, topic and finding of each result, its remedy below."""
    lines = []
    for result in report.results:
        problem, remedy = result.what.rstrip("."), result.remedy
        lines.append(f"{result.level:{LEVEL_WIDTH}}{result.topic:{TOPIC_WIDTH}}{problem}")
        lines += [f"{'':{LEVEL_WIDTH + TOPIC_WIDTH}}{remedy}"] if remedy else []
    return lines


def speed_of(report: PairReport) -> dict[str, Any] | None:
    """What the pair may reach here, as JSON; None for one that does not fit."""
    from edgespec.runtime.measuring.cost_estimate import Machine, estimates, to_dict

    if report.work is None:
        return None
    machine = Machine.here()
    return to_dict(estimates(report.work, machine), machine)


def speed_lines(report: PairReport) -> Iterator[str]:
    """The same in lines."""
    from edgespec.runtime.measuring.cost_estimate import Machine, estimates, lines

    if report.work is None:
        return
    machine, label = Machine.here(), "speed"
    for line in lines(estimates(report.work, machine), machine):
        yield f"{'':{LEVEL_WIDTH}}{label:{TOPIC_WIDTH}}{line}"
        label = ""


def summary(report: PairReport) -> str:
    """The last line: the method, and how many results are refused and warnings."""
    refused, warnings = report.count("refused"), report.count("warning")
    beside = f", {counted(warnings, 'warning')}" if warnings else ""
    title = METHODS[report.method].title if report.method else "unknown"
    if report.probe is not None and report.probe.unrelated:
        return f"{title}: shapes fit, but the draft was not made for this base{beside}"
    return f"{title}: {f'does not fit, {refused} refused' if refused else 'fits'}{beside}"
