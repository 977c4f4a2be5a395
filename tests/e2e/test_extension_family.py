"""A family that the package does not know, added by one row of the public table: Seed-OSS, which is
Llama with a bias at the output of attention that has a key of its own.

It goes the whole way, from its checkpoint to answers with drafts, and no file of the package is
touched. What a row is: docs/add_a_family.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.backends.registry import open_runner
from edgespec.config import DecoderConfig
from edgespec.config.fields import Fields
from edgespec.contract import Role
from edgespec.families import FAMILIES, Family
from edgespec.families.base import read_attention, read_decoder, read_layer
from edgespec.rope import RopeTable
from edgespec.runtime.lanes.decoder import CachedDecoder
from edgespec.runtime.lanes.embedding import EmbeddingTable
from tests import toys
from tests.e2e.workshop import Cli, cli
from tests.one_lane import OneLane
from tests.toys.files import random_tensors, save, write_json
from tests.toys.tokenizer import write_tokenizer

__all__ = ["cli"]

NAME = "SeedOssForCausalLM"
SIZES = ("--max-input-len", "48", "--max-kv-cache-capacity", "64")


def seed_oss(fields: Fields) -> DecoderConfig:
    """The layers of a Seed-OSS configuration."""
    attention = read_attention(
        fields,
        128,
        qkv_bias=fields.flag("attention_bias", True),
        o_bias=fields.flag("attention_out_bias", False),
    )
    mlp_bias = fields.flag("mlp_bias", False)
    return read_decoder(fields, read_layer(fields, attention, mlp_bias=mlp_bias))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint, its tensors named by transformers."""
    from transformers import AutoModelForCausalLM, SeedOssConfig

    path = tmp_path_factory.mktemp("seed_oss") / "base"
    path.mkdir()
    config = SeedOssConfig(
        attention_bias=True,
        attention_out_bias=True,
        bos_token_id=1,
        eos_token_id=2,
        head_dim=32,
        hidden_size=64,
        intermediate_size=96,
        max_position_embeddings=256,
        num_attention_heads=4,
        num_hidden_layers=7,
        num_key_value_heads=2,
        vocab_size=256,
    )
    raw: dict[str, Any] = config.to_dict() | {"architectures": [NAME], "dtype": "float32"}
    write_json(path / "config.json", raw)
    write_json(path / "generation_config.json", {"eos_token_id": 2})
    write_tokenizer(path, 256, 256)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    save(path, random_tensors(shapes, 0, "float32"), 1)
    return path


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, NAME, Family("Seed-OSS", "seed_oss", seed_oss))


def test_without_the_row_the_family_is_unknown(base: Path, cli: Cli, tmp_path: Path) -> None:
    refused = cli("export", base, tmp_path / "onnx")
    assert refused.code == 3
    assert NAME in refused.err


@pytest.mark.usefixtures("family")
def test_one_row_takes_a_family_from_its_checkpoint_to_answers(
    base: Path, cli: Cli, tmp_path: Path
) -> None:
    draft = toys.make_draft(tmp_path / "draft", base, "eagle")
    assert "7 layers, hidden 64" in cli("inspect", base).out
    assert "EAGLE-3: fits" in cli("check", base, draft).out
    parts = {"base": (base, "--eagle-base"), "draft": (draft, "--base-model-dir", base)}
    for name, (source, *flags) in parts.items():
        done = cli("export", source, tmp_path / "onnx" / name, *flags)
        assert done.code == 0, done.err
        onnx = tmp_path / "onnx" / name / "llm"
        line = ("--onnx-dir", onnx, "--engine-dir", tmp_path / "engines")
        assert "golden outputs reproduced" in cli("build", *line, *SIZES).out
    request = {"messages": [{"role": "user", "content": "the small boat"}]}
    written = {"requests": [request], "max_generate_length": 16, "temperature": 0.0}
    (tmp_path / "input.json").write_text(json.dumps(written))
    files = ("--input-file", tmp_path / "input.json", "--output-file", tmp_path / "output.json")
    told = cli(
        "infer", "--engine-dir", tmp_path / "engines", *files, "--spec-decode", "--check-lossless"
    )
    assert told.code == 0, told.err
    assert json.loads((tmp_path / "output.json").read_text())["responses"]
    compare_with_transformers(base, tmp_path / "engines")


def compare_with_transformers(base: Path, engine_dir: Path) -> None:
    """Logits of a prompt, in float32."""
    runner, config = open_runner(engine_dir, Role.BASE)
    model = toys.load_base(base)
    ids = np.random.default_rng(0).integers(3, 256, 20)
    with torch.no_grad():
        wanted = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    rope = FAMILIES[NAME].decoder(Fields(json.loads((base / "config.json").read_text()), "")).rope
    table = EmbeddingTable(engine_dir / "embedding.safetensors", config.component)
    decoder = OneLane(CachedDecoder(runner, table, RopeTable.of(rope, runner.capacity)))
    found = decoder.causal(ids, np.arange(20)).logits[0]
    assert np.abs(found - wanted).max() <= 2e-4
    runner.close()
