"""The flags that say which images may be read, the same for `infer` and `chat`.

Knows flags. What they allow stands in `edgespec.images`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgespec.cli.paths import DIRECTORY, EXISTING_DIRECTORY, EXISTING_FILE

if TYPE_CHECKING:
    from edgespec.images import ImageRules

FLAGS: dict[str, dict[str, Any]] = {
    "--multimodal-engine-dir": {
        "type": DIRECTORY,
        "metavar": "DIR",
        "help": "The image encoder, or what has it in `visual`.  [default: visual in the engine directory]",
    },
    "--allow-image-root": {
        "multiple": True,
        "type": EXISTING_DIRECTORY,
        "metavar": "DIR",
        "help": (
            "A directory whose images may be read, besides that of the input file; may be given"
            " repeatedly."
        ),
    },
    "--allow-image-urls": {
        "is_flag": True,
        "help": "Fetch images from http(s) URLs, from public addresses alone.",
    },
}


IMAGE: dict[str, Any] = {
    "multiple": True,
    "type": EXISTING_FILE,
    "metavar": "FILE",
    "help": ("Send this image with each --prompt, before its text; may be given repeatedly."),
}


def image_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """--multimodal-engine-dir, --allow-image-root and --allow-image-urls."""
    for flag, settings in reversed(FLAGS.items()):
        command = click.option(flag, **settings)(command)
    return command


def take_images(
    values: dict[str, Any], input_file: Path | None, named: Sequence[Path] = ()
) -> dict[str, Any]:
    """What these flags say, as arguments of Engine; they are taken out of `values`. Files that are
    `named` on the command line may be read wherever they are."""
    directory = values.pop("multimodal_engine_dir")
    rules = take_image_rules(values, input_file)
    rules = replace(rules, roots=(*rules.roots, *named))
    return {"multimodal_engine_dir": directory, "image_rules": rules}


def take_image_rules(values: dict[str, Any], input_file: Path | None) -> ImageRules:
    """The rules of these flags, which are taken out of `values`. `input_file` names the directory
    that relative paths begin at, before they begin at the working directory; None, and what is no
    regular file, such as a pipe: the working directory alone."""
    from edgespec.images import ImageRules

    is_file = input_file is not None and input_file.is_file()
    return ImageRules(
        directory=input_file.absolute().parent if input_file and is_file else None,
        roots=tuple(values.pop("allow_image_root")),
        allow_urls=values.pop("allow_image_urls"),
        also_working_directory=True,
    )
