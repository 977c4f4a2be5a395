"""The options of every session."""

from __future__ import annotations

import os

import onnxruntime
import pytest

from edgespec.backends.ort.session import session_options


def test_threads_spin_from_one_operator_to_the_next_alone() -> None:
    """Decision 4 has what it is worth: a clock in a test would measure its neighbors."""
    options = session_options()
    assert 0 < int(options.get_session_config_entry("session.intra_op.spin_duration_us")) <= 100


def test_a_confined_process_has_no_more_threads_than_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With two threads on one core each operator would wait for the other thread's turn."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5})
    assert session_options().intra_op_num_threads == 3
    free = onnxruntime.SessionOptions().intra_op_num_threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert session_options().intra_op_num_threads == free  # what ONNX Runtime chooses
