"""Parquet prompt sets: read by whichever package is installed, and refused with the remedy where
none is."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edgespec.errors import MissingDependency, RequestError
from edgespec.prompts import read_prompt_set

COLUMNS: dict[str, list[Any]] = {
    "question_id": ["a1", "b2"],
    "category": ["coding", "writing"],
    "sub_category": ["sql", None],
    "turns": [["One", "Two"], ["Three"]],
    "multiturn": [True, False],
}
BYTES = b"PAR1 stands for a file PAR1"


class Table:
    def to_pydict(self) -> dict[str, list[Any]]:
        return COLUMNS


class Column:
    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def tolist(self) -> list[Any]:
        """As pandas gives them: lists are arrays, and a missing text is NaN."""
        shown = [float("nan") if value is None else value for value in self.values]
        return [np.array(value, object) if isinstance(value, list) else value for value in shown]


class Frame:
    columns = tuple(COLUMNS)

    def __getitem__(self, name: str) -> Column:
        return Column(COLUMNS[name])


def read_table(source: io.BytesIO) -> Table:
    assert source.read() == BYTES
    return Table()


def read_parquet(source: io.BytesIO) -> Frame:
    assert source.read() == BYTES
    return Frame()


def install(monkeypatch: pytest.MonkeyPatch, **modules: object) -> None:
    """Lets these packages be the only ones that read Parquet."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "pandas", None)
    for name, (function, value) in modules.items():
        module = ModuleType(name)
        setattr(module, function, value)
        full = {"pyarrow": "pyarrow.parquet"}.get(name, name)
        monkeypatch.setitem(sys.modules, full, module)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "set.parquet"
    found.write_bytes(BYTES)
    return found


@pytest.mark.parametrize(
    "package",
    [{"pyarrow": ("read_table", read_table)}, {"pandas": ("read_parquet", read_parquet)}],
)
def test_rows_are_prompts(
    path: Path, monkeypatch: pytest.MonkeyPatch, package: dict[str, object]
) -> None:
    install(monkeypatch, **package)
    first, second = read_prompt_set(path).requests
    assert (first.name, first.messages[0].content, first.turns) == ("a1", "One", ("Two",))
    assert (second.name, second.turns) == ("b2", ())
    (only,) = read_prompt_set(path, categories=["sql"]).requests
    assert only.name == "a1"


def test_missing_package_is_named_with_the_remedy(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch)
    with pytest.raises(MissingDependency, match="neither pyarrow nor pandas") as caught:
        read_prompt_set(path)
    assert "pip install pyarrow" in caught.value.remedy

    # pandas without a package that reads Parquet
    def no_engine(source: io.BytesIO) -> Frame:
        raise ImportError("no engine")

    install(monkeypatch, pandas=("read_parquet", no_engine))
    with pytest.raises(MissingDependency, match="neither pyarrow nor pandas"):
        read_prompt_set(path)


@pytest.mark.parametrize("data", [b"PAR1", b"PAR1 cut o", BYTES[:-1]])
def test_truncated_file_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    install(monkeypatch, pyarrow=("read_table", read_table))
    path.write_bytes(data)
    with pytest.raises(RequestError, match="without its end"):
        read_prompt_set(path)


def test_damaged_file_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: io.BytesIO) -> Table:
        raise ValueError("bad thrift")

    install(monkeypatch, pyarrow=("read_table", broken))
    with pytest.raises(RequestError, match="no readable Parquet file: bad thrift"):
        read_prompt_set(path)


def test_wrong_row_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, pyarrow=("read_table", read_table))
    monkeypatch.setitem(COLUMNS, "turns", [["One"], [3]])
    with pytest.raises(RequestError, match=r"row 2: turns\[0\] is 3, not a string"):
        read_prompt_set(path)


def test_file_of_pyarrow_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "set.parquet"
    parquet.write_table(pyarrow.table(COLUMNS), path)
    assert [request.name for request in read_prompt_set(path).requests] == ["a1", "b2"]
