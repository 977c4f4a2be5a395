"""A dump as a training's data: which kind it is, and whether it is of this base and recipe. Knows
no method."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from edgespec.artifacts import hashes
from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import OptionError
from edgespec.methods import METHODS
from edgespec.progress import Progress
from edgespec.training import dumps, modelopt_dumps
from edgespec.training.data import Template
from edgespec.training.dumps import Dump, Widths
from edgespec.training.recipe import TrainRecipe


def opened_dump(
    path: Path,
    recipe: TrainRecipe,
    base: Checkpoint,
    model: ModelConfig,
    config: DraftConfig,
    layers: tuple[int, ...],
    template: Template,
    progress: Progress,
) -> Dump:
    """The dump of a recipe. Raises BundleError, PairingError and RequestError where it is damaged,
    not whole, or of another base, tokenizer, set of layers or data."""
    if modelopt_dumps.is_modelopt(path):
        if recipe["validation.data_path"] is not None:
            raise OptionError(
                "validation.data_path: the base's layers, which would answer, are not loaded.",
                "Remove it: a part of ModelOpt's dump is held out. Dumps of edgespec data"
                " hidden-states have answers in them.",
            )
        held, seed = recipe["validation.num_prompts"], recipe["training.seed"]
        widths = widths_of(config, model, 0)
        return modelopt_dumps.open_modelopt(path, widths, model.vocab_size, held, seed)
    dump, said = dumps.open_dump(path)
    wanted = made_of(base, template, progress) | {"aux_layers": [*layers]}
    if (data_path := recipe["data.data_path"]) is not None:
        sha256 = hashes.sha256_file(Path(data_path))
        wanted["data"] = {"name": Path(data_path).name, "sha256": sha256}
    dumps.refuse_other(path, said, wanted, recipe)
    return dump


def widths_of(config: DraftConfig, model: ModelConfig, num_top: int) -> Widths:
    """What a token's states take."""
    width, hidden = config.target_hidden_size, model.decoder.hidden_size
    dtype = "float32" if model.dtype == "float32" else "bfloat16"
    final = 0 if METHODS[config.method].base_output == "final_hidden_state" else hidden
    return Widths(config.num_aux_layers * width, final, min(num_top, model.vocab_size), dtype)


def made_of(base: Checkpoint, template: Template, progress: Progress) -> dict[str, Any]:
    """What dump.json says of a base and its tokenizer."""
    backend = template.tokenizer.backend_tokenizer.to_str()
    return {
        "base": {"name": base.path.resolve().name, "identity": base.identity(progress)},
        "tokenizer": hashlib.sha256(backend.encode()).hexdigest(),
        "chat_template": hashlib.sha256(str(template.tokenizer.chat_template).encode()).hexdigest(),
    }
