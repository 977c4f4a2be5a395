"""One logger per process with a sink that changes, the recorder, and errors as users see them."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest

from edgespec.backends.tensorrt.logger import (
    Errors,
    cleaned,
    ignore,
    lines_to,
    logger_of,
    recorder_of,
)


class Severity(Enum):
    ERROR = 1
    WARNING = 2


class Library:
    """What is used of the library's module."""

    class ILogger:
        pass

    class IErrorRecorder:
        pass


def test_the_process_has_one_logger_and_its_sink_changes() -> None:
    first: list[tuple[str, str]] = []
    second: list[tuple[str, str]] = []
    with lines_to(Library, lambda *line: first.append(line)) as logger:
        logger.log(Severity.WARNING, "outer")
        with lines_to(Library, lambda *line: second.append(line)) as again:
            assert again is logger
            logger.log(Severity.ERROR, "inner")
        logger.log(Severity.WARNING, "outer again")
    logger.log(Severity.ERROR, "to nobody")
    assert first == [("WARNING", "outer"), ("WARNING", "outer again")]
    assert second == [("ERROR", "inner")]


def test_the_sink_is_given_back_after_an_error() -> None:
    with pytest.raises(KeyError), lines_to(Library, print):
        raise KeyError
    assert logger_of(Library).sink is ignore


def test_errors_are_read_from_recorder_and_log() -> None:
    errors = Errors()
    recorder: Any = recorder_of(Library, errors)
    errors.log("WARNING", "not this one")
    errors.log("ERROR", "In node 24\n\n  the cache must be static")
    recorder.report_error("FAILED_EXECUTION", "Build canceled by user")
    assert errors.lines == ["In node 24", "  the cache must be static", "Build canceled by user"]
    assert (recorder.num_errors(), recorder.has_overflowed()) == (1, False)
    assert recorder.get_error_code(0) == "FAILED_EXECUTION"
    assert recorder.get_error_desc(0) == "Build canceled by user"
    recorder.clear()
    assert recorder.num_errors() == 0


SAID = [
    "While parsing node number 24 [TensorScatter -> 'present_key_0']:",
    "--- Begin node ---",
    "The KV cache tensor must have a static sequence length",
    "Error Code 1: Cuda Runtime (In catchCudaError (cudaError 35: CUDA driver version))",
    "--- End node ---",
    "The KV cache tensor must have a static sequence length",
]


def test_the_missing_driver_is_no_error_where_nothing_runs_on_a_device() -> None:
    (line,) = cleaned(SAID, without_device=True)
    assert line.startswith("The KV cache tensor")


def test_on_a_device_an_error_of_its_driver_is_shown() -> None:
    assert len(cleaned(SAID, without_device=False)) == 2
    other = ["Cuda Runtime (cudaError 2: out of memory)"]
    assert cleaned(other, without_device=True) == other
