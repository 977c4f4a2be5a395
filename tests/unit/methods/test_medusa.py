"""Medusa heads by their published configurations and tensors: the file counts, whatever config.json
says; and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.artifacts.component import ComponentConfig
from edgespec.errors import BundleError, CheckpointError, UnsupportedModel
from edgespec.methods.medusa import MedusaConfig, has_head_tensors, parse_medusa_config
from tests.toys.medusa import head_shapes

Shapes = dict[str, tuple[int, ...]]
VICUNA_7B: dict[str, Any] = {  # FasterDecoding/medusa-vicuna-7b-v1.3
    "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}
VERSION_2 = {**VICUNA_7B, "medusa_num_heads": 5, "version": "2"}
MODELOPT = {
    "model_type": "llama",
    "vocab_size": 32000,
    "medusa": {"num_medusa_heads": 4, "num_medusa_layers": 1},
}


def published(heads: int = 5, blocks: int = 1, prefix: str = "") -> Shapes:
    return head_shapes(heads, blocks, 4096, 32000, prefix)


def without_logits(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if ".linear." in name}


def test_five_heads_in_the_file_are_five_whatever_the_config_says() -> None:
    found = parse_medusa_config(VICUNA_7B, published())
    assert (found.num_heads, found.num_blocks, found.declared_heads) == (5, 1, 2)
    assert (found.vocab_size, found.target_hidden_size, found.own_head) == (32000, 4096, True)
    assert (found.base_name, found.layout) == ("lmsys/vicuna-7b-v1.3", "medusa")
    assert found.decoder.num_layers == 0


def test_version_2_has_no_matrices_of_logits_and_does_not_say_its_vocabulary() -> None:
    found = parse_medusa_config(VERSION_2, without_logits(published()))
    assert (found.own_head, found.vocab_size, found.num_heads) == (False, 0, 5)


@pytest.mark.parametrize(
    ("prefix", "layout"), [("medusa_head.", "merged"), ("medusa_heads.", "modelopt")]
)
def test_merged_heads_are_found_beside_their_base(prefix: str, layout: str) -> None:
    base: Shapes = {"model.embed_tokens.weight": (32000, 4096), "lm_head.weight": (32000, 4096)}
    found = parse_medusa_config(MODELOPT, base | published(4, prefix=prefix))
    assert (found.num_heads, found.layout, found.prefix) == (4, layout, prefix)
    assert found.declared_heads == 4


def test_several_blocks_are_counted_by_the_place_of_the_matrix_behind_them() -> None:
    found = parse_medusa_config(VICUNA_7B, published(3, 2))
    assert (found.num_heads, found.num_blocks) == (3, 2)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5])
def test_one_to_five_heads_are_taken(heads: int) -> None:
    assert parse_medusa_config(VICUNA_7B, published(heads)).num_heads == heads


def test_six_heads_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="6 Medusa heads"):
        parse_medusa_config(VICUNA_7B, published(6))


WHOLE = published(3)
BROKEN: dict[str, tuple[Shapes, str]] = {
    "a head without a matrix of logits": (
        {n: s for n, s in WHOLE.items() if n != "2.1.weight"},
        "not all of one form",
    ),
    "a head that is missing": (
        {n: s for n, s in WHOLE.items() if not n.startswith("1.")},
        "not all of one form",
    ),
    "another depth": (
        WHOLE | {"1.1.linear.weight": (4096, 4096), "1.1.linear.bias": (4096,)},
        "not all of one form",
    ),
    "no head": ({"x": (1,)}, "named in 0 ways"),
    "two kinds of names": (WHOLE | published(3, prefix="medusa_head."), "named in 2 ways"),
    "a block that is not square": (WHOLE | {"0.0.linear.weight": (4096, 64)}, "is square"),
    "a matrix of another width": (WHOLE | {"0.1.weight": (32000, 64)}, "4096 wide"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_heads_are_refused(case: str) -> None:
    shapes, words = BROKEN[case]
    with pytest.raises(CheckpointError, match=words):
        parse_medusa_config(VICUNA_7B, shapes)


@pytest.mark.parametrize("heads", ["3", -1, 2**40, True, [], None])
def test_a_number_of_heads_that_is_none_is_no_more_than_a_note(heads: object) -> None:
    found = parse_medusa_config(VICUNA_7B | {"medusa_num_heads": heads}, WHOLE)
    assert found.num_heads == 3


def test_heads_are_known_by_their_tensors_and_a_base_is_no_draft() -> None:
    assert has_head_tensors({}, lambda: WHOLE)
    assert not has_head_tensors(VICUNA_7B, lambda: {"embed_tokens.weight": (8, 8)} | WHOLE)
    assert not has_head_tensors(VICUNA_7B, lambda: {"layers.0.mlp.up_proj.weight": (8, 8)})


# ---- the exported component

EXPORTED: dict[str, Any] = {
    "model": "Medusa",
    "spec_decode_type": "medusa",
    "engine_role": "draft",
    "vocab_size": 256,
    "draft_vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 0,
    "base_model_hidden_size": 64,
    "identity": "a",
    "medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1},
    "pair": {
        "base_identity": None,
        "base_name": None,
        "tap_ids": None,
        "num_taps": 1,
        "target_hidden_size": 64,
        "own_embedding": False,
    },
    "graph": {
        "role": "draft",
        "hidden_size": 64,
        "num_layers": 0,
        "num_kv_heads": 0,
        "head_dim": 0,
        "rotary_dim": 0,
        "vocab_size": 256,
        "features": 0,
        "base_features": 64,
        "block": False,
        "sliding": False,
        "recurrent": None,
        "heads": 3,
    },
}


def test_a_component_of_heads_writes_what_it_reads() -> None:
    found = ComponentConfig.from_dict(EXPORTED, "config.json")
    assert found.to_dict() == EXPORTED
    assert (found.rope, found.ropes, found.num_layers) == (None, (), 0)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("medusa", "num_medusa_heads", 2),
        ("medusa", "num_medusa_layers", None),
        ("graph", "heads", 65),
        ("graph", "heads", 0),
        ("graph", "num_layers", 1),
        ("graph", "features", 64),
        ("graph", "block", True),
        ("graph", "base_features", 128),
        ("graph", "vocab_size", 255),
        ("graph", "role", "base"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(section: str, key: str, value: object) -> None:
    changed = EXPORTED | {section: EXPORTED[section] | {key: value}}
    with pytest.raises(BundleError):
        ComponentConfig.from_dict(changed, "config.json")


def test_configs_are_values() -> None:
    assert isinstance(parse_medusa_config(VICUNA_7B, WHOLE), MedusaConfig)
