"""Claims about quantize/draft.py: EAGLE-3 drafts in each format, calibrated on what their base
feeds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization, read_weight
from edgespec.errors import EdgeSpecError, OutputError, PairingError, UnsupportedModel
from edgespec.graphs.eagle3 import named_tensors
from edgespec.methods.eagle3 import Eagle3Config
from edgespec.modules.base_model import aux_hidden_states
from edgespec.modules.eagle3 import Eagle3
from edgespec.quantization.schemes import MADE
from edgespec.quantize import draft, modelopt, work
from edgespec.quantize.llm import Options, Quantized, quantize_llm
from tests import toys
from tests.reference import Eagle3Reference
from tests.unit.quantize.test_llm import HIDDEN, INNER, VOCAB, Told, header, table

pytestmark = pytest.mark.usefixtures("needs_modelopt")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair") / "base"
    return toys.make_base(path, "llama", layers=7, hidden=HIDDEN, intermediate=INNER, vocab=VOCAB)


@pytest.fixture(scope="module")
def drafts(base: Path) -> dict[str, Path]:
    root, more = base.parent, {"hidden": HIDDEN, "intermediate": INNER, "target_hidden_size": True}
    return {
        "eagle": toys.make_draft(root / "eagle", base, "eagle", **more),
        "specforge": toys.make_draft(root / "specforge", base, "specforge", **more),
        "modelopt": toys.make_draft(root / "modelopt", base, "modelopt", **more),
        "speculators": toys.make_draft(
            root / "speculators", base, "speculators", **more, norm_before_residual=True
        ),
    }


def quantized(base: Path, path: Path, out: Path, quantization: str, **more: Any) -> Quantized:
    options = Options(quantization, num_samples=2, calib_seq_len=32, **more)
    return draft.quantize_draft(str(base), str(path), out, options, Told(), modelopt.Log())


def config_of(path: Path) -> tuple[Checkpoint, Eagle3Config]:
    checkpoint = Checkpoint(path)
    config = detect(checkpoint)
    assert isinstance(config, Eagle3Config)
    return checkpoint, config


@pytest.mark.parametrize("layout", ["eagle", "specforge", "modelopt", "speculators"])
def test_module_computes_what_the_reference_does(
    base: Path, drafts: dict[str, Path], layout: str
) -> None:
    checkpoint, config = config_of(drafts[layout])
    _, names = named_tensors(checkpoint, config)
    module = Eagle3(config).eval()
    module.load_state_dict(draft.read_weights(checkpoint, Checkpoint(base), names, config))
    reference = Eagle3Reference(drafts[layout], base)
    features, embeds = torch.randn(9, 3 * HIDDEN), torch.randn(9, HIDDEN)
    mask, places = torch.ones(1, 9, 9, dtype=torch.bool).tril(), torch.arange(9)[None]
    wanted, _, _ = reference.forward(embeds[None], reference.fuse(features[None]), places, mask)
    with torch.no_grad():
        torch.testing.assert_close(module(features, embeds), wanted[0], rtol=1e-4, atol=1e-4)


def test_features_are_the_hidden_states_at_the_taps(base: Path) -> None:
    model, ids = toys.load_base(base), torch.arange(3, 12)[None]
    with torch.no_grad():
        states = model(ids, output_hidden_states=True).hidden_states
        found = aux_hidden_states(model, (2, 3, 4), ids)
    torch.testing.assert_close(found, torch.cat([states[i][0] for i in (2, 3, 4)], dim=-1))


@pytest.mark.parametrize("name", MADE)
def test_every_format_in_modelopts_layout_and_all_else_untouched(
    base: Path, drafts: dict[str, Path], tmp_path: Path, name: str
) -> None:
    source = drafts["eagle"]
    result = quantized(base, source, tmp_path / "out", name)
    expected: dict[str, Any] = {}
    for tensor, entry in header(source).items():
        module = tensor.removesuffix(".weight")
        if not module.endswith("_proj"):
            expected[tensor] = entry
            continue
        for part, (dtype, shape) in table(name, *entry[1]).items():
            expected[f"{module}.{part}"] = ("F32" if dtype == "?" else dtype, shape)
    assert header(tmp_path / "out") == expected
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    for tensor in ("fc.weight", "norm.weight", "lm_head.weight", "d2t"):
        assert torch.equal(before[tensor], after[tensor])
    found = result.manifest.check
    typical = {"fp8": 0.026, "int4_awq": 0.118, "int8_sq": 0.0085, "nvfp4": 0.095, "mxfp8": 0.027}[
        name
    ]
    errors = list(found.weight_errors.values())
    assert sum(errors) / len(errors) == pytest.approx(typical, rel=0.25)
    assert 0.9 < found.logits_cosine < 1


@pytest.mark.parametrize("layout", ["specforge", "modelopt", "speculators"])
def test_each_layout_keeps_its_names_and_records_its_base(
    base: Path, drafts: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    quantized(base, drafts[layout], tmp_path / "out", "fp8", lm_head_quantization="nvfp4")
    checkpoint = Checkpoint(tmp_path / "out")
    quantization = read_quantization(checkpoint)
    assert quantization is not None
    weights = {
        name for name in checkpoint.tensors if name.endswith(("_proj.weight", "lm_head.weight"))
    }
    assert weights == {name for name in Checkpoint(drafts[layout]).tensors if name in weights}
    for name in weights:
        assert read_weight(checkpoint, quantization, name.removesuffix(".weight")) is not None
    assert read_weight(checkpoint, quantization, "fc") is None
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    verifier = config.get("speculators_config", {}).get("verifier", {})
    assert (verifier.get("name_or_path") or config["base_model_name_or_path"]) == str(
        base.resolve()
    )


def test_smoothing_comes_from_the_features_of_the_base(
    base: Path, drafts: dict[str, Path], tmp_path: Path
) -> None:
    """Another base of the same shape gives other vectors: the calibration sees what it feeds."""
    sizes: dict[str, Any] = {"layers": 7, "hidden": HIDDEN, "intermediate": INNER, "vocab": VOCAB}
    other = toys.make_base(tmp_path / "other", "llama", seed=9, **sizes)
    scales = []
    for i, one in enumerate((base, other)):
        quantized(one, drafts["eagle"], tmp_path / f"out{i}", "int8_sq")
        tensors = load_file(tmp_path / f"out{i}" / "model.safetensors")
        scales.append(
            next(
                value for name, value in tensors.items() if name.endswith("o_proj.pre_quant_scale")
            )
        )
    assert not torch.equal(*scales)


def test_what_does_not_belong_together_is_refused(
    base: Path, drafts: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def refused(kind: type[EdgeSpecError], said: str, one: Path, path: Path, **more: Any) -> None:
        with pytest.raises(kind, match=said):
            quantized(one, path, out, "fp8", **more)
        assert not out.exists()

    narrow = toys.make_base(tmp_path / "narrow", "llama", layers=7, hidden=64, vocab=VOCAB)
    refused(PairingError, "hidden states of width 128", narrow, drafts["eagle"])
    other = toys.make_base(
        tmp_path / "other", "llama", layers=7, hidden=HIDDEN, intermediate=INNER, vocab=400
    )
    refused(PairingError, "vocabulary", other, drafts["eagle"])
    refused(UnsupportedModel, "is a base model, not a draft", base, base)
    refused(
        UnsupportedModel, "is an EAGLE-3 draft, not a base", drafts["eagle"], drafts["modelopt"]
    )
    refused(
        UnsupportedModel, "a draft's cache stays as it is", base, drafts["eagle"], fp8_cache=True
    )
    quantized(base, drafts["eagle"], out, "fp8")
    with pytest.raises(UnsupportedModel, match="quantized already"):
        quantized(base, out, tmp_path / "again", "fp8")


@pytest.mark.parametrize("whose", ["base", "draft"])
def test_a_pair_whose_weights_changed_past_the_first_bytes_is_not_there_already(
    base: Path, drafts: dict[str, Path], tmp_path: Path, whose: str
) -> None:
    paths = [
        Path(shutil.copytree(path, tmp_path / name))
        for name, path in (("base", base), ("draft", drafts["eagle"]))
    ]
    quantized(*paths, tmp_path / "out", "fp8")
    assert "already up to date" in quantized(*paths, tmp_path / "out", "fp8").notes[0]
    file = tmp_path / whose / "model.safetensors"
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if name.endswith("up_proj.weight"))[100:] *= 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(OutputError, match="already exists"):
        quantized(*paths, tmp_path / "out", "fp8")


def test_a_draft_is_not_written_over_an_unfinished_base(
    base: Path, drafts: dict[str, Path], tmp_path: Path
) -> None:
    class Stopping(Told):
        def start(self, stage: str, total: int) -> None:
            super().start(stage, total)
            if stage == "export":
                raise KeyboardInterrupt

    options = Options("fp8", num_samples=2, calib_seq_len=32)
    with pytest.raises(KeyboardInterrupt):
        quantize_llm(str(base), tmp_path / "out", options, Stopping(), modelopt.Log())
    with pytest.raises(
        OutputError, match=r"an unfinished run to .*out is of base .*, this one of eagle"
    ):
        quantized(base, drafts["eagle"], tmp_path / "out", "fp8")
    assert len(work.CalibrationWork(work.directory_of(tmp_path / "out")).parts) == 7
