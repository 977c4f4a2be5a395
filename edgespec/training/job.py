"""Everything about a training that can be read, and refused, before the base is loaded.

Knows checkpoints, conversations and recipes, and no method: those stand in `table`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgespec.artifacts import atomic
from edgespec.artifacts.outputs import refuse_overwriting
from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.detect import detect, detect_base, text_section
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import (
    CheckpointError,
    MissingDependency,
    OptionError,
    PairingError,
    RequestError,
    UnsupportedModel,
)
from edgespec.methods import METHODS, BaseSide, DraftSide, mismatches, resolve_aux_layers
from edgespec.methods.draft_layers import base_keys
from edgespec.progress import Progress
from edgespec.training import data, doctor, files, in_base
from edgespec.training.data import Question, Row, Rows, Template
from edgespec.training.dumps import Dump
from edgespec.training.files import DraftFiles
from edgespec.training.offline import opened_dump
from edgespec.training.pictures import Pictures, pictures_of
from edgespec.training.recipe import TrainRecipe
from edgespec.training.row import BaseFacts, TrainRow, row_of
from edgespec.training.vocabulary import most_frequent, read_vocabulary, token_counts

HELD_OUT_SHARE = 0.05  # of the conversations


@dataclass(frozen=True, slots=True)
class Job:
    """One resolved training, before the base is loaded."""

    recipe: TrainRecipe
    out: Path
    base: Checkpoint
    model: ModelConfig
    config: DraftConfig
    row: TrainRow
    files: DraftFiles
    init: Checkpoint | None
    draft_ids: torch.Tensor | None
    rows: Rows
    template: Template
    questions: tuple[Question, ...]  # held out
    pictures: Pictures | None  # None: the data has no images
    data: tuple[str, str]  # name, and sha256 of the file and its images
    dump: Dump | None
    answered: Sequence[Row]  # some, with what the base should have answered
    facts: doctor.Facts  # of the data
    progress: Progress
    note: Callable[[str], None]

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        return self.model.eos_token_ids

    @property
    def work_dir(self) -> Path:
        """Where checkpoints are."""
        return self.out.absolute().parent / f".{self.out.absolute().name}.train"

    @property
    def num_weights(self) -> int:
        """Of the draft's files."""
        return sum(int(np.prod(shape)) for shape in self.row_shapes().values())

    def row_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Own name -> shape of what is written."""
        if self.init is None:
            return self.row.shapes(self.files.config)
        named, _ = self.row.names(self.init, self.config)
        return {own: named.tensors[name].shape for own, name in self.files.names.items()}


def open_job(
    recipe: TrainRecipe,
    init: str | None,
    progress: Progress,
    note: Callable[[str], None],
    *,
    occupied: bool = False,
) -> Job:
    """Everything that can be read and refused without the base's weights. `occupied`: the output
    may hold what an earlier run left."""
    base_dir, out = (needed(recipe, k) for k in ("model.model_name_or_path", "training.output_dir"))
    offline = recipe["data.offline_data_path"]
    if recipe["model.use_fake_base_for_offline"] and offline is None:
        raise OptionError(
            f"{recipe.source}: model.use_fake_base_for_offline goes with data.offline_data_path.",
            "Name a dump of hidden states there, or remove the key.",
        )
    data_path = None if offline else needed(recipe, "data.data_path")
    init = init or recipe.values.get(recipe.own_key("init_checkpoint"))
    refuse_overwriting(Path(out), (base_dir, recipe["data.data_path"], offline, init))
    if not occupied:
        atomic.refuse_occupied(Path(out))
    conversations = None
    if data_path is not None:
        conversations = data.read_conversations(Path(data_path), recipe["data.sample_size"])
        data.refuse_unanswered(conversations)
    base = open_checkpoint(base_dir)
    model = base_model(base)
    tokenizer = tokenizer_of(base)
    facts = BaseFacts(base, model, text_section(base), tokenizer)
    row, started, draft_ids = row_of(recipe.method), None, None
    if METHODS[recipe.method].weights_in == "base_checkpoint":
        config, draft_files, started = in_base.opened(facts, recipe, row, init)
    elif init is None:
        config, draft_files, draft_ids = new_draft(facts, recipe, row, base, base_dir)
    else:
        started = open_checkpoint(init)
        config, draft_files, draft_ids = old_draft(started, recipe, row, model, base, base_dir)
    layers = aux_layers_of(config, model)
    refuse_missing(recipe, row)
    held, pictures = questions_of(recipe), None
    if conversations is not None:
        pictures = pictures_of(
            str(base.place), model, (*conversations.items, *(asked[:2] for asked in held)),
            row.images, Path(recipe["data.vlm_processor"] or base.path),
            Path(recipe["data.vlm_img_dir"] or conversations.path.parent),
        )  # fmt: skip
    serving = tokenizer.chat_template
    template = Template(tokenizer, model.eos_token_ids, template_text(recipe), pictures)
    dump, questions, answered = None, tuple[Question, ...](), list[Row]()
    length, otherwise = min(recipe["training.training_seq_len"], model.max_position), None
    answers_only = recipe["training.answer_only_loss"]
    if conversations is None:
        dump = opened_dump(Path(offline), recipe, base, model, config, layers, template, progress)
        rows, source = dump.rows, (Path(offline).name, dump.sha256)
    else:
        kept, questions = split(conversations, held, template, recipe)
        rows = data.rows_of(kept, template, length, answers_only=answers_only)
        source = (conversations.path.name, hash_of(conversations, rows))
        otherwise = doctor.renders_otherwise(template, serving, kept.items[0][1])
        answered = doctor.answers_in(kept, template, length)
    row.check(config, rows)
    if config.draft_vocab_size < config.vocab_size and draft_ids is None:
        counts = token_counts(rows, config.vocab_size)
        draft_ids = most_frequent(counts, config.draft_vocab_size, model.eos_token_ids)
    if draft_ids is not None and init is None:
        offsets = draft_ids - torch.arange(len(draft_ids))
        draft_files = replace(draft_files, beside={**draft_files.beside, "d2t": offsets})
    known = doctor.data_facts(rows, answers_only, covered(rows, draft_ids), otherwise)
    for text in (*notes_of(recipe, rows, draft_ids), *map(str, doctor.findings(known))):
        note(text)
    return Job(
        recipe, Path(out), base, model, config, row, draft_files, started, draft_ids, rows,
        template, questions, pictures, source, dump, answered, known, progress, note,
    )  # fmt: skip


def measured_questions(recipe: TrainRecipe) -> tuple[Sequence[Question], Template, str]:
    """The prompts that a training measures acceptance with, and the sha256 of its data."""
    conversations = data.read_conversations(
        Path(needed(recipe, "data.data_path")), recipe["data.sample_size"]
    )
    base = open_checkpoint(needed(recipe, "model.model_name_or_path"))
    stops = base_model(base).eos_token_ids
    template = Template(tokenizer_of(base), stops, template_text(recipe))
    held = questions_of(recipe)
    return split(conversations, held, template, recipe)[1], template, conversations.sha256


def refuse_missing(recipe: TrainRecipe, row: TrainRow) -> None:
    """Raises MissingDependency for a package that the recipe asks for, and UnsupportedModel where
    ModelOpt trains no such draft."""
    if recipe["training.report_to"] == "tensorboard" and find_spec("tensorboard") is None:
        raise MissingDependency(
            "training.report_to is tensorboard, which is not installed.",
            "pip install 'edgespec[tensorboard]'",
        )
    if recipe["training.engine"] != "modelopt":
        return
    if recipe["data.offline_data_path"] is not None:
        raise OptionError(
            "training.engine is modelopt, which runs the base; with data.offline_data_path its"
            " layers are not loaded.",
            "Remove one of the two keys.",
        )
    if row.modelopt is None:
        raise UnsupportedModel(
            f"training.engine is modelopt, which trains no {METHODS[recipe.method].title} draft"
            " that is exported here.",
            "Remove it.",
        )
    if find_spec("modelopt") is None:
        raise MissingDependency(
            "training.engine is modelopt, which is not installed.",
            "pip install 'edgespec[quantize]'",
        )


def aux_layers_of(config: DraftConfig, model: ModelConfig) -> tuple[int, ...]:
    """The hidden_states indices that a draft reads; none where it reads the last state."""
    if METHODS[config.method].base_output == "final_hidden_state":
        return ()
    return resolve_aux_layers(config, model.decoder.num_layers)


def needed(recipe: TrainRecipe, key: str) -> str:
    """The value of a key without which nothing can be trained. Raises OptionError."""
    if (value := recipe[key]) is None:
        name = {"data.data_path": "data", "training.output_dir": "output_dir"}.get(
            key, "base_model"
        )
        raise OptionError(
            f"{recipe.source} does not say {key}.", f"Write it there, or pass `{name}`."
        )
    return str(value)


def base_model(base: Checkpoint) -> ModelConfig:
    """The base's configuration. Raises UnsupportedModel for a draft, and for a quantized base."""
    if (quantization := read_quantization(base)) is not None:
        raise UnsupportedModel(
            f"{base.place} is quantized ({quantization.layout}); drafts learn from the original.",
            "Give the float16 or bfloat16 checkpoint: a draft of it serves the quantized one too.",
        )
    return detect_base(
        base, "Pass `base_model` with the base, and `init` with a draft to go on from."
    )


def tokenizer_of(base: Checkpoint) -> Any:
    """transformers' tokenizer of a base. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(base.path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the tokenizer of {base.place} cannot be read: {str(error).partition(chr(10))[0]}",
            "Put the model's tokenizer files beside its weights.",
        ) from error


def named_base(base: Checkpoint, base_dir: str) -> str:
    """The base as a draft's config.json names it."""
    return str(base.path.resolve()) if Path(base_dir).is_dir() else base_dir


def new_draft(
    facts: BaseFacts, recipe: TrainRecipe, row: TrainRow, base: Checkpoint, base_dir: str
) -> tuple[DraftConfig, DraftFiles, torch.Tensor | None]:
    """Configuration and files of a new draft, and the tokens of its vocabulary where a file says
    them."""
    raw = row.config(facts, recipe)
    raw |= base_keys(raw, named_base(base, base_dir))
    shapes, draft_format = row.shapes(raw), METHODS[recipe.method].format
    assert draft_format is not None
    config = (row.parse or draft_format.parse)(raw, shapes, recipe.source)
    ids = None
    if (cache := recipe["data.draft_vocab_cache"]) is not None:
        ids = read_vocabulary(Path(cache), config.draft_vocab_size, config.vocab_size)
    names = row.new_names(config) if row.new_names else {name: name for name in shapes}
    return config, DraftFiles(raw, names, {}, row.weights), ids


def old_draft(
    draft: Checkpoint,
    recipe: TrainRecipe,
    row: TrainRow,
    model: ModelConfig,
    base: Checkpoint,
    base_dir: str,
) -> tuple[DraftConfig, DraftFiles, torch.Tensor | None]:
    """The same of a draft to go on from, whose layout stays. Raises PairingError for one of another
    base, and UnsupportedModel for one of another method."""
    config = detect(draft)
    if isinstance(config, ModelConfig) or config.method != recipe.method:
        what = "a base" if isinstance(config, ModelConfig) else METHODS[config.method].draft_title
        wanted = METHODS[recipe.method].draft_title
        raise UnsupportedModel(f"`init`: {draft.place} is {what}, not {wanted}.", f"Pass {wanted}.")
    if (quantization := read_quantization(draft)) is not None:
        raise UnsupportedModel(
            f"`init`: {draft.place} is quantized ({quantization.layout}).", "Pass the original."
        )
    if (key := recipe.shape_key()) is not None:
        raise OptionError(
            "`init` has an architecture of its own, and the recipe says another.",
            f"Leave out the recipe's {key}.",
        )
    sides = BaseSide.of_checkpoint(model, str(base.place)), DraftSide.of_checkpoint(config)
    for mismatch in mismatches(*sides):
        raise PairingError(mismatch.what, mismatch.remedy or "Pass a draft of this base.")
    named, names = row.names(draft, config)
    beside = {
        name: files.tensor_of(named, name)
        for name in named.tensors
        if name not in names.values() or name == names.get("embed_tokens.weight")
    }
    raw = {**draft.config, **base_keys(draft.config, named_base(base, base_dir))}
    offsets = read_d2t(draft, config)
    ids = None if offsets is None else torch.from_numpy(offsets + np.arange(len(offsets)))
    return config, DraftFiles(raw, names, beside, row.weights), ids


def template_text(recipe: TrainRecipe) -> str | None:
    """The chat template of a recipe's file."""
    path = recipe["data.chat_template"]
    return None if path is None else read_template(Path(path))


def read_template(path: Path) -> str:
    """The chat template of a file. Raises RequestError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the chat template {path} cannot be read: {error}", "Give a file of Jinja in UTF-8."
        ) from error


def questions_of(recipe: TrainRecipe) -> Sequence[data.Asked]:
    """The prompts of a file of their own; none where the recipe names none."""
    if (path := recipe["validation.data_path"]) is None:
        return ()
    return data.read_questions(Path(path))[: recipe["validation.num_prompts"]]


def hash_of(conversations: data.Conversations, rows: Rows) -> str:
    """The SHA-256 of the data: of the file, and of its images where it has some."""
    keys = [picture.key for row in rows.rows for picture in row.pictures]
    if not keys:
        return conversations.sha256
    return hashlib.sha256(" ".join([conversations.sha256, *keys]).encode()).hexdigest()


def template_of(base_dir: str, chat_template: Path | None = None) -> tuple[ModelConfig, Template]:
    """A base's configuration and its chat template, or another. Raises what reading them raises."""
    base = open_checkpoint(base_dir)
    model = base_model(base)
    text = None if chat_template is None else read_template(chat_template)
    return model, Template(tokenizer_of(base), model.eos_token_ids, text)


def split(
    conversations: data.Conversations,
    held: Sequence[data.Asked],
    template: Template,
    recipe: TrainRecipe,
) -> tuple[data.Conversations, tuple[Question, ...]]:
    """What is trained on, and the prompts that acceptance is measured with: those of a file of
    their own, or a twentieth of the conversations."""
    count, items = recipe["validation.num_prompts"], conversations.items
    if not held:
        count = min(count, max(1, round(HELD_OUT_SHARE * len(items))))
        order = np.random.default_rng(recipe["training.seed"]).permutation(len(items))
        chosen = {*order[:count].tolist()}
        held = [(*items[i], ()) for i in sorted(chosen)]
        items = tuple(item for i, item in enumerate(items) if i not in chosen)
        if not items:
            raise RequestError(
                f"{conversations.path} has one conversation, which is needed to measure with.",
                "Give more, or a file of prompts as validation.data_path.",
            )
    asked = [template.question(messages, later, where) for where, messages, later in held]
    most = recipe["training.training_seq_len"] - recipe["validation.max_new_tokens"]
    short = tuple(question for question in asked if 1 < len(question.ids) <= most)
    if not short:
        raise RequestError(
            f"all prompts to measure with are longer than {most} tokens.",
            "Raise training.training_seq_len, or give a file of prompts as validation.data_path.",
        )
    return replace(conversations, items=items), short


def notes_of(recipe: TrainRecipe, rows: Rows, draft_ids: torch.Tensor | None) -> Iterator[str]:
    """What the user should know before it begins."""
    yield from recipe.notes
    length = recipe["training.training_seq_len"]
    if rows.num_cut:
        yield f"{rows.num_cut} conversations are longer than {length} tokens, and cut there"
    if rows.num_dropped:
        yield f"{rows.num_dropped} conversations have no answer within {length} tokens"
    share = rows.num_predicted / rows.num_tokens
    yield f"{len(rows.rows)} conversations, {rows.num_tokens} tokens, {share:.0%} of them learned"
    if draft_ids is not None:
        has = covered(rows, draft_ids)
        yield f"the draft vocabulary of {len(draft_ids)} tokens has {has:.1%} of the text"


def covered(rows: Rows, draft_ids: torch.Tensor | None) -> float | None:
    """The share of the text that a smaller draft vocabulary has."""
    if draft_ids is None:
        return None
    counts = [int(np.isin(row.ids, draft_ids.numpy()).sum()) for row in rows.rows]
    return sum(counts) / rows.num_tokens
