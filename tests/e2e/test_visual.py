"""Image encoders on the command line: export, build and inspect, what is refused, and that nothing
half-written is left."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgespec.artifacts import file_names
from edgespec.errors import BundleError, EngineClosed, LimitError, RequestError
from edgespec.runtime.vision.encoder import VisionEncoder
from edgespec.vision.grid import Grid
from tests import made, shared, toys
from tests.e2e.workshop import Cli, cli
from tests.toys.vision import IMAGE_TOKENS, write_vlm

__all__ = ["cli"]

BESIDE = {"config.json", "manifest.json", "preprocessor_config.json"}


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return shared.made_once("vlm for commands", lambda path: write_vlm(path, "qwen2_5_vl"))


@pytest.fixture
def export(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of an export, to be changed."""
    return Path(shutil.copytree(made.exported(checkpoint), tmp_path / "onnx"))


@pytest.fixture
def engines(export: Path, tmp_path: Path, cli: Cli) -> Path:
    done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", tmp_path / "engines")
    assert done.code == 0, done.err
    return tmp_path / "engines"


@dataclass(frozen=True)
class Made:
    pixel_values: NDArray[np.float32]
    grid: Grid
    key: str = "a key"
    source: str = "requests[0] image 1"


def image(height: int, width: int, values: int = 1176, frames: int = 1) -> Made:
    return Made(np.zeros((frames * height * width, values), np.float32), (frames, height, width))


def files_of(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def rewritten(directory: Path, change: Callable[[Path], None]) -> None:
    """Change a directory, and let its manifest say so."""
    change(directory)
    path = directory / file_names.MANIFEST
    manifest = json.loads(path.read_text())
    listed = manifest.get("files") or manifest["engines"]["visual"]["files"]
    for name, entry in listed.items():
        data = (directory / name).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        entry.pop("mtime_ns", None)
    path.write_text(json.dumps(manifest))


def set_keys(name: str, values: Mapping[str, Any]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        raw = json.loads((directory / name).read_text())
        for key, value in values.items():
            *sections, last = key.split("/")
            place = raw
            for section in sections:
                place = place[section]
            place[last] = value
        (directory / name).write_text(json.dumps(raw))

    return change


# ---- export


def test_export_writes_the_encoder_beside_the_language_model(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "onnx"
    done = cli("export", checkpoint, out)
    assert done.code == 0, done.err
    visual = out / "visual"
    files = {"model.onnx", "model.onnx.data", "golden.safetensors"}
    assert {path.name for path in visual.iterdir()} == BESIDE | files
    copied = (visual / "preprocessor_config.json").read_bytes()
    assert copied == (checkpoint / "preprocessor_config.json").read_bytes()
    config = json.loads((visual / "config.json").read_text())
    assert IMAGE_TOKENS.items() <= config.items()
    assert config["identity"] == json.loads((out / "llm/config.json").read_text())["identity"]
    before = files_of(visual)
    again = cli("export", checkpoint, out)
    assert again.code == 0
    assert again.out.count("already there and unchanged") == 2
    assert files_of(visual) == before


def test_skip_visual_leaves_the_encoder_out_until_it_is_asked_for(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    out = tmp_path / "onnx"
    assert cli("export", checkpoint, out, "--skip-visual").code == 0
    assert [path.name for path in out.iterdir()] == ["llm"]
    done = cli("export", checkpoint, out)
    assert done.code == 0, done.err
    assert done.out.count("already there and unchanged") == 1
    assert (out / "visual/model.onnx").is_file()


def test_another_model_is_not_written_over_an_encoder(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    out, other = tmp_path / "onnx", tmp_path / "other"
    assert cli("export", checkpoint, out).code == 0
    write_vlm(other, "qwen2_5_vl", seed=1)
    shutil.rmtree(out / "llm")
    before = files_of(out / "visual")
    done = cli("export", other, out)
    assert done.code == 3
    assert f"{out / 'visual'} holds an export of {checkpoint.name}" in done.err
    assert [path.name for path in out.iterdir()] == ["visual"]
    assert files_of(out / "visual") == before


def without(path: Path, out: Path, *beginnings: str) -> Path:
    """A copy of a checkpoint without some tensors."""
    copy = Path(shutil.copytree(path, out))
    tensors = load_file(copy / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not name.startswith(beginnings)}
    save_file(kept, copy / "model.safetensors")
    return copy


def test_a_model_without_its_encoder_is_exported_as_text_alone(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    text = without(checkpoint, tmp_path / "text", "visual.")
    done = cli("export", text, tmp_path / "onnx")
    assert done.code == 0, done.err
    assert "the checkpoint has no tensors of its image encoder" in done.out
    assert [path.name for path in (tmp_path / "onnx").iterdir()] == ["llm"]


def test_an_encoder_of_another_family_is_left_out_and_that_is_said(
    tmp_path: Path, cli: Cli
) -> None:
    for stack, said in (("published", True), ("text", False)):
        base = toys.make_gemma3(tmp_path / stack, stack=stack)
        done = cli("export", base, tmp_path / "onnx" / stack)
        assert done.code == 0, done.err
        assert ("no image encoder of this family: text alone is exported" in done.out) == said
        assert [path.name for path in (tmp_path / "onnx" / stack).iterdir()] == ["llm"]
    silent = cli("export", tmp_path / "published", tmp_path / "other", "--skip-visual")
    assert "image encoder" not in silent.out


def test_a_missing_tensor_of_the_encoder_is_named(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    damaged = without(checkpoint, tmp_path / "damaged", "visual.merger.ln_q")
    done = cli("export", damaged, tmp_path / "onnx")
    assert done.code == 3
    assert "missing (1): visual.merger.ln_q.weight" in done.err
    assert not (tmp_path / "onnx").exists()


def test_text_goes_on_without_a_damaged_encoder(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    damaged = without(checkpoint, tmp_path / "damaged", "visual.merger.ln_q")
    refused = cli("export", damaged, tmp_path / "onnx")
    assert refused.code == 3
    assert "leave the image encoder out with --skip-visual" in refused.err
    said = cli("inspect", damaged)
    assert said.code == 3
    assert "visual.merger.ln_q.weight" in said.err
    assert cli("export", damaged, tmp_path / "onnx", "--skip-visual").code == 0
    checked = cli("check", damaged, checkpoint, "--json")
    found = {result["topic"]: result for result in json.loads(checked.out)["results"]}
    assert found["image encoder"]["level"] == "warning"
    assert "`skip_visual`" in found["image encoder"]["remedy"]
    assert found["tensors"]["level"] == "ok"
    sizes = ("--max-input-len", 48, "--max-kv-cache-capacity", 64, "--max-generate-length", 2)
    run = ("run", damaged, "--prompt", "a", *sizes)
    assert "--skip-visual" in cli(*run).err
    done = cli(*run, "--skip-visual")
    assert done.code == 0, done.err
    assert not list((tmp_path / "cache").rglob("visual.onnx"))


def in_int4(checkpoint: Path, out: Path, module: str) -> tuple[Path, NDArray[np.float32]]:
    """A copy of a checkpoint with one Linear of its encoder in INT4, in blocks of 32 inputs, as
    llm-compressor packs it; and what its weight is."""
    copy = Path(shutil.copytree(checkpoint, out))
    tensors = load_file(copy / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith(f"{module}.weight"))
    shape, stem = tensors.pop(name).shape, name.removesuffix("weight")
    rng, groups = np.random.default_rng(0), -(-shape[1] // 32)
    values = rng.integers(0, 16, (shape[0], -(-shape[1] // 8) * 8), np.uint32)
    scales = rng.uniform(0.01, 0.02, (shape[0], groups)).astype(np.float32)
    words = sum(values[:, i::8] << np.uint32(4 * i) for i in range(8))
    tensors[f"{stem}weight_packed"] = np.asarray(words, np.uint32).view(np.int32)
    tensors[f"{stem}weight_scale"] = scales
    tensors[f"{stem}weight_shape"] = np.array(shape, np.int64)
    save_file(tensors, copy / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {"weights": weights | {"symmetric": True}, "targets": [f"re:.*{module}"]}
        },
    }
    set_keys("config.json", {"quantization_config": settings})(copy)
    signed = values[:, : shape[1]].astype(np.float32) - 8
    return copy, signed * np.repeat(scales, 32, axis=1)[:, : shape[1]]


@pytest.mark.parametrize("module", ["blocks.0.attn.proj", "merger.mlp.0"])
def test_packed_weights_of_an_encoder_are_those_that_they_stand_for(
    module: str, checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    copy, weight = in_int4(checkpoint, tmp_path / "int4", module)
    plain = Path(shutil.copytree(checkpoint, tmp_path / "plain"))
    tensors = load_file(plain / "model.safetensors")
    (name,) = (name for name in tensors if name.endswith(f"{module}.weight"))
    save_file(tensors | {name: weight}, plain / "model.safetensors")
    rows = []
    for model in (copy, plain):
        done = cli("export", model, tmp_path / "onnx" / model.name)
        assert done.code == 0, done.err
        golden = tmp_path / "onnx" / model.name / "visual/golden.safetensors"
        rows.append(load_file(golden)["image_embeds"])
    np.testing.assert_allclose(*rows, rtol=1e-4, atol=1e-5)


def test_text_goes_on_without_an_encoder_whose_weights_no_graph_has(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    """INT4 in blocks that do not divide the inputs."""
    copy, weight = in_int4(checkpoint, tmp_path / "int4", "blocks.0.mlp.down_proj")
    refused = cli("export", copy, tmp_path / "onnx")
    assert refused.code == 3
    assert f"3 scales per row for {weight.shape[1]} inputs" in refused.err
    assert "leave the image encoder out with --skip-visual" in refused.err
    assert cli("export", copy, tmp_path / "onnx", "--skip-visual").code == 0


def test_names_of_newer_and_older_files_are_the_same_encoder(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "newer"))
    tensors = load_file(copy / "model.safetensors")
    renamed = {
        name if not name.startswith("visual.") else f"model.{name}": value
        for name, value in tensors.items()
    }
    save_file(renamed, copy / "model.safetensors")
    assert cli("export", copy, tmp_path / "onnx").code == 0
    ours, theirs = (
        load_file(path / "visual/golden.safetensors")
        for path in (tmp_path / "onnx", made.exported(checkpoint))
    )
    assert (ours["image_embeds"] == theirs["image_embeds"]).all()


def test_a_checkpoint_without_a_preprocessor_config_says_what_is_missing(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    copy = Path(shutil.copytree(checkpoint, tmp_path / "bare"))
    (copy / "preprocessor_config.json").unlink()
    done = cli("export", copy, tmp_path / "onnx")
    assert done.code == 0, done.err
    assert "no preprocessor_config.json" in done.out


def test_an_export_with_other_processor_files_is_not_taken_for_this_one(
    checkpoint: Path, tmp_path: Path, cli: Cli
) -> None:
    copy, out = Path(shutil.copytree(checkpoint, tmp_path / "copy")), tmp_path / "onnx"
    assert cli("export", copy, out).code == 0
    processor = copy / "preprocessor_config.json"
    processor.write_text(json.dumps(json.loads(processor.read_text()) | {"max_pixels": 200704}))
    done = cli("export", copy, out)
    assert done.code == 4
    assert f"{out / 'visual'} already exists" in done.err
    assert sorted(path.name for path in out.iterdir()) == ["llm", "visual"]


# ---- build


def test_build_writes_the_encoder_below_the_engines(engines: Path, cli: Cli) -> None:
    found = {path.name for path in (engines / "visual").iterdir()}
    assert found == BESIDE | {"visual.onnx", "visual.onnx.data"}
    done = cli("inspect", engines / "visual")
    assert done.code == 0
    assert "at most image tokens 1024, image tokens per image 512" in done.out
    assert "at least image tokens 4" in done.out


def test_a_directory_named_visual_is_the_engine_itself(
    export: Path, tmp_path: Path, cli: Cli
) -> None:
    target = tmp_path / "engines/visual"
    # in the spellings of TensorRT-LLM and TensorRT Edge-LLM too
    sizes = ("--minImageTokens", 2, "--max_image_tokens", 64, "--max-image-tokens-per-image", 32)
    done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", target, *sizes)
    assert done.code == 0, done.err
    config = json.loads((target / "config.json").read_text())
    assert config["builder_config"] == {
        "min_image_tokens": 2,
        "max_image_tokens": 64,
        "max_image_tokens_per_image": 32,
    }


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            ("--min-image-tokens", 513),
            "--min-image-tokens 513 exceeds --max-image-tokens-per-image",
        ),
        (("--max-image-tokens", 511), "--max-image-tokens-per-image 512 exceeds"),
        (("--min-image-tokens", 0), "--min-image-tokens is 0"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(
    sizes: tuple[str, int], said: str, export: Path, tmp_path: Path, cli: Cli
) -> None:
    target = tmp_path / "engines"
    done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", target, *sizes)
    assert done.code == 3
    assert said in done.err
    assert not target.exists()


def test_a_second_build_takes_the_place_of_the_first(engines: Path, export: Path, cli: Cli) -> None:
    before = files_of(engines / "visual")
    done = cli(
        "build", "--onnx-dir", export / "visual", "--engine-dir", engines, "--weights", "int8"
    )
    assert done.code == 0, done.err
    assert "golden outputs approached (cosine 0.99" in done.out
    assert [path.name for path in engines.iterdir()] == ["visual"]
    assert files_of(engines / "visual").keys() == before.keys()
    with VisionEncoder.open(engines) as encoder:
        assert encoder.config.weights.scheme == "int8"


def test_a_directory_of_exports_takes_no_engine(export: Path, cli: Cli) -> None:
    before = files_of(export / "visual")
    done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", export)
    assert done.code == 3
    assert f"{export / 'visual'} is not an engine directory" in done.err
    assert files_of(export / "visual") == before


def test_an_engine_that_computes_something_else_is_not_kept(
    export: Path, tmp_path: Path, cli: Cli
) -> None:
    def change(directory: Path) -> None:
        arrays = load_file(directory / "golden.safetensors")
        arrays["image_embeds"][3] += 1
        save_file(arrays, directory / "golden.safetensors")

    rewritten(export / "visual", change)
    target = tmp_path / "engines"
    done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", target)
    assert done.code == 3
    assert "the engine's image_embeds on the golden image differ" in done.err
    assert not target.exists()


CONTRADICTIONS: list[tuple[Mapping[str, Any], str]] = [
    ({"vision_config/fullatt_block_indexes": [0, 1, 2, 3]}, "; by config.json none"),
    ({"vision_config/out_hidden_size": 64}, "by config.json image_embeds"),
    ({"vision_config/norm": "none"}, "'norm'"),
    ({"vision_config/window_size": 14}, "'window_size'"),
    ({"vision_config/window_size": 16000}, "'window_size'"),
    ({"image_token_id": -1}, "'image_token_id'"),
    ({"engine_role": "llm"}, "config.json: spec_decode_type None"),
]


@pytest.mark.parametrize(("keys", "said"), CONTRADICTIONS)
def test_a_config_that_is_not_that_of_the_graph_is_refused(
    keys: Mapping[str, Any], said: str, export: Path, tmp_path: Path, cli: Cli
) -> None:
    rewritten(export / "visual", set_keys("config.json", keys))
    target = tmp_path / "engines"
    done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", target)
    assert done.code == 3
    assert said in done.err
    assert not target.exists()


def test_an_encoder_is_neither_base_nor_draft(export: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", tmp_path, "--spec-base")
    assert done.code == 3
    assert "exported as visual, the flag says base" in done.err


def test_an_encoder_and_a_language_model_do_not_share_a_directory(
    engines: Path, export: Path, cli: Cli
) -> None:
    done = cli("build", "--onnx-dir", export / "llm", "--engine-dir", engines / "visual")
    assert done.code == 3
    assert "holds the engine of an image encoder" in done.err
    assert cli("build", "--onnx-dir", export / "llm", "--engine-dir", engines).code == 0
    done = cli("inspect", engines)
    assert done.code == 0
    assert "visual/ holds an image encoder" in done.out
    for target in (engines, engines / "visual"):  # in whichever order they are built
        done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", target)
        assert done.code == 0, done.err
    assert "visual/ holds an image encoder" in cli("inspect", engines).out


def test_flags_of_the_other_component_are_said_to_be_unused(
    export: Path, tmp_path: Path, cli: Cli
) -> None:
    sizes = ("--max-batch-size", 1, "--max-image-tokens", 2048)
    visual = cli("build", "--onnx-dir", export / "visual", "--engine-dir", tmp_path / "e", *sizes)
    assert "--max-batch-size is for a language model and not used here" in visual.out
    text = cli("build", "--onnx-dir", export / "llm", "--engine-dir", tmp_path / "e", *sizes)
    assert "--max-image-tokens is for the image encoder and not used here" in text.out


def test_a_dry_run_writes_nothing(export: Path, tmp_path: Path, cli: Cli) -> None:
    target = tmp_path / "engines"
    done = cli("build", "--onnx-dir", export / "visual", "--engine-dir", target, "--dry-run")
    assert done.code == 0
    assert "an image encoder of 4 layers" in done.out
    assert not target.exists()


def test_a_dry_run_names_the_flags_that_it_does_not_use_and_what_images_lack(
    export: Path, tmp_path: Path, cli: Cli
) -> None:
    def remove(directory: Path) -> None:
        (directory / "preprocessor_config.json").unlink()
        manifest = json.loads((directory / file_names.MANIFEST).read_text())
        del manifest["files"]["preprocessor_config.json"]
        (directory / file_names.MANIFEST).write_text(json.dumps(manifest))

    remove(export / "visual")
    files = ("--onnx-dir", export / "visual", "--engine-dir", tmp_path / "e")
    done = cli("build", *files, "--dry-run", "--max-batch-size", 1, "--weights", "int8")
    assert done.code == 0, done.err
    assert "--max-batch-size is for a language model and not used here" in done.out
    assert "weights int8" in done.out
    for found in (done, cli("build", *files)):
        assert "put it beside the checkpoint's config.json, remove this directory" in found.out


# ---- a finished engine


@pytest.mark.parametrize("name", ["visual.onnx", "visual.onnx.data", "preprocessor_config.json"])
def test_a_truncated_file_is_named(name: str, engines: Path, cli: Cli) -> None:
    path = engines / "visual" / name
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BundleError, match=name):
        VisionEncoder.open(engines)
    done = cli("inspect", engines / "visual")
    assert done.code == 3
    assert name in done.err


def test_an_engine_of_another_machine_is_refused(engines: Path, cli: Cli) -> None:
    keys = {"engines/visual/fingerprint/onnxruntime": "1.0"}
    set_keys("manifest.json", keys)(engines / "visual")
    done = cli("inspect", engines / "visual")
    assert "does not run here: the visual engine was built with ONNX Runtime 1.0" in done.out


def test_a_directory_without_an_encoder_says_how_to_build_one(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="has no engine of an image encoder") as caught:
        VisionEncoder.open(tmp_path)
    assert "edgespec build --onnx-dir OUT/visual" in caught.value.remedy


def test_images_beyond_the_limits_name_the_flag(export: Path, tmp_path: Path, cli: Cli) -> None:
    sizes = ("--min-image-tokens", 4, "--max-image-tokens-per-image", 12)
    cli("build", "--onnx-dir", export / "visual", "--engine-dir", tmp_path / "e", *sizes)
    with VisionEncoder.open(tmp_path / "e/visual") as encoder:
        assert len(encoder.encode(image(6, 8))) == 12
        with pytest.raises(LimitError, match=r"requests\[0\] image 1 has 14 tokens") as caught:
            encoder.encode(image(4, 14))
        assert "`max_image_tokens_per_image`" in caught.value.remedy
        with pytest.raises(LimitError, match="has 2 tokens") as caught:
            encoder.encode(image(2, 4))
        assert "`min_image_tokens`" in caught.value.remedy
        with pytest.raises(RequestError, match="has 2 frames"):
            encoder.encode(image(4, 4, frames=2))
        with pytest.raises(BundleError, match="prepared as"):
            encoder.encode(image(4, 4, values=1536))
        with pytest.raises(BundleError, match="blocks of 2 x 2"):
            encoder.encode(image(5, 4))
    with pytest.raises(EngineClosed):
        encoder.encode(image(6, 8))


def test_run_prepares_the_encoder_with_the_language_model(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    sizes = ("--max-input-len", 48, "--max-kv-cache-capacity", 64, "--max-generate-length", 2)
    done = cli("run", checkpoint, "--prompt", "a", *sizes)
    assert done.code == 0, done.err
    (found,) = (tmp_path / "cache").rglob("visual.onnx")
    with VisionEncoder.open(found.parent.parent) as encoder:
        assert len(encoder.encode(image(4, 4))) == 4


def test_run_prepares_images_as_the_checkpoint_says_now(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    processor = copy / "preprocessor_config.json"
    sizes = ("--max-input-len", 48, "--max-kv-cache-capacity", 64, "--max-generate-length", 2)
    assert cli("run", copy, "--prompt", "a", *sizes).code == 0
    processor.write_text(json.dumps(json.loads(processor.read_text()) | {"max_pixels": 200704}))
    assert cli("run", copy, "--prompt", "a", *sizes).code == 0
    made_now = [path.read_text() for path in (tmp_path / "cache").rglob(processor.name)]
    assert processor.read_text() in made_now
