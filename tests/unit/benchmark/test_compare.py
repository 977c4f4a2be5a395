"""Comparing two reports: what is unlike is refused by name, and a difference has to be more than
noise."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from edgespec.benchmark.compare import changes, refuse_unlike, unlike, words
from edgespec.benchmark.report import Report
from edgespec.benchmark.statistics import FASTER, NOISE, SLOWER, UNKNOWN
from edgespec.errors import RequestError
from tests.unit.benchmark.reports import (
    PLAIN,
    document,
    drafted,
    figure,
    passes,
    read,
    report,
    row,
    typed,
)

ROWS = (PLAIN, drafted(3, None, 1.5, 1.6, 1.55, 1.52), passes(1, 0.01, 0.01, 0.01, 0.01))


def changed(path: str, value: Any) -> Report:
    """The report with another value at a place."""
    found = deepcopy(document(*ROWS))
    *above, last = path.split(".")
    place = found
    for name in above:
        place = place[name]
    place[last] = value
    return read(found)


@pytest.mark.parametrize(
    ("path", "value", "name"),
    [
        ("environment.device", "another", "device"),
        ("environment.threads", 1, "threads"),
        ("environment.power_mode", "MAXN", "power_mode"),
        ("environment.governors", ["powersave"], "governors"),
        ("environment.versions.numpy", "3", "versions.numpy"),
        ("environment.versions.onnxruntime", "1", "versions.onnxruntime"),
        ("engine.method", "mtp", "method"),
        ("engine.engines.base.sha256", "bb", "engines.base.sha256"),
        ("engine.engines.draft", {"sha256": "cc"}, "engines.draft"),
        ("settings.prompts.source", "file", "prompts.source"),
        ("settings.sampling", None, "sampling"),
        ("settings.warmup", 0, "warmup"),
        ("rows", [PLAIN], "rows"),
    ],
)
def test_unlike_runs_are_refused_by_name(path: str, value: Any, name: str) -> None:
    found = [*unlike(report(*ROWS), changed(path, value))]
    assert [one.name for one in found] == [name]
    with pytest.raises(RequestError, match=f"these runs are unlike: {name}: ") as caught:
        refuse_unlike(found, ["cores"])
    top = name.partition(".")[0]
    assert caught.value.remedy.endswith(f"`allow` {top}.")
    refuse_unlike(found, [top])
    refuse_unlike(found, [name])


def test_all_that_is_unlike_is_named_at_once() -> None:
    other = changed("environment.threads", 1)
    other = replace(other, settings={**other.settings, "warmup": 4})
    with pytest.raises(RequestError) as caught:
        refuse_unlike([*unlike(report(*ROWS), other)], ["threads"])
    assert "warmup: 1 and 4" in caught.value.what
    assert "threads" not in caught.value.what


def test_number_of_repeats_and_load_may_differ() -> None:
    other = changed("state.before", {"load_average": [9, 9, 9]})
    other = replace(other, settings={**other.settings, "repeats": 99})
    other = replace(other, engine={**other.engine, "directory": "moved"})
    assert [*unlike(report(*ROWS), other)] == []


def test_results_of_faster_slower_and_noise() -> None:
    before = report(
        PLAIN,
        drafted(1, None, 1.0, 1.01, 1.02, 1.03),
        drafted(2, None, 1.0, 1.01, 1.02, 1.03),
        drafted(3, None, 1.0, 1.01),
        passes(4, 0.011, 0.0111, 0.0112, 0.0113),
    )
    after = report(
        row("decode", figures={"tokens_per_s": figure(20.1, 20.6, 19.4, 20.0)}),
        drafted(1, None, 1.2, 1.21, 1.22, 1.23),
        drafted(2, None, 0.9, 0.91, 0.92, 0.93),
        drafted(3, None, 9.0, 9.01),
        passes(4, 0.010, 0.0101, 0.0102, 0.0103),
    )
    found = changes(before, after)
    assert [(change.figure, change.result) for change in found] == [
        ("tokens_per_s", NOISE),  # the control first
        ("tokens_per_s", FASTER),
        ("speed_over_plain", FASTER),
        ("tokens_per_s", SLOWER),
        ("speed_over_plain", SLOWER),
        ("tokens_per_s", UNKNOWN),  # two against two
        ("speed_over_plain", UNKNOWN),
        ("pass_s", FASTER),
        ("cost_over_one_row", FASTER),
    ]
    assert [change.is_control for change in found] == [True, *[False] * 8]
    faster = found[2]
    assert faster.ratio == pytest.approx(1.215 / 1.015, rel=0.01)
    assert faster.interval is not None
    assert faster.interval.low > 1.15
    told = faster.to_dict()
    assert (told["plan"]["steps"], told["result"], told["control"]) == (1, FASTER, False)


def test_rows_are_named_by_what_they_measure() -> None:
    tree = drafted(3, 0.7, 1.0, kind="tree") | {"spec_policy": "adaptive"}
    names = [words(typed(one)) for one in (PLAIN, tree, passes(8, 0.1), row("prefill"))]
    assert names == [
        "plain 128+64 b1",
        "up to tree 2/3/4 at 0.7 128+64 b1",
        "pass over 8 128 b1",
        "prefill 128 b1",
    ]
    assert words(typed(row("decode", input_tokens=None))) == "plain file+64 b1"
