"""What commands say of families whose layers differ: Gemma-3's two windows and rotary embeddings,
and Phi-3's two sets of factors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import toys
from tests.e2e.workshop import Cli, cli

__all__ = ["cli"]

ORIGINAL = 64  # tokens before longrope's long factors


def test_inspect_tells_windows_and_both_rotary_embeddings(tmp_path: Path, cli: Cli) -> None:
    path = toys.make_gemma3(tmp_path / "base", layers=8, stack="published")
    said = cli("inspect", path).out
    assert "window 7 in 6 of 8 layers" in said
    assert "local RoPE  default, theta 100, in layers with a window" in said
    decoder = json.loads(cli("inspect", path, "--json").out)["config"]["decoder"]
    assert decoder["layer_windows"] == [7, 7, None, 7, 7, None, 7, 7]
    assert (decoder["rope"]["theta"], decoder["local_rope"]["theta"]) == (1e6, 100.0)


@pytest.mark.parametrize(("capacity", "factors"), [(ORIGINAL, "short"), (ORIGINAL + 1, "long")])
def test_one_export_serves_engines_of_both_sets_of_factors(
    tmp_path: Path, cli: Cli, capacity: int, factors: str
) -> None:
    base = toys.make_phi3(tmp_path / "base", longrope=ORIGINAL, partial_rotary=0.75, tied=True)
    assert cli("export", base, tmp_path / "onnx").code == 0
    line = ("--onnx-dir", tmp_path / "onnx" / "llm", "--engine-dir", tmp_path / "engines")
    built = cli("build", *line, "--max-input-len", 32, "--max-kv-cache-capacity", capacity)
    assert f"longrope: the {factors} factors" in built.out
    assert "golden outputs reproduced" in built.out
