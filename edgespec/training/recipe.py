"""What a training recipe says: ModelOpt's keys and our own as one table, with what each means here.

Knows keys and values. Knows neither YAML (see `pipeline.recipe`) nor torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.errors import RequestError, UnsupportedModel
from edgespec.methods import dflash, eagle3

REPORT = "training.json"  # beside a trained draft: recipe, base, data and figures
TYPE_KEY = "metadata.recipe_type"
OF_TYPE = {"speculative_eagle": eagle3.NAME, "speculative_dflash": dflash.NAME}
TYPE_OF = {method: kind for kind, method in OF_TYPE.items()}
SECTIONS = {eagle3.NAME: "eagle", dflash.NAME: "dflash"}
LOSSES, OPTIMIZERS = ("kl", "ce", "lk"), ("muon", "adamw_torch")
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
    """A key that means something here: the kind of its value, its default (by method where they
    differ), its bounds or its choices."""

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
LORA = Idle("it belongs to eagle_base_lora, which is off")
DUMPS = Fixed("this version runs the base while it trains, and reads no dumped hidden states", ())
IMAGES = Fixed("this version trains on text alone", ())
LOOP = Idle("the loop does it as this method needs it")
COMMON: Mapping[str, Key | Idle | Fixed] = {
    TYPE_KEY: Key(TEXT),
    "metadata.description": Idle("it is a description"),
    "model.model_name_or_path": Key(TEXT),
    "model.trust_remote_code": Fixed("code of checkpoints is never run"),
    "model.use_fake_base_for_offline": Fixed(DUMPS.why),
    "data.data_path": Key(TEXT),
    "data.chat_template": Key(TEXT),
    "data.draft_vocab_cache": Key(TEXT),
    "data.sample_size": Key(WHOLE, -1, least=-1),
    "data.mode": Idle("ModelOpt derives it from other keys"),
    "data.lazy_preprocess": Idle("all is tokenized first, so that errors come first"),
    "data.final_aux_is_base_hidden": Idle("it is of dumped hidden states"),
    "data.offline_data_path": DUMPS,
    "data.streaming_server_url": DUMPS,
    "data.streaming_model_name": DUMPS,
    "data.vlm_img_dir": IMAGES,
    "data.vlm_processor": IMAGES,
    "training.output_dir": Key(TEXT),
    "training.minutes": Key(NUMBER, least=0.01),
    "training.num_train_epochs": Key(NUMBER, least=0.001),
    "training.max_steps": Key(WHOLE, -1, least=-1),
    "training.per_device_train_batch_size": Key(WHOLE, 4, least=1),
    "training.gradient_accumulation_steps": Key(WHOLE, 1, least=1),
    "training.training_seq_len": Key(WHOLE, 2048, least=8),
    "training.answer_only_loss": Key(SWITCH, {eagle3.NAME: False, dflash.NAME: True}),
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
    "training.cp_size": Fixed("this version trains on one device", (1,)),
    "training.dp_shard_size": Fixed("this version trains on one device", (1,)),
    "training.estimate_ar": Idle(MEASURED),
    "training.ar_validate_steps": Idle(MEASURED),
    "training.do_eval": Idle(MEASURED),
    "training.save_strategy": Idle("checkpoints are written ten times, and every save_steps"),
    "training.logging_steps": Idle(SHOWN),
    "training.disable_tqdm": Idle(SHOWN),
    "training.report_to": Idle(SHOWN),
    "training.dataloader_drop_last": LOOP,
    "training.remove_unused_columns": LOOP,
    "training.ddp_find_unused_parameters": LOOP,
    "training.ddp_timeout": LOOP,
    "validation.data_path": Key(TEXT),
    "validation.num_prompts": Key(WHOLE, 32, least=1),
    "validation.max_new_tokens": Key(WHOLE, 64, least=2),
    "validation.max_draft_len": Key(WHOLE, 3, least=1, most=64),
}
OF_METHOD: Mapping[str, Mapping[str, Key | Idle | Fixed]] = {
    eagle3.NAME: {
        "eagle.eagle_ttt_steps": Key(WHOLE, 4, least=1, most=32),
        "eagle.eagle_loss_decay_factor": Key(NUMBER, 0.8, least=0, most=1),
        "eagle.eagle_self_logit_distillation": Key(SWITCH, True),
        "eagle.eagle_architecture_config": Key(KEYS_, {}),
        "eagle.eagle_decoder_type": Fixed("drafts have llama's layers here", ("llama",)),
        "eagle.eagle_mix_hidden_states": Fixed("chains are unrolled over their own states alone"),
        "eagle.eagle_freeze_base_model": Fixed("the base is never trained", (True,)),
        "eagle.eagle_hidden_state_distillation": Fixed("it is the loss of EAGLE-1"),
        "eagle.eagle_reuse_base_decoder": Fixed("ModelOpt ignores it for Hugging Face's models"),
        "eagle.eagle_offline": Fixed(DUMPS.why),
        "eagle.eagle_base_lora": Fixed("the base is never trained"),
        "eagle.eagle_base_lora_rank": LORA,
        "eagle.eagle_base_lora_alpha": LORA,
        "eagle.eagle_base_lora_target_modules": LORA,
        "eagle.eagle_base_lora_preservation_loss_weight": LORA,
        "eagle.eagle_base_lora_warmup_steps": LORA,
        "eagle.eagle_base_lora_start_layer": LORA,
        "eagle.eagle_base_lora_logits_detach_prob": LORA,
        "eagle.eagle_use_torch_compile": Idle("nothing is compiled"),
        "eagle.eagle_report_acc": Idle(MEASURED),
        "eagle.eagle_enable_nvtx": Idle("nothing is traced"),
        "eagle.eagle_export_rope_scaling": Idle(
            "a draft is exported with the RoPE it learned; rope_scaling in"
            " eagle_architecture_config stretches both"
        ),
    },
    dflash.NAME: {
        "dflash.dflash_block_size": Key(WHOLE, 8, least=2, most=64),
        "dflash.dflash_num_anchors": Key(WHOLE, 32, least=1),
        "dflash.dflash_loss_objective": Key(TEXT, "dpace", choices=("dpace", "decay")),
        "dflash.dflash_dpace_alpha": Key(NUMBER, 0.5, least=1e-6, most=1),
        "dflash.dflash_loss_decay_factor": Key(NUMBER, 4.0, least=0),
        "dflash.dflash_self_logit_distillation": Key(SWITCH, True),
        "dflash.dflash_mask_token_id": Key(WHOLE, least=0),
        "dflash.dflash_swa_window_size": Key(WHOLE, least=1),
        "dflash.dflash_draft_attention": Key(
            TEXT, "bidirectional", choices=("bidirectional", "causal")
        ),
        "dflash.dflash_init_checkpoint": Key(TEXT),
        "dflash.dflash_architecture_config": Key(KEYS_, {}),
        "dflash.dflash_freeze_base_model": Fixed("the base is never trained", (True,)),
        "dflash.dflash_attention_sink": Fixed("engines have no attention sinks"),
        "dflash.dflash_offline": Fixed(DUMPS.why),
        "dflash.dflash_report_acc": Idle(MEASURED),
        "dflash.dflash_use_torch_compile": Idle("nothing is compiled"),
        "dflash.dflash_export_rope_scaling": Idle("a draft is exported with the RoPE it learned"),
        "dflash.dflash_lambda_base_start": Idle("it is Domino's"),
        "dflash.dflash_lambda_base_decay_ratio": Idle("it is Domino's"),
        "dflash.dflash_ce_loss_alpha": Idle("it is DSpark's"),
        "dflash.dflash_l1_loss_alpha": Idle("it is DSpark's"),
        "dflash.dflash_confidence_head_alpha": Idle("it is DSpark's"),
    },
}


@dataclass(frozen=True, slots=True)
class TrainRecipe:
    """A recipe that was read: `recipe["training.seed"]` is the value of a key, or its default."""

    method: str
    values: Mapping[str, Any]
    source: str
    notes: tuple[str, ...] = ()  # on keys that change nothing

    def __getitem__(self, key: str) -> Any:
        row = table(self.method)[key]
        assert isinstance(row, Key)
        default = row.default
        if isinstance(default, dict) and self.method in default:
            default = default[self.method]
        return self.values.get(key, default)

    def section(self, key: str) -> Any:
        """The value of a key of the method's own section, without its prefix: `ttt_steps`."""
        name = SECTIONS[self.method]
        return self[f"{name}.{name}_{key}"]

    @property
    def loss(self) -> str:
        """What is minimized: the divergence from the base (kl), the text (ce), or LK."""
        return self["training.loss"] or ("kl" if self.section("self_logit_distillation") else "ce")

    def shaping(self) -> dict[str, Any]:
        """The keys and values that shape a result, of which a run that goes on may change none."""
        free = ("training.minutes", "training.output_dir")
        return {key: self[key] for key, row in table(self.method).items()
                if isinstance(row, Key) and key not in (*free, TYPE_KEY)}  # fmt: skip


def table(method: str) -> Mapping[str, Key | Idle | Fixed]:
    """The keys of a method's recipes."""
    return {**COMMON, **OF_METHOD[method]}


def read_recipe(values: Mapping[str, Any], source: str) -> TrainRecipe:
    """The recipe that keys and values in sections make. Raises RequestError that names the key, and
    UnsupportedModel for another kind of draft."""
    method = method_of(values, source)
    known, given, notes = table(method), dict[str, Any](), list[str]()
    for key, value in flat(values, known):
        where, row = f"{source}: {key}", known.get(key)
        if row is None:
            close = difflib.get_close_matches(key[:80], known, n=1, cutoff=0)[0]
            raise RequestError(
                f"{where} is not a known key of a recipe for {method}",
                f"The nearest is {close}. Correct the key, or remove it.",
            )
        if value is None:
            continue
        if isinstance(row, Idle):
            notes.append(f"{key} changes nothing: {row.why}")
        elif isinstance(row, Fixed):
            if not any(value == fixed and type(value) is type(fixed) for fixed in row.values):
                remedy = (
                    f"Write {shown(row.values[0])}, or remove it." if row.values else "Remove it."
                )
                raise UnsupportedModel(f"{where} is {shown(value)}: {row.why}", remedy)
        else:
            given[key] = checked(value, row, where)
    return TrainRecipe(method, given, source, tuple(notes))


def method_of(values: Mapping[str, Any], source: str) -> str:
    """The method of a recipe, by its type. Raises RequestError and UnsupportedModel."""
    metadata = values.get("metadata")
    kind = metadata.get("recipe_type") if isinstance(metadata, dict) else None
    if kind not in OF_TYPE:
        what = "has no metadata.recipe_type" if kind is None else f"is of the type {shown(kind)}"
        raise UnsupportedModel(f"{source} {what}", f"Types that train here: {', '.join(OF_TYPE)}.")
    section = values.get("dflash")
    inner = section.get("dflash_architecture_config") if isinstance(section, dict) else None
    projector = inner.get("projector_type", "none") if isinstance(inner, dict) else "none"
    if projector not in ("none", "dflash", None):
        raise UnsupportedModel(
            f"{source}: projector_type {shown(projector)}: this version trains no such draft",
            "Remove the key for a DFlash draft.",
        )
    return OF_TYPE[kind]


def flat(values: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each key with its section before it, and its value."""
    sections = {key.partition(".")[0] for key in known}
    for section, inner in values.items():
        if isinstance(inner, dict):
            yield from ((f"{section}.{key}", value) for key, value in inner.items())
        elif inner is not None or section not in sections:
            yield str(section), inner


def checked(value: Any, row: Key, where: str) -> Any:
    """A value of the kind that its key wants. Raises RequestError."""
    wrong = type(value) not in KINDS[row.kind]
    wrong = wrong or (row.least is not None and value < row.least)
    wrong = wrong or (row.most is not None and value > row.most)
    if wrong or (row.choices and value not in row.choices):
        wanted = " or ".join(row.choices) or row.kind
        bounds = [f"at least {row.least:g}"] if row.least is not None else []
        bounds += [f"at most {row.most:g}"] if row.most is not None else []
        raise RequestError(f"{where} is {shown(value)}", f"Write {', '.join([wanted, *bounds])}.")
    return value


def shown(value: object) -> str:
    """A value as a recipe spells it."""
    return value if isinstance(value, str) else json.dumps(value)[:60]
