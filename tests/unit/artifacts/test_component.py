"""Claims about component.py and backends/engine_config.py: what is written is read again, and what
is wrong is refused by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.engine_config import EngineConfig
from edgespec.config import RopeConfig
from edgespec.contract import GraphShape, RecurrentShape, Role, image_widths
from edgespec.errors import BundleError

GOLDEN = Path(__file__).parents[2] / "golden"
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
        {"mrope_section": [2, 3, 3], "mrope_interleaved": True},
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


def test_config_of_a_base_that_takes_images_is_written_as_it_was_read() -> None:
    raw = golden("export_base_config.json")
    raw["graph"]["deepstack"] = 3
    found = ComponentConfig.from_dict(raw, "config.json")
    assert image_widths(found.graph) == {"deepstack_embeds": 3 * found.hidden_size}
    assert json.loads(json.dumps(found.to_dict())) == raw


WRONG: list[tuple[str, list[str], Any]] = [
    ("engines_base_config.json", ["spec_decode_type"], "eagle9"),
    ("engines_base_config.json", ["engine_role"], "judge"),
    ("engines_base_config.json", ["engine_role"], ["base"]),
    ("engines_base_config.json", ["spec_decode_type"], {}),
    ("engines_base_config.json", ["graph"], None),
    ("engines_base_config.json", ["graph", "head_dim"], "16"),
    ("engines_base_config.json", ["graph", "deepstack"], 99),
    ("engines_base_config.json", ["graph", "deepstack"], -1),
    ("engines_draft_config.json", ["graph", "deepstack"], 1),
    ("engines_base_config.json", ["rope", "mrope_section"], [8]),
    ("engines_base_config.json", ["rope", "mrope_section"], [4, 4, 1]),
    ("engines_base_config.json", ["rope", "mrope_section"], [9, -1, 0]),
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
    ("engines_draft_config.json", ["pair", "num_taps"], 2),
    # One key against another
    ("engines_base_config.json", ["head_dim"], 32),
    ("engines_base_config.json", ["graph", "head_dim"], 32),
    ("engines_base_config.json", ["graph", "num_kv_heads"], 4),
    ("engines_base_config.json", ["graph", "num_layers"], 4),
    ("engines_base_config.json", ["graph", "vocab_size"], 255),
    ("engines_base_config.json", ["graph", "features"], 128),
    ("engines_base_config.json", ["graph", "base_features"], 64),
    ("engines_base_config.json", ["eagle_hidden_state_layers"], [2, 4, 9]),
    ("engines_base_config.json", ["rope_theta"], 1e6),
    ("engines_base_config.json", ["kv_cache_dtype"], "fp16"),
    ("engines_draft_config.json", ["graph", "base_features"], 64),
    ("engines_draft_config.json", ["base_model_hidden_size"], 64),
    ("engines_draft_config.json", ["graph", "features"], 63),
    # Sizes that no model has
    ("engines_base_config.json", ["num_hidden_layers"], 10**9),
    ("engines_base_config.json", ["graph", "num_layers"], 10**9),
    ("engines_base_config.json", ["vocab_size"], 10**10),
    ("engines_base_config.json", ["graph", "features"], 2**40),
    # Rotary embeddings
    ("engines_base_config.json", ["rope", "kind"], "mrope"),
    ("engines_base_config.json", ["rope", "theta"], float("nan")),
    ("engines_base_config.json", ["rope", "rotary_dim"], 15),
    ("engines_base_config.json", ["rope", "rotary_dim"], 32),
    ("engines_base_config.json", ["rope", "beta_slow"], 1e-320),
    ("engines_base_config.json", ["rope", "truncate"], "yes"),
    ("engines_base_config.json", ["rope", "short_factor"], [1.0]),
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
    assert path[-1].removeprefix("eagle_hidden_state_") in caught.value.what
    assert caught.value.remedy.endswith("Build the engine again.")


EXPORTED = [row for row in WRONG if row[1][0] not in ("builder_config", "weights")]


@pytest.mark.parametrize(("name", "path", "value"), EXPORTED)
def test_what_is_wrong_in_an_export_is_to_be_exported_again(
    name: str, path: list[str], value: Any
) -> None:
    raw = golden(name)
    place = raw
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(BundleError) as caught:
        ComponentConfig.from_dict(raw, "config.json")
    assert caught.value.remedy.endswith("Export the checkpoint again.")


QUANTIZATION: dict[str, Any] = {
    "layout": "modelopt",
    "schemes": {
        "fp8": {
            "linears": 14,
            "blocks": [],
            "activations": "static tensor",
            "activations_in_graph": True,
        },
        "int4_wo": {
            "linears": 1,
            "blocks": [32, 128],
            "activations": "none",
            "activations_in_graph": True,
        },
    },
    "lm_head": None,
    "unquantised": ["lm_head"],
    "kv_cache": {"type": "fp8", "scales": [[1.0, 0.5]], "in_graph": False},
    "golden": "as they are",
}


def test_quantization_is_written_as_it_was_read() -> None:
    raw = golden("export_base_config.json") | {"quantization": QUANTIZATION}
    found = ComponentConfig.from_dict(raw, "config.json")
    assert found.quantization is not None
    assert found.quantization.schemes["int4_wo"].blocks == (32, 128)
    assert json.dumps(found.to_dict()) == json.dumps(raw)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["schemes"], None),
        (["schemes"], []),
        (["schemes", "fp8"], 14),
        (["schemes", "fp8", "linears"], "14"),
        (["schemes", "fp8", "linears"], None),
        (["schemes", "fp8", "blocks"], [True]),
        (["schemes", "fp8", "activations_in_graph"], None),
        (["unquantised"], [3]),
        (["kv_cache"], 8),
        (["kv_cache", "scales"], [[1.0]]),
        (["kv_cache", "type"], None),
        (["golden"], 3),
    ],
)
def test_what_is_wrong_in_a_quantization_is_refused_by_its_key(path: list[str], value: Any) -> None:
    raw = golden("export_base_config.json") | {"quantization": json.loads(json.dumps(QUANTIZATION))}
    place = raw["quantization"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(BundleError, match=path[-1]):
        ComponentConfig.from_dict(raw, "config.json")


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
