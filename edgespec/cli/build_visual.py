"""The part of `edgespec build` that is for image encoders: its flags, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edgespec.backends.base import BuildOptions, Progress
from edgespec.cli.built import built_dict, built_lines
from edgespec.cli.terminal import json_text, say
from edgespec.contract import Role
from edgespec.errors import BundleError
from edgespec.vision.contract import ImageLimits

Command = Callable[..., None]
USUAL = ImageLimits()
LIMITS = tuple(asdict(USUAL))
_HELP = {
    "min_image_tokens": "Image encoder: tokens of an image, at least.",
    "max_image_tokens": "Image encoder: tokens of all images of a request, at most.",
    "max_image_tokens_per_image": "Image encoder: tokens of an image, at most.",
}


def image_options(command: Command) -> Command:
    """The flags of an encoder's limits."""
    for name, value in reversed(asdict(USUAL).items()):
        flag = f"--{name.replace('_', '-')}"
        option = click.option(flag, default=value, show_default=True, help=_HELP[name])
        command = option(command)
    return command


def take_limits(values: dict[str, Any]) -> ImageLimits:
    """The limits of these flags, which are taken out of `values`."""
    return ImageLimits(**{name: values.pop(name) for name in LIMITS})


def run(
    onnx_dir: Path,
    engine_dir: Path,
    limits: ImageLimits,
    *,
    backend: str,
    options: BuildOptions,
    asked_role: str | None,
    dry_run: bool,
    as_json: bool,
    unused: Iterable[str],
) -> None:
    """Build the engine of an image encoder and print it; `asked_role` is what the flags say that
    the component is, `unused` are names of limits that it does not have."""
    from edgespec.backends.vision.build import build_visual, plan_visual
    from edgespec.cli.progress import Bars

    if asked_role is not None:
        what = f"{onnx_dir} is exported as {Role.VISUAL.value}, the flag says {asked_role}"
        raise BundleError(what, f"Leave the flag out, or give the directory of the {asked_role}.")
    if dry_run:
        lines = plan_visual(onnx_dir, engine_dir, limits, backend=backend, options=options)
        show_planned((*lines, *given(unused, "a language model")), as_json=as_json)
        return
    with Bars() as bars:
        built = build_visual(
            onnx_dir,
            engine_dir,
            limits,
            backend=backend,
            options=options,
            progress=Progress(
                start=lambda total: bars.start("engine", total),
                advance=bars.advance,
                prove=lambda passes: bars.start("golden outputs", passes),
                warn=lambda text: say(f"warning: {text}", err=True),
            ),
        )
    notes = (*built.notes, *given(unused, "a language model"))
    if as_json:
        click.echo(json_text(built_dict(Role.VISUAL.value, built, notes)))
        return
    for line in built_lines(Role.VISUAL.value, built, notes):
        say(line)


def given(names: Iterable[str], owner: str) -> Iterator[str]:
    """A note on each flag of these limits on the command line: `owner` has it."""
    source = click.get_current_context().get_parameter_source
    for name in names:
        if source(name) is ParameterSource.COMMANDLINE:
            yield f"--{name.replace('_', '-')} is for {owner} and not used here"


def show_planned(lines: Iterable[str], *, as_json: bool) -> None:
    """Print what would be built."""
    if as_json:
        click.echo(json_text({"role": Role.VISUAL.value, "lines": list(lines)}))
        return
    say(f"{Role.VISUAL.value}: no engine built")
    for line in lines:
        say(f"  {line}")
