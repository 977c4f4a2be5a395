"""What a recipe for Medusa heads says: ModelOpt's section `medusa`. Knows no torch."""

from __future__ import annotations

from pathlib import Path

from edgespec.errors import command
from edgespec.methods.medusa import MAX_BLOCKS, MAX_HEADS
from edgespec.training.keys import WHOLE, Fixed, Key, Trainable


def exports(base: str, draft: Path) -> list[tuple[str, str]]:
    """The commands that export the pair, and what to build of each."""
    return [
        (command("export", base, "onnx/base", medusa_base=True), "onnx/base/llm"),
        (command("export", draft, "onnx/draft", base_model_dir=base), "onnx/draft/medusa_draft"),
    ]


TRAINABLE = Trainable(
    recipe_type="speculative_medusa",
    section="medusa",
    module="edgespec.training.medusa",
    defaults={"training.loss": "ce"},
    shape_keys=("num_heads", "num_layers"),
    keys={
        "medusa.medusa_num_heads": Key(WHOLE, 4, least=1, most=MAX_HEADS),
        "medusa.medusa_num_layers": Key(WHOLE, 1, least=1, most=MAX_BLOCKS),
        "data.draft_vocab_cache": Fixed("heads have the vocabulary of their base", ()),
    },
    exports=exports,
)
