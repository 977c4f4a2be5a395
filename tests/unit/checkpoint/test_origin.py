"""Claims about checkpoint/origin.py: a manifest is believed where it belongs to the weights beside
it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from edgespec.artifacts import file_names, hashes
from edgespec.checkpoint.files import Checkpoint
from edgespec.checkpoint.origin import origin_of
from tests import toys

ORIGINAL = "ab" * 32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.make_base(tmp_path_factory.mktemp("origin") / "base", layers=1)


@pytest.fixture
def quantized(source: Path, tmp_path: Path) -> Path:
    """A checkpoint with the manifest that quantize writes, whatever its weights are."""
    path = Path(shutil.copytree(source, tmp_path / "quantized"))
    write_manifest(path)
    return path


def write_manifest(path: Path, **changed: object) -> None:
    value = {
        "format": 1,
        "kind": "quantize",
        "source": {"identity": ORIGINAL},
        "files": hashes.file_entries(path),
    }
    (path / file_names.MANIFEST).write_text(json.dumps(value | changed))


def test_the_original_is_what_the_manifest_names(quantized: Path) -> None:
    found = origin_of(Checkpoint(quantized))
    assert (found.identity, found.doubt) == (ORIGINAL, None)


def test_without_a_manifest_of_quantize_nothing_is_known_and_nothing_doubted(
    source: Path, quantized: Path
) -> None:
    assert origin_of(Checkpoint(source)).doubt is None
    write_manifest(quantized, kind="something else", format="theirs")
    assert origin_of(Checkpoint(quantized)) == origin_of(Checkpoint(source))


def test_a_changed_text_leaves_the_origin_as_it_is(quantized: Path) -> None:
    (quantized / "tokenizer_config.json").write_text("{}")
    assert origin_of(Checkpoint(quantized)).identity == ORIGINAL


def one_byte_changed(path: Path) -> None:
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (one_byte_changed, "does not have the hash"),
        (
            lambda path: shutil.move(path / "model.safetensors", path / "weights.safetensors"),
            "does not list weights",
        ),
        (lambda path: write_manifest(path, source={}), "does not declare its source"),
        (lambda path: write_manifest(path, files={}), "does not list its files"),
        (lambda path: write_manifest(path, files="all"), "does not list its files"),
        (lambda path: write_manifest(path, format=99), "has format 99"),
        (lambda path: (path / file_names.MANIFEST).write_text("{"), "cannot be read"),
    ],
)
def test_a_manifest_that_does_not_belong_to_these_weights_is_not_believed(
    quantized: Path, change: Callable[[Path], object], said: str
) -> None:
    change(quantized)
    found = origin_of(Checkpoint(quantized))
    assert found.identity is None
    assert found.doubt is not None
    assert said in found.doubt


def test_without_hashes_only_sizes_are_looked_at(quantized: Path) -> None:
    one_byte_changed(quantized)
    assert origin_of(Checkpoint(quantized), read_weights=False).identity == ORIGINAL
