"""Export, build and infer with the TensorRT backend as it is, over a simulated library: greedy
tokens are those of the same engine without drafts, and those of ONNX Runtime's engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.main import run
from tests import shared, toys
from tests.e2e.workshop import Cli, asked, cli, infer, responses
from tests.tensorrt_simulator.device import HostDevice
from tests.tensorrt_simulator.installed import install

__all__ = ["cli"]

SIZES = ["--max-input-len", "64", "--max-kv-cache-capacity", "128"]
TREES = ["--max-verify-tree-size", "16", "--max-draft-tree-size", "16"]
PORTABLE, NATIVE = "10.13.3.9", "10.16.2.10"
QUESTIONS = ("one two", "three four five six")


@dataclass(frozen=True)
class Pair:
    """A base, its draft, and how both are exported."""

    make_base: Callable[..., Path]
    base_keys: dict[str, Any]
    export_base: str
    draft: str  # the directory of its component
    make_draft: Callable[..., Path] | None = None
    draft_keys: dict[str, Any] = field(default_factory=dict)


PAIRS = {
    "eagle3": Pair(
        toys.make_base,
        {"layers": 7},
        "--eagle-base",
        "llm",
        toys.make_draft,
        {"layout": "specforge"},
    ),
    "dflash": Pair(
        toys.make_base,
        {"family": "qwen3", "layers": 8},
        "--dflash-base",
        "dflash_draft",
        toys.make_dflash,
        {"block_size": 8},
    ),
    "mtp": Pair(
        toys.make_qwen3_5,
        {
            "hidden": 32,
            "heads": 2,
            "head_dim": 16,
            "layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "--mtp",
        "mtp_draft",
    ),
}


def exported(name: str) -> list[Path]:
    """The components of a pair, made once."""
    pair = PAIRS[name]

    def make(out: Path) -> None:
        base = pair.make_base(out / "base", **pair.base_keys)
        draft = out / "draft"
        if pair.make_draft is not None:
            pair.make_draft(draft, base, **pair.draft_keys)
            line = ["export", str(draft), str(out / "onnx-draft"), "--base-model-dir", str(base)]
            assert run(line) == 0
        reads = ["--dflash-draft-dir", str(draft)] if pair.export_base == "--dflash-base" else []
        assert run(["export", str(base), str(out / "onnx"), pair.export_base, *reads]) == 0

    root = shared.made_once(("tensorrt pair", name), make)
    draft = root / ("onnx" if pair.make_draft is None else "onnx-draft") / pair.draft
    return [root / "onnx" / "llm", draft]


def built(cli: Cli, name: str, out: Path, *options: object) -> Path:
    """The engines of a pair."""
    for component in exported(name):
        done = cli("build", "--onnx-dir", component, "--engine-dir", out, *SIZES, *TREES, *options)
        assert done.code == 0, done.err
    return out


def tokens(cli: Cli, engines: Path, tmp_path: Path, *options: object) -> list[list[int]]:
    """What `infer` answers."""
    line = infer(engines, tmp_path, *map(asked, QUESTIONS), max_generate_length=20)
    done = cli(*line, *options)
    assert done.code == 0, done.err
    return [answer["output_ids"] for answer in responses(tmp_path)]


def test_greedy_tokens_are_those_of_plain_decoding_and_of_onnx_runtime(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    reference = built(cli, name, tmp_path / "ort")
    expected = tokens(cli, reference, tmp_path)
    install(monkeypatch, version)
    engines = built(cli, name, tmp_path / "engines", "--backend", "tensorrt", "--compute", "fp32")
    assert tokens(cli, engines, tmp_path) == expected
    assert tokens(cli, engines, tmp_path, "--spec-decode", "--check-lossless") == expected
    device = HostDevice.current
    assert device is not None
    assert "graph" in device.launched
    assert "attention_mask" in device.launched
    assert ("copy_rows" in device.launched) == (version == PORTABLE)
    assert device.closed
    assert not device.memory


def test_drafts_change_nothing_in_half_precision(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, NATIVE)
    options = ("--backend", "tensorrt", "--compute", "fp16")
    engines = built(cli, "eagle3", tmp_path / "engines", *options)
    plain = tokens(cli, engines, tmp_path)
    device = HostDevice.current
    assert device is not None
    assert "convert" in device.launched  # embeddings come in float32
    assert tokens(cli, engines, tmp_path, "--spec-decode", "--check-lossless") == plain


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"name", "version"} <= set(metafunc.fixturenames):
        rows = [(name, version) for name in PAIRS for version in (NATIVE, PORTABLE)]
        metafunc.parametrize(("name", "version"), rows, ids=lambda text: str(text))
