"""A GGUF file of each family is the checkpoint that it was made from: config, tensors, logits."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from numpy.typing import NDArray

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint, open_checkpoint
from edgespec.checkpoint.gguf.header import read_model
from edgespec.checkpoint.gguf.source import NOTE
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.checkpoint.names import expected_tensors
from edgespec.config import AttentionSpec, ModelConfig, RopeConfig
from edgespec.errors import EdgeSpecError, UnsupportedModel
from edgespec.export.components import export
from edgespec.export.options import ExportOptions
from edgespec.families import FAMILIES
from edgespec.graphs.completeness import check_complete
from edgespec.pipeline.inspection import kind_of
from edgespec.quantization.quantized_weight import dequantize
from edgespec.rope import RopeTable
from tests import gguf_files, toys

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
}
NO_ROPE = RopeConfig(2.0, 2)
LINEAR_KEYS = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))


def llama3_factors(hf: Path) -> dict[str, Any]:
    """`rope_freqs.weight`: what llama3's scaling divides each frequency by."""
    plain = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    turns = 64 * plain / (2 * np.pi)
    smooth = np.clip((turns - 1.0) / (4.0 - 1.0), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / 8.0 + smooth)).astype(np.float32)}


def longrope_factors(hf: Path) -> dict[str, Any]:
    rope = Checkpoint(hf).config["rope_scaling"]
    names = {"rope_factors_long.weight": "long_factor", "rope_factors_short.weight": "short_factor"}
    return {name: np.array(rope[key], np.float32) for name, key in names.items()}


Toy = tuple[Callable[..., Path], dict[str, Any], dict[str, Any], Callable[[Path], Any] | None]
CASES: Mapping[str, Toy] = {
    "llama": (toys.make_base, {"attention_bias": True, "mlp_bias": True}, {}, None),
    "llama3": (toys.make_base, {"tied": True, "rope": LLAMA3}, {}, llama3_factors),
    "qwen2": (toys.make_base, {"family": "qwen2"}, {}, None),
    "qwen3": (toys.make_base, {"family": "qwen3", "head_dim": 32, "rope": YARN}, YARN_KEYS, None),
    "qwen3moe": (toys.make_qwen3_moe, {}, {}, None),
    "phi3": (
        toys.make_phi3,
        {"tied": True, "partial_rotary": 0.75, "longrope": 128, "sliding_window": 100},
        {"rope.scaling.original_context_length": 128, "rope.scaling.attn_factor": 1.1338934190},
        longrope_factors,
    ),
    "gemma3": (
        toys.make_gemma3,
        {"layers": 7, "pattern": 6, "scalar": 32, "rope": {"rope_type": "linear", "factor": 2.0}},
        LINEAR_KEYS,
        None,
    ),
    "qwen35": (toys.make_qwen3_5, {"tied": True}, {}, None),
    "qwen35moe": (toys.make_qwen3_5, {"experts": 4}, {}, None),
}


def made(case: str, tmp_path: Path, kind: str = "F32") -> tuple[Checkpoint, Checkpoint, Any]:
    """The checkpoint in safetensors, the one in GGUF, and the file's numbers."""
    make, options, keys, factors = CASES[case]
    hf = make(tmp_path / "hf", **options)
    extra = factors(hf) if factors else {}
    tensors = gguf_files.write(hf, tmp_path / "model.gguf", kind, keys, extra)
    return Checkpoint(hf), open_checkpoint(tmp_path / "model.gguf"), tensors


def decoder_of(checkpoint: Checkpoint) -> Any:
    """The decoder, with rotary embeddings as the rows of their positions."""
    config = detect(checkpoint)
    assert isinstance(config, ModelConfig)
    ropes = {rope: RopeTable.of(rope, 256) for rope in config.decoder.ropes}
    bare = [
        replace(s, mixer=replace(s.mixer, rope=NO_ROPE))
        if isinstance(s.mixer, AttentionSpec)
        else s
        for s in config.decoder.layers
    ]
    return config, bare, ropes.values()


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_is_the_checkpoint_that_it_was_made_from(case: str, tmp_path: Path) -> None:
    hf, ours, _ = made(case, tmp_path)
    (wanted, layers, ropes), (config, got, rows) = decoder_of(hf), decoder_of(ours)
    assert got == layers
    assert (config.vocab_size, config.tied_head) == (wanted.vocab_size, wanted.tied_head)
    for row, rope in zip(rows, ropes, strict=True):
        np.testing.assert_allclose(row.cos, rope.cos, atol=2e-5)
        np.testing.assert_allclose(row.sin, rope.sin, atol=2e-5)
    check_complete(ours, config)
    for name in expected_tensors(config):
        same = hf.read(name)
        array = ours.read(name)
        assert (array.dtype, array.shape) == (same.dtype, same.shape), name
        rounded = name.endswith(("norm.weight", "A_log"))  # 1 added and taken off, a logarithm
        np.testing.assert_allclose(array, same, rtol=0, atol=2e-7 if rounded else 0, err_msg=name)
        np.testing.assert_array_equal(ours.read_rows(name, 1, 9), array[1:9])


@pytest.mark.parametrize("case", ["llama", "qwen35", "qwen35moe"])
def test_quantized_rows_and_heads_are_put_in_order(case: str, tmp_path: Path) -> None:
    hf, ours, _ = made(case, tmp_path, "Q8_0")
    quantization, seen = read_quantization(ours), 0
    assert quantization is not None
    for name in expected_tensors(detect(hf)):  # type: ignore[arg-type]
        if name in ours.tensors:
            continue
        weight = read_weight(ours, quantization, name.removesuffix(".weight"))
        assert weight is not None
        assert weight.scheme.name == "q8_0"
        wanted = hf.read(name)
        # half a step of int8, and the float16 of its scale
        most = np.abs(wanted).max() * (1 / 254 + 1 / 2048)
        assert np.abs(dequantize(weight) - wanted).max() <= most, name
        seen += 1
    assert seen > 10


def blocks_of_nvfp4(array: NDArray[Any], kind: Type) -> tuple[NDArray[Any], Type]:
    """Any blocks at all, whose scales are numbers; gguf-py does not make this type."""
    shape = (*array.shape[:-1], array.shape[-1] // 64, 36)
    raw = np.random.default_rng(array.size).integers(0, 256, shape, np.uint8)
    raw[..., :4] = raw[..., :4] % 127
    return raw.reshape(*array.shape[:-1], -1), kind


def test_nvfp4_is_multiplied_by_the_scales_beside_it(tmp_path: Path) -> None:
    hf = toys.make_qwen3_moe(tmp_path / "hf", layers=1, experts=4, expert_size=64)
    beside = {f"blk.0.ffn_{part}_exps": np.array([0.5, 3, 0.1, 7]) for part in ("up", "down")}
    beside["blk.0.attn_q"] = np.array([0.25])
    extra = {f"{name}.scale": scale.astype(np.float32) for name, scale in beside.items()}
    extra["blk.0.attn_q.input_scale"] = np.ones(1, np.float32)
    file = tmp_path / "m.gguf"
    stored = gguf_files.write(hf, file, "NVFP4", extra=extra, encode=blocks_of_nvfp4)
    ours = open_checkpoint(file)
    quantization = read_quantization(ours)
    assert quantization is not None
    layer = "model.layers.0"
    for module, array, scale in (
        (f"{layer}.self_attn.q_proj", stored["blk.0.attn_q.weight"], 0.25),
        (f"{layer}.self_attn.k_proj", stored["blk.0.attn_k.weight"], 1),
        (f"{layer}.mlp.experts.1.up_proj", stored["blk.0.ffn_up_exps.weight"][1], 3),
        (f"{layer}.mlp.experts.3.down_proj", stored["blk.0.ffn_down_exps.weight"][3], 7),
        (f"{layer}.mlp.experts.3.gate_proj", stored["blk.0.ffn_gate_exps.weight"][3], 1),
    ):
        weight = read_weight(ours, quantization, module)
        assert weight is not None
        np.testing.assert_array_equal(dequantize(weight), array * np.float32(scale), module)
    check_complete(ours, detect(ours))  # type: ignore[arg-type]
    extra["blk.0.ffn_up_exps.scale"] = np.ones(3, np.float32)
    gguf_files.write(hf, file, "NVFP4", extra=extra, encode=blocks_of_nvfp4)
    with pytest.raises(EdgeSpecError, match=r"m\.gguf: .*ffn_up_exps.scale.* the shape \[3\]"):
        open_checkpoint(file)


def test_split_files_are_one_model(tmp_path: Path) -> None:
    hf = toys.make_base(tmp_path / "hf", layers=2)
    gguf_files.write(hf, tmp_path / "m.gguf", split_max_tensors=8)
    for part in tmp_path.glob("*.gguf"):
        part.rename(part.with_suffix(".GGUF"))
    parts = sorted(tmp_path.glob("*.GGUF"))
    assert kind_of(parts[0]) == "gguf"
    assert len(parts) > 2
    ours = open_checkpoint(parts[0])
    for name in expected_tensors(detect(ours)):  # type: ignore[arg-type]
        np.testing.assert_array_equal(ours.read(name), Checkpoint(hf).read(name))
    with pytest.raises(EdgeSpecError, match=rf"(?s)is not the first part.*{parts[0].name}"):
        open_checkpoint(parts[1])
    parts[1].unlink()
    with pytest.raises(EdgeSpecError, match=f"{parts[1].name} is missing"):
        open_checkpoint(parts[0])


@pytest.mark.parametrize(
    ("more", "extra", "said"),
    [
        ({"logit_scale": 2.0}, {}, r"has llama\.logit_scale, which"),
        ({"block_count": [2, 3]}, {}, r"llama\.block_count is .*not one finite number"),
        ({"attention.value_length": 8}, {}, "attention.value_length 8 is not"),
        ({"rope.scaling.type": "ntk"}, {}, r"rope\.scaling\.type is 'ntk'"),
        ({}, {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}, "attn_sinks"),
        ({}, {"rope_freqs.weight": np.zeros(8, np.float32)}, "not positive and finite"),
        ({"attention.head_count": 8}, {}, "attn_q.weight"),
        ({"rope.freq_base": -1.0}, {}, r"'llama\.rope\.freq_base' is -1\.0, not"),
        ({"rope.dimension_count": 99}, {}, r"rope\.dimension_count is 99, and a head has 16"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    more: dict[str, Any], extra: dict[str, Any], said: str, tmp_path: Path
) -> None:
    hf = toys.make_base(tmp_path / "hf", layers=2)
    gguf_files.write(hf, tmp_path / "m.gguf", more=more, extra=extra)
    with pytest.raises(EdgeSpecError, match=said) as found:
        open_checkpoint(tmp_path / "m.gguf")
    assert "m.gguf" in found.value.what
    assert found.value.remedy
    assert not list(tmp_path.glob("cache/gguf/*"))


def test_an_unknown_architecture_is_refused_with_those_that_are_known(
    tmp_path: Path,
) -> None:
    file = tmp_path / "m.gguf"
    gguf_files.write(toys.make_base(tmp_path / "hf", layers=2), file)
    file.write_bytes(file.read_bytes().replace(b"llama", b"alpac", 1))
    with pytest.raises(UnsupportedModel, match="'alpac'") as found:
        open_checkpoint(file)
    known = {row.gguf.architecture for row in FAMILIES.values() if row.gguf}
    assert known <= set(found.value.remedy.removeprefix("It reads ").rstrip(".").split(", "))


def test_the_export_of_a_gguf_is_that_of_the_checkpoint_byte_by_byte(tmp_path: Path) -> None:
    made("llama", tmp_path)
    options = ExportOptions(golden=False)
    for name, model in (("a", "hf"), ("b", "model.gguf")):
        export(str(tmp_path / model), tmp_path / name, options)
    for name in ("model.onnx", "model.onnx.data", "embedding.safetensors"):
        files = [tmp_path / side / "llm" / name for side in "ab"]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def test_types_of_few_bits_are_rounded_again_and_it_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hf = toys.make_base(tmp_path / "hf", layers=1, hidden=256, intermediate=256)
    tensors = gguf_files.write(hf, tmp_path / "m.gguf", "TQ2_0")
    ours = open_checkpoint(tmp_path / "m.gguf")
    quantization = read_quantization(ours)
    assert quantization is not None
    weight = read_weight(ours, quantization, "model.layers.0.mlp.up_proj")
    assert weight is not None
    wanted = tensors["blk.0.ffn_up.weight"]
    np.testing.assert_allclose(dequantize(weight), wanted, atol=np.abs(wanted).max() / 254)
    open_checkpoint(tmp_path / "m.gguf").identity()
    assert caplog.text.count("tq2_0 is rounded again, to int8 in blocks of 32") == 1


def test_a_scale_that_is_nan_is_refused_with_file_and_tensor(tmp_path: Path) -> None:
    hf, file = toys.make_base(tmp_path / "hf", layers=1), tmp_path / "m.gguf"
    gguf_files.write(hf, file, "Q8_0")
    place = read_model(file).tensors["blk.0.ffn_up.weight"].offset
    data = bytearray(file.read_bytes())
    data[place : place + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(data)
    ours = open_checkpoint(file)
    quantization = read_quantization(ours)
    assert quantization is not None
    with pytest.raises(EdgeSpecError, match=r"m\.gguf: tensor .*up_proj.* NaN or Inf"):
        read_weight(ours, quantization, "model.layers.0.mlp.up_proj")


def test_a_file_that_changed_is_another_checkpoint(tmp_path: Path) -> None:
    hf, file = toys.make_base(tmp_path / "hf", layers=1), tmp_path / "m.gguf"
    gguf_files.write(hf, file)
    before = open_checkpoint(file)
    other = Path(shutil.copy(file, tmp_path / "other.gguf"))
    of_other = open_checkpoint(other)
    other.unlink()  # as on a disk that is not there now
    for directory in (before.path, of_other.path):
        os.utime(directory / NOTE, (0, 0))
    gguf_files.write(hf, file, more={"context_length": 64})
    with pytest.raises(EdgeSpecError, match=r"m\.gguf was changed since it was opened"):
        assert before.tensors
    del before  # while it is open, its directory stays
    gc.collect()
    after = open_checkpoint(file)
    assert after.config["max_position_embeddings"] == 64
    kept = {after.path, of_other.path}
    assert set((tmp_path / "cache" / "gguf").iterdir()) == kept
    gguf_files.write(hf, file)
    again = open_checkpoint(file)  # another run may be reading what is not a day old
    assert set((tmp_path / "cache" / "gguf").iterdir()) == kept | {again.path}


def test_what_lacks_weights_is_called_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    gguf_files.write(toys.make_base(tmp_path / "hf", layers=2), file, more={"block_count": 3})
    with pytest.raises(EdgeSpecError, match=rf"{file} are not those that {file} declares") as found:
        export(str(file), tmp_path / "out", ExportOptions(golden=False))
    assert "cache" not in found.value.what + found.value.remedy
