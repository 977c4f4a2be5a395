"""Claims about backends/pair_check.py: which base and draft belong together, by what their exports
recorded, and what each refusal says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts.component import ComponentConfig
from edgespec.backends.build import build
from edgespec.backends.pair_check import check_pairing
from edgespec.contract import Role
from edgespec.errors import PairingError
from edgespec.export.components import ExportOptions, export
from edgespec.pipeline.inspection import inspect
from tests.small_pair import LIMITS, small_pair

GOLDEN = Path(__file__).parents[2] / "golden"
Keys = dict[str, Any]


def golden(role: str) -> Keys:
    keys: Keys = json.loads((GOLDEN / f"export_{role}_config.json").read_text())
    return keys


BASE = golden("base") | {"identity": "a", "eagle_hidden_state_layers": [2, 4, 5]}
DRAFT = golden("draft")
PAIR = {**DRAFT["pair"], "base_identity": "a"}


def merged(keys: Keys, changed: Keys) -> Keys:
    """`graph` is merged key by key; sizes that repeat others follow them."""
    graph = {**keys["graph"], **changed.get("graph", {})}
    found = {**keys, **changed, "graph": graph}
    graph["hidden_size"] = found["hidden_size"]
    graph["vocab_size"] = found.get("draft_vocab_size", found["vocab_size"])
    if pair := found.get("pair"):
        graph["features"] = found["hidden_size"]
        graph["base_features"] = pair["num_taps"] * pair["target_hidden_size"]
        found["base_model_hidden_size"] = graph["base_features"]
    elif found["spec_decode_type"] == "eagle3":
        graph["features"] = len(found["eagle_hidden_state_layers"]) * found["hidden_size"]
    return found


def pairing(base: Keys, draft: Keys, built: Role | None = None) -> None:
    base, draft = merged(BASE, base), merged(DRAFT, draft)
    check_pairing(
        ComponentConfig.from_dict(base, "base"), ComponentConfig.from_dict(draft, "draft"), built
    )


def check(base: Keys, pair: Keys) -> None:
    pairing(base, {"pair": PAIR | pair})


@pytest.mark.parametrize(
    "base", [{}, {"quantized_from": "original"}, {"quantized_from": "another"}]
)
@pytest.mark.parametrize("pair", [{}, {"base_quantized_from": "original"}])
def test_the_base_that_a_draft_was_exported_for_is_its_own_whatever_is_known_of_origins(
    base: Keys, pair: Keys
) -> None:
    check({"identity": "fp8"} | base, {"base_identity": "fp8"} | pair)


@pytest.mark.parametrize(
    ("base", "pair"),
    [
        ({"identity": "nvfp4", "quantized_from": "original"}, {"base_identity": "original"}),
        ({"identity": "original"}, {"base_identity": "fp8", "base_quantized_from": "original"}),
        ({"identity": "any"}, {"base_identity": None}),
    ],
)
def test_other_weights_of_one_origin_are_a_pair(base: Keys, pair: Keys) -> None:
    check(base, pair)


@pytest.mark.parametrize("origin", [{}, {"base_quantized_from": "third"}])
def test_another_base_is_refused(origin: Keys) -> None:
    with pytest.raises(PairingError, match="another base checkpoint"):
        check(
            {"identity": "nvfp4", "quantized_from": "original"}, {"base_identity": "fp8"} | origin
        )


MTP_BASE: Keys = {"spec_decode_type": "mtp", "graph": {"features": 64}}
MTP: Keys = {
    "spec_decode_type": "mtp",
    "graph": {"base_features": 64},
    "pair": PAIR | {"tap_ids": None, "num_taps": 1},
}


def test_head_and_its_base_are_a_pair() -> None:
    pairing(MTP_BASE, MTP)


def test_head_of_another_base_is_refused() -> None:
    for built in (None, Role.BASE, Role.DRAFT):
        with pytest.raises(
            PairingError, match="MTP head and the base were exported from diff"
        ) as e:
            pairing(MTP_BASE | {"identity": "b"}, MTP, built)
        assert "--base-model-dir" not in e.value.remedy  # which an export with --mtp refuses
        assert "--mtp" in e.value.remedy
        assert "another engine directory" in e.value.remedy


def test_only_a_draft_that_is_being_built_can_be_exported_for_the_other_base() -> None:
    base, draft = {"identity": "b"}, {"pair": PAIR}
    with pytest.raises(PairingError, match="the one in this engine directory") as found:
        pairing(base, draft, Role.DRAFT)
    assert found.value.remedy.startswith("Export the draft again with `base_model_dir`")
    with pytest.raises(PairingError, match="than this one") as found:
        pairing(base, draft, Role.BASE)
    assert found.value.remedy.startswith("Use another engine directory for this base")


WRONG: list[tuple[Keys, Keys, str]] = [
    ({"vocab_size": 257}, {}, "256 tokens, that of the base has 257"),
    ({"hidden_size": 65}, {}, "the hidden size of the base is 65"),
    ({}, {"hidden_size": 32}, "itself of width 32"),
    ({"eagle_hidden_state_layers": [1, 4, 5]}, {}, r"hidden_states \[1, 4, 5\]"),
    ({}, {"pair": PAIR | {"tap_ids": None, "num_taps": 2}}, "the draft reads 2 aux layers"),
    ({}, {"pair": PAIR | {"base_identity": "b"}}, "another base checkpoint"),
    (MTP_BASE, {}, "exported for an MTP head"),
]


@pytest.mark.parametrize("built", [None, Role.BASE, Role.DRAFT])
@pytest.mark.parametrize(("base", "draft", "said"), WRONG)
def test_every_refusal_of_a_pair_names_another_directory(
    base: Keys, draft: Keys, said: str, built: Role | None
) -> None:
    with pytest.raises(PairingError, match=said) as found:
        pairing(base, {"pair": PAIR} | draft, built)
    assert "se another engine directory" in found.value.remedy


def test_base_of_another_kind_is_refused_with_the_flag_that_would_fit() -> None:
    eagle = {"pair": PAIR}
    said = "an EAGLE-3 draft, the base was exported for an MTP head"
    with pytest.raises(PairingError, match=said) as found:
        pairing(MTP_BASE, eagle)
    assert "--eagle-base" in found.value.remedy
    with pytest.raises(PairingError) as found:
        pairing(MTP_BASE, eagle, Role.BASE)
    assert found.value.remedy.startswith("Use another engine directory for this base")
    said = "an MTP head, the base was exported for an EAGLE-3 draft"
    with pytest.raises(PairingError, match=said) as found:
        pairing({}, MTP)
    assert "--mtp" in found.value.remedy


def test_layers_that_a_base_does_not_emit_are_named_with_the_flag_that_would_fit() -> None:
    with pytest.raises(PairingError) as found:
        pairing({"eagle_hidden_state_layers": [1, 4, 5]}, {"pair": PAIR})
    assert "`eagle_base` `aux_layers` 2,4,5, or use" in found.value.remedy


# A draft beside a plain engine


def test_draft_beside_a_plain_engine_is_refused(tmp_path: Path) -> None:
    """Whichever is built first, and by inspect; a plain engine emits no hidden states for it."""
    pair, plain = small_pair(), tmp_path / "plain"
    export(str(pair.base), plain, ExportOptions())
    build(plain / "llm", tmp_path / "first", LIMITS)
    with pytest.raises(PairingError, match="no base in this engine directory, only a plain") as no:
        build(pair.draft_onnx, tmp_path / "first", LIMITS)
    assert "`eagle_base`" in no.value.remedy
    build(pair.draft_onnx, tmp_path / "second", LIMITS)
    with pytest.raises(PairingError, match="this is a plain decoder, and an EAGLE-3 draft"):
        build(plain / "llm", tmp_path / "second", LIMITS)
    all_three = Path(shutil.copytree(pair.engine, tmp_path / "third"))
    build(plain / "llm", all_three, LIMITS)
    assert not inspect(all_three).problems
    without_base(all_three)
    (problem,) = inspect(all_three).problems
    assert "no base in this engine directory" in problem.what


def without_base(engine: Path) -> None:
    """As an earlier version built it: a plain engine and a draft."""
    manifest = json.loads((engine / "manifest.json").read_text())
    files = set(manifest["engines"].pop("base")["files"])
    kept = {name for entry in manifest["engines"].values() for name in entry["files"]}
    for name in files - kept:
        (engine / name).unlink()
    (engine / "manifest.json").write_text(json.dumps(manifest))
