"""cost_profile.json: kept whole, and used for its own engines on its own device alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.contract import Role
from edgespec.errors import BundleError, OutputError
from edgespec.runtime.costs.cost_profile import (
    FILE,
    MAX_BYTES,
    CostProfile,
    ObserveTime,
    PassTime,
    ProposeTime,
    device_of,
    drop_stale,
    find_profile,
    hashes_of,
    read_profiles,
    write_profile,
)
from tests.e2e.workshop import small_disk
from tests.lossless.pairs import shared_pair

__all__ = ["small_disk"]


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shared_pair("llama", "eagle") / "engines", tmp_path / "engines"))


def profile_of(engines: Path, method: str | None = "eagle3") -> CostProfile:
    roles = (Role.BASE, Role.DRAFT) if method else (Role.BASE,)
    return CostProfile(
        role=Role.BASE,
        base=(PassTime(rows=1, context=128, batch=1, seconds=0.01),),
        method=method,
        propose=(ProposeTime(levels=1, top_k=1, context=128, batch=1, seconds=0.001),),
        observe=(ObserveTime(rows=1, context=128, batch=1, seconds=0.002),),
        engines=hashes_of(engines, roles),
        device=device_of(engines, Role.BASE),
    )


def why(engines: Path, method: str | None = "eagle3") -> str | None:
    found = find_profile(engines, Role.BASE, method, has_engine=method is not None)
    assert found.profile is None
    return found.why


def edited(engines: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((engines / FILE).read_text())
    edit(raw)
    (engines / FILE).write_text(json.dumps(raw))


def test_a_profile_is_read_as_it_was_written(engines: Path) -> None:
    profile = profile_of(engines)
    write_profile(engines, profile)
    assert list(read_profiles(engines)) == [profile]
    assert find_profile(engines, Role.BASE, "eagle3", has_engine=True).profile == profile


def test_a_profile_of_before_busy_machines_were_noticed_is_read(engines: Path) -> None:
    write_profile(engines, profile_of(engines))
    edited(engines, lambda raw: [raw["profiles"][0].pop(name) for name in ("waited", "attempts")])
    assert list(read_profiles(engines)) == [profile_of(engines)]


# ---- busy machines


def steps(*seconds: float) -> tuple[PassTime, ...]:
    return tuple(
        PassTime(rows=2**i, context=128, batch=1, seconds=one) for i, one in enumerate(seconds)
    )


def test_threads_that_waited_for_a_core_say_that_the_machine_was_busy(engines: Path) -> None:
    quiet = profile_of(engines)
    assert quiet.busy is None
    assert replace(quiet, waited=0.05).busy is None
    assert replace(quiet, waited=0.34, attempts=2).busy == (
        "costs were measured on a busy machine: threads waited 0.34 s of each second for a core"
    )


def test_more_rows_that_cost_less_say_so_until_they_do_again(engines: Path) -> None:
    falling = replace(profile_of(engines), base=steps(0.0059, 0.177, 0.112))
    assert falling.busy == (
        "costs were measured on a busy machine: 4 rows took 0.63 times as long as 2"
    )
    assert replace(falling, attempts=2).busy is None  # so are these kernels
    assert replace(falling, base=steps(0.010, 0.0095, 0.011)).busy is None
    elsewhere = (*steps(0.02), *steps(0.01))  # of two places
    apart = tuple(replace(time, context=100 * i) for i, time in enumerate(elsewhere))
    assert replace(falling, base=apart).busy is None


def test_no_profile_was_measured(engines: Path) -> None:
    assert why(engines) == "what a step costs here was not measured"
    assert list(read_profiles(engines)) == []


def test_the_base_of_a_pair_has_the_costs_of_the_pair(engines: Path) -> None:
    """So do methods that need no engine; another one with an engine has none."""
    profile = profile_of(engines)
    write_profile(engines, profile)
    assert find_profile(engines, Role.BASE, None, has_engine=False).profile == profile
    assert find_profile(engines, Role.BASE, "suffix", has_engine=False).profile == profile
    assert find_profile(engines, Role.BASE, "dflash", has_engine=True).profile is None
    assert find_profile(engines, Role.LLM, None, has_engine=False).profile is None


def test_a_new_profile_takes_the_place_of_one_of_its_base(engines: Path) -> None:
    write_profile(engines, profile_of(engines, None))
    write_profile(engines, profile_of(engines))
    assert [profile.method for profile in read_profiles(engines)] == ["eagle3"]


def test_profiles_of_other_engines_are_not_used_and_go(engines: Path) -> None:
    write_profile(engines, replace(profile_of(engines), engines={"base": "0" * 64}))
    assert why(engines) == "the engines were built again after their costs were measured"
    drop_stale(engines)
    assert not (engines / FILE).exists()
    drop_stale(engines)  # where there is none


def test_a_profile_of_engines_that_are_there_stays(engines: Path) -> None:
    profile = profile_of(engines)
    write_profile(engines, profile)
    drop_stale(engines)
    assert list(read_profiles(engines)) == [profile]


def test_another_device_is_named(engines: Path) -> None:
    device = {**device_of(engines, Role.BASE), "cpu": "Another CPU"}
    write_profile(engines, replace(profile_of(engines), device=device))
    said = why(engines)
    assert said is not None
    assert said.startswith("the costs were measured on another device (cpu Another CPU, here ")


def test_a_process_on_fewer_cores_is_another_device(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system binds no process to cores")
    write_profile(engines, profile_of(engines))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 6})
    said = why(engines)
    assert said is not None
    assert "here 7" in said


# ---- damaged files


DAMAGE: dict[str, Callable[[dict[str, Any]], object]] = {
    "its format is not 1": lambda raw: raw.update(format=99),
    "format is not 1": lambda raw: raw.update(profiles={}),
    "not subscriptable": lambda raw: raw.update(profiles=[3]),
    "names no role": lambda raw: raw["profiles"][0].update(role="king"),
    "no method": lambda raw: raw["profiles"][0].update(method=[]),
    "no objects": lambda raw: raw["profiles"][0].update(engines=[]),
    "base is empty": lambda raw: raw["profiles"][0].update(base=[]),
    "not iterable": lambda raw: raw["profiles"][0].update(propose=None),
    "missing": lambda raw: raw["profiles"][0]["base"][0].pop("rows"),
    "unexpected": lambda raw: raw["profiles"][0]["base"][0].update(cols=1),
    "rows is True": lambda raw: raw["profiles"][0]["base"][0].update(rows=True),
    "rows is 1.5": lambda raw: raw["profiles"][0]["base"][0].update(rows=1.5),
    "rows is 1000": lambda raw: raw["profiles"][0]["base"][0].update(rows=10**4000),
    "seconds is 0.0": lambda raw: raw["profiles"][0]["base"][0].update(seconds=0.0),
    "seconds is 1e-320": lambda raw: raw["profiles"][0]["propose"][0].update(seconds=1e-320),
    "seconds is 1e+308": lambda raw: raw["profiles"][0]["base"][0].update(seconds=1e308),
    "waited and attempts are no": lambda raw: raw["profiles"][0].update(waited=float("nan")),
    "and attempts are no numbers": lambda raw: raw["profiles"][0].update(attempts="2"),
    "seconds is -1": lambda raw: raw["profiles"][0]["base"][0].update(seconds=-1),
    "seconds is inf": lambda raw: raw["profiles"][0]["base"][0].update(seconds=float("inf")),
    "seconds is 'x'": lambda raw: raw["profiles"][0]["base"][0].update(seconds="x"),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_damaged_file_is_not_used_and_says_why(engines: Path, said: str) -> None:
    write_profile(engines, profile_of(engines))
    edited(engines, DAMAGE[said])
    with pytest.raises(BundleError, match="--measure-costs") as raised:
        list(read_profiles(engines))
    assert said in raised.value.what
    assert said in str(why(engines))
    write_profile(engines, profile_of(engines))  # measured again, it is whole again
    assert len(list(read_profiles(engines))) == 1


@pytest.mark.parametrize(
    "content", [b"", b'{"format": 1, "profil', b"\xff\xfe", b"[" * 10**5, b"[1]"]
)
def test_a_truncated_file_is_not_used(engines: Path, content: bytes) -> None:
    (engines / FILE).write_bytes(content)
    assert "is no cost profile" in str(why(engines))
    drop_stale(engines)
    assert not (engines / FILE).exists()


def test_a_huge_file_is_not_read(engines: Path) -> None:
    with (engines / FILE).open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert "plausible size" in str(why(engines))


def test_a_full_disk_leaves_the_profile_as_it_was(
    engines: Path, small_disk: Callable[[int], Path]
) -> None:
    pages = 64 + sum(-(-file.stat().st_size // 4096) for file in engines.iterdir())
    disk = small_disk(pages)
    there = Path(shutil.copytree(engines, disk / "engines"))
    profile = profile_of(there)
    write_profile(there, profile)
    (disk / "filler").write_bytes(b"\0" * shutil.disk_usage(disk).free)
    larger = replace(profile, base=profile.base * 400)
    with pytest.raises(OutputError):
        write_profile(there, larger)
    assert list(read_profiles(there)) == [profile]
    assert not [path for path in there.iterdir() if path.name.startswith(".")]
