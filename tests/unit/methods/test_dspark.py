"""Claims about DSpark's configurations: four layouts are one reading, heads must be as declared,
and an export keeps what it reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.errors import BundleError, CheckpointError, UnsupportedModel
from edgespec.graphs.completeness import check_complete
from edgespec.methods.dspark import DSparkConfig, Heads, read_spec, spec_of, write_spec
from edgespec.safe_read.fields import BundleFields
from tests import toys

LAYOUTS = get_args(toys.DSparkLayout)
HEADS = Heads(
    markov_rank=8,
    markov_kind="vanilla",
    confidence=True,
    confidence_reads_markov=True,
    first_slot=0,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("dspark") / "base", "qwen3", layers=8)


def found(path: Path) -> DSparkConfig:
    config = detect(open_checkpoint(path))
    assert isinstance(config, DSparkConfig)
    return config


def section_of(config: dict[str, Any]) -> dict[str, Any]:
    """Where the keys of the heads stand."""
    inner: dict[str, Any] = config.get("dflash_config", {})
    return inner if "markov_rank" in inner else config


def edited(path: Path, **changes: Any) -> Path:
    """Keys of the heads changed; `...` takes one out."""
    config = json.loads((path / "config.json").read_text())
    place = section_of(config)
    place |= changes
    for key in [key for key, value in place.items() if value is ...]:
        del place[key]
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_layouts_are_one_reading(base: Path, tmp_path: Path, layout: Any) -> None:
    path = toys.make_dspark(tmp_path, base, layout)
    draft = found(path)
    assert (draft.method, draft.layout) == ("dspark", layout)
    assert (draft.aux_layer_ids, draft.block_size, draft.mask_token_id) == ((2, 6), 5, 255)
    assert (draft.windows, draft.causal, draft.heads) == ((None,) * 2, (False,) * 2, HEADS)
    assert (draft.first_slot, draft.num_drafts) == (0, 5)
    assert draft.own_head == draft.own_embedding == (layout == "deepspec")
    check_complete(open_checkpoint(path), draft)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("keys", "heads"),
    [
        ({"kind": "gated"}, replace(HEADS, markov_kind="gated")),
        ({"kind": "rnn"}, replace(HEADS, markov_kind="rnn")),
        (
            {"confidence": False},
            replace(HEADS, confidence=False, confidence_reads_markov=False),
        ),
    ],
    ids=str,
)
def test_heads_are_as_declared(
    base: Path, tmp_path: Path, layout: Any, keys: dict[str, Any], heads: Heads
) -> None:
    path = toys.make_dspark(tmp_path, base, layout, **keys)
    assert found(path).heads == heads
    check_complete(open_checkpoint(path), found(path))


@pytest.mark.parametrize("layout", ["deepspec", "specforge", "speculators"])
def test_a_confidence_head_alone_reads_the_state(base: Path, tmp_path: Path, layout: Any) -> None:
    path = toys.make_dspark(tmp_path / "one", base, layout, with_markov=False)
    assert found(path).heads == replace(HEADS, confidence_reads_markov=False)
    path = toys.make_dspark(tmp_path / "two", base, layout, rank=0)
    assert found(path).heads == replace(HEADS, markov_rank=0, confidence_reads_markov=False)
    assert set(found(path).head_shapes) == {
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }


def test_heads_below_logit_head_are_the_same(base: Path, tmp_path: Path) -> None:
    path = toys.make_dspark(tmp_path, base, "specforge", contained=True)
    check_complete(open_checkpoint(path), found(path))


@pytest.mark.parametrize("layout", ["modelopt", "speculators"])
def test_the_anchor_s_slot_drafts_unless_the_library_says_otherwise(
    base: Path, tmp_path: Path, layout: Any
) -> None:
    draft = found(toys.make_dspark(tmp_path, base, layout, from_anchor=False))
    assert (draft.first_slot, draft.num_drafts) == (1, 4)


def test_speculators_defaults_are_its_own(base: Path, tmp_path: Path) -> None:
    """256, vanilla, both heads, from the anchor (its DSparkSpeculatorConfig)."""
    path = toys.make_dspark(tmp_path, base, "speculators", rank=256)
    keys = ("markov_rank", "markov_head_type", "sample_from_anchor", "enable_confidence_head")
    edited(path, **dict.fromkeys((*keys, "confidence_head_with_markov"), ...))
    assert found(path).heads == replace(HEADS, markov_rank=256)


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        ("deepspec", {"markov_rank": ...}, "'markov_rank' is missing"),
        ("deepspec", {"markov_head_type": ...}, "'markov_head_type' is missing"),
        ("deepspec", {"enable_confidence_head": ...}, "'enable_confidence_head' is missing"),
        ("deepspec", {"markov_rank": -1}, "'markov_rank' is -1, not a whole number from 0"),
        ("deepspec", {"markov_rank": 2**40}, "'markov_rank' is"),
        ("deepspec", {"markov_head_type": "lstm"}, "'lstm', not vanilla, gated or rnn"),
        ("deepspec", {"markov_rank": 16}, r"markov_w1.weight has the shape \[256, 8\]"),
        ("deepspec", {"markov_head_type": "rnn"}, "joint_proj.weight is missing"),
        ("deepspec", {"confidence_head_with_markov": False}, r"confidence_head.* \[1, 72\]"),
        ("deepspec", {"target_layer_ids": [-1, 5]}, "a list of layer numbers"),
        (
            "speculators",
            {"markov_rank": 0},
            "not positive: the confidence head reads",
        ),
        ("modelopt", {"markov_ranks": 3}, "nearest is 'markov_rank'"),
        ("specforge", {"target_layer_ids": [1]}, r"fc.weight has the shape"),
    ],
)
def test_contradictions_are_named(
    base: Path, tmp_path: Path, layout: Any, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        found(edited(toys.make_dspark(tmp_path, base, layout), **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel.* layers are not Qwen3's"),
        ({"architectures": ["DeepseekV4DSparkModel"]}, "DeepseekV4DSparkModel"),
        ({"selector_rank": 4}, "DFlash2"),
        ({"attention_sink_bias": True}, "attention sinks"),
    ],
)
def test_other_families_and_relatives_are_refused(
    base: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        found(edited(toys.make_dspark(tmp_path, base), **changes))


def test_a_cut_head_is_named(base: Path, tmp_path: Path) -> None:
    path = toys.make_dspark(tmp_path, base)
    file = path / "model.safetensors"
    name = "markov_head.markov_w2.weight"
    save_file(load_file(file) | {name: torch.ones(255, 8)}, file)
    with pytest.raises(CheckpointError, match=r"markov_w2.weight has the shape \[255, 8\]"):
        found(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_keeps_what_it_reads(base: Path, tmp_path: Path, layout: Any) -> None:
    config = found(toys.make_dspark(tmp_path, base, layout, kind="gated"))
    keys = {"vocab_size": 256, "num_hidden_layers": 2}
    for draft, role in ((True, "draft"), (False, "base")):
        spec = spec_of(config, draft=draft)
        fields = BundleFields(keys | {"engine_role": role} | write_spec(spec), "config.json")
        assert read_spec(fields) == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("markov_rank", "8"),
        ("markov_rank", -1),
        ("markov_head_type", "lstm"),
        ("enable_confidence_head", 1),
        ("confidence_head_with_markov", "x"),
        ("sample_from_anchor", 0),
        ("block_size", 0),
        ("mask_token_id", 256),
    ],
)
def test_damaged_keys_of_an_export_are_named(
    base: Path, tmp_path: Path, key: str, value: object
) -> None:
    spec = spec_of(found(toys.make_dspark(tmp_path, base)), draft=True)
    keys = {"vocab_size": 256, "num_hidden_layers": 2, "engine_role": "draft"}
    inner = write_spec(spec)["dspark_config"] | {key: value}
    with pytest.raises(BundleError, match=key):
        read_spec(BundleFields(keys | {"dspark_config": inner}, "config.json"))
