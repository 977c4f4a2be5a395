"""Claims about what is read from disk: the table of `tests/tampers.py`, without a run of any
command. `scripts/tamper.py` takes all rows through the command line."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

import edgespec
from edgespec.artifacts import file_names
from edgespec.artifacts.component_files import d2t_offsets
from edgespec.backends import engine_dir as engines
from edgespec.backends.canonical_graph import OPERATORS, check_graph
from edgespec.backends.golden_file import read_golden
from edgespec.backends.onnx_dir import open_onnx_dir
from edgespec.checkpoint.detect import detect
from edgespec.checkpoint.files import open_checkpoint
from edgespec.contract import Role, canonical_contract
from edgespec.errors import EdgeSpecError
from edgespec.runtime.lanes.embedding import EmbeddingTable
from edgespec.runtime.text.tokenizer import Tokenizer
from tests import tampers
from tests.small_pair import SmallPair, small_pair
from tests.tampers import TAMPERS, Tamper

# What is found when it is read, before anything is computed
READ = [row for row in TAMPERS if not row.by_run and "model.safetensors" not in row.name]


@pytest.fixture(scope="module")
def pair() -> SmallPair:
    return small_pair()


def sound(pair: SmallPair, where: str) -> Path:
    return {
        "base": pair.base,
        "draft": pair.draft,
        "onnx_base": pair.base_onnx,
        "onnx_draft": pair.draft_onnx,
        "engines": pair.engine,
    }[where]


def read(where: str, directory: Path) -> None:
    """All that is read of a directory before anything is computed."""
    if where in ("base", "draft"):
        detect(open_checkpoint(directory))
    elif where == "engines":
        read_engines(directory)
    else:
        onnx = open_onnx_dir(directory)
        check_graph(onnx.model, canonical_contract(onnx.config.graph), onnx.manifest.files)
        if onnx.golden:
            read_golden(onnx.golden, onnx.config.graph, onnx.config.vocab_size)


def read_engines(directory: Path) -> None:
    base, _ = engines.open_engine(directory, Role.BASE)
    draft, _ = engines.open_engine(directory, Role.DRAFT)
    EmbeddingTable(directory / file_names.EMBEDDING, base.component)
    d2t_offsets(directory / file_names.D2T, draft.component)
    Tokenizer.open(directory)


def copied(pair: SmallPair, where: str, tmp_path: Path) -> Path:
    """Links to large files would be changed with their originals: all bytes are copied."""
    return shutil.copytree(sound(pair, where), tmp_path / where, copy_function=shutil.copy2)


@pytest.mark.parametrize("where", ["base", "draft", "onnx_base", "onnx_draft", "engines"])
def test_what_nobody_changed_is_read(pair: SmallPair, where: str) -> None:
    read(where, sound(pair, where))


def test_weights_that_are_links_are_read(pair: SmallPair, tmp_path: Path) -> None:
    """ONNX's own checker refuses symbolic links, and files that have two names."""
    directory, blob = copied(pair, "onnx_base", tmp_path), tmp_path / "blob"
    data = (directory / file_names.MODEL_DATA).rename(blob)
    (directory / file_names.MODEL_DATA).symlink_to(data)
    read("onnx_base", directory)
    (directory / file_names.MODEL_DATA).unlink()
    (directory / file_names.MODEL_DATA).hardlink_to(blob)
    read("onnx_base", directory)


@pytest.mark.parametrize("row", READ, ids=lambda row: row.name[:60])
def test_what_was_changed_is_refused_by_name(pair: SmallPair, tmp_path: Path, row: Tamper) -> None:
    directory = copied(pair, row.where, tmp_path)
    tampers.apply(row, directory)
    with pytest.raises(EdgeSpecError) as caught:
        read(row.where, directory)
    assert row.said.lower() in caught.value.what.lower()
    assert caught.value.exit_code == 3
    assert caught.value.remedy


def test_the_rows_differ() -> None:
    assert len({row.name for row in TAMPERS}) == len(TAMPERS) >= 150


def test_the_operators_are_those_that_the_exporter_writes() -> None:
    """By the source of `graphs`; that no export has another one, every build of the tests shows."""
    package = Path(edgespec.__file__).parent / "graphs"
    written = {
        call.args[0].value
        for path in package.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("op", "node")
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }
    compared = {"Equal", "Greater"}  # by name, through a function
    assert written | compared == OPERATORS
