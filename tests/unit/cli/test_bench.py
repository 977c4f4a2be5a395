"""Lists of `bench`, and names that stand in two places."""

from __future__ import annotations

import click
import pytest

from edgespec.cli.bench import run, serve
from edgespec.cli.lists import Counts, Names, Texts
from edgespec.compat.bench_tools import SERVE_NAMES, THEIR_NAMES


@pytest.mark.parametrize(
    ("command", "names"), [(run.command, THEIR_NAMES), (serve.command, SERVE_NAMES)]
)
def test_every_other_name_means_a_flag_that_is_there(
    command: click.Command, names: dict[str, str]
) -> None:
    flags = {flag for param in command.params for flag in param.opts}
    assert set(names.values()) <= flags
    assert not set(names) & flags


def test_lists_are_read_with_commas_each_value_once() -> None:
    assert Counts().convert("1, 4,8,4", None, None) == (1, 4, 8)
    assert Counts().convert(7, None, None) == (7,)
    assert Names("ab").convert("b,a", None, None) == ("b", "a")
    assert Texts().convert("0.5:0.4,0.7", None, None) == ("0.5:0.4", "0.7")
    assert Counts().convert((1, 2), None, None) == (1, 2)


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Counts(), "", "whole number"),
        (Counts(), "1,,2", "whole number"),
        (Counts(), "-1", "whole number"),
        (Counts(), "1.5", "whole number"),
        (Counts(), "\u0661", "whole number"),
        (Counts(2), "1", "from 2 on"),
        (Counts(), "9" * 40, "whole number"),
        (Counts(), ",".join(map(str, range(1, 70))), "69 values, and 64 is the limit"),
        (Names("ab"), "c", "none of a, b"),
        (Texts(), "a,", "a value is empty"),
    ],
)
def test_what_is_no_list_is_refused(kind: click.ParamType, text: str, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        kind.convert(text, None, None)
