"""Reports are read back, and anything else is refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.benchmark.report import read_report, write_report
from edgespec.errors import OutputError, RequestError
from tests.unit.benchmark.reports import PLAIN, document, drafted, passes, report, row


def test_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    choices = {"kind": "static tree", "top_k": 2, "steps": 1, "verify_size": 3}
    trees = [
        drafted(3, None, 1.5, kind="tree") | {"spec_policy": "adaptive"},
        drafted(3, 0.7, 1.5, kind="chain"),
        drafted(1, None, 1.5) | {"plan": choices | {"choices": [[0], [1]]}},
        drafted(7, None, 1.5, kind="block"),
    ]
    value = document(PLAIN, *trees, passes(4, 0.01), row("prefill", input_tokens=None))
    (tmp_path / "a.json").write_text(json.dumps(value))
    write_report(tmp_path / "b.json", read_report(tmp_path / "a.json"))
    assert json.loads((tmp_path / "b.json").read_text()) == value


def test_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    write_report(tmp_path / "link.json", report())
    assert (tmp_path / "link.json").is_symlink()
    assert read_report(tmp_path / "a.json") == report()


def test_directory_that_is_not_there_is_an_output_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        write_report(tmp_path / "file" / "a.json", report())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("", "is no benchmark report"),
        ("{", "Expecting"),
        ('{"kind": "benchmark", "format": NaN}', "NaN is not JSON"),
        ("[" * 100_000, "is no benchmark report"),
        ([], "its kind is not benchmark"),
        ({"kind": "verify"}, "its kind is not benchmark"),
        (document() | {"format": 2}, "its format is 2, and 1 is read"),
        (document() | {"environment": None}, "'environment' is missing"),
        (document() | {"rows": {}}, "'rows' is {}, not a list of objects"),
        (document(row("none")), r"\(rows\[0\]\): 'mode' is 'none', not one of"),
        (document(row("decode", figures=[])), r"'figures' is \[\], not an object"),
        (document(row("decode", batch_size="1")), "'batch_size' is '1', not a whole number"),
        (
            document(row("decode", figures={"tokens_per_s": {"median": 1}})),
            r"\(figures\): 'tokens_per_s' is {'median': 1}, not a figure",
        ),
        (
            document(PLAIN, row("decode", speed_over_plain={"samples": ["x"]})),
            r"rows\[1\]\) \(speed_over_plain\): 'samples' is \['x'\], not a list of numbers",
        ),
        (
            document(row("verify", rows=4, cost_over_one_row={"samples": []})),
            "'cost_over_one_row' is {'samples': \\[\\]}, not a figure",
        ),
        (document(drafted(3, None, 1.5, kind="bush")), "no plan is {'kind': 'bush'"),
        (
            document(drafted(1, None, 1.5, kind="static tree")),
            "choices: None is not a tree",
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
