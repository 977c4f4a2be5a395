"""Claims about DFlash drafts in quantize/draft.py: each format, calibrated on blocks behind what
their base says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.backends.build import build
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.contract import Limits
from edgespec.errors import PairingError, UnsupportedModel
from edgespec.export.components import ExportOptions, export
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.modules.block_draft import BlockDraftModule
from edgespec.prompts import SamplingParams
from edgespec.quantization.schemes import MADE
from edgespec.quantize import draft, modelopt
from edgespec.quantize.llm import Options, Quantized
from edgespec.quantize.table import QUANTIZABLE, blocks_of
from edgespec.runtime.engine import Engine
from tests import toys
from tests.parity.dflash_reference import DFlashReference
from tests.unit.quantize.test_llm import HIDDEN, INNER, VOCAB, Told

PER_COMMIT = ("fp8", "int4_awq")  # in each format, test_draft.py quantizes an EAGLE draft
MIXED = ["sliding_attention", "full_attention"]
LIMITS = Limits(
    max_input_len=32, max_kv_cache_capacity=64, max_verify_tree_size=8, max_draft_tree_size=8
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair") / "base"
    return toys.make_base(path, "qwen3", layers=6, hidden=HIDDEN, intermediate=INNER, vocab=VOCAB)


def made(base: Path, path: Path, layout: toys.Layout = "z-lab", **keys: Any) -> Path:
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": INNER, "block_size": 8}
    return toys.make_dflash(path, base, layout, **(sizes | keys))


@pytest.fixture(scope="module")
def plain(base: Path) -> Path:
    return made(base, base.parent / "z-lab")


def quantized(base: Path, path: Path, out: Path, quantization: str, **more: Any) -> Quantized:
    options = Options(quantization, num_samples=2, calib_seq_len=32, **more)
    return draft.quantize_draft(str(base), str(path), out, options, Told(), modelopt.Log())


def config_of(path: Path) -> tuple[Checkpoint, BlockDraftConfig]:
    checkpoint = Checkpoint(path)
    config = detect(checkpoint)
    assert isinstance(config, BlockDraftConfig)
    return checkpoint, config


def module_of(base: Path, path: Path) -> BlockDraftModule:
    checkpoint, config = config_of(path)
    named, names = QUANTIZABLE[config.method].names(checkpoint, config)
    module = BlockDraftModule(config).eval()
    module.load_state_dict(draft.read_weights(named, Checkpoint(base), names, config))
    return module


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"layer_types": MIXED, "window": 4},
        {"use_swa": True, "window": 5, "causal": True},
        {"fused": True, "renamed": True, "attention_bias": True, "rope_theta": 1e6},
        {"layout": "speculators", "aux_layers": (2, 5), "draft_vocab": 96},
    ],
    ids=str,
)
def test_module_computes_what_the_reference_does(
    base: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    path = made(base, tmp_path / "draft", **keys)
    module, reference = module_of(base, path), DFlashReference(path, base)
    features = torch.randn(9, len(reference.aux_layers) * HIDDEN)
    embeds = reference.embed_tokens[torch.tensor([11, *[reference.mask_token] * 7])]
    with torch.no_grad():
        found = module(features, embeds)
    torch.testing.assert_close(found, reference.block(features, 11, 8), rtol=1e-4, atol=1e-4)


def test_a_module_of_halves_takes_features_beyond_their_range(base: Path, plain: Path) -> None:
    module = module_of(base, plain)
    embeds = torch.randn(8, HIDDEN)
    features = torch.full((5, 2 * HIDDEN), 3e4)
    with torch.no_grad():
        wanted = module(features, embeds)
        found = module.half()(features, embeds.half())
    assert found.isfinite().all()
    assert torch.nn.functional.cosine_similarity(found.float(), wanted, dim=-1).min() > 0.99


def test_blocks_begin_with_a_known_token_behind_all_that_came_before(plain: Path) -> None:
    _, config = config_of(plain)
    ids, table = torch.arange(100, 120), torch.arange(VOCAB)[:, None] * torch.ones(1, HIDDEN)
    features = torch.randn(20, 2 * HIDDEN)
    blocks = blocks_of(config, features, ids, table)
    assert [len(context) for context, _ in blocks] == [4, 9, 14, 19]
    for context, block in blocks:
        assert torch.equal(context, features[: len(context)])
        assert block[:, 0].tolist() == [
            100 + len(context),
            *[config.mask_token_id] * (config.block_size - 1),
        ]
    assert blocks_of(config, features[:2], ids[:2], table)[0][0].shape[0] == 1


@pytest.mark.usefixtures("needs_modelopt")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in PER_COMMIT else pytest.mark.deep) for name in MADE],
)
def test_every_format_goes_through_export_and_build_and_stays_lossless(
    base: Path, plain: Path, tmp_path: Path, name: str
) -> None:
    result = quantized(base, plain, tmp_path / "out", name)
    before, after = (
        load_file(plain / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    for tensor, values in before.items():
        if not tensor.endswith("_proj.weight"):
            assert torch.equal(values, after[tensor])
    checkpoint, config = config_of(tmp_path / "out")
    assert (config.own_head, config.block_size) == (False, 8)
    quantization = read_quantization(checkpoint)
    assert quantization is not None
    rounded = [
        tensor.removesuffix(".weight") for tensor in before if tensor.endswith("_proj.weight")
    ]
    assert len(rounded) == 2 * 7
    for module in rounded:
        weight = read_weight(checkpoint, quantization, module)
        assert weight is not None
        assert weight.scheme.name == name
    assert read_weight(checkpoint, quantization, "fc") is None
    found = result.manifest.check
    assert 0.9 < found.logits_cosine < 1
    assert found.num_tokens % 8 == 0
    export(str(base), tmp_path, ExportOptions(base_for="dflash", draft_dir=str(tmp_path / "out")))
    export(
        str(base),
        tmp_path,
        ExportOptions(draft_for="dflash", draft_dir=str(tmp_path / "out")),
    )
    for component in ("llm", "dflash_draft"):
        build(tmp_path / component, tmp_path / "engine", LIMITS)
    with Engine(tmp_path / "engine") as engine:
        sampling, prompt = (
            SamplingParams(temperature=0.0, max_generate_length=20),
            list(range(5, 14)),
        )
        assert (
            engine.generate(prompt, sampling).token_ids
            == engine.plainly(prompt, sampling).token_ids
        )


@pytest.mark.usefixtures("needs_modelopt")
def test_the_guides_command_gives_the_draft_a_quantized_head_of_its_own(
    base: Path, plain: Path, tmp_path: Path
) -> None:
    result = quantized(base, plain, tmp_path / "out", "nvfp4", lm_head_quantization="nvfp4")
    assert "an lm_head of its own" in result.notes[-1]
    checkpoint, config = config_of(tmp_path / "out")
    assert config.own_head
    quantization = read_quantization(checkpoint)
    assert quantization is not None
    weight = read_weight(checkpoint, quantization, "lm_head")
    assert weight is not None
    assert (weight.scheme.name, weight.shape) == ("nvfp4", (VOCAB, HIDDEN))
    assert result.manifest.check.weight_errors["lm_head"] < 0.12
    done = export(str(tmp_path / "out"), tmp_path, ExportOptions(base_model_dir=str(base)))
    assert any("15 Linears" in note for note in done.notes)
    assert build(done.directory, tmp_path / "engine", LIMITS).golden_cosine is not None


@pytest.mark.usefixtures("needs_modelopt")
def test_fused_and_renamed_tensors_are_written_under_the_authors_names(
    base: Path, tmp_path: Path
) -> None:
    path = made(base, tmp_path / "draft", fused=True, renamed=True)
    quantized(base, path, tmp_path / "out", "fp8")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.0.self_attn.k_proj.weight_scale",
    } <= names
    assert not any("qkv" in name or "context" in name for name in names)
    config_of(tmp_path / "out")


@pytest.mark.usefixtures("needs_modelopt")
def test_a_head_and_a_map_of_its_own_stay_with_the_draft(base: Path, tmp_path: Path) -> None:
    path = made(
        base,
        tmp_path / "draft",
        "speculators",
        aux_layers=(2, 5),
        draft_vocab=96,
        own_embedding=True,
    )
    quantized(base, path, tmp_path / "out", "int4_awq", lm_head_quantization="int4_awq")
    before, after = (
        load_file(path / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    for name in ("d2t", "embed_tokens.weight", "fc.weight"):
        assert torch.equal(before[name], after[name])
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["speculators_config"]["verifier"]["name_or_path"] == str(base.resolve())
    assert export(str(tmp_path / "out"), tmp_path, ExportOptions()).role == "draft"


@pytest.mark.usefixtures("needs_modelopt")
def test_scales_come_from_the_features_of_the_base(base: Path, plain: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"layers": 6, "hidden": HIDDEN, "intermediate": INNER, "vocab": VOCAB}
    other = toys.make_base(tmp_path / "other", "qwen3", seed=9, **sizes)
    scales = []
    for i, one in enumerate((base, other)):
        quantized(one, plain, tmp_path / f"out{i}", "int8_sq")
        scales.append(
            load_file(tmp_path / f"out{i}" / "model.safetensors")[
                "layers.0.self_attn.k_proj.pre_quant_scale"
            ]
        )
    assert not torch.equal(*scales)


@pytest.mark.usefixtures("needs_modelopt")
def test_a_hybrid_base_feeds_its_draft(tmp_path: Path) -> None:
    base = toys.make_qwen3_5(
        tmp_path / "base", layers=8, hidden=HIDDEN, intermediate=INNER, images=True
    )
    path = made(base, tmp_path / "draft")
    result = quantized(base, path, tmp_path / "out", "fp8", lm_head_quantization="fp8")
    assert result.manifest.check.logits_cosine > 0.99


def test_what_does_not_belong_together_is_refused(base: Path, plain: Path, tmp_path: Path) -> None:
    shallow = toys.make_base(
        tmp_path / "shallow", "qwen3", layers=5, hidden=HIDDEN, intermediate=INNER, vocab=VOCAB
    )
    for one, error, said, more in (
        (shallow, PairingError, "has 5 layers", {}),
        (base, UnsupportedModel, "a draft's cache stays as it is", {"fp8_cache": True}),
        (base, UnsupportedModel, "names no Linear", {"exclude": ("fc",)}),
    ):
        with pytest.raises(error, match=said):
            quantized(one, plain, tmp_path / "out", "fp8", **more)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("needs_modelopt")
def test_an_fc_that_somebody_else_quantized_is_not_exported(
    base: Path, plain: Path, tmp_path: Path
) -> None:
    """Its weights are rounded like a projection's, under the settings of one."""
    quantized(base, plain, tmp_path / "out", "fp8")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    weight = tensors["fc.weight"]
    scale = weight.abs().max() / 448
    tensors |= {"fc.weight": (weight / scale).to(torch.float8_e4m3fn), "fc.weight_scale": scale}
    tensors["fc.input_scale"] = torch.tensor(0.1)
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "hf_quant_config.json"):
        file = tmp_path / "out" / name
        settings = json.loads(file.read_text())
        inside = (
            settings["quantization_config"] if name == "config.json" else settings["quantization"]
        )
        for key in ("ignore", "exclude_modules"):
            if key in inside:
                inside[key] = [one for one in inside[key] if "fc" not in one]
        file.write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=r"fc of .* is quantized"):
        export(str(tmp_path / "out"), tmp_path, ExportOptions(base_model_dir=str(base)))
