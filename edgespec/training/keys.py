"""The keys of training recipes, ModelOpt's and our own, with what each means here, and what a
method adds to them. Knows no method, and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TYPE_KEY = "metadata.recipe_type"
LOSSES, OPTIMIZERS = ("kl", "ce", "lk"), ("muon", "adamw_torch")
ENGINES, REPORTS = ("edgespec", "modelopt"), ("none", "tensorboard")
SCHEDULES = ("warmup_stable_decay", "linear", "cosine", "constant")

TEXT, WHOLE, NUMBER, SWITCH, KEYS_ = "a text", "a whole number", "a number", "true or false", "keys"
KINDS: Mapping[str, tuple[type, ...]] = {
    TEXT: (str,),
    WHOLE: (int,),
    NUMBER: (int, float),
    SWITCH: (bool,),
    KEYS_: (dict,),
}


@dataclass(frozen=True, slots=True)
class Key:
    """A key that means something here: the kind of its value, its default, its bounds or its
    choices."""

    kind: str
    default: Any = None
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Idle:
    """A key that changes nothing here, and why."""

    why: str


@dataclass(frozen=True, slots=True)
class Fixed:
    """A key whose values other than `values` are refused, and why."""

    why: str
    values: tuple[Any, ...] = (False,)


MEASURED = "acceptance is measured with each checkpoint"
SHOWN = "progress is shown on stderr"
OFFLINE = Idle("data.offline_data_path says it")
STREAMED = Fixed("this version reads hidden states of files, and streams none", ())
LOOP = Idle("the loop does it as this method needs it")
Keys = Mapping[str, Key | Idle | Fixed]
COMMON: Keys = {
    TYPE_KEY: Key(TEXT),
    "metadata.description": Idle("it is a description"),
    "model.model_name_or_path": Key(TEXT),
    "model.trust_remote_code": Fixed("code of checkpoints is never run"),
    "model.use_fake_base_for_offline": Key(SWITCH, False),
    "data.data_path": Key(TEXT),
    "data.chat_template": Key(TEXT),
    "data.draft_vocab_cache": Key(TEXT),
    "data.sample_size": Key(WHOLE, -1, least=-1),
    "data.mode": Idle("ModelOpt derives it from other keys"),
    "data.lazy_preprocess": Idle("all is tokenized first, so that errors come first"),
    "data.final_aux_is_base_hidden": Idle("it is of streamed hidden states"),
    "data.offline_data_path": Key(TEXT),
    "data.streaming_server_url": STREAMED,
    "data.streaming_model_name": STREAMED,
    "data.vlm_img_dir": Key(TEXT),
    "data.vlm_processor": Key(TEXT),
    "training.output_dir": Key(TEXT),
    "training.minutes": Key(NUMBER, least=0.01),
    "training.num_train_epochs": Key(NUMBER, least=0.001),
    "training.max_steps": Key(WHOLE, -1, least=-1),
    "training.per_device_train_batch_size": Key(WHOLE, 4, least=1),
    "training.gradient_accumulation_steps": Key(WHOLE, 1, least=1),
    "training.training_seq_len": Key(WHOLE, 2048, least=8),
    "training.answer_only_loss": Key(SWITCH, False),
    "training.engine": Key(TEXT, "edgespec", choices=ENGINES),
    "training.loss": Key(TEXT, choices=LOSSES),
    "training.optim": Key(TEXT, "muon", choices=OPTIMIZERS),
    "training.learning_rate": Key(NUMBER, 3e-3, least=0.0),
    "training.lr_scheduler_type": Key(TEXT, "warmup_stable_decay", choices=SCHEDULES),
    "training.warmup_steps": Key(NUMBER, least=0),
    "training.warmup_ratio": Key(NUMBER, 0.03, least=0, most=0.9),
    "training.weight_decay": Key(NUMBER, 0.05, least=0),
    "training.max_grad_norm": Key(NUMBER, 1.0, least=0),
    "training.bf16": Key(SWITCH, True),
    "training.save_steps": Key(WHOLE, least=1),
    "training.seed": Key(WHOLE, 0, least=0, most=2**31),
    "training.fp16": Fixed("bf16 is the half type that trains here"),
    "training.tf32": Idle("the base and the draft are multiplied in bfloat16 or float32"),
    "training.cp_size": Fixed("each process has whole texts", (1,)),
    "training.dp_shard_size": Fixed("each process has the whole base", (1,)),
    "training.estimate_ar": Idle(MEASURED),
    "training.ar_validate_steps": Idle(MEASURED),
    "training.do_eval": Idle(MEASURED),
    "training.save_strategy": Idle("checkpoints are written ten times, and every save_steps"),
    "training.logging_steps": Idle(SHOWN),
    "training.disable_tqdm": Idle(SHOWN),
    "training.report_to": Key(TEXT, "none", choices=REPORTS),
    "training.dataloader_drop_last": LOOP,
    "training.remove_unused_columns": LOOP,
    "training.ddp_find_unused_parameters": LOOP,
    "training.ddp_timeout": LOOP,
    "validation.data_path": Key(TEXT),
    "validation.num_prompts": Key(WHOLE, 32, least=1),
    "validation.max_new_tokens": Key(WHOLE, 64, least=2),
    "validation.max_draft_len": Key(WHOLE, 3, least=1, most=64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """A method's recipes. `keys` are those of its own `section`, `defaults` those of common keys
    that differ, `shape_keys` the own ones that a draft to go on from has settled, and `module` has
    the TrainRow. `exports` are the commands that export a base and its draft, each with the
    directory to build (base, draft). `claims` says whether a recipe of this type is for this
    method, by its section; the keys `marks` of its architecture say nothing else. `refuse` raises
    UnsupportedModel for a section that asks for a draft which is not trained here.
    """

    recipe_type: str
    section: str
    module: str
    keys: Keys
    exports: Callable[[str, Path], list[tuple[str, str]]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    shape_keys: tuple[str, ...] = ("architecture_config",)
    claims: Callable[[Mapping[str, Any]], bool] = lambda section: True
    marks: tuple[str, ...] = ()
    refuse: Callable[[Mapping[str, Any], str], None] = lambda section, source: None

    @property
    def all_keys(self) -> Keys:
        """The keys of a recipe."""
        return {**COMMON, **self.keys}


def shown(value: object) -> str:
    """A value as a recipe spells it."""
    return value if isinstance(value, str) else json.dumps(value)[:60]
