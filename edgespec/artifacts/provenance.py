"""What wrote a directory: our version, the command line without prompts, and packages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgespec.errors import flag_of

TEXT_FLAGS = tuple(map(flag_of, ("prompt", "system")))


def provenance() -> dict[str, Any]:
    """Returns our version, the command line without prompts, and the versions of the packages that
    write files."""
    versions = {
        name: installed_version(name) for name in ("numpy", "onnx", "onnx-ir", "safetensors")
    }
    command = [Path(sys.argv[0]).name, *without_texts(sys.argv[1:])]
    return {"edgespec": installed_version("edgespec"), "command": command, "packages": versions}


def without_texts(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a command line with "..." for what was said to a model: an engine
    outlives a conversation and may be given away."""
    shown = []
    for before, argument in pairwise(["", *arguments]):
        name, equals, _ = argument.partition("=")
        if before in TEXT_FLAGS:
            shown.append("...")
        else:
            shown.append(f"{name}=..." if equals and name in TEXT_FLAGS else argument)
    return shown


@cache
def installed_version(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
