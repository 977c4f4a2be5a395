"""What is read of Linux about memory and cores."""

from __future__ import annotations

from pathlib import Path

from edgespec.backends.machine import waited_s


def test_the_time_without_a_core_is_that_of_all_threads(tmp_path: Path) -> None:
    for thread, line in {"1": "5 1500000000 9\n", "2": "5 500000000 9\n", "3": ""}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(line)
    assert waited_s(tmp_path) == 2.0
    assert waited_s(tmp_path / "nowhere") == 0.0
