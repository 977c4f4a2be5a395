"""A drafting method with a checkpoint of its own that test code alone brings along: one row in each
public table, none of the package's files touched. Its drafts have EAGLE-3's layers under another
config key, and a component and a flag of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts.component import ComponentConfig
from edgespec.artifacts.manifest import ExportManifest
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import Checkpoint
from edgespec.config import DraftConfig, Shapes
from edgespec.contract import Role
from edgespec.errors import PairingError, UnsupportedModel
from edgespec.export.component import Component
from edgespec.export.components import ExportOptions, export
from edgespec.export.draft import draft_component, pair_config, vocabulary_map
from edgespec.export.request import ExportRequest
from edgespec.export.row import ComponentRow, Emitted
from edgespec.export.table import COMPONENTS
from edgespec.graphs.registry import DRAFTS
from edgespec.methods import METHODS, DraftFormat, mismatches
from edgespec.methods.eagle3 import Eagle3Spec, parse_eagle3_config
from edgespec.pairing.common import common_checks
from edgespec.pairing.forcing import chain_forcing
from edgespec.pairing.row import PairingRow
from edgespec.pairing.table import PAIRINGS
from edgespec.quantize.table import QUANTIZABLE
from edgespec.runtime.drafters.registry import DRAFTERS
from tests import toys
from tests.e2e.workshop import Cli, asked, cli

__all__ = ["cli"]
NAME = "glider"
LAYERS = (2, 4, 6)


def parse(raw: Mapping[str, Any], shapes: Shapes, source: str) -> DraftConfig:
    config = parse_eagle3_config(raw, shapes, source)
    return replace(config, method=NAME, layout="toy", aux_layer_ids=tuple(raw["glider_layers"]))


def emits(request: ExportRequest) -> Emitted:
    layers = request.drafted().config.aux_layer_ids
    assert layers is not None
    return Emitted(aux_layers=layers, spec=Eagle3Spec(aux_layer_ids=layers), note="for gliders")


def draft(request: ExportRequest) -> Component:
    drafted = request.drafted()
    pair = pair_config(request, drafted.config.aux_layer_ids)
    return draft_component(
        request, "Glider", pair, d2t=vocabulary_map(drafted), notes=("a glider draft",)
    )


METHOD = replace(
    METHODS["eagle3"],
    name=NAME,
    title="Glider",
    draft_title="a Glider draft",
    aliases=(),
    export_params={"glider_base": True},
    component="glider_draft",
    takes_aux_layers=False,
    format=DraftFormat(matches_config=lambda config: "glider_layers" in config, parse=parse),
    config_rows=lambda config: [("wings", "two")],
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ComponentRow(
        emits=emits,
        draft=draft,
        base_needs_draft=True,
        recorded=lambda request: {"glider": True} if request.method == NAME else {},
    )
    checks = common_checks(lambda config: config.aux_layer_ids)
    monkeypatch.setitem(METHODS, NAME, METHOD)
    monkeypatch.setitem(DRAFTS, NAME, DRAFTS["eagle3"])
    monkeypatch.setitem(COMPONENTS, NAME, row)
    monkeypatch.setitem(DRAFTERS, NAME, DRAFTERS["eagle3"])
    monkeypatch.setitem(PAIRINGS, NAME, PairingRow(checks=checks, force=chain_forcing))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gliders")
    base = toys.make_base(path / "base", layers=8)
    toys.make_base(path / "small", layers=6, vocab=300)
    glider = toys.make_draft(path / "glider", base, "specforge")
    config = json.loads((glider / "config.json").read_text())
    (glider / "config.json").write_text(json.dumps(config | {"glider_layers": LAYERS}))
    toys.make_draft(path / "eagle", base, "specforge")
    return path


@pytest.mark.usefixtures("registered")
def test_base_and_draft_are_exported_each_for_the_other(shop: Path, tmp_path: Path) -> None:
    options = ExportOptions(base_for=NAME, draft_dir=str(shop / "glider"))
    made = export(str(shop / "base"), tmp_path / "onnx", options)
    base = ComponentConfig.read(made.directory / "config.json")
    assert (base.method, base.role, base.spec.aux_layer_ids) == (NAME, Role.BASE, LAYERS)
    assert ExportManifest.read(made.directory).options["glider"] is True
    assert "for gliders" in made.notes

    options = ExportOptions(base_model_dir=str(shop / "base"))
    made = export(str(shop / "glider"), tmp_path / "onnx", options)
    assert made.directory == tmp_path / "onnx" / "glider_draft"
    drafted = ComponentConfig.read(made.directory / "config.json")
    assert (drafted.model, drafted.method, drafted.role) == ("Glider", NAME, Role.DRAFT)
    assert drafted.pair is not None
    assert drafted.pair.aux_layer_ids == LAYERS
    assert (made.directory / "golden.safetensors").is_file()
    assert list(mismatches(base.as_base(), drafted.as_draft())) == []


@pytest.mark.usefixtures("registered")
def test_the_whole_chain_is_lossless(shop: Path, tmp_path: Path, cli: Cli) -> None:
    """Built, inspected and run: the words of each step are the method's own."""
    onnx, engines = tmp_path / "onnx", tmp_path / "engines"
    options = ExportOptions(base_for=NAME, draft_dir=str(shop / "glider"), golden=False)
    export(str(shop / "base"), onnx, options)
    line = ["export", shop / "glider", onnx, "--base-model-dir", shop / "base", "--no-golden"]
    assert cli(*line).code == 0
    shown = cli("inspect", onnx / "llm")
    assert shown.code == 0, shown.err
    assert "aux layers  2, 4, 6" in shown.out

    for part in ("llm", "glider_draft"):
        done = cli("build", "--onnx-dir", onnx / part, "--engine-dir", engines)
        assert done.code == 0, done.err
    shown = cli("inspect", engines)
    assert shown.code == 0, shown.err
    assert "base and draft belong together" in shown.out

    asked_for = {"requests": [asked("one two"), asked("three", temperature=1.0, seed=4)]}
    (tmp_path / "input.json").write_text(json.dumps(asked_for | {"max_generate_length": 20}))
    files = ["--input-file", tmp_path / "input.json", "--output-file", tmp_path / "output.json"]
    words = [
        "infer",
        "--engine-dir",
        engines,
        *files,
        "--spec-decode",
        "--check-lossless",
        "--json",
    ]
    done = cli(*words)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["lossless"] == "yes"
    assert summary["speculative"]["base_passes_after_prefill"] > 0


@pytest.mark.usefixtures("registered")
def test_another_methods_base_is_no_pair(shop: Path, tmp_path: Path) -> None:
    options = ExportOptions(base_for="eagle3", aux_layers=LAYERS, golden=False)
    made = export(str(shop / "base"), tmp_path / "eagle", options)
    base = ComponentConfig.read(made.directory / "config.json")
    options = ExportOptions(base_model_dir=str(shop / "base"), golden=False)
    made = export(str(shop / "glider"), tmp_path / "glider", options)
    drafted = ComponentConfig.read(made.directory / "config.json")
    (found,) = mismatches(base.as_base(), drafted.as_draft())
    assert found.topic == "method"
    assert "a Glider draft" in found.what
    assert "an EAGLE-3 draft" in found.what


@pytest.mark.usefixtures("registered")
def test_what_is_refused_at_export(shop: Path, tmp_path: Path) -> None:
    glider, eagle, out = str(shop / "glider"), str(shop / "eagle"), tmp_path / "out"
    with pytest.raises(PairingError, match="a Glider draft is exported by the draft"):
        export(str(shop / "base"), out, ExportOptions(base_for=NAME))
    with pytest.raises(PairingError, match="is not a Glider draft"):
        export(str(shop / "base"), out, ExportOptions(base_for=NAME, draft_dir=eagle))
    with pytest.raises(UnsupportedModel, match="a Glider draft, and names the layers"):
        export(glider, out, ExportOptions(aux_layers=LAYERS))
    with pytest.raises(PairingError, match="the draft's vocabulary has 256 tokens"):
        export(glider, out, ExportOptions(base_model_dir=str(shop / "small")))
    assert not out.exists()


@pytest.mark.usefixtures("registered")
def test_check_and_probe(shop: Path, cli: Cli) -> None:
    done = cli("check", shop / "base", shop / "glider")
    assert done.code == 0, done.out
    assert "Glider, toy layout" in done.out
    assert "hidden_states 2, 4, 6, as the draft names them" in done.out
    assert done.out.splitlines()[-1].startswith("Glider: fits")
    done = cli("check", shop / "base", shop / "glider", "--probe")
    assert done.code == 3  # its weights are random
    assert "the draft's first token is the base's next one" in done.out
    assert done.out.splitlines()[-1] == (
        "Glider: shapes fit, but the draft was not made for this base"
    )
    done = cli("check", shop / "small", shop / "glider")
    assert done.code == 3
    assert done.out.splitlines()[-1].startswith("Glider: does not fit")


@pytest.mark.usefixtures("registered")
def test_inspect(shop: Path, cli: Cli) -> None:
    done = cli("inspect", shop / "glider")
    assert done.code == 0, done.err
    assert "Glider draft (toy layout)" in done.out
    assert "aux layers  3 of width 64: 2, 4, 6" in done.out
    assert "wings       two" in done.out
    shown = json.loads(cli("inspect", shop / "glider", "--json").out)
    assert shown["config"]["method"] == NAME


@pytest.mark.usefixtures("registered")
def test_quantize_takes_it_once_it_has_a_row(
    shop: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--base-model-dir", shop / "small", "--draft-model-dir", shop / "glider"]
    line = ["quantize", "draft", *flags, "--output-dir", tmp_path / "q", "--quantization", "fp8"]
    assert "a Glider draft, which is not quantized here" in cli(*line).err
    monkeypatch.setitem(QUANTIZABLE, NAME, QUANTIZABLE["eagle3"])
    assert "the draft's vocabulary has 256 tokens" in cli(*line).err


def test_without_its_rows_it_is_what_its_tensors_are(shop: Path) -> None:
    found = detect(Checkpoint(shop / "glider"))
    assert isinstance(found, DraftConfig)
    assert found.method == "eagle3"
