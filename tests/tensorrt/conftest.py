"""Ends a run of these tests with the table of what was asked."""

from __future__ import annotations

import pytest

from tests.tensorrt import matrix


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not matrix.ASKED:
        return
    from tests.tensorrt import rtx

    terminalreporter.section("graphs")
    for line in matrix.table(matrix.ASKED, rtx.version().name):
        terminalreporter.write_line(line)
