"""How the command line spells the parameters that messages name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import click
import pytest

from edgespec.backends.registry import BACKENDS, find_backend
from edgespec.cli.main import cli
from edgespec.cli.spellings import OTHERWISE, SPELLINGS
from edgespec.errors import PARAM, LimitError

PACKAGE = Path(__file__).resolve().parents[3] / "edgespec"


def flags_below(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for param in command.get_params(ctx):
        yield from (*param.opts, *param.secondary_opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from flags_below(inner, click.Context(inner, parent=ctx, info_name=name))


@pytest.fixture(scope="module")
def names() -> set[str]:
    """All flags of all commands, as parameters."""
    flags = set(flags_below(cli, click.Context(cli)))
    params = {flag.removeprefix("--").replace("-", "_") for flag in flags}
    backends = [backend for backend in map(find_backend, BACKENDS) if backend is not None]
    return params | {option.name for backend in backends for option in backend.options}


def test_what_is_spelled_as_a_flag_is_one(names: set[str]) -> None:
    flags = {text.split()[0] for name, text in SPELLINGS.items() if name != "image_root"}
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= names


def texts_of(code: CodeType) -> Iterator[str]:
    """The strings of compiled code; level 2 leaves out the docstrings."""
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from texts_of(value)
        for text in value if isinstance(value, tuple | frozenset) else (value,):
            if isinstance(text, str):
                yield text


def test_each_flag_that_a_message_names_is_spelled(names: set[str]) -> None:
    named = {
        match[1]
        for path in PACKAGE.rglob("*.py")
        for text in texts_of(compile(path.read_text(), path, "exec", optimize=2))
        for match in PARAM.finditer(text)
    }
    assert len(named) > 80
    assert named & names <= SPELLINGS.keys()


def test_an_error_is_spelled_and_keeps_its_parameter() -> None:
    error = LimitError("`max_input_len` 70 exceeds 64", "Lower `dynamic_tree_max_topK` to 2.")
    spelled = error.spelled(SPELLINGS)
    assert (error.param, spelled.param) == ("max_input_len", "max_input_len")
    assert str(error).startswith("`max_input_len` 70 exceeds")
    assert spelled.what == "--max-input-len 70 exceeds 64"
    assert spelled.remedy == f"Lower {OTHERWISE['dynamic_tree_max_topK']} to 2."
    assert LimitError("too long", param="prompt").param == "prompt"
