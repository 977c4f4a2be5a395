"""Claims about DFlash checkpoints: recognised in every layout, and the same tensors under every
spelling."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.block_draft import IGNORED, expected_tensors, named_as_ours
from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.detect import check_tensors, detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.source import RowRange
from edgespec.errors import CheckpointError, EdgeSpecError, UnsupportedModel
from edgespec.graphs.completeness import check_complete
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.dspark import DSparkConfig
from tests.toys import Layout, make_base, make_dflash, make_qwen3_5, write_pickle

LAYOUTS: list[Layout] = ["z-lab", "modelopt", "speculators"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), "qwen3", layers=8, tokenizer=False)


def config_of(checkpoint: Checkpoint) -> BlockDraftConfig:
    found = detect(checkpoint)
    assert isinstance(found, BlockDraftConfig)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_draft_of_each_layout_is_recognised_and_whole(
    layout: Layout, base: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(
        make_dflash(tmp_path, base, layout, aux_layers=[2, 6], layers=3, block_in="top")
    )
    config = config_of(checkpoint)
    assert (config.layout, config.aux_layer_ids, config.block_size, config.mask_token_id) == (
        layout,
        (2, 6),
        4,
        255,
    )
    assert config.decoder.rope.theta == 1e6
    check_tensors(expected_tensors(config), checkpoint)


def test_default_taps_follow_the_depth_of_the_base(base: Path, tmp_path: Path) -> None:
    assert config_of(open_checkpoint(make_dflash(tmp_path, base, layers=3))).aux_layer_ids == (
        2,
        4,
        6,
    )


def test_a_hybrid_base_may_have_a_draft(tmp_path: Path) -> None:
    base = make_qwen3_5(tmp_path / "base", images=True, layers=8, tokenizer=False)
    config = config_of(open_checkpoint(make_dflash(tmp_path / "draft", base)))
    assert (config.target_hidden_size, config.num_target_layers, config.decoder.rope.theta) == (
        64,
        8,
        1e7,
    )


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"renamed": True}, {"fused": True, "renamed": True, "shards": 2}]
)
@pytest.mark.parametrize("pickled", [False, True])
def test_every_spelling_gives_the_same_tensors(
    options: dict[str, Any], pickled: bool, base: Path, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"attention_bias": True, "dtype": "bfloat16", "aux_layers": [2, 6]}
    plain = open_checkpoint(make_dflash(tmp_path / "plain", base, **common))
    path = make_dflash(tmp_path / "other", base, **common, **options)
    other = open_checkpoint(write_pickle(path) if pickled else path, allow_pickle=pickled)
    config = config_of(other)
    assert config == config_of(plain)
    named = named_as_ours(other, config)
    check_tensors(expected_tensors(config), named, IGNORED)
    for name in plain.tensors:
        assert named.tensors[name].name == name
        np.testing.assert_array_equal(
            named.read(name).view(np.uint16), plain.read(name).view(np.uint16)
        )
        np.testing.assert_array_equal(
            named.read_rows(name, 1, 3).view(np.uint16), plain.read_rows(name, 1, 3).view(np.uint16)
        )
        raw = io.BytesIO()
        named.write_to(name, raw)
        assert raw.getvalue() == plain.read(name).tobytes()


def test_other_names_leave_the_identity_alone(base: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_dflash(tmp_path, base, fused=True))
    assert named_as_ours(checkpoint, config_of(checkpoint)).identity() == checkpoint.identity()
    assert checkpoint.renamed({"only": RowRange("norm.weight")}).tensors.keys() == {"only"}


def test_reduced_vocabulary_is_mapped(base: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        make_dflash(tmp_path, base, "speculators", draft_vocab=96, aux_layers=[2, 6])
    )
    config = config_of(checkpoint)
    offsets = read_d2t(checkpoint, config)
    assert offsets is not None
    used = load_file(tmp_path / "model.safetensors")["t2d"].nonzero()[:, 0].numpy()
    np.testing.assert_array_equal(np.arange(96) + offsets, used)
    check_tensors(expected_tensors(config), named_as_ours(checkpoint, config), IGNORED)


# What ModelOpt itself writes


@pytest.mark.parametrize(
    ("name", "windows", "causal", "rope"),
    [
        ("plain", None, False, "default"),
        ("windowed", 16, False, "default"),
        ("causal", None, True, "default"),
        ("stretched", None, False, "yarn"),
    ],
)
def test_modelopt_s_own_export_is_read(
    name: str, windows: int | None, causal: bool, rope: str, modelopt_drafts: Path
) -> None:
    checkpoint = open_checkpoint(modelopt_drafts / name)
    config = config_of(checkpoint)
    assert (config.layout, config.aux_layer_ids, config.num_target_layers) == (
        "modelopt",
        (2, 6),
        8,
    )
    assert (config.windows, config.causal) == ((windows,) * 2, (causal,) * 2)
    assert (config.block_size, config.mask_token_id, config.decoder.rope.kind) == (4, 3, rope)
    check_tensors(expected_tensors(config), named_as_ours(checkpoint, config))


@pytest.mark.parametrize(("name", "kind"), [("dspark", "vanilla"), ("dspark-rnn", "rnn")])
def test_modelopt_s_own_dspark_draft_is_read(name: str, kind: str, modelopt_drafts: Path) -> None:
    checkpoint = open_checkpoint(modelopt_drafts / name)
    config = detect(checkpoint)
    assert isinstance(config, DSparkConfig)
    assert (config.layout, config.first_slot, config.heads.markov_kind) == ("modelopt", 0, kind)
    assert config.heads.confidence == (kind == "rnn")
    check_complete(checkpoint, config)


def test_heads_that_the_config_does_not_mention_are_refused(
    modelopt_drafts: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(modelopt_drafts / "dspark", tmp_path / "dspark"))
    shutil.copy(modelopt_drafts / "plain" / "config.json", path)
    with pytest.raises(UnsupportedModel, match=r"a DSpark draft .* does not say so"):
        detect(open_checkpoint(path))


@pytest.mark.parametrize(("name", "said"), [("domino", "Domino"), ("sinks", "attention sinks")])
@pytest.mark.parametrize("by", ["config", "tensors"])
def test_modelopt_s_own_relatives_are_refused_by_name(
    name: str, said: str, by: str, modelopt_drafts: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(modelopt_drafts / name, tmp_path / name))
    if by == "tensors":
        shutil.copy(modelopt_drafts / "plain" / "config.json", path)
    with pytest.raises(UnsupportedModel, match=said):
        detect(open_checkpoint(path))


# What does not fit


def edit(path: Path, **changes: torch.Tensor) -> Checkpoint:
    file = path / "model.safetensors"
    save_file(load_file(file) | changes, file)
    return open_checkpoint(path)


def test_fused_and_quantised_is_refused(base: Path, tmp_path: Path) -> None:
    path = make_dflash(tmp_path, base, fused=True)
    config = config_of(open_checkpoint(path))
    scaled = edit(path, **{"layers.0.self_attn.qkv_proj.weight_scale": torch.ones(1)})
    with pytest.raises(UnsupportedModel, match=r"self_attn\.qkv_proj is fused and quantized"):
        named_as_ours(scaled, config)


def test_two_tensors_of_one_name_are_refused(base: Path, tmp_path: Path) -> None:
    path = make_dflash(tmp_path, base)
    config = config_of(open_checkpoint(path))
    with pytest.raises(
        CheckpointError, match=r"has 'norm.weight' twice: final_norm.weight and norm.weight"
    ):
        named_as_ours(edit(path, **{"final_norm.weight": torch.ones(64)}), config)


def test_a_cut_fused_linear_is_refused_by_its_rows(base: Path, tmp_path: Path) -> None:
    path = make_dflash(tmp_path, base, fused=True)
    config = config_of(open_checkpoint(path))
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj.weight' has the shape \[191, 64\]; expected 192 rows"
    ):
        named_as_ours(
            edit(path, **{"layers.1.mlp.gate_up_proj.weight": torch.ones(191, 64)}), config
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nonsense_in_any_key_never_ends_in_a_traceback(
    layout: Layout, base: Path, tmp_path: Path
) -> None:
    path = make_dflash(tmp_path, base, layout, aux_layers=[2, 6], block_in="both")
    config = json.loads((path / "config.json").read_text())
    places = [config, config.get("dflash_config", {}), config.get("transformer_layer_config", {})]
    nonsense = (
        None,
        True,
        -1,
        0,
        3,
        1e300,
        float("nan"),
        "x",
        [],
        [[]],
        [None],
        {},
        {"a": {}},
        2**70,
    )
    tried = 0
    for place in places:
        for key in list(place):
            kept = place[key]
            for value in nonsense:
                place[key] = value
                (path / "config.json").write_text(json.dumps(config))
                try:
                    found = detect(open_checkpoint(path))
                    if isinstance(found, BlockDraftConfig):
                        named_as_ours(open_checkpoint(path), found)
                except EdgeSpecError:
                    tried += 1
            place[key] = kept
    assert tried > 50
