"""Claims about component.py and backends/engine_config.py: what is written is read again, and what
is wrong is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.engine_config import EngineConfig
from edgespec.component import ComponentConfig
from edgespec.config import RopeConfig
from edgespec.contract import GraphShape, RecurrentShape, Role
from edgespec.errors import BundleError

GOLDEN = Path(__file__).parents[1] / "golden"
EXPORTS = ("export_base_config.json", "export_draft_config.json")
ENGINES = ("engines_base_config.json", "engines_draft_config.json")


def golden(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((GOLDEN / name).read_text())
    return value


@pytest.mark.parametrize("name", EXPORTS)
def test_config_of_an_export_is_written_as_it_was_read(name: str) -> None:
    raw = golden(name)
    assert json.dumps(ComponentConfig.from_dict(raw, name).to_dict()) == json.dumps(raw)


@pytest.mark.parametrize("name", ENGINES)
def test_config_of_an_engine_is_written_as_it_was_read(name: str) -> None:
    raw = golden(name)
    assert json.dumps(EngineConfig.from_dict(raw, name).to_dict()) == json.dumps(raw)


@pytest.mark.parametrize(
    "rope",
    [
        {"kind": "linear", "factor": 8.0},
        {"kind": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ],
)
def test_config_with_two_masks_and_two_ropes_is_written_as_it_was_read(
    rope: dict[str, Any],
) -> None:
    raw = golden("export_base_config.json")
    raw["graph"] |= {"sliding": True, "local_rotary_dim": 16}
    raw["sliding_window"] = 7
    local = dict(raw["rope"])
    raw["rope"] |= rope
    found = ComponentConfig.from_dict({**raw, "local_rope": local}, "config.json")
    assert found.local_rope is not None
    assert (found.sliding_window, found.graph.sliding, found.local_rope.kind) == (
        7,
        True,
        "default",
    )
    assert json.loads(json.dumps(found.to_dict())) == {**raw, "local_rope": local}
    with pytest.raises(BundleError, match="local_rope"):
        ComponentConfig.from_dict(raw, "config.json")


WRONG: list[tuple[str, list[str], Any]] = [
    ("engines_base_config.json", ["spec_decode_type"], "eagle9"),
    ("engines_base_config.json", ["engine_role"], "judge"),
    ("engines_base_config.json", ["engine_role"], ["base"]),
    ("engines_base_config.json", ["spec_decode_type"], {}),
    ("engines_base_config.json", ["graph"], None),
    ("engines_base_config.json", ["graph", "head_dim"], "16"),
    ("engines_base_config.json", ["graph", "role"], "draft"),
    ("engines_base_config.json", ["rope"], 5),
    ("engines_base_config.json", ["rope", "theta"], None),
    ("engines_base_config.json", ["rope", "colour"], 1),
    ("engines_base_config.json", ["sliding_window"], "x"),
    ("engines_base_config.json", ["vocab_size"], 1e10),
    ("engines_base_config.json", ["eos_token_id"], "end"),
    ("engines_base_config.json", ["eagle_hidden_state_layers"], [2, "four"]),
    ("engines_base_config.json", ["eagle_hidden_state_layers"], None),
    ("engines_base_config.json", ["builder_config"], None),
    ("engines_base_config.json", ["builder_config", "max_batch_size"], 0),
    ("engines_base_config.json", ["weights", "scheme"], 4),
    ("engines_draft_config.json", ["pair"], []),
    ("engines_draft_config.json", ["pair", "num_taps"], -3),
    ("engines_draft_config.json", ["draft_vocab_size"], None),
]


@pytest.mark.parametrize(("name", "path", "value"), WRONG)
def test_what_is_wrong_in_a_config_is_refused_by_its_key(
    name: str, path: list[str], value: Any
) -> None:
    raw = golden(name)
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(BundleError) as caught:
        EngineConfig.from_dict(raw, "config.json")
    assert path[-1] in caught.value.what
    assert "gain" in caught.value.remedy  # export, or build, again


def test_what_to_dict_gives_is_read_again_without_a_file() -> None:
    """Also the tuples that JSON would make lists of."""
    recurrent = RecurrentShape((0, 2), 2, 4, 16, 16, 4)
    graph = GraphShape(Role.LLM, 64, 4, 2, 16, 16, 256, recurrent=recurrent)
    config = ComponentConfig(
        model="Hybrid",
        method=None,
        role=Role.LLM,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope=RopeConfig(1e4, 16),
        identity="x",
        graph=graph,
        max_position=128,
    )
    assert ComponentConfig.from_dict(config.to_dict(), "here") == config


def test_config_without_the_key_of_its_end_tokens_is_refused() -> None:
    raw = golden("export_base_config.json")
    del raw["eos_token_id"]
    with pytest.raises(BundleError, match="'eos_token_id' is missing"):
        ComponentConfig.from_dict(raw, "config.json")
    assert ComponentConfig.from_dict(raw | {"eos_token_id": []}, "config.json").eos_token_ids == ()
