"""The demo pair of `recipes/demo` with the first layers of its base alone: logits of a trained
model, at a third of the time.

Knows where the layers of a checkpoint stand. Knows no engine.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from edgespec.export.components import ExportOptions
from tests import made, shared

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo"
INPUT = RECIPE / "input.json"
LAYERS = 5
AUX_LAYERS = (1, 2, 4)


def base() -> Path:
    """The checkpoint of the base, made once a run."""

    def make(out: Path) -> None:
        source = RECIPE / "base"
        shutil.copytree(source, out / "base", ignore=shutil.ignore_patterns("model.safetensors"))
        config = json.loads((source / "config.json").read_text())
        config |= {"num_hidden_layers": LAYERS, "layer_types": config["layer_types"][:LAYERS]}
        (out / "base" / "config.json").write_text(json.dumps(config))
        later = tuple(f"model.layers.{i}." for i in range(LAYERS, 16))
        tensors = load_file(source / "model.safetensors")
        kept = {name: one for name, one in tensors.items() if not name.startswith(later)}
        save_file(kept, out / "base" / "model.safetensors", metadata={"format": "pt"})

    return shared.made_once(("demo", LAYERS), make) / "base"


def exports(checkpoint: Path | None = None) -> tuple[Path, Path]:
    """Base and draft, exported; `checkpoint` stands for the base."""
    model = checkpoint or base()
    of_base = ExportOptions(base_for="eagle3", aux_layers=AUX_LAYERS)
    of_draft = ExportOptions(base_model_dir=str(model), aux_layers=AUX_LAYERS)
    draft = made.exported(RECIPE / "draft", of_draft)
    return made.exported(model, of_base) / "llm", draft / "llm"
