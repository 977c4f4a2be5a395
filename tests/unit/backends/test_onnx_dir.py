"""Claims about backends/onnx_dir.py: an exported directory is read where all its files are those of
its manifest, and is refused with the file that is not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.backends.onnx_dir import open_export
from edgespec.contract import Role
from edgespec.errors import BundleError
from tests.small_pair import SmallPair, copied, edit_json, flip_byte, small_pair


@pytest.fixture(scope="module")
def pair() -> SmallPair:
    return small_pair()


@pytest.fixture
def onnx(pair: SmallPair, tmp_path: Path) -> Path:
    """A draft's, to be damaged."""
    return copied(pair.draft_onnx, tmp_path / "llm")


def refusal(path: Path, *, spec_base: bool = False, spec_draft: bool = False) -> str:
    with pytest.raises(BundleError) as caught:
        open_export(path, spec_base=spec_base, spec_draft=spec_draft)
    assert len(caught.value.remedy) > 10
    return f"{caught.value.what}\n{caught.value.remedy}"


def test_whole_directory_is_read(onnx: Path) -> None:
    found = open_export(onnx, spec_base=False, spec_draft=True)
    assert (found.role, found.model, found.golden) == (
        Role.DRAFT,
        onnx / "model.onnx",
        onnx / "golden.safetensors",
    )


# Files


@pytest.mark.parametrize(
    "name",
    ["model.onnx", "model.onnx.data", "config.json", "d2t.safetensors", "golden.safetensors"],
)
def test_flipped_byte(onnx: Path, name: str) -> None:
    flip_byte(onnx / name, -40 if name == "config.json" else -1)
    assert str(onnx / name) in refusal(onnx)


def test_missing_file(onnx: Path) -> None:
    (onnx / "model.onnx.data").unlink()
    assert f"{onnx / 'model.onnx.data'} is missing" in refusal(onnx)


def test_truncated_file(onnx: Path) -> None:
    os.truncate(onnx / "model.onnx.data", 1000)
    assert f"{onnx / 'model.onnx.data'} has 1000 bytes" in refusal(onnx)


@pytest.mark.parametrize("name", ["config.json", "manifest.json"])
def test_missing_record(onnx: Path, name: str) -> None:
    (onnx / name).unlink()
    assert f"{onnx / name} does not exist" in refusal(onnx)


# Manifests


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "sub/../model.onnx", ""])
def test_manifest_that_leads_out_of_its_directory(onnx: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("x")
    entry = {"bytes": 1, "sha256": "0" * 64}
    edit_json(onnx / "manifest.json", lambda m: m["files"].update({name: entry}))
    said = refusal(onnx)
    assert str(onnx / "manifest.json") in said
    assert repr(name) in said


NO_MANIFESTS: dict[str, Callable[[Any], object]] = {
    "no files": lambda m: m.pop("files"),
    "files in a list": lambda m: m.update(files=[]),
    "no hash": lambda m: m["files"]["model.onnx"].pop("sha256"),
    "a number for an entry": lambda m: m.update(files={"model.onnx": 7}),
    "format 99": lambda m: m.update(format=99),
    "no format": lambda m: m.pop("format"),
}


@pytest.mark.parametrize("case", NO_MANIFESTS)
def test_manifest_that_is_not_one(onnx: Path, case: str) -> None:
    edit_json(onnx / "manifest.json", NO_MANIFESTS[case])
    assert str(onnx / "manifest.json") in refusal(onnx)


# Which directory it is


def test_one_level_too_high(pair: SmallPair) -> None:
    assert f"--onnx-dir {pair.draft_onnx}" in refusal(pair.draft_onnx.parent)


def test_nowhere(tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(tmp_path / "nowhere")


def test_flag_for_the_other_one_of_the_pair(pair: SmallPair) -> None:
    assert f"{pair.draft_onnx} is exported as draft" in refusal(pair.draft_onnx, spec_base=True)
    assert f"{pair.base_onnx} is exported as base" in refusal(pair.base_onnx, spec_draft=True)
