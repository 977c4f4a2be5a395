"""What `build` and `import` say of a built engine, of a language model or of an image encoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.backends.build import Built
    from edgespec.backends.vision.build import BuiltEncoder


def built_dict(name: str, built: Built | BuiltEncoder, notes: Iterable[str]) -> dict[str, Any]:
    """What --json prints of the engine of the component `name`."""
    return {
        "role": name,
        "engine": str(built.engine),
        "bytes": built.size_bytes,
        "golden_difference": built.golden_difference,
        "golden_cosine": built.golden_cosine,
        "unproven": built.unproven,
        "weights": built.weights.to_dict(),
        "seconds": built.seconds,
        "notes": list(notes),
    }


def built_lines(name: str, built: Built | BuiltEncoder, notes: Iterable[str]) -> Iterator[str]:
    """An engine, and below it what is to be said of it."""
    size = f"{built.size_bytes / 1e6:.1f} MB, {built.seconds:.1f} s"
    yield f"{name}: {built.engine} ({size})"
    for note in (checked(built), *notes):
        yield f"  {note}"


def checked(built: Built | BuiltEncoder) -> str:
    """How the engine agrees with the golden outputs."""
    if built.unproven is not None:
        return f"not compared with the golden outputs: {built.unproven}"
    if built.golden_difference is None:
        return "no golden outputs to check with"
    if built.golden_cosine is not None:
        return f"golden outputs approached (cosine {built.golden_cosine:.4f})"
    return f"golden outputs reproduced (largest difference {built.golden_difference:.1e})"
