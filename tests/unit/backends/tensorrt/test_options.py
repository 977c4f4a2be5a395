"""The flags of the two backends, and their values."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.backends.tensorrt.options import (
    TensorRTOptions,
    options_of,
    parse_options,
    sm_of,
)
from edgespec.backends.tensorrt.versions import RTX, TENSORRT
from edgespec.errors import OptionError


def test_nothing_chosen_leaves_everything_to_checkpoint_library_and_device() -> None:
    assert parse_options({}) == TensorRTOptions()


def test_chosen_values_are_read() -> None:
    found = parse_options(
        {
            "compute": "bf16",
            "opt_level": "5",
            "workspace_mib": "2048",
            "compute_capability": "SM120",
            "library_version": "10.13",
            "timing_cache": "times.bin",
            "emit_onnx": "out",
        }
    )
    assert found == TensorRTOptions(
        compute="bfloat16",
        sm=120,
        optimization_level=5,
        workspace_bytes=2 << 30,
        timing_cache=Path("times.bin"),
        library_version="10.13",
        emit_onnx=Path("out"),
    )


def test_no_timing_cache_is_another_thing_than_the_usual_one() -> None:
    assert parse_options({"timing_cache": "none"}) == TensorRTOptions(keep_times=False)


@pytest.mark.parametrize("text", ["SM120", "sm_120", "120", "12.0", " sm120 "])
def test_a_compute_capability_may_be_written_as_nvidia_does(text: str) -> None:
    assert sm_of(text) == 120


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compute_capability", "thor"),
        ("compute_capability", "1"),
        ("compute_capability", "SM1200"),
        ("workspace_mib", "0"),
        ("workspace_mib", "-5"),
        ("workspace_mib", "4G"),
        ("library_version", "new"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(OptionError, match=f"`{name}` {value}"):
        parse_options({name: value})


def test_only_the_library_that_keeps_times_has_the_flag() -> None:
    names = {lib: {option.name for option in options_of(lib)} for lib in (TENSORRT, RTX)}
    assert names[TENSORRT] - names[RTX] == {"timing_cache"}
    assert names[RTX] < names[TENSORRT]
