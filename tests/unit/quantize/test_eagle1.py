"""EAGLE-1 drafts through `quantize draft`: calibrated on the base's state after its last norm, and
exported as what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.layouts import read_quantization
from edgespec.export.components import ExportOptions, export
from edgespec.graphs.eagle1 import named_tensors
from edgespec.methods.eagle1 import Eagle1Config
from edgespec.modules.base_model import final_hidden_state
from edgespec.modules.eagle1 import Eagle1
from edgespec.quantize import draft, modelopt
from edgespec.quantize.llm import Options
from tests import toys
from tests.reference_eagle1 import Eagle1Reference
from tests.unit.quantize.test_llm import HIDDEN, INNER, VOCAB, Told

pytestmark = pytest.mark.usefixtures("needs_modelopt")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair") / "base"
    return toys.make_base(path, "llama", layers=4, hidden=HIDDEN, intermediate=INNER, vocab=VOCAB)


@pytest.fixture(scope="module")
def source(base: Path) -> Path:
    return toys.make_eagle1(base.parent / "draft", base)


def config_of(path: Path) -> tuple[Checkpoint, Eagle1Config]:
    checkpoint = Checkpoint(path)
    config = detect(checkpoint)
    assert isinstance(config, Eagle1Config)
    return checkpoint, config


@pytest.mark.parametrize("norms", [False, True])
def test_module_computes_what_the_reference_does(base: Path, tmp_path: Path, norms: bool) -> None:
    path = toys.make_eagle1(
        tmp_path, base, "modelopt", first_norm=norms, last_norm=norms, fc_bias=norms, layers=2
    )
    checkpoint, config = config_of(path)
    _, names = named_tensors(checkpoint, config)
    module = Eagle1(config).eval()
    module.load_state_dict(draft.read_weights(checkpoint, Checkpoint(base), names, config))
    reference, states = Eagle1Reference(path, base), torch.randn(9, HIDDEN)
    tokens = list(range(3, 12))
    wanted, _ = reference.forward(tokens, states)
    embeds = reference.embed_tokens[torch.tensor(tokens)]
    with torch.no_grad():
        torch.testing.assert_close(module(states, embeds), wanted, rtol=1e-4, atol=1e-4)


def test_it_is_calibrated_on_the_state_after_the_last_norm(base: Path) -> None:
    model, ids = toys.load_base(base), torch.arange(3, 12)[None]
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(final_hidden_state(model, ids), wanted)


@pytest.mark.parametrize("lm_head", [None, "int4_awq"])
def test_quantized_draft_is_still_one_and_exports(
    base: Path, source: Path, tmp_path: Path, lm_head: str | None
) -> None:
    options = Options("int4_awq", lm_head_quantization=lm_head, num_samples=2, calib_seq_len=32)
    result = draft.quantize_draft(
        str(base), str(source), tmp_path / "out", options, Told(), modelopt.Log()
    )
    checkpoint, config = config_of(tmp_path / "out")
    assert config.own_head == (lm_head is not None)
    found = read_quantization(checkpoint)
    assert found is not None
    assert found.rule("layers.0.mlp.up_proj") is not None
    assert found.rule("fc") is None
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("fc.weight", "fc.bias", "embed_tokens.weight"):
        assert torch.equal(before[name], after[name])
    assert 0.9 < result.manifest.check.logits_cosine < 1
    exported = export(
        str(tmp_path / "out"), tmp_path / "onnx", ExportOptions(base_model_dir=str(base))
    )
    assert exported.role == "draft"
