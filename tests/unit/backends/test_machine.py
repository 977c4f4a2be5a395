"""What is read of Linux about memory and cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.backends.machine import cores, waited_s


def test_the_time_without_a_core_is_that_of_all_threads(tmp_path: Path) -> None:
    for thread, line in {"1": "5 1500000000 9\n", "2": "5 500000000 9\n", "3": ""}.items():
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(line)
    assert waited_s(tmp_path) == 2.0
    assert waited_s(tmp_path / "nowhere") == 0.0


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "9000000 100000\n"}, 64),
        ({"cpu.max": "?"}, 64),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_a_container_has_as_many_cores_as_its_share_is_worth(
    files: dict[str, str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as `docker --cpus=2` on a machine of 64."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores(tmp_path) == count
