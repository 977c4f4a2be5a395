"""Claims about JetSpec's configurations: what its authors publish is read, and what only has the
name is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.errors import BundleError, CheckpointError, EdgeSpecError, UnsupportedModel
from edgespec.methods import METHODS
from edgespec.methods.block_draft import BlockDraftConfig
from edgespec.methods.block_method import spec_of
from edgespec.methods.jetspec import read_spec, write_spec
from edgespec.safe_read.fields import BundleFields
from tests import toys


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("jetspec") / "base", "qwen3", layers=8)


def found(path: Path) -> BlockDraftConfig:
    config = detect(open_checkpoint(path))
    assert isinstance(config, BlockDraftConfig)
    return config


def edited(path: Path, inner: dict[str, Any] | None = None, **top: Any) -> Path:
    """A change to `...` takes the key out."""
    config = json.loads((path / "config.json").read_text())
    config["dflash_config"] |= inner or {}
    config |= top
    for place in (config, config["dflash_config"]):
        for key in [key for key, value in place.items() if value is ...]:
            del place[key]
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("section", ["dflash_config", "jetspec_config"])
def test_a_published_draft_is_read(base: Path, tmp_path: Path, section: Any) -> None:
    draft = found(toys.make_jetspec(tmp_path, base, section=section, aux_layers=(2, 6)))
    assert (draft.method, draft.layout) == ("jetspec", "jetspec")
    assert (draft.aux_layer_ids, draft.block_size, draft.mask_token_id) == ((2, 6), 4, 255)
    assert (draft.windows, draft.causal) == ((None, None), (True, True))
    assert (draft.own_embedding, draft.own_head, draft.num_drafts) == (False, False, 3)


def test_windows_are_kept_and_every_layer_is_causal(base: Path, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    draft = found(toys.make_jetspec(tmp_path, base, layer_types=kinds, window=6))
    assert (draft.windows, draft.causal) == ((6, None), (True, True))


def test_a_head_that_is_not_causal_is_a_dflash_draft(base: Path, tmp_path: Path) -> None:
    path = edited(toys.make_jetspec(tmp_path, base), {"causal_head": False})
    assert (found(path).method, found(path).causal) == ("dflash", (False, False))


@pytest.mark.parametrize(
    ("inner", "top", "said"),
    [
        ({"causal": False}, {}, r"'causal_head' is true and 'causal' is false"),
        ({}, {"is_causal": False}, r"'causal_head' is true and 'is_causal' is false"),
        ({"causal_head": ...}, {"architectures": ["JetSpecDraftModel"]}, "'causal_head' is not"),
        ({"causal_head": "yes"}, {}, "'causal_head' is 'yes', not true or false"),
        ({"mask_tokens_id": 3}, {}, "nearest is 'mask_token_id'"),
        ({}, {"jetspec_config": {"causal_head": True}}, "both jetspec_config and dflash_config"),
        ({"block_size": 6}, {}, "'block_size' is 4 at the top level and 6"),
    ],
)
def test_contradictions_are_named(
    base: Path, tmp_path: Path, inner: dict[str, Any], top: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        found(edited(toys.make_jetspec(tmp_path, base), inner, **top))


@pytest.mark.parametrize(
    ("inner", "top", "said"),
    [
        ({"target_hidden_size": 96}, {}, "initialise the adapter between them at random"),
        ({}, {"speculators_model_type": "jetspec"}, "no release of it has one"),
        ({"selector_rank": 8}, {}, "DFlash2 .* a selector walks"),
        ({"attention_sink_bias": True}, {}, "attention sinks"),
        ({"shift_label": True}, {}, "one further than here"),
    ],
)
def test_what_only_has_the_name_is_refused(
    base: Path, tmp_path: Path, inner: dict[str, Any], top: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        found(edited(toys.make_jetspec(tmp_path, base), inner, **top))


def test_an_export_keeps_what_it_reads(base: Path, tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    config = found(toys.make_jetspec(tmp_path, base, layer_types=kinds, window=6))
    keys = {"vocab_size": 256, "num_hidden_layers": 2}
    for draft, role in ((True, "draft"), (False, "base")):
        spec = spec_of(config, draft=draft)
        written = write_spec(spec)
        assert written["jetspec_config"]["causal_head"] is True
        fields = BundleFields(keys | {"engine_role": role} | written, "config.json")
        assert read_spec(fields) == spec


@pytest.mark.parametrize("change", [{"causal_head": False}, {"causal": [True, False]}])
def test_an_export_whose_rows_are_not_causal_is_refused(
    base: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    spec = spec_of(found(toys.make_jetspec(tmp_path, base)), draft=True)
    keys = {"vocab_size": 256, "num_hidden_layers": 2, "engine_role": "draft"}
    inner = write_spec(spec)["jetspec_config"] | change
    with pytest.raises(BundleError, match="causal_head"):
        read_spec(BundleFields(keys | {"jetspec_config": inner}, "config.json"))


@pytest.mark.parametrize("make", [toys.make_jetspec, toys.make_dspark])
def test_nonsense_in_any_key_never_ends_in_a_traceback(
    base: Path, tmp_path: Path, make: Any
) -> None:
    path = make(tmp_path, base)
    config = json.loads((path / "config.json").read_text())
    nonsense = (None, True, -1, 0, 3, 1e300, float("nan"), "x", [], [[]], [None], {}, 2**70)
    tried = 0
    for place in (config, config.get("dflash_config", {})):
        for key in list(place):
            kept = place[key]
            for value in nonsense:
                place[key] = value
                (path / "config.json").write_text(json.dumps(config))
                try:
                    detect(open_checkpoint(path))
                except EdgeSpecError:
                    tried += 1
            place[key] = kept
    assert tried > 50


def test_the_method_says_how_its_base_is_exported() -> None:
    assert list(METHODS["jetspec"].export_params) == ["jetspec_base", "jetspec_draft_dir"]
