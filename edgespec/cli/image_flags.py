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
    "help": ("Send this image with each --prompt, before its text; may be given repeatedly."),
}


def image_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """--multimodal-engine-dir, --allow-image-root and --allow-image-urls."""
    for flag, settings in reversed(FLAGS.items()):
        command = click.option(flag, **settings)(command)
    return command


def take_images(values: dict[str, Any], input_file: Path | None) -> dict[str, Any]:
    """What these flags say, as arguments of Engine; they are taken out of `values`."""
    directory = values.pop("multimodal_engine_dir")
    return {"multimodal_engine_dir": directory, "image_rules": take_image_rules(values, input_file)}


def take_image_rules(values: dict[str, Any], input_file: Path | None) -> ImageRules:
    """The rules of these flags, which are taken out of `values`."""
    from edgespec.images import ImageRules

    roots, urls = tuple(values.pop("allow_image_root")), values.pop("allow_image_urls")
    return beside(ImageRules(None, roots, urls, also_working_directory=True), input_file)


def beside(
    rules: ImageRules | None, input_file: Path | None, named: Sequence[Path] = ()
) -> ImageRules:
    """Rules with the directory of `input_file`: relative paths begin there, before they begin at
    the working directory. None, and what is no regular file, such as a pipe, has none. Files that
    are `named` on the command line may be read wherever they are."""
    assert rules is not None
    is_file = input_file is not None and input_file.is_file()
    directory = input_file.absolute().parent if input_file and is_file else None
    return replace(rules, directory=directory, roots=(*rules.roots, *named))
