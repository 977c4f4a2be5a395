"""Claims about backends/engine_dir.py: an engine is opened where all its files are those of its
manifest, and is refused with the file that is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgespec.artifacts import page_cache
from edgespec.backends import engine_dir as engines
from edgespec.backends.build import build
from edgespec.backends.manifest import FileEntry
from edgespec.contract import Role
from edgespec.errors import BundleError, EdgeSpecError
from edgespec.runtime.opening.open_engine import choose_draft
from tests.small_pair import LIMITS, SmallPair, copied, edit_json, flip_byte, small_pair


@pytest.fixture(scope="module")
def pair() -> SmallPair:
    return small_pair()


@pytest.fixture
def engine(pair: SmallPair, tmp_path: Path) -> Path:
    """Base and draft, to be damaged."""
    return copied(pair.engine, tmp_path / "engine")


def refusal(path: Path, *roles: Role) -> str:
    """What the first of these roles that is refused is refused with; both by default."""
    with pytest.raises(BundleError) as caught:
        [engines.open_engine(path, role) for role in roles or (Role.BASE, Role.DRAFT)]
    assert len(caught.value.remedy) > 10
    return f"{caught.value.what}\n{caught.value.remedy}"


def test_whole_directory_is_opened(engine: Path) -> None:
    for role in (Role.BASE, Role.DRAFT):
        assert engines.open_engine(engine, role)[0].role is role


# Files


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (Role.BASE, "spec_base.onnx"),
        (Role.BASE, "spec_base.onnx.data"),
        (Role.BASE, "embedding.safetensors"),
        (Role.DRAFT, "spec_draft.onnx"),
        (Role.DRAFT, "spec_draft.onnx.data"),
        (Role.DRAFT, "d2t.safetensors"),
    ],
)
def test_flipped_byte(engine: Path, role: Role, name: str) -> None:
    flip_byte(engine / name)
    assert f"{engine / name} does not have the hash" in refusal(engine, role)


@pytest.mark.parametrize(
    ("role", "name"),
    [
        (Role.BASE, "base_config.json"),
        (Role.BASE, "tokenizer.json"),
        (Role.DRAFT, "draft_config.json"),
    ],
)
def test_missing_file(engine: Path, role: Role, name: str) -> None:
    (engine / name).unlink()
    assert f"{engine / name} is missing" in refusal(engine, role)


# Manifests; what is wrong in an entry: test_manifest.py


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname"])
def test_manifest_that_leads_out_of_its_directory(engine: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("x")
    entry = {"bytes": 1, "sha256": "0" * 64, "mtime_ns": 0}
    edit_json(
        engine / "manifest.json", lambda m: m["engines"]["base"]["files"].update({name: entry})
    )
    said = refusal(engine)
    assert str(engine / "manifest.json") in said
    assert repr(name) in said


NO_MANIFESTS: dict[str, Callable[[Any], object]] = {
    "no engines": lambda m: m.pop("engines"),
    "engines in a list": lambda m: m.update(engines=["base"]),
    "a number for an engine": lambda m: m["engines"].update(base=7),
    "no files": lambda m: m["engines"]["base"].pop("files"),
    "no fingerprint": lambda m: m["engines"]["base"].pop("fingerprint"),
    "that of an export": lambda m: m.update(kind="export"),
    "format 2": lambda m: m.update(format=2),
}


@pytest.mark.parametrize("case", NO_MANIFESTS)
def test_manifest_that_is_not_one(engine: Path, case: str) -> None:
    edit_json(engine / "manifest.json", NO_MANIFESTS[case])
    assert str(engine) in refusal(engine)


# Which directory it is


def test_nowhere(tmp_path: Path) -> None:
    said = refusal(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in said
    assert "edgespec build" in said


def test_base_without_the_draft_that_is_asked_for(pair: SmallPair) -> None:
    with pytest.raises(BundleError, match="no draft engine") as caught:
        choose_draft(pair.base_engine, True, None)
    assert str(pair.base_engine) in caught.value.what
    assert not choose_draft(pair.base_engine, None, None).drafts


def test_export_is_no_place_for_engines(pair: SmallPair, tmp_path: Path) -> None:
    onnx = copied(pair.base_onnx, tmp_path / "llm")
    before = sorted(path.name for path in onnx.iterdir())
    with pytest.raises(EdgeSpecError) as caught:
        build(pair.draft_onnx, onnx, LIMITS)
    assert caught.value.exit_code == 3
    assert str(onnx) in caught.value.what
    assert "--engine-dir" in caught.value.remedy
    assert sorted(path.name for path in onnx.iterdir()) == before


def test_an_installed_engine_is_what_later_runs_read(
    pair: SmallPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hashes are those of the disk: what was written has left the page cache before."""
    renewed, hashed = list[str](), list[str]()
    monkeypatch.setattr(page_cache, "renew", lambda path: renewed.append(path.name))
    file_entry = FileEntry.of

    def of(path: Path) -> FileEntry:
        assert path.name in renewed
        hashed.append(path.name)
        return file_entry(path)

    monkeypatch.setattr(FileEntry, "of", of)
    build(pair.base_onnx, tmp_path / "engine", LIMITS)
    assert "spec_base.onnx.data" in hashed
