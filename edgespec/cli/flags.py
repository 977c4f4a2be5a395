"""One flag, whatever its spelling: kebab-case, snake_case and camelCase are the same.

Knows spelling and click.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import click

HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
INTERRUPTED = 130


def kebab(flag: str) -> str:
    """--maxKVCacheCapacity, --max_kv_cache_capacity -> --max-kv-cache-capacity; a value after `=`
    stays as it is."""
    if not flag.startswith("--") or len(flag) < 3:
        return flag
    name, equals, value = flag[2:].partition("=")
    return f"--{HUMPS.sub('-', name).replace('_', '-').lower()}{equals}{value}"


class EdgeCommand(click.Command):
    """A command that takes every spelling of its flags; `aliases` maps the mirrored tool's other
    names to ours."""

    def __init__(self, *args: Any, aliases: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aliases = dict(aliases or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(
            ctx, [self.canonical(arg) for arg in until_separator(args)] + rest(args)
        )

    def canonical(self, arg: str) -> str:
        flag = kebab(arg)
        name, equals, value = flag.partition("=")
        return self.aliases.get(name, name) + equals + value


def until_separator(args: list[str]) -> list[str]:
    return args[: args.index("--")] if "--" in args else args


def rest(args: list[str]) -> list[str]:
    return args[args.index("--") :] if "--" in args else []
