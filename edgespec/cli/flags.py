"""Flags in kebab-case, snake_case and camelCase are the same flag, and a mistyped one is answered.

Knows spelling and click. Of commands it knows only those that it is asked about.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from edgespec.compat.edgellm import PROGRAMS, Missing

HUMPS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
RUN, HELP = "run", ("--help", "-h")
GIVEN = f"{__name__}.given"  # in a context's meta: the flags on the command line


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

    `aliases` maps the names of TensorRT Edge-LLM to ours, `missing` its flags that this version
    does not have to their answers.
    """

    def __init__(
        self,
        *args: Any,
        aliases: Mapping[str, str] | None = None,
        missing: Mapping[str, Missing] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.aliases = dict(aliases or {})
        self.params += [missing_option(flag, row) for flag, row in (missing or {}).items()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses arguments whose flags up to `--` are in any spelling."""
        flags = [self.canonical(arg) for arg in until_separator(args)]
        ctx.meta[GIVEN] = frozenset(flag.partition("=")[0] for flag in flags)
        try:
            return super().parse_args(ctx, flags + rest(args))
        except click.NoSuchOption as error:
            refuse_unknown_flag(self, ctx, error.option_name)

    def canonical(self, arg: str) -> str:
        """Returns an argument with the canonical name of its flag."""
        flag = kebab(arg)
        name, equals, value = flag.partition("=")
        return self.aliases.get(name, name) + equals + value


class EdgeGroup(click.Group):
    """A group of commands that answers a mistyped command or flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the group's own flags and the command's name."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            refuse_unknown_flag(self, ctx, error.option_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds the command; click.UsageError with the nearest name where there is none."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            refuse_unknown_command(self, ctx, args[0])
        return super().resolve_command(ctx, args)


class DefaultGroup(EdgeGroup):
    """A group of commands; without the name of one its `run` is called."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts `run` before the arguments that name no command."""
        if args and args[0] not in (*self.commands, *HELP) and not self.is_mistyped(args[0]):
            args = [RUN, *args]
        return super().parse_args(ctx, args)

    def is_mistyped(self, word: str) -> bool:
        """Whether a word is nearly the name of a command, and of no directory."""
        return not Path(word).exists() and bool(difflib.get_close_matches(word, self.commands))


def until_separator(args: list[str]) -> list[str]:
    """Returns the arguments before `--`."""
    return args[: args.index("--")] if "--" in args else args


def rest(args: list[str]) -> list[str]:
    """Returns the arguments from `--` on."""
    return args[args.index("--") :] if "--" in args else []


def refuse(wrong: Mapping[str, object]) -> None:
    """Raises click.UsageError for the first that is so; its message has parameters in backticks."""
    for message, is_so in wrong.items():
        if is_so:
            raise click.UsageError(message, click.get_current_context())


# ---- flags and commands that are not there


def missing_option(flag: str, row: Missing) -> click.Option:
    """A hidden option that is refused with its row's answer, unless it asks for nothing."""

    def refuse(ctx: click.Context, param: click.Parameter, value: str | bool | None) -> None:
        given: frozenset[str] = ctx.meta.get(GIVEN, frozenset())
        if value in (None, False) or row.asks_for_nothing(value or "", given):
            return
        shown = flag if row.switch else f"{flag} {value}"
        raise click.UsageError(f"{shown}: {row.instead}.", ctx)

    return click.Option(
        [flag], hidden=True, expose_value=False, is_flag=row.switch, callback=refuse
    )


def refuse_unknown_flag(command: click.Command, ctx: click.Context, flag: str) -> NoReturn:
    """Raises click.NoSuchOption, with the nearest flags or the commands that have it."""
    nearest = difflib.get_close_matches(flag, flags_of(command, ctx))
    if nearest:
        hint = f" Did you mean {either(nearest)}?"
    elif homes := homes_of(flag, ctx.find_root()):
        hint = f" It is a flag of edgespec {either(homes)}."
    else:
        hint = ""
    raise click.NoSuchOption(flag, message=f"No such option: {flag}.{hint}", ctx=ctx)


def refuse_unknown_command(group: click.Group, ctx: click.Context, name: str) -> NoReturn:
    """Raises click.UsageError with the nearest commands, or what to do instead."""
    names = group.list_commands(ctx)
    nearest = difflib.get_close_matches(name.lower().replace("_", "-"), names)
    if name in PROGRAMS:
        hint = PROGRAMS[name]
    elif nearest:
        hint = f"Did you mean {either(nearest)}?"
    else:
        hint = f"Commands: {', '.join(names)}."
    raise click.UsageError(f"No such command: {name}. {hint}", ctx)


def flags_of(command: click.Command, ctx: click.Context) -> list[str]:
    """The flags that the command's --help lists."""
    options = [p for p in command.get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
    return [flag for option in options for flag in (*option.opts, *option.secondary_opts)]


def homes_of(flag: str, root: click.Context) -> list[str]:
    """The commands whose --help lists the flag."""
    homes, wanted = [], kebab(flag)
    for path, command in commands_of(root.command, root):
        if wanted in flags_of(command, click.Context(command, parent=root)):
            homes.append(path)
    return homes


def commands_of(
    group: click.Command, ctx: click.Context, before: str = ""
) -> Iterable[tuple[str, click.Command]]:
    """The commands of a group and of those below it, with their names as they are typed."""
    if not isinstance(group, click.Group):
        return
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if isinstance(command, click.Group):
            yield from commands_of(command, ctx, f"{before}{name} ")
        elif command is not None:
            yield f"{before}{name}", command


def either(names: list[str]) -> str:
    """`a`, `a or b`, or `a, b or c`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
