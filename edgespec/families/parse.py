"""Base models from their config.json, by the row of their family. Knows no drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from edgespec.config.fields import Fields, dtype_of, token_ids
from edgespec.config.values import ModelConfig
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.families.base import Family
from edgespec.families.table import FAMILIES, by_model_type
from edgespec.families.vision import image_tokens, vision_of


def parse_model_config(raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """A base model from its config.json; `source` names the file in errors.

    A missing `torch_dtype` reads as float32: the tensors know better (see checkpoint/detect.py).
    Raises CheckpointError for missing or impossible values, UnsupportedModel for what this version
    cannot do.
    """
    top = Fields(raw, source)
    architecture = _architecture(top)
    family = FAMILIES[architecture]
    fields = _text_fields(top, family)
    bos = _token_ids(top, fields, "bos_token_id")
    decoder = family.decoder(fields)
    vision = vision_of(top, family, decoder.hidden_size)
    return ModelConfig(
        architecture=architecture,
        decoder=decoder,
        vocab_size=fields.size("vocab_size"),
        tied_head=top.flag("tie_word_embeddings", fields.flag("tie_word_embeddings", False)),
        max_position=fields.size("max_position_embeddings"),
        dtype=dtype_of(fields if fields.get("dtype") or fields.get("torch_dtype") else top),
        eos_token_ids=_token_ids(top, fields, "eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        mtp_layers=family.mtp_layers(fields) if family.mtp_layers else 0,
        vision=vision,
        image_tokens=image_tokens(top, family) if vision else None,
    )


def parse_eos(raw: Mapping[str, Any], source: str = "config.json") -> tuple[int, ...]:
    """The `eos_token_id` of a config.json or generation_config.json: none, one or several ids."""
    return token_ids(Fields(raw, source), "eos_token_id")


def with_eos(config: ModelConfig, ids: Iterable[int]) -> ModelConfig:
    """The same model, ending at `ids` (duplicates dropped, order kept)."""
    return replace(config, eos_token_ids=tuple(dict.fromkeys(ids)))


def _text_fields(top: Fields, family: Family) -> Fields:
    """The text part, with the family's defaults for what it leaves out."""
    fields, key = top, family.text_key
    if key and (top.get(key) is not None or not family.text_at_top):
        fields = top.section(key)
    return replace(fields, raw={**family.defaults, **fields.raw})


def _token_ids(top: Fields, fields: Fields, key: str) -> tuple[int, ...]:
    """Token ids of the text part, or those of the whole where it has none."""
    return token_ids(fields, key) or token_ids(top, key)


def _architecture(fields: Fields) -> str:
    """The key of FAMILIES; transformers goes by model_type, so the two names must agree."""
    model_type, names_by_type = fields.text("model_type"), by_model_type()
    architectures = fields.get("architectures") or [names_by_type.get(model_type or "", model_type)]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise fields.wrong("architectures", "a list with the name of one class")
    name = architectures[0]
    known = model_type is None or model_type in names_by_type
    if name not in FAMILIES or len(architectures) > 1 or not known:
        names = [*map(str, architectures), *([] if known else [f"with model_type {model_type!r}"])]
        raise UnsupportedModel(
            f"{fields.source}: architecture {', '.join(names)} is not one that this version knows.",
            f"Supported base models: {', '.join(FAMILIES)}.",
        )
    if model_type is not None and model_type != FAMILIES[name].model_type:
        raise CheckpointError(
            f"{fields.source} contradicts itself: architectures says {name}, model_type says"
            f" {model_type!r}.",
            f"For {name}, model_type is {FAMILIES[name].model_type!r}.",
        )
    return name
