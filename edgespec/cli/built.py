"""What `build` and `import` say of a built engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgespec.backends.build import Built


def built_dict(built: Built, notes: Iterable[str]) -> dict[str, Any]:
    """What --json prints of an engine."""
    return {
        "role": built.role.value,
        "engine": str(built.engine),
        "bytes": built.size_bytes,
        "golden_difference": built.golden_difference,
        "golden_cosine": built.golden_cosine,
        "unproven": built.unproven,
        "weights": built.weights.to_dict(),
        "seconds": built.seconds,
        "notes": list(notes),
    }


def built_lines(built: Built, notes: Iterable[str]) -> Iterator[str]:
    """An engine, and below it what is to be said of it."""
    size = f"{built.size_bytes / 1e6:.1f} MB, {built.seconds:.1f} s"
    yield f"{built.role.value}: {built.engine} ({size})"
    for note in (checked(built), *notes):
        yield f"  {note}"


def checked(built: Built) -> str:
    """How the engine agrees with the golden outputs."""
    if built.unproven is not None:
        return f"not compared with the golden outputs: {built.unproven}"
    if built.golden_difference is None:
        return "no golden outputs to check with"
    if built.golden_cosine is not None:
        return f"golden outputs approached (cosine {built.golden_cosine:.4f})"
    return f"golden outputs reproduced (largest difference {built.golden_difference:.1e})"
