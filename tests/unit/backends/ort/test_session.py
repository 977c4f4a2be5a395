"""The options of every session."""

from __future__ import annotations

from edgespec.backends.ort.session import session_options


def test_threads_spin_from_one_operator_to_the_next_alone() -> None:
    """Decision 4 has what it is worth: a clock in a test would measure its neighbors."""
    options = session_options()
    assert 0 < int(options.get_session_config_entry("session.intra_op.spin_duration_us")) <= 100
