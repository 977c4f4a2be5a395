"""The table of versions: what each can do, and what becomes of versions that are not in it."""

from __future__ import annotations

import logging

import pytest

from edgespec.backends.tensorrt.target import Dialect
from edgespec.backends.tensorrt.versions import (
    RTX,
    TENSORRT,
    Library,
    build_environment,
    capabilities_of,
    faults_of,
    known_versions,
)
from edgespec.errors import EnvironmentProblem


@pytest.mark.parametrize(
    ("library", "text", "dialect", "attention", "by_flag"),
    [
        (TENSORRT, "10.13.3.9", Dialect.PORTABLE, False, True),
        (TENSORRT, "10.14.1.48.post1", Dialect.PORTABLE, True, True),
        (TENSORRT, "10.15.1.29", Dialect.NATIVE, True, True),
        (TENSORRT, "10.16", Dialect.NATIVE, True, True),
        (TENSORRT, "11.0.0.114", Dialect.NATIVE, True, False),
        (TENSORRT, "11.4.0.106", Dialect.NATIVE, True, False),
        (RTX, "1.4.0.76", Dialect.NATIVE, True, True),
        (RTX, "1.7.1.116", Dialect.NATIVE, True, False),
    ],
)
def test_a_version_takes_its_dialect(
    library: Library, text: str, dialect: Dialect, attention: bool, by_flag: bool
) -> None:
    found = capabilities_of(library, text)
    assert (found.dialect, found.typed_by_flag) == (dialect, by_flag)
    assert found.has_attention is attention


def test_only_rtx_compiles_for_absent_devices_and_has_no_timing_cache() -> None:
    rtx, thor = capabilities_of(RTX, "1.7"), capabilities_of(TENSORRT, "10.13")
    assert (120 in rtx.compiles_for, 110 in rtx.compiles_for) == (True, False)
    assert 121 not in capabilities_of(RTX, "1.4").compiles_for
    assert thor.compiles_for == ()
    assert (thor.timing_cache, rtx.timing_cache) == (True, False)


def test_a_newer_minor_version_is_taken_for_the_newest_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert capabilities_of(TENSORRT, "11.9.0").version == (11, 4)
    assert "11.9.0 is newer than the versions known here" in caplog.text


@pytest.mark.parametrize("text", ["10.3.0", "10.12", "9.3", "12.0", "soon", "11", ""])
def test_a_version_that_is_too_old_or_unknown_is_refused(text: str) -> None:
    with pytest.raises(EnvironmentProblem) as error:
        capabilities_of(TENSORRT, text)
    assert "10.13 to 10.16, 11.0 to 11.4" in error.value.remedy
    assert error.value.exit_code == 4


def test_the_table_has_every_version_once() -> None:
    assert known_versions(RTX) == "1.4 to 1.7"


@pytest.mark.parametrize(
    ("version", "found"),
    [("10.13.3.9", 1), ("10.13.3.9.post1", 1), ("10.13.2.6", 0), ("10.13", 1), ("10.1", 0)],
)
def test_a_compiler_with_a_known_fault_is_built_around(version: str, found: int) -> None:
    faults = faults_of(TENSORRT, version)
    assert len(faults) == found
    variables = build_environment(faults, {"HOME": "/home/x"})
    assert variables["HOME"] == "/home/x"
    assert variables.get("__LUNOWUD") == ("-peep:fc_h_fusion=off" if found else None)


def test_what_avoids_a_fault_stands_behind_what_the_user_set_and_once() -> None:
    faults = faults_of(TENSORRT, "10.13.3.9")
    mine = build_environment(faults, {"__LUNOWUD": "-x=1"})
    assert mine["__LUNOWUD"] == "-x=1 -peep:fc_h_fusion=off"
    assert build_environment(faults, mine) == mine
    assert faults_of(RTX, "10.13.3.9") == ()
