"""--tokenizer-dir, which scripts for TensorRT-LLM pass: engines bring their tokenizer, and this only
checks that it is the same."""

from __future__ import annotations

from pathlib import Path

import click


def check_tokenizer(ctx: click.Context, engine_dir: Path, given: Path | None) -> None:
    """Raises click.UsageError where the tokenizer.json of a directory is not that of the engines,
    or there is none to compare."""
    if given is None:
        return
    from edgespec.artifacts import file_names

    name = file_names.TOKENIZER
    ours, theirs = engine_dir / name, given / name
    if not theirs.is_file():
        message = f"--tokenizer-dir {given}: it has no {name} to compare with that of the engines"
    elif ours.is_file() and ours.read_bytes() != theirs.read_bytes():
        message = (
            f"--tokenizer-dir {given}: its {name} is not the one that the engines were made with"
        )
    else:
        return
    raise click.UsageError(f"{message}. Leave the flag out: engines bring their tokenizer.", ctx)
