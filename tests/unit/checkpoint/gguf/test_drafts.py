"""A GGUF file of a draft is the checkpoint that it was made from: config, tensors, vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.mtp import mtp_head
from edgespec.config import DraftConfig, ModelConfig
from edgespec.errors import CheckpointError
from edgespec.methods.aux_layers import resolve_aux_layers
from edgespec.methods.block_draft import own_name
from tests import gguf_files, toys


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))


def read(checkpoint: Checkpoint) -> tuple[DraftConfig, dict[str, Any]]:
    """The configuration, without who wrote it, and all tensors but those of the vocabulary."""
    config = detect(checkpoint)
    assert isinstance(config, DraftConfig)
    names = {
        own_name(name).replace("midlayer.", "layers.0."): name
        for name in checkpoint.tensors
        if name not in ("d2t", "t2d")
    }
    arrays = {own: checkpoint.read(name) for own, name in sorted(names.items())}
    return config, arrays


def same_tensors(hf: dict[str, Any], ours: dict[str, Any]) -> None:
    assert list(ours) == list(hf)
    for name, array in hf.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)


@pytest.mark.parametrize("layout", ["modelopt", "specforge"])
def test_an_eagle3_draft(layout: toys.DraftLayout, tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", layers=8)
    hf = Checkpoint(toys.make_draft(tmp_path / "hf", base, layout, aux_layers=(1, 3, 6)))
    gguf_files.write_eagle3(hf.path, tmp_path / "draft.gguf", [1, 3, 6])
    ours = open_checkpoint(tmp_path / "draft.gguf")
    (wanted, theirs), (config, found) = read(hf), read(ours)
    same_tensors(theirs, found)
    assert resolve_aux_layers(config, 8) == (1, 3, 6)
    same = ("layout", "aux_layer_ids", "aux_layer_convention", "decoder", "base_name")
    rest = {name: getattr(wanted, name) for name in same}
    assert replace(config, **rest) == wanted
    assert config.decoder.layers[0].mlp == wanted.decoder.layers[0].mlp
    np.testing.assert_array_equal(read_d2t(ours, config), read_d2t(hf, wanted))


def test_ids_of_a_d2t_are_never_taken_for_offsets(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", layers=8)
    hf = toys.make_draft(tmp_path / "hf", base, "modelopt", t2d=False)
    gguf_files.write_eagle3(hf, tmp_path / "draft.gguf", [2, 4, 5])
    ours = open_checkpoint(tmp_path / "draft.gguf")
    config, _ = read(ours)
    stored = ours.tensors["d2t"]
    ids = np.arange(len(ours.read("d2t")), dtype=np.int64)  # offsets 0, 1, 2 ... would do as well
    with (tmp_path / "draft.gguf").open("r+b") as file:
        file.seek(stored.offset)
        file.write(ids.tobytes())
    np.testing.assert_array_equal(read_d2t(ours, config), np.zeros_like(ids))


def test_a_dflash_draft(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", layers=8)
    hf = Checkpoint(toys.make_dflash(tmp_path / "hf", base, "z-lab", aux_layers=(2, 5)))
    gguf_files.write_dflash(hf.path, tmp_path / "draft.gguf")
    ours = open_checkpoint(tmp_path / "draft.gguf")
    (wanted, theirs), (config, found) = read(hf), read(ours)
    same_tensors(theirs, found)
    assert replace(config, num_target_layers=8) == wanted


def test_an_mtp_head_in_its_base(tmp_path: Path) -> None:
    hf = Checkpoint(toys.make_qwen3_5(tmp_path / "hf", layers=4))
    gguf_files.write(hf.path, tmp_path / "base.gguf", mtp=True)
    ours = open_checkpoint(tmp_path / "base.gguf")
    config, wanted = detect(ours), detect(hf)
    assert isinstance(config, ModelConfig)
    assert isinstance(wanted, ModelConfig)
    assert mtp_head(ours, config) == mtp_head(hf, wanted)
    for name in mtp_head(hf, wanted):
        np.testing.assert_allclose(ours.read(name), hf.read(name), atol=2e-7, err_msg=name)


def test_layers_that_are_no_numbers(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", layers=8)
    hf = toys.make_draft(tmp_path / "hf", base, "modelopt")
    gguf_files.write_eagle3(hf, tmp_path / "draft.gguf", [1.5, 2.5])  # type: ignore[list-item]
    with pytest.raises(CheckpointError, match=r"eagle3\.extract_layers is .*1.5, 2.5"):
        open_checkpoint(tmp_path / "draft.gguf")
