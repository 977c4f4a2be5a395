"""Claims about Qwen3.5: what is quantized and what stays byte for byte, and that norms of (1 + w)
come to no harm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.errors import CheckpointError, UnsupportedModel
from edgespec.quantization.quantized_weight import dequantize
from edgespec.quantization.schemes import MADE
from tests.unit.quantize import qwen3_5, whole_model
from tests.unit.quantize.test_layerwise import batches_of, quantized
from tests.unit.quantize.test_llm import table

pytestmark = pytest.mark.usefixtures("needs_modelopt")

SHORT = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
    "?": torch.bfloat16,
}
STAYS = ("conv1d.weight", "in_proj_a.weight", "in_proj_b.weight")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("qwen3_5")
    return {
        "text": qwen3_5.make(root / "text"),
        "images": qwen3_5.make(root / "images", images=True),
    }


@pytest.fixture(scope="module")
def made(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("made")
    return {name: quantized(bases["text"], root / name, name) for name in MADE}


def quantized_linears(names: set[str]) -> list[str]:
    """Linears of attention, MLP and gated delta net, by the names that Qwen published."""
    ends = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
    return sorted(
        name.removesuffix(".weight")
        for name in names
        if ".layers." in name and name.endswith(ends) and not name.startswith("mtp.")
    )


@pytest.mark.parametrize("name", MADE)
def test_linears_are_quantized_and_all_else_stays_byte_for_byte(
    bases: dict[str, Path], made: dict[str, Any], name: str
) -> None:
    source, found = (whole_model.tensors_of(path) for path in (bases["text"], made[name].directory))
    linears = quantized_linears(set(source))
    assert len(linears) == 3 * 6 + 7
    for module in linears:
        for part, (dtype, shape) in table(name, *source.pop(f"{module}.weight").shape).items():
            tensor = found.pop(f"{module}.{part}")
            assert (tensor.dtype, tuple(tensor.shape)) == (SHORT[dtype], shape), f"{module}.{part}"
    assert whole_model.differing(found, source) == []
    assert any(tensor.endswith(STAYS) for tensor in source)
    assert any(tensor.startswith("mtp.") for tensor in source)


@pytest.mark.parametrize("name", MADE)
def test_tensors_are_those_of_modelopts_whole_model(
    bases: dict[str, Path], made: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """But for what transformers drops or casts: the MTP head, and parameters in float32."""
    whole_model.export(bases["text"], tmp_path / "theirs", name, batches_of(bases["text"]))
    ours, theirs = (
        whole_model.tensors_of(path) for path in (made[name].directory, tmp_path / "theirs")
    )
    apart = whole_model.differing(ours, theirs)
    assert all(tensor.startswith("mtp.") or tensor.endswith("A_log") for tensor in apart), apart
    settings = json.loads((made[name].directory / "hf_quant_config.json").read_text())[
        "quantization"
    ]
    wanted = json.loads((tmp_path / "theirs" / "hf_quant_config.json").read_text())["quantization"]
    assert set(settings["exclude_modules"]) == {*wanted["exclude_modules"], "mtp*"}


@pytest.mark.parametrize("name", MADE)
def test_written_bytes_compute_what_the_original_does(
    bases: dict[str, Path], made: dict[str, Any], name: str
) -> None:
    """A whole model of transformers with the weights read back; int4_awq folded into norms gives
    0.93."""
    cosine = float(
        torch.nn.functional.cosine_similarity(
            logits(bases["text"], None), logits(bases["text"], made[name].directory), dim=-1
        ).mean()
    )
    least = {"fp8": 0.998, "int4_awq": 0.98, "int8_sq": 0.999, "nvfp4": 0.98, "mxfp8": 0.998}[name]
    assert cosine > least
    assert made[name].manifest.check.logits_cosine > least


def logits(base: Path, quantized: Path | None) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if quantized is not None:
        checkpoint = Checkpoint(quantized)
        settings = read_quantization(checkpoint)
        assert settings is not None
        for module in quantized_linears({name for name, _ in model.named_parameters()}):
            weight = read_weight(checkpoint, settings, module)
            assert weight is not None
            model.get_submodule(module).weight.data = torch.from_numpy(dequantize(weight))
    ids = torch.randint(3, 320, (4, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    return found


@pytest.mark.parametrize("name", ["int4_awq", "fp8", "mxfp8"])
def test_model_of_text_and_images_is_quantized_as_its_text(
    bases: dict[str, Path], made: dict[str, Any], tmp_path: Path, name: str
) -> None:
    quantized(bases["images"], tmp_path / "out", name)
    source, found = (whole_model.tensors_of(path) for path in (bases["images"], tmp_path / "out"))
    text = {key.replace("model.language_model.", "model."): tensor for key, tensor in found.items()}
    encoder = {key: text.pop(key) for key in list(text) if key.startswith("model.visual.")}
    assert (
        whole_model.differing(
            encoder, {key: source[key] for key in source if key.startswith("model.visual.")}
        )
        == []
    )
    # The MTP head and the layers: the same bytes as those of the text model, under the other names
    assert (
        whole_model.differing(
            {key: text[key] for key in text if not key.startswith("mtp.")},
            {
                key: tensor
                for key, tensor in whole_model.tensors_of(made[name].directory).items()
                if "mtp." not in key
            },
        )
        == []
    )
    checkpoint = Checkpoint(tmp_path / "out")
    settings = read_quantization(checkpoint)
    assert settings is not None
    for module in (
        "model.visual.blocks.0.attn.qkv",
        "mtp.layers.0.mlp.down_proj",
        "lm_head",
        "model.language_model.layers.0.linear_attn.in_proj_a",
    ):
        assert settings.rule(module) is None, module
    assert settings.rule("model.language_model.layers.0.linear_attn.in_proj_z") is not None


def test_exclusions_go_by_the_names_on_disk(bases: dict[str, Path], tmp_path: Path) -> None:
    quantized(bases["images"], tmp_path / "out", "fp8", exclude=("*.linear_attn.*",))
    found = whole_model.tensors_of(tmp_path / "out")
    assert (
        found["model.language_model.layers.0.linear_attn.out_proj.weight"].dtype == torch.bfloat16
    )
    assert found["model.language_model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_a_head_of_another_format_leaves_the_names_on_disk(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """Settings of two formats name every Linear, as keys and in groups."""
    quantized(bases["images"], tmp_path / "out", "fp8", lm_head_quantization="nvfp4")
    for file in ("hf_quant_config.json", "config.json"):
        text = (tmp_path / "out" / file).read_text()
        assert "model.language_model.layers.0.mlp.up_proj" in text
        assert '"model.layers.' not in text
    settings = read_quantization(Checkpoint(tmp_path / "out"))
    assert settings is not None
    for module, scheme in (
        ("model.language_model.layers.0.mlp.up_proj", "fp8"),
        ("lm_head", "nvfp4"),
    ):
        rule = settings.rule(module)
        assert rule is not None
        assert rule.scheme.name == scheme


@pytest.mark.parametrize("family", ["text", "images"])
@pytest.mark.parametrize("name", ["fp8", "mxfp8"])
def test_layers_that_the_config_does_not_count_are_refused(
    bases: dict[str, Path], tmp_path: Path, family: str, name: str
) -> None:
    surplus = Path(shutil.copytree(bases[family], tmp_path / "surplus"))
    config = json.loads((surplus / "config.json").read_text())
    (config if family == "text" else config["text_config"]).update(
        num_hidden_layers=3, full_attention_interval=3
    )
    (surplus / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"has tensors of layer 3, but its config\.json has 3 layers"
    ):
        quantized(surplus, tmp_path / "out", name)


def test_broken_checkpoints_are_refused(bases: dict[str, Path], tmp_path: Path) -> None:
    lacking = qwen3_5.copy_without(
        bases["text"], tmp_path / "lacking", "model.layers.0.linear_attn.A_log"
    )
    for name in ("fp8", "mxfp8"):
        with pytest.raises(CheckpointError, match=r"layers\.0\.linear_attn\.A_log \(missing\)"):
            quantized(lacking, tmp_path / "o", name)
    config = json.loads((bases["text"] / "config.json").read_text())
    for change, said in (
        ({"num_hidden_layers": "4"}, "'num_hidden_layers' is '4'"),
        ({"tie_word_embeddings": False}, "has no lm_head.weight"),
        (
            {
                "model_type": "qwen3_5",
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "text_config": [1],
            },
            "'text_config' is",
        ),
    ):
        (lacking / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=said):
            quantized(lacking, tmp_path / "o", "fp8")
    (lacking / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_next"}))
    with pytest.raises(UnsupportedModel):
        quantized(lacking, tmp_path / "o", "fp8")
