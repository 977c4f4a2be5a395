"""Flags in kebab-case, snake_case and camelCase are the same flag.

Knows spelling and click. Knows no command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import click

HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
INTERRUPTED = 130


def kebab(flag: str) -> str:
    """Returns a flag in kebab-case: --maxKVCacheCapacity -> --max-kv-cache-capacity.

    A value after `=` is unchanged.
    """
    if not flag.startswith("--") or len(flag) < 3:
        return flag
    name, equals, value = flag[2:].partition("=")
    return f"--{HUMPS.sub('-', name).replace('_', '-').lower()}{equals}{value}"


class EdgeCommand(click.Command):
    """A command that accepts every spelling of its flags.

    `aliases` maps the names of TensorRT Edge-LLM to ours.
    """

    def __init__(self, *args: Any, aliases: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.aliases = dict(aliases or {})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments whose flags up to `--` are in any spelling."""
        flags = [self.canonical(arg) for arg in until_separator(args)]
        return super().parse_args(ctx, flags + rest(args))

    def canonical(self, arg: str) -> str:
        """Returns an argument with the canonical name of its flag."""
        flag = kebab(arg)
        name, equals, value = flag.partition("=")
        return self.aliases.get(name, name) + equals + value


def until_separator(args: list[str]) -> list[str]:
    """Returns the arguments before `--`."""
    return args[: args.index("--")] if "--" in args else args


def rest(args: list[str]) -> list[str]:
    """Returns the arguments from `--` on."""
    return args[args.index("--") :] if "--" in args else []
