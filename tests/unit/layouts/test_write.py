"""Drafts in other layouts: the same draft under other names, with the keys that each one's readers
ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.checkpoint.d2t import read_d2t
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.cli.export_draft import FORMATS
from edgespec.config import DraftConfig
from edgespec.errors import EdgeSpecError
from edgespec.layouts.table import LAYOUTS
from edgespec.layouts.write import comparable, export_draft
from tests import toys

Make = Callable[[Path, Path], Path]
MAKERS: dict[str, Make] = {
    "eagle3": lambda p, b: toys.make_draft(p, b, "modelopt", aux_layers=(2, 4, 5), rope_theta=7e5),
    "eagle3-wide": lambda p, b: toys.make_draft(
        p, b, "speculators", fc_norm=True, norm_output=True, norm_before_residual=True, layers=2,
        aux_layers=(1, 3, 6), qk_norm=True, own_embedding=True, rope_spelling="new", rope_theta=5e5,
        rope={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ),
    "eagle1": lambda p, b: toys.make_eagle1(p, b, "eagle"),
    "eagle1-norms": lambda p, b: toys.make_eagle1(
        p, b, "modelopt", first_norm=True, last_norm=True
    ),
    "dflash": lambda p, b: toys.make_dflash(p, b, "z-lab", renamed=True, fused=True),
    "dflash-windows": lambda p, b: toys.make_dflash(
        p, b, "speculators", layer_types=["sliding_attention", "full_attention"], window=8,
        causal=False, draft_vocab=96, aux_layers=(2, 5),
    ),
    "dflash-causal": lambda p, b: toys.make_dflash(
        p, b, "modelopt", causal=True, window=9, use_swa=True
    ),
    "dspark": lambda p, b: toys.make_dspark(p, b, "deepspec", kind="gated"),
    "dspark-modelopt": lambda p, b: toys.make_dspark(p, b, "modelopt", kind="rnn"),
    "medusa": lambda p, b: toys.make_medusa(p, b, "safetensors"),
    "medusa-merged": lambda p, b: toys.make_medusa(p, b, "modelopt"),
    "medusa-shared": lambda p, b: toys.make_medusa(p, b, "shared-head"),
}  # fmt: skip
# What is written, and of it keys that the readers of the layout look for
WRITTEN: list[tuple[str, str, dict[str, Any]]] = [
    ("eagle3", "modelopt", {"eagle_config.eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "architectures": ["LlamaForCausalLMEagle3"], "rope_theta": 7e5, "rope_scaling": None,
        "bos_token_id": 1, "eos_token_id": 2, "mlp_bias": False, "pretraining_tp": 1}),
    ("eagle3", "speculators", {"speculators_model_type": "eagle3", "rope_theta": None,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "norm_before_residual": False,
        "transformer_layer_config.rope_theta": 7e5, "transformer_layer_config.eos_token_id": 2,
        "speculators_config.verifier.architectures": ["Qwen3ForCausalLM"]}),
    ("eagle3", "sglang", {"eagle_config.eagle_aux_hidden_state_layer_ids": [1, 3, 4]}),
    ("eagle3", "eagle", {"eagle_config": None, "draft_vocab_size": 96, "eos_token_id": 2}),
    ("eagle3-wide", "speculators", {"fc_norm": True, "norm_output": True,
        "transformer_layer_config.model_type": "qwen3",
        "transformer_layer_config.rope_scaling.factor": 4.0}),
    ("eagle3-wide", "modelopt", {"eagle_config.return_hidden_post_norm": True}),
    ("eagle1", "modelopt", {"eagle_config.use_aux_hidden_state": False}),
    ("eagle1", "eagle", {"bias": True}),
    ("eagle1-norms", "modelopt", {"eagle_config.use_last_layernorm": True}),
    ("dflash", "modelopt", {"dflash_config.causal": False, "num_target_layers": 8}),
    ("dflash", "z-lab", {"dflash_config.target_layer_ids": [1, 5], "auto_map": None}),
    ("dflash", "speculators", {"aux_hidden_state_layer_ids": [2, 6], "mask_token_id": 255}),
    ("dflash-windows", "speculators", {"sliding_window_non_causal": True}),
    ("dflash-causal", "z-lab", {"is_causal": None}),
    ("dflash-causal", "modelopt", {"dflash_config.swa_window_size": 9}),
    ("dspark", "modelopt", {"dflash_config.projector_type": "dspark"}),
    ("dspark", "speculators", {"markov_rank": 8, "sample_from_anchor": True}),
    ("dspark-modelopt", "deepspec", {"architectures": ["Qwen3DSparkModel"]}),
    ("medusa", "medusa", {"medusa_num_heads": 3, "medusa_num_layers": 1}),
    ("medusa-shared", "medusa", {"version": "2"}),
]  # fmt: skip
IDS = [f"{kind}:{layout}" for kind, layout, _ in WRITTEN]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("layouts") / "base", "qwen3", layers=8)


def at(config: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        config = (config or {}).get(part)  # type: ignore[assignment]
    return config


@pytest.mark.parametrize(
    ("kind", "layout", "keys"), WRITTEN, ids=[f"{r[0]}-{r[1]}" for r in WRITTEN]
)
def test_a_draft_is_the_same_in_another_layout(
    kind: str, layout: str, keys: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    old = MAKERS[kind](tmp_path / "old", base)
    out = tmp_path / "new"
    export_draft(str(old), out, layout, str(base))
    sides = [open_checkpoint(path) for path in (old, out)]
    one, other = (detect(side) for side in sides)
    assert isinstance(one, DraftConfig)
    assert isinstance(other, DraftConfig)
    assert comparable(one) == comparable(other)
    if 0 < one.draft_vocab_size < one.vocab_size:
        maps = [read_d2t(side, config) for side, config in zip(sides, (one, other), strict=True)]
        assert maps[0] is not None
        assert maps[1] is not None
        assert maps[0].tolist() == maps[1].tolist()
    assert {key: at(sides[1].config, key) for key in keys} == keys
    weights = [
        sorted(t.numpy().tobytes() for n, t in load(path).items() if n not in ("d2t", "t2d"))
        for path in (old, out)
    ]
    if kind != "dflash":  # whose Linears were fused
        assert weights[0] == weights[1]


def load(path: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


def test_names_are_those_of_each_layout(base: Path, tmp_path: Path) -> None:
    found = {}
    for kind, layout in (
        ("eagle3", "sglang"),
        ("eagle3", "modelopt"),
        ("dspark", "modelopt"),
        ("medusa-merged", "medusa"),
    ):
        old = MAKERS[kind](tmp_path / f"{kind}-{layout}", base)
        done = export_draft(str(old), tmp_path / f"{kind}-{layout}-new", layout, str(base))
        found[kind, layout] = {*load_file(done.directory / done.file)}
    assert {"midlayer.hidden_norm.weight", "t2d", "d2t"} <= found["eagle3", "sglang"]
    assert "layers.0.hidden_norm.weight" in found["eagle3", "modelopt"]
    assert "t2d" not in found["eagle3", "modelopt"]
    assert {"markov_w1.weight", "confidence_proj.bias", "gate_proj.bias"} <= found[
        "dspark", "modelopt"
    ]
    assert found["medusa-merged", "medusa"] == {
        f"{i}.{name}" for i in range(3) for name in ("0.linear.weight", "0.linear.bias", "1.weight")
    }


@pytest.mark.parametrize(("kind", "layout", "said"), [
    ("eagle3-wide", "sglang", "cannot say that a draft has more than one layer"),
    ("eagle3", "z-lab", "the layout z-lab is of DFlash; this is an EAGLE-3 draft"),
    ("eagle1-norms", "eagle", "a norm before its first layer"),
    ("dflash-windows", "modelopt", "a vocabulary of its own"),
])  # fmt: skip
def test_what_a_layout_cannot_say_is_refused(
    kind: str, layout: str, said: str, base: Path, tmp_path: Path
) -> None:
    old = MAKERS[kind](tmp_path / "old", base)
    with pytest.raises(EdgeSpecError, match=said):
        export_draft(str(old), tmp_path / "new", layout, str(base))
    assert not (tmp_path / "new").exists()


def test_aux_layers_that_no_key_names_are_refused(base: Path, tmp_path: Path) -> None:
    old = toys.make_draft(tmp_path / "old", base, "modelopt", aux_layers=(1, 4, 6))
    with pytest.raises(EdgeSpecError, match=r"has the aux layers \[1, 4, 6\]"):
        export_draft(str(old), tmp_path / "new", "eagle", str(base))


def test_the_base_is_asked_for_and_must_fit(base: Path, tmp_path: Path) -> None:
    old = toys.make_draft(tmp_path / "old", base, "modelopt")
    with pytest.raises(EdgeSpecError, match=r"the base of .*old is not known"):
        export_draft(str(old), tmp_path / "new", "speculators", None)
    other = toys.make_base(tmp_path / "other", "qwen3", vocab=300, layers=8)
    with pytest.raises(EdgeSpecError, match="300"):
        export_draft(str(old), tmp_path / "new", "speculators", str(other))
    with pytest.raises(EdgeSpecError, match="is a base"):
        export_draft(str(base), tmp_path / "new", "speculators", str(base))


def test_the_command_has_all_layouts() -> None:
    assert [*FORMATS] == [*LAYOUTS]


def test_offsets_in_order_of_frequency_keep_their_order(base: Path, tmp_path: Path) -> None:
    old = toys.make_draft(tmp_path / "old", base, "modelopt")
    file = old / "model.safetensors"
    tensors = load_file(file)
    ids = (tensors["d2t"] + torch.arange(96)).flip(0)
    save_file(tensors | {"d2t": ids - torch.arange(96)}, file)
    export_draft(str(old), tmp_path / "new", "sglang", str(base))
    new = load_file(tmp_path / "new" / "model.safetensors")
    assert torch.equal(new["d2t"] + torch.arange(96), ids)
    assert sorted(ids.tolist()) == new["t2d"].nonzero().flatten().tolist()
    assert json.loads((tmp_path / "new" / "config.json").read_text())["vocab_size"] == 256


@pytest.mark.parametrize("name", ["plain", "windowed", "causal", "dspark", "dspark-rnn"])
def test_modelopts_own_drafts_are_written_as_it_writes_them(
    name: str, modelopt_drafts: Path, tmp_path: Path
) -> None:
    """By way of another layout, to the last name and key; ours names base and ends besides."""
    old, base = modelopt_drafts / name, modelopt_drafts / "base"
    middle = tmp_path / "speculators"
    export_draft(str(old), middle, "speculators", str(base))
    export_draft(str(middle), tmp_path / "new", "modelopt", str(base))
    theirs, ours = (open_checkpoint(path) for path in (old, tmp_path / "new"))
    assert {*theirs.tensors} == {*ours.tensors}
    besides = {"bos_token_id": 1, "eos_token_id": 2, "base_model_name_or_path": str(base)}
    assert ours.config == theirs.config | besides
