"""`edgespec check --tensorrt`: `backends.tensorrt` looks, this shows a finding a line or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgespec.cli.terminal import json_text, say
from edgespec.errors import counted

if TYPE_CHECKING:
    from edgespec.backends.tensorrt.parser_check import Checked

REFUSED = 3
LEVEL_WIDTH, RULE_WIDTH = 9, 21


def show(directory: Path, release: str, *, as_json: bool) -> int:
    """Check the graph of a directory for a release, and print what was found; the exit code."""
    from edgespec.backends.tensorrt.parser_check import check
    from edgespec.backends.tensorrt.rules import Level
    from edgespec.backends.tensorrt.versions import release_of

    checked = check(directory, release_of(release))
    report = checked.report
    refused, warnings = report.count(Level.REFUSED), report.count(Level.WARNING)
    if as_json:
        shown = {
            "onnx_dir": str(directory),
            "release": release,
            "lowered_for": None if checked.target is None else asdict(checked.target),
            "operators": dict(report.operators),
            "rules": report.rules,
            "findings": [asdict(finding) for finding in report.findings],
            "warnings": warnings,
            "refused": refused,
        }
        click.echo(json_text(shown))
    else:
        for line in text_of(checked, refused, warnings):
            say(line)
    return REFUSED if refused else 0


def text_of(checked: Checked, refused: int, warnings: int) -> Iterator[str]:
    """The lines of a report: level, rule and place of each kind of finding, its remedy below, and
    the summary last."""
    report, target = checked.report, checked.target
    for (level, rule), group in groupby(report.findings, lambda f: (f.level, f.rule)):
        findings = list(group)
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        first = findings[0]
        yield f"{level:{LEVEL_WIDTH}}{rule:{RULE_WIDTH}}{first.node}: {first.what}{more}"
        yield f"{'':{LEVEL_WIDTH + RULE_WIDTH}}{first.remedy}"
    nodes = counted(sum(report.operators.values()), "node")
    form = "as it is" if target is None else f"lowered: {target.dialect}, {target.compute}"
    kept = f"{refused} refused" if refused else f"keeps the {report.rules} rules that are known"
    beside = f", {counted(warnings, 'warning')}" if warnings else ""
    yield f"{report.version.name}, {nodes}, {form}: {kept}{beside}"
