"""Reports are read back, and anything else is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.benchmark.report import read_report, write_report
from edgespec.errors import OutputError, RequestError
from tests.unit.benchmark.reports import PLAIN, drafted, report, row


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    value = report(PLAIN, drafted(3, 0.7, 1.5))
    write_report(tmp_path / "a.json", value)
    assert read_report(tmp_path / "a.json") == value


def test_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    write_report(tmp_path / "link.json", report())
    assert (tmp_path / "link.json").is_symlink()
    assert read_report(tmp_path / "a.json") == report()


def test_directory_that_is_not_there_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        write_report(tmp_path / "file" / "a.json", report())


FIGURE = {"median": 1.0, "samples": [1.0]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is no benchmark report"),
        ("{", "Expecting"),
        ('{"kind": "benchmark", "format": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "is no benchmark report"),
        ([], "its kind is not benchmark"),
        ({"kind": "verify"}, "its kind is not benchmark"),
        (report() | {"format": 2}, "its format is 2, and 1 is read"),
        (report() | {"environment": None}, "environment is no object"),
        (report() | {"rows": {}}, "rows is no list"),
        (report(row("none")), r"rows\[0\] has none of the modes"),
        (report(row("decode", figures=[])), r"rows\[0\].figures is no object"),
        (report(row("decode", batch_size="1")), r"rows\[0\].batch_size is no whole number"),
        (
            report(row("decode", figures={"tokens_per_s": {"samples": [1]}})),
            r"rows\[0\].tokens_per_s is no figure",
        ),
        (
            report(PLAIN, row("decode", speed_over_plain=FIGURE | {"samples": ["x"]})),
            r"rows\[1\].speed_over_plain is no figure",
        ),
        (
            report(row("verify", rows=4, cost_over_one_row=FIGURE | {"samples": []})),
            r"rows\[0\].cost_over_one_row is no figure",
        ),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, value: Any, said: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    with pytest.raises(RequestError, match=said) as caught:
        read_report(path)
    assert str(path) in caught.value.what
    assert "bench --json" in caught.value.remedy


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="No such file"):
        read_report(tmp_path / "none.json")
    with pytest.raises(RequestError, match="is no benchmark report"):
        read_report(tmp_path)
