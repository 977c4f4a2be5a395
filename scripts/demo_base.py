"""Which base a draft was trained for: what `edgespec train` wrote beside it, or a file that has the
base's hash.

Knows the demo base and these files. Knows nothing of training, and needs no torch: `demo.py` reads it
to see whether a draft that it finds is for the base that it has.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from edgespec.checkpoint.files import open_checkpoint
from edgespec.training.recipe import REPORT

DEMO_BASE = Path(__file__).resolve().parent.parent / "recipes" / "demo" / "base"
NOTE = "trained_for.json"


def hash_of(base: Path) -> str:
    """The SHA-256 of a base's weights and configuration."""
    found = hashlib.sha256()
    for name in ("config.json", "model.safetensors"):
        found.update((base / name).read_bytes())
    return found.hexdigest()


def note_base(draft: Path, base: Path = DEMO_BASE) -> None:
    """Writes into the directory of a draft which base it was trained for."""
    (draft / NOTE).write_text(json.dumps({"base_sha256": hash_of(base)}, indent=2) + "\n")


def noted_base(draft: Path) -> str | None:
    """The hash of the base that a draft was trained for; None where it does not say."""
    try:
        found = json.loads((draft / NOTE).read_text())["base_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def is_for(draft: Path, base: Path = DEMO_BASE) -> bool:
    """Whether a draft was trained for this base."""
    if (draft / REPORT).exists():
        found = json.loads((draft / REPORT).read_text())["base"]["identity"]
        return bool(found == open_checkpoint(base).identity())
    return noted_base(draft) == hash_of(base)
