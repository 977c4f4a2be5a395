"""`edgespec bench compare` and `draw`: what is made of reports that are there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from edgespec.cli.bench.kept import PICTURE, PICTURES, check_pictures, draw_pictures
from edgespec.cli.flags import EdgeCommand, refuse
from edgespec.cli.infer import check_outputs
from edgespec.cli.lists import Texts
from edgespec.cli.paths import FILE
from edgespec.cli.terminal import json_text, say


@click.command("compare", cls=EdgeCommand)
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option(
    "--allow",
    "allowed",
    type=Texts(),
    multiple=True,
    metavar="NAME",
    help="Let runs differ in this, by the name that the refusal says; may be given repeatedly.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def compare(before: Path, after: Path, allowed: tuple[tuple[str, ...], ...], as_json: bool) -> None:
    """Compare two reports of `bench --json`: is AFTER faster than BEFORE, or is it noise?

    Runs that are unlike are refused (exit 3), and each difference is named: another device or
    power mode, other threads, versions, engines, prompts or sizes. Each row gets the ratio of AFTER
    over BEFORE with its exact 95 % interval (Hodges-Lehmann, by the ranks of all pairs); faster or
    slower is said where 1 is outside. Plain decoding is the control: where it differs, the machine
    was not the same, and the speeds over plain are what counts.

    \b
    edgespec bench compare before.json after.json
    edgespec bench compare int8.json int4.json --allow engines
    """
    from edgespec.benchmark.compare import changes, refuse_unlike, unlike
    from edgespec.benchmark.report import read_report
    from edgespec.cli.bench import tables

    mine, its = read_report(before), read_report(after)
    differing = [*unlike(mine, its)]
    refuse_unlike(differing, [name for names in allowed for name in names])
    rows = changes(mine, its)
    if as_json:
        differences = [asdict(one) for one in differing]
        value = {"allowed_differences": differences, "rows": [row.to_dict() for row in rows]}
        click.echo(json_text(value))
    else:
        tables.show_changes(rows, differing)


@click.command("draw", cls=EdgeCommand)
@click.argument("report", type=FILE)
@PICTURE
@PICTURES
def draw(report: Path, picture: Path | None, pictures: Path | None) -> None:
    """Draw the pictures of a report of `bench --json`.

    Panels: the cost of a base pass over N rows, acceptance by position, and speed over plain decoding
    by the size of the draft and by acceptance, as far as the report has rows for them.

    \b
    edgespec bench draw report.json --pictures pictures
    """
    refuse({"give `picture` FILE or `pictures` DIR": picture is None and pictures is None})
    from edgespec.benchmark.report import read_report

    check_outputs((report,), picture)
    check_pictures((report,), picture, pictures)
    for path in draw_pictures(read_report(report), picture, pictures):
        say(str(path))
