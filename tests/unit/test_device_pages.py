"""The pages for devices: their commands parse as they stand, and their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from edgespec.cli.main import cli

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("thor.md", "rtx.md", "tensorrt.md")
LINK = re.compile(r"\]\(([^)#:]*)(?:#([^)]*))?\)")


def commands(page: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"^    (edgespec .*)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "line"), [(page, line) for page in PAGES for line in commands(page)]
)
def test_a_command_parses_as_it_stands(page: str, line: str) -> None:
    _, *words = shlex.split(line, comments=True)
    context = click.Context(cli, **cli.context_settings)
    command: click.Command = cli
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None
        command = found
    with command.make_context(name, words, parent=context) as made:
        assert not made.args


def anchors(text: str) -> set[str]:
    """Headings as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_page_and_a_heading(page: str) -> None:
    links = LINK.findall((DOCS / page).read_text(encoding="utf-8"))
    assert links
    for target, anchor in links:
        path = DOCS / (target or page)
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), (target, anchor)
