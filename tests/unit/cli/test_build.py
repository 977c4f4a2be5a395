"""What `edgespec build` refuses before it reads anything."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from edgespec.cli.main import cli


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--weight-block", "0"], "--weight-block means nothing with --weights fp32"),
        (["--weights", "int4", "--weight-block", "0"], "--weight-block 0 is for --weights int8"),
    ],
)
def test_a_block_that_does_not_go_with_the_weights_is_refused(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(
        cli, ["build", "--onnx-dir", "onnx", "--engine-dir", "engine", *flags]
    )
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize("flags", [[], ["--"], ["--backend"], ["--json"]])
def test_a_line_without_the_directories_is_wrong_usage(flags: list[str]) -> None:
    result = CliRunner().invoke(cli, ["build", *flags])
    assert result.exit_code == 2
