"""What the linter refuses, NVIDIA's own compiler refuses too, and it takes what the linter takes.

Where a rule stands on documents alone (`Rtx.NOBODY`), the compiler takes both graphs: the test
says so, so that a release that begins to refuse them is noticed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.backends.tensorrt.linter import lint, lint_file
from tests.tensorrt import rtx
from tests.unit.backends.tensorrt.rule_graphs import PAIRS, Pair, with_external_weight

pytestmark = pytest.mark.tensorrt
NAMES = [f"{pair.rule}-{i}" for i, pair in enumerate(PAIRS)]


@pytest.mark.parametrize("pair", PAIRS, ids=NAMES)
def test_rtx_refuses_what_breaks_a_rule_and_takes_what_keeps_it(pair: Pair) -> None:
    version = rtx.version()
    for broken in (True, False):
        model = pair.model(broken=broken)
        found = {finding.rule for finding in lint(model, version).findings}
        assert broken or pair.rule not in found
        rejects = pair.elsewhere.get(version.name, pair.rejects)
        expected = rejects if pair.rule in found else ""
        answer = rtx.ask(model.SerializeToString(), build=pair.rejects == "build")
        assert answer.step == expected, (broken, found, answer.lines)


def test_rtx_refuses_weights_that_are_missing_or_too_short(tmp_path: Path) -> None:
    whole = with_external_weight(tmp_path / "whole", 64)
    assert lint_file(whole, rtx.version()).findings == ()
    assert rtx.ask(whole, build=False).step == ""
    # 1.4 to 1.6 read a file that is too short without a word
    for length in (0, 60) if rtx.version().line >= (11, 4) else (0,):
        short = with_external_weight(tmp_path / str(length), length)
        assert [f.rule for f in lint_file(short, rtx.version()).findings] == ["external-data"]
        assert rtx.ask(short, build=False).step == "parse"
