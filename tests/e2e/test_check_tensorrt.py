"""Claims about `edgespec check --tensorrt` as users type it: lines, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.export.components import ExportOptions
from tests import made, toys
from tests.e2e.workshop import Cli, cli

__all__ = ["cli"]


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = toys.make_base(tmp_path_factory.mktemp("check") / "base", "qwen3", dtype="bfloat16")
    return made.exported(base, ExportOptions(golden=False)) / "llm"


@pytest.fixture(scope="module")
def canonical(export: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph of the export alone, in a directory that is no export."""
    path = tmp_path_factory.mktemp("canonical")
    (path / "model.onnx").write_bytes((export / "model.onnx").read_bytes())
    for file in [f for f in export.iterdir() if f.suffix in (".data", ".safetensors")]:
        (path / file.name).symlink_to(file)
    return path


@pytest.mark.parametrize(
    ("release", "dialect"),
    [("10.13", "portable"), ("10.15", "native"), ("11.4", "native"), ("rtx-1.7", "native")],
)
def test_an_export_is_lowered_and_keeps_the_rules(
    export: Path, cli: Cli, release: str, dialect: str
) -> None:
    done = cli("check", export, "--tensorrt", release)
    assert done.code == 0
    last = done.out.splitlines()[-1]
    assert f"lowered: {dialect}, bfloat16: keeps the" in last
    assert last.endswith(", 3 warnings")
    assert "refused" not in done.out


def test_a_graph_that_is_not_lowered_is_refused_with_the_nodes(canonical: Path, cli: Cli) -> None:
    done = cli("check", canonical, "--tensorrt", "11.4")
    assert done.code == 3
    assert "refused  cache-length" in done.out
    assert "(TensorScatter): past_key_0 has the shape" in done.out
    assert "Give the graph fixed sizes there" in done.out
    assert "as it is: " in done.out.splitlines()[-1]


def test_json_has_each_finding(canonical: Path, cli: Cli) -> None:
    done = cli("check", canonical, "--tensorrt", "10.13", "--json")
    shown = json.loads(done.out)
    assert done.code == 3
    assert shown["release"] == "10.13"
    assert shown["lowered_for"] is None
    assert shown["refused"] == sum(f["level"] == "refused" for f in shown["findings"])
    scatters = [f for f in shown["findings"] if "(TensorScatter)" in f["node"]]
    assert len(scatters) == shown["operators"]["TensorScatter"] > 0
    assert {f["rule"] for f in scatters} == {"operator"}
    assert all(f["remedy"] for f in shown["findings"])


def test_json_says_what_an_export_was_lowered_for(export: Path, cli: Cli) -> None:
    shown = json.loads(cli("check", export, "--tensorrt", "11.4", "--json").out)
    assert shown["lowered_for"]["dialect"] == "native"
    assert shown["lowered_for"]["compute"] == "bfloat16"
    assert shown["refused"] == 0


@pytest.mark.parametrize("flags", [["--mtp"], ["--probe"], ["--allow-pickle"], ["DRAFT"]])
def test_other_flags_beside_it_are_refused(export: Path, cli: Cli, flags: list[str]) -> None:
    done = cli("check", export, *flags, "--tensorrt", "11.4")
    assert done.code == 2
    assert "give only that and --json" in done.err


def test_a_release_without_rules_is_refused(export: Path, cli: Cli) -> None:
    done = cli("check", export, "--tensorrt", "9.3")
    assert done.code == 2
    assert "no rules are known for TensorRT '9.3'" in done.err
    assert "10.13" in done.err


def test_what_is_no_graph_is_refused_with_the_way_to_one(
    export: Path, tmp_path: Path, cli: Cli
) -> None:
    checkpoint = toys.make_base(tmp_path / "base", "qwen3")
    done = cli("check", checkpoint, "--tensorrt", "11.4")
    assert done.code == 3
    assert f"edgespec export {checkpoint} OUT" in done.err
    assert cli("check", tmp_path / "nowhere", "--tensorrt", "11.4").code == 3


def test_a_damaged_export_is_refused(export: Path, tmp_path: Path, cli: Cli) -> None:
    copy = tmp_path / "llm"
    copy.mkdir()
    for file in export.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "model.onnx").write_bytes(b"rubbish")
    assert cli("check", copy, "--tensorrt", "11.4").code == 3
