"""A draft model's row: what its config.json keeps, and with which bases it goes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts.component import ComponentConfig
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.config import ModelConfig
from edgespec.contract import Role, canonical_contract
from edgespec.errors import BundleError
from edgespec.export.components import ExportOptions
from edgespec.methods import METHODS, as_draft, find_method, mismatches
from edgespec.methods.draft_model import DraftModelConfig, DraftModelSpec
from edgespec.methods.sides import PLAIN_METHOD
from tests import made, toys


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """config.json of an exported draft."""
    path = tmp_path_factory.mktemp("models")
    base = toys.make_base(path / "base", layers=2, hidden=96)
    draft = toys.make_base(path / "draft", layers=1, max_position=96)
    options = ExportOptions(as_draft="draft_model", base_model_dir=str(base), golden=False)
    out = made.exported(draft, options) / "draft_model" / "config.json"
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def read(raw: dict[str, Any]) -> ComponentConfig:
    return ComponentConfig.from_dict(raw, "config.json")


def test_config_is_written_as_it_was_read(raw: dict[str, Any]) -> None:
    config = read(raw)
    assert json.dumps(config.to_dict()) == json.dumps(raw)
    assert config.spec == DraftModelSpec(max_position=96)
    assert (config.role, config.reads_base) == (Role.DRAFT, False)


def test_graph_is_that_of_a_plain_decoder(raw: dict[str, Any]) -> None:
    shape = read(raw).graph
    plain = canonical_contract(replace(shape, role=Role.LLM))
    contract = canonical_contract(shape)
    assert (contract.inputs, contract.outputs) == (plain.inputs, plain.outputs)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["max_position_embeddings"], None, "max_position_embeddings"),
        (["max_position_embeddings"], 0, "max_position_embeddings"),
        (["engine_role"], "base", "engine_role"),
        (["pair", "num_taps"], 1, "num_taps"),
        (["graph", "base_features"], 64, "base_features"),
        (["graph", "features"], 64, "features"),
        (["draft_vocab_size"], 255, "vocab_size"),
        (["pair"], None, "pair"),
    ],
)
def test_what_is_wrong_is_refused_by_its_key(
    raw: dict[str, Any], path: list[str], value: Any, said: str
) -> None:
    changed = json.loads(json.dumps(raw))
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    if path == ["engine_role"]:
        changed["graph"]["role"], changed["eos_token_id"] = value, 2
    with pytest.raises(BundleError, match=said):
        read(changed)


def test_draft_of_another_method_has_aux_layers(raw: dict[str, Any]) -> None:
    golden = Path(__file__).parents[2] / "golden" / "export_draft_config.json"
    config = json.loads(golden.read_text())
    config["pair"] |= {"num_taps": 0, "tap_ids": None}
    with pytest.raises(BundleError, match="'num_taps' is 0, not positive"):
        read(config)


@pytest.mark.parametrize("method", [PLAIN_METHOD, "eagle3"])
def test_any_base_of_the_same_weights_fits(raw: dict[str, Any], method: str) -> None:
    draft = read(raw)
    assert draft.pair is not None
    golden = Path(__file__).parents[2] / "golden" / "export_base_config.json"
    side = read(json.loads(golden.read_text())).as_base()
    base = replace(side, method=method, vocab_size=999, identity=draft.pair.base_identity)
    assert list(mismatches(base, draft.as_draft())) == []
    (other,) = mismatches(replace(base, identity="ab", origin="ab"), draft.as_draft())
    assert other.topic == "identity"


def test_whole_model_is_a_draft_of_this_method_and_a_draft_stays_what_it_is(
    tmp_path: Path,
) -> None:
    base = toys.make_base(tmp_path / "base", layers=8)
    eagle = detect(open_checkpoint(toys.make_draft(tmp_path / "eagle", base, "eagle")))
    model = detect(open_checkpoint(base))
    assert isinstance(model, ModelConfig)
    drafted = as_draft(model)
    assert isinstance(drafted, DraftModelConfig)
    assert (drafted.method, drafted.model) == ("draft_model", model)
    assert as_draft(eagle) is eagle


def test_other_tools_names_find_it() -> None:
    for name in ("DraftTarget", "Draft_Target", "draft-model", "draft_model"):
        assert find_method(name) is METHODS["draft_model"]
