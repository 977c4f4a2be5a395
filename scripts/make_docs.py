"""Writes docs/cli.md from `--help`, all of it, docs/api.md from docstrings, docs/config.schema.json and the
tables of docs/config.md from the tables of keys, and the rules in docs/tensorrt.md from theirs, so
that they cannot say anything else; `--check` fails where they do.

Knows click's command tree and the files; `api_page` knows docstrings, `config_page` keys. Knows nothing of what the
commands do.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import api_page
import click
import config_page
import rules_page

from edgespec.cli.help_pages import whole

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH = 100

HEAD = """\
# The command line

<!-- Written by scripts/make_docs.py from --help. Change the help, then run `make docs`. -->
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail with a diff where a page is stale",
    )
    options = parser.parse_args(arguments)

    from edgespec.cli.main import cli

    pages = {
        "cli.md": render(cli, "edgespec"),
        "api.md": api_page.render(),
        "config.md": config_page.render(),
        "config.schema.json": config_page.schema(),
        "tensorrt.md": rules_page.render(),
    }
    if options.check:
        return max(check(name, page) for name, page in pages.items())
    for name, page in pages.items():
        (DOCS / name).write_text(page, encoding="utf-8")
    return 0


def render(command: click.Command, name: str) -> str:
    """The whole page: one section per command, in the order of `--help`."""
    return HEAD + "".join(sections(command, name, None))


def sections(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    settings = {
        "terminal_width": WIDTH,
        "max_content_width": WIDTH,
        "help_option_names": ["-h", "--help"],
        "show_default": True,
    }
    context = click.Context(command, info_name=name, parent=parent, **settings)
    help_text = click.unstyle(whole(command).get_help(context)).rstrip()
    help_text = "\n".join(line.rstrip() for line in help_text.splitlines())
    yield f"\n## {context.command_path}\n\n```text\n{help_text}\n```\n"
    if isinstance(command, click.Group):
        for child_name in command.list_commands(context):
            child = command.get_command(context, child_name)
            if child is not None and not child.hidden:
                yield from sections(child, child_name, context)


def check(name: str, page: str) -> int:
    path = DOCS / name
    found = path.read_text(encoding="utf-8") if path.exists() else ""
    if found == page:
        return 0
    diff = difflib.unified_diff(
        found.splitlines(keepends=True),
        page.splitlines(keepends=True),
        f"docs/{name}",
        f"docs/{name} as it should be",
    )
    sys.stderr.writelines(diff)
    print(f"docs/{name} is stale. Run: make docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
