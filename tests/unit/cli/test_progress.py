"""The steps of a long command where there is no terminal."""

from __future__ import annotations

import pytest

from edgespec.cli.progress import Steps


def test_each_step_is_one_line_on_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with Steps() as steps:
        steps.step("export")
        steps.start("weights", 3)
        steps.step("build")
        steps.note("a note")
    assert capsys.readouterr().err == "export ...\nbuild ...\na note\n"
