"""Pictures render as PNG and SVG, with what the report has; skipped where matplotlib is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgespec.benchmark.pictures import check_installed, draw_directory, draw_file, format_of
from edgespec.errors import MissingDependency, OptionError, RequestError
from tests.unit.benchmark.reports import PLAIN, drafted, passes, report

PNG = b"\x89PNG\r\n\x1a\n"
ALL = report(
    PLAIN,
    *(passes(rows, 0.01 * rows) for rows in (1, 2, 4)),
    *(drafted(steps, rate, 1.1 * steps * rate) for steps in (1, 3) for rate in (0.5, 0.9)),
)
NAMES = ("cost_curve", "acceptance", "speed_by_size", "speed_by_acceptance")


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.mark.usefixtures("_matplotlib")
def test_each_panel_is_drawn_in_both_formats(tmp_path: Path) -> None:
    files = draw_directory(ALL, tmp_path / "made" / "pictures")
    assert [path.name for path in files] == [
        f"{n}.{kind}" for n in NAMES for kind in ("png", "svg")
    ]
    for path in files:
        data = path.read_bytes()
        assert len(data) > 5000
        assert data.startswith(PNG if path.suffix == ".png" else b"<?xml")
    assert b"</svg>" in (tmp_path / "made" / "pictures" / "acceptance.svg").read_bytes()


@pytest.mark.usefixtures("_matplotlib")
def test_one_file_has_all_panels_and_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        draw_file(ALL, tmp_path / name)
    first, second = ((tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    draw_file(report(passes(1, 0.01), passes(2, 0.02)), tmp_path / "few.svg")
    assert len((tmp_path / "few.svg").read_bytes()) < len(first) / 2
    draw_file(ALL, tmp_path / "a.PNG")
    assert (tmp_path / "a.PNG").read_bytes().startswith(PNG)


@pytest.mark.usefixtures("_matplotlib")
def test_more_lines_than_colors_are_counted(tmp_path: Path) -> None:
    rows = [drafted(steps, 0.5, 1.0) for steps in range(1, 11)]
    draw_file(report(*rows), tmp_path / "a.svg")
    assert len((tmp_path / "a.svg").read_bytes()) > 5000


@pytest.mark.usefixtures("_matplotlib")
def test_report_without_rows_for_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no rows of which pictures are drawn"):
        draw_file(report(PLAIN), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_other_formats_are_refused() -> None:
    with pytest.raises(OptionError, match=r"neither .png nor .svg"):
        format_of(Path("a.jpg"))
    assert format_of(Path("x.SVG")) == "svg"


def test_missing_matplotlib_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match="matplotlib") as caught:
        check_installed()
    assert "pip install 'edgespec[pictures]'" in caught.value.remedy
