"""An image encoder in a GGUF file of its own is that of the checkpoint that it was made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.vision import stored_vision_names, vision_tensors
from edgespec.config import ModelConfig
from edgespec.errors import EdgeSpecError
from edgespec.export.components import export
from edgespec.export.options import ExportOptions
from edgespec.images import read_processor
from tests import gguf_files
from tests.toys.vision import write_vlm

FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))


def made(tmp_path: Path, model_type: str, encoder: str = "mmproj-F32.gguf") -> Path:
    """A base in GGUF with its encoder beside it; the checkpoint in safetensors stands in `hf`."""
    write_vlm(tmp_path / "hf", model_type)
    gguf_files.write(tmp_path / "hf", tmp_path / "m-F32.gguf")
    gguf_files.write_mmproj(tmp_path / "hf", tmp_path / encoder)
    return tmp_path / "m-F32.gguf"


def config_of(checkpoint: Checkpoint) -> ModelConfig:
    config = detect(checkpoint)
    assert isinstance(config, ModelConfig)
    return config


@pytest.mark.parametrize("model_type", FAMILIES)
def test_both_files_are_exported_as_the_checkpoint_is_to_the_bit(
    model_type: str, tmp_path: Path
) -> None:
    file = made(tmp_path, model_type)
    ours, theirs = open_checkpoint(file), open_checkpoint(tmp_path / "hf")
    ends = {"eos_token_ids": (), "bos_token_id": None}
    assert replace(config_of(ours), **ends) == replace(config_of(theirs), **ends)
    got, wanted = (read_processor(checkpoint.path) for checkpoint in (ours, theirs))
    assert (got.patch_size, got.merge_size) == (wanted.patch_size, wanted.merge_size)
    assert (got.image_mean, got.image_std) == (wanted.image_mean, wanted.image_std)
    for name, model in (("a", tmp_path / "hf"), ("b", file)):
        export(str(model), tmp_path / name, ExportOptions(golden=False))
    for name in ("llm", "visual"):
        for part in ("model.onnx", "model.onnx.data"):
            files = [tmp_path / side / name / part for side in "ab"]
            assert files[0].read_bytes() == files[1].read_bytes(), (name, part)
    assert ours.identity() == open_checkpoint(file).identity()


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_quantized_encoders_are_read_as_numbers(kind: str, tmp_path: Path) -> None:
    file = made(tmp_path, "qwen2_5_vl", f"mmproj-{kind}.gguf")
    gguf_files.write_mmproj(tmp_path / "hf", tmp_path / f"mmproj-{kind}.gguf", kind)
    ours, hf = open_checkpoint(file), Checkpoint(tmp_path / "hf")
    vision = config_of(ours).vision
    assert vision is not None
    names, theirs = stored_vision_names(ours, vision), stored_vision_names(hf, vision)
    for name in vision_tensors(vision):
        wanted, got = hf.read(theirs[name]), ours.read(names[name]).astype(np.float32)
        np.testing.assert_allclose(got, wanted, rtol=2**-8, atol=np.abs(wanted).max() / 120)
        np.testing.assert_array_equal(ours.read_rows(names[name], 1, 3), got[1:3])


def test_what_does_not_fit_is_told_and_the_text_part_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, other = made(tmp_path, "qwen3_vl"), tmp_path / "other"
    other.mkdir()
    made(other, "qwen2_5_vl").rename(other / "m.gguf")
    (tmp_path / "mmproj-F32.gguf").unlink()
    assert config_of(open_checkpoint(file)).vision is None
    (other / "mmproj-F32.gguf").rename(tmp_path / "mmproj-F32.gguf")
    assert config_of(open_checkpoint(file)).vision is None
    assert "text part alone runs: mmproj-F32.gguf is an image encoder of the kind" in caplog.text
    assert "qwen2.5vl_merger" in caplog.text
    with pytest.raises(EdgeSpecError, match="is the image encoder of a model"):
        open_checkpoint(tmp_path / "mmproj-F32.gguf")


def test_damaged_and_doubtful_encoders_are_refused_by_name(tmp_path: Path) -> None:
    file, encoder = made(tmp_path, "qwen3_vl"), tmp_path / "mmproj-F32.gguf"
    whole = encoder.read_bytes()
    ours = open_checkpoint(file)
    for old, new, said in (
        (b"v.patch_embd.weight.1", b"v.patch_embd.weight.2", "v.patch_embd.weight.2"),
        (b"v.blk.0.ln1.weight", b"v.blk.0.ln3.weight", "v.blk.0.ln3.weight"),
        (b"clip.vision.patch_size", b"clip.vision.patch_kind", "clip.vision.patch_kind"),
        (b"clip.vision.block_count", b"klip.vision.block_count", "no clip.vision.block_count"),
    ):
        encoder.write_bytes(whole.replace(old, new))
        with pytest.raises(EdgeSpecError, match=rf"mmproj-F32\.gguf has .*{said}"):
            open_checkpoint(file)
    with pytest.raises(EdgeSpecError, match=r"mmproj-F32\.gguf was changed since it was opened"):
        assert ours.tensors
    encoder.write_bytes(whole)
    (tmp_path / "mmproj-Another-F32.gguf").write_bytes(whole)
    with pytest.raises(EdgeSpecError, match="image encoders of several models"):
        open_checkpoint(file)
