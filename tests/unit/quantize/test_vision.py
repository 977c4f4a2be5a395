"""Claims about image encoders in FP8, from quantize through export and build to rows: they are what
torch computes with weights and activations that the test rounds itself; and every refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from edgespec.artifacts.manifest import QuantizeManifest
from edgespec.backends.build import build
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.checkpoint.vision import vision_quantization
from edgespec.contract import Limits
from edgespec.errors import (
    BuildError,
    CheckpointError,
    EdgeSpecError,
    RequestError,
    UnsupportedModel,
)
from edgespec.families import parse_model_config
from edgespec.images import PreparedImage, read_processor
from edgespec.pipeline.inspection import inspect
from edgespec.progress import Silent
from edgespec.quantize import layerwise, modelopt, vision
from edgespec.quantize.calibration_images import SIZES, CalibrationImages
from edgespec.quantize.llm import Options, Quantized, quantize_llm
from edgespec.runtime.vision.encoder import VisionEncoder
from tests import made, shared, toys
from tests.toys.vision import write_vlm

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
families = pytest.mark.parametrize("family", FAMILIES)
PREFIXES = {"qwen2_5_vl": "visual.", "qwen3_vl": "model.visual."}
E4M3_MAX = 448.0
LIMITS = Limits(min_image_tokens=1)


def checkpoint_of(family: str) -> Path:
    return shared.made_once(("vlm", family), lambda path: write_vlm(path, family))


def write_images(folder: Path) -> Path:
    """Three images of odd sizes: noise, dark stripes, and a white field with a black spot."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(3)
    noise = rng.integers(0, 256, (117, 203, 3), dtype=np.uint8)
    stripes = np.zeros((90, 61, 3), np.uint8)
    stripes[::7] = (40, 0, 90)
    spot = np.full((151, 151, 3), 255, np.uint8)
    spot[20:60, 30:50] = 0
    for name, pixels in (("a.png", noise), ("b.bmp", stripes), ("c.jpg", spot)):
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def quantized(base: Path, out: Path, quantization: str | None = None, **more: Any) -> Quantized:
    texts = {"num_samples": 2, "calib_seq_len": 32} if quantization else {}
    options = Options(quantization, **(texts | {"visual_quantization": "fp8"} | more))
    return quantize_llm(str(base), out, options, Silent(), modelopt.Log())


@dataclass(frozen=True)
class Case:
    family: str
    base: Path
    images: Path
    out: Path

    @property
    def prepared(self) -> list[PreparedImage]:
        return list(CalibrationImages.of(self.images, read_processor(self.base)))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.out / "model.safetensors")


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A checkpoint whose image encoder alone is quantized, calibrated with a folder."""
    root = tmp_path_factory.mktemp(request.param)
    base, images = checkpoint_of(request.param), write_images(root / "images")
    quantized(base, root / "out", image_dataset=images)
    return Case(request.param, base, images, root / "out")


# ---- the reference: transformers' encoder, with Linears whose inputs are watched or rounded


def reference_encoder(base: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    return model.eval().requires_grad_(False).model.visual


def linears(visual: Any) -> dict[str, torch.nn.Linear]:
    return {n: m for n, m in visual.named_modules() if isinstance(m, torch.nn.Linear)}


@contextmanager
def hooked(visual: Any, hook_of: Callable[[str], Callable[..., Any]]) -> Iterator[None]:
    hooks = [m.register_forward_pre_hook(hook_of(n)) for n, m in linears(visual).items()]
    yield
    for hook in hooks:
        hook.remove()


def rows(visual: Any, image: PreparedImage) -> torch.Tensor:
    with torch.no_grad():
        pixels = torch.from_numpy(image.pixel_values.copy())
        found = visual(pixels, grid_thw=torch.tensor([image.grid]))
    features = getattr(found, "deepstack_features", None) or []
    return torch.cat([found.pooler_output, *features], dim=-1)


def largest_inputs(visual: Any, image: PreparedImage) -> dict[str, float]:
    found: dict[str, float] = {}

    def watch(name: str) -> Callable[..., Any]:
        def hook(_: Any, inputs: Any) -> None:
            found[name] = float(inputs[0].abs().max())

        return hook

    with hooked(visual, watch):
        rows(visual, image)
    return found


def fp8(x: torch.Tensor, amax: float) -> torch.Tensor:
    """x rounded to E4M3 with the scale of `amax`."""
    scale = amax / E4M3_MAX
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale


def round_weights(visual: Any) -> None:
    """Rounds all weights, those of gate_proj and up_proj with one scale."""
    found = linears(visual)
    amax = {name: float(module.weight.abs().max()) for name, module in found.items()}
    for name, module in found.items():
        pair = [name.replace("up_proj", "gate_proj"), name.replace("gate_proj", "up_proj")]
        module.weight.data = fp8(module.weight.data, max(amax[other] for other in pair))


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, dim=-1).mean())


# ---- parity


def test_scales_cover_all_images(case: Case) -> None:
    visual, tensors, prefix = reference_encoder(case.base), case.tensors, PREFIXES[case.family]
    each = [largest_inputs(visual, image) for image in case.prepared]
    assert len(each) == 3
    for name in linears(visual):
        wanted = max(found[name] for found in each) / E4M3_MAX
        assert float(tensors[f"{prefix}{name}.input_scale"]) == pytest.approx(wanted, rel=1e-4)
    # No image alone has the largest values of all Linears
    assert all(any(found[n] < max(o[n] for o in each) for n in found) for found in each)


def test_engine_computes_what_torch_does_with_rounded_weights_and_activations(case: Case) -> None:
    """With the scales as they are written, whose last bits decide how a value is rounded."""
    plain, visual = reference_encoder(case.base), reference_encoder(case.base)
    tensors, prefix = case.tensors, PREFIXES[case.family]
    round_weights(visual)

    def rounding(name: str) -> Callable[..., Any]:
        amax = float(tensors[f"{prefix}{name}.input_scale"]) * E4M3_MAX
        return lambda _, inputs: (fp8(inputs[0], amax), *inputs[1:])

    exported, engines = made.exported(case.out), case.out.parent / "engines"
    built = build(exported / "visual", engines, LIMITS)
    assert any("fp8 is emulated" in note for note in built.notes)
    with VisionEncoder.open(engines) as encoder, hooked(visual, rounding):
        for image in case.prepared:
            found = encoder.encode(image)
            parts = [found.embeds, *found.extras.values()]
            ours = torch.from_numpy(np.concatenate(parts, axis=-1))
            wanted = rows(visual, image)
            assert (ours - wanted).norm() < 1e-3 * wanted.norm()
    with VisionEncoder.open(engines) as encoder:
        for image in case.prepared:
            embeds = torch.from_numpy(encoder.encode(image).embeds)
            before = rows(plain, image)[:, : embeds.shape[1]]
            assert 0.99 < cosine(embeds, before) < 0.99999


def test_all_else_is_byte_for_byte(case: Case) -> None:
    before, after = load_file(case.base / "model.safetensors"), case.tensors
    prefix = PREFIXES[case.family]
    for name, tensor in before.items():
        if f"{name.removesuffix('.weight')}.weight_scale" in after:
            assert name.startswith(prefix)
            assert after[name].dtype is torch.float8_e4m3fn
        else:
            assert torch.equal(tensor, after[name])
    quantized_names = {n.removesuffix(".weight_scale") for n in after if n.endswith("weight_scale")}
    stored = {f"{prefix}{n}" for n in linears(reference_encoder(case.base))}
    assert quantized_names == stored
    assert (case.out / "preprocessor_config.json").is_file()


def test_settings_name_the_encoder_and_leave_text_out(case: Case) -> None:
    written = Checkpoint(case.out)
    settings = read_quantization(written)
    assert settings is not None
    prefix = PREFIXES[case.family]
    config = parse_model_config(written.config, "config.json").vision
    assert config is not None
    assert vision_quantization(written, config) is not None
    rule = settings.rule(f"{prefix}blocks.0.attn.qkv")
    assert rule is not None
    assert rule.scheme.name == "fp8"
    stack = "model" if case.family == "qwen2_5_vl" else "model.language_model"
    kept = ("lm_head", f"{stack}.layers.0.mlp.up_proj", f"{prefix}patch_embed.proj")
    assert [settings.rule(name) for name in kept] == [None] * 3
    manifest = QuantizeManifest.read(case.out)
    assert manifest.check is None
    assert manifest.visual is not None
    assert manifest.visual.num_images == 3
    assert manifest.visual.rows_cosine > 0.99
    assert manifest.request.options["image_dataset"]["name"] == "images"


def test_inspect_shows_the_encoder(case: Case) -> None:
    said = inspect(case.out).to_dict()
    assert said["quantization"]["schemes"]["fp8"]["linears"] == 22
    assert said["quantized"]["visual"]["num_images"] == 3


def test_the_same_request_is_not_run_twice_and_another_folder_is(
    case: Case, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(case.images, tmp_path / "moved"))
    again = quantized(case.base, case.out, image_dataset=moved)
    assert "already up to date" in again.notes[0]
    (moved / "b.bmp").unlink()
    with pytest.raises(EdgeSpecError, match="already exists"):
        quantized(case.base, case.out, image_dataset=moved)


# ---- with text formats


@pytest.mark.usefixtures("needs_modelopt")
@pytest.mark.parametrize("name", [pytest.param("fp8", marks=pytest.mark.deep), "nvfp4"])
@families
def test_text_formats_stand_beside_it(family: str, name: str, tmp_path: Path) -> None:
    base, out = checkpoint_of(family), tmp_path / "out"
    result = quantized(base, out, name, exclude=("*.attn.proj",))
    check, visual = result.manifest.check, result.manifest.visual
    assert check is not None
    assert visual is not None
    written = Checkpoint(out)
    settings = read_quantization(written)
    assert settings is not None
    vision_names = set(visual.weight_errors)
    assert not any(n.endswith("attn.proj") for n in vision_names)
    for module, scheme in [(n, "fp8") for n in vision_names] + [
        (n, name) for n in check.weight_errors
    ]:
        rule = settings.rule(module)
        assert rule is not None
        assert rule.scheme.name == scheme
    algo = json.loads((out / "hf_quant_config.json").read_text())["quantization"]["quant_algo"]
    assert algo == ("FP8" if name == "fp8" else "MIXED_PRECISION")
    exported = made.exported(out)
    for part in ("llm", "visual"):
        assert (exported / part / "model.onnx").is_file()


@pytest.mark.usefixtures("needs_modelopt")
def test_an_encoder_that_cannot_be_quantized_is_found_before_text_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(shutil.copytree(checkpoint_of("qwen3_vl"), tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    tensors["model.visual.blocks.0.mlp.linear_fc1.weight"] *= 1e38
    save_file(tensors, base / "model.safetensors")
    calibrated: list[str] = []
    monkeypatch.setattr(layerwise.Calibration, "run", lambda _: calibrated.append("text"))
    with pytest.raises(BuildError, match="is not finite"):
        quantized(base, tmp_path / "out", "fp8")
    assert not calibrated


@pytest.mark.parametrize(("files", "title"), [(1, "1 image from"), (3, "3 images from")])
def test_images_are_counted_in_words(files: int, title: str, tmp_path: Path) -> None:
    processor, folder = read_processor(checkpoint_of("qwen3_vl")), write_images(tmp_path / "photos")
    for name in ("a.png", "b.bmp", "c.jpg")[files:]:
        (folder / name).unlink()
    assert CalibrationImages.of(folder, processor).title == f"{title} the folder photos"
    assert CalibrationImages.of(None, processor).title == "8 drawn images"


# ---- images


def test_drawn_images_are_always_the_same_and_of_several_shapes() -> None:
    processor = read_processor(checkpoint_of("qwen3_vl"))
    first, second = CalibrationImages.of(None, processor), CalibrationImages.of(None, processor)
    assert first.digest() == second.digest()
    images = list(first)
    assert len(images) == len(first) == len(SIZES)
    assert len({image.grid for image in images}) > 4
    assert len({image.key for image in images}) == len(SIZES)


def test_large_images_are_made_smaller(tmp_path: Path) -> None:
    Image.new("RGB", (3000, 2000), "red").save(tmp_path / "large.png")
    (image,) = CalibrationImages.of(tmp_path, read_processor(checkpoint_of("qwen2_5_vl")))
    assert image.num_tokens <= 512


def damage(folder: Path) -> None:
    path = folder / "a.png"
    path.write_bytes(path.read_bytes()[:200])


def rewrite_empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (damage, "a.png"),
        (rewrite_empty, "has no image"),
        (shutil.rmtree, "is no directory that can be read"),
    ],
)
def test_bad_folders_are_refused_before_any_work(
    change: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    folder = write_images(tmp_path / "images")
    change(folder)
    with pytest.raises(RequestError, match=text):
        quantized(checkpoint_of("qwen2_5_vl"), tmp_path / "out", image_dataset=folder)
    assert not [path for path in tmp_path.iterdir() if path.name != "images"]


# ---- refusals


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    base = toys.make_base(tmp_path / "base", "qwen3")
    with pytest.raises(UnsupportedModel, match="has no image encoder"):
        quantized(base, tmp_path / "out")


def test_a_checkpoint_without_its_processor_is_refused(tmp_path: Path) -> None:
    base = Path(shutil.copytree(checkpoint_of("qwen3_vl"), tmp_path / "base"))
    (base / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json"):
        quantized(base, tmp_path / "out")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"visual_quantization": "int4_awq"}, "to fp8 alone"),
        ({"visual_quantization": None}, "nothing is to be quantized"),
        ({"visual_quantization": None, "image_dataset": Path("x")}, "`image_dataset` without"),
        ({"lm_head_quantization": "fp8"}, "`lm_head_quantization` without `quantization`"),
        ({"fp8_cache": True}, "`kv_cache_quantization` without `quantization`"),
        ({"target": "orin"}, "orin"),
        ({"calib_data": "texts.txt"}, "`calib_data` without `quantization`"),
        ({"num_samples": 2}, "`num_samples` without `quantization`"),
        ({"calib_seq_len": 32}, "`calib_seq_len` without `quantization`"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedModel, match=text):
        Options(None, **({"visual_quantization": "fp8"} | flags))


def test_excluding_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no Linear of the image encoder"):
        quantized(checkpoint_of("qwen3_vl"), tmp_path / "out", exclude=("*",))


@pytest.mark.parametrize(
    ("factor", "error", "text"),
    [
        (1 / 40, BuildError, "rows have a cosine of"),
        (1e6, BuildError, "rows have a cosine of"),
        (float("nan"), CheckpointError, "input_scale"),
    ],
)
def test_wrong_scales_of_activations_are_found(
    factor: float,
    error: type[EdgeSpecError],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibrate = vision.calibrate

    def wrong(*args: Any) -> vision.Scales:
        found = calibrate(*args)
        found.amax = {name: value * factor for name, value in found.amax.items()}
        return found

    monkeypatch.setattr(vision, "calibrate", wrong)
    with pytest.raises(error, match=text):
        quantized(checkpoint_of("qwen3_vl"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_wrong_scales_of_weights_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    amax = vision.VisionPieces.amax
    monkeypatch.setattr(vision.VisionPieces, "amax", lambda self, own: amax(self, own) / 3)
    with pytest.raises(BuildError, match="relative error"):
        quantized(checkpoint_of("qwen3_vl"), tmp_path / "out")
