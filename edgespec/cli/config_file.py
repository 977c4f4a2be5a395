"""`--config FILE.yaml` and `key=value`: a file's keys become the defaults of a command's flags, and
its `speculative_config` goes to the engine.

Knows flags. Which keys of TensorRT-LLM's files mean nothing here stands in `compat.config_keys`, how
YAML is read in `pipeline.recipe`, what the block means in `compat.speculative_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from edgespec.cli.draft_flags import KEY_NAMES, TREE_NAMES
from edgespec.cli.flags import EdgeCommand, kebab, rest, until_separator
from edgespec.cli.paths import FILE
from edgespec.compat.config_keys import ALSO_CALLED, FOREIGN, Foreign
from edgespec.errors import RequestError, in_terms_of, spelled
from edgespec.pipeline.recipe import nearest, read_config, shown

if TYPE_CHECKING:
    from edgespec.compat.decoding import DecodingConfig

BLOCK = "speculative_config"
META = f"{__name__}.read"  # in a context's meta: what the file and the overrides say
OWN = (
    "config",
    "key_values",
    "help",
    "help_all",
    "drafter",
)  # parameters that a file does not give
SIZES = ("spec_draft_top_k", "spec_draft_step", "spec_verify_size")


class Read(NamedTuple):
    """What a file and the overrides say beside flags: the block for the engine, where it stands,
    and notes on keys that mean nothing here."""

    block: Mapping[str, object] | None
    where: str
    notes: tuple[str, ...]


class ConfigCommand(EdgeCommand):
    """A command whose flags have the values of --config FILE as defaults. The command line and
    environment variables come first."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Reads the file, then parses the arguments."""
        given = [self.canonical(arg) for arg in until_separator(args)] + rest(args)
        try:
            options, _, _ = self.make_parser(ctx).parse_args(list(given))
        except click.UsageError:
            return super().parse_args(ctx, args)  # says so with a hint
        # click has a marker of its own for what was not given
        path, given_keys = options.get("config"), options.get("key_values")
        path = path if isinstance(path, str) else None
        overrides = given_keys if isinstance(given_keys, tuple) else ()
        if not ctx.resilient_parsing and (path or overrides):
            source = path or "command line"
            values = read_config(Path(path) if path else None, overrides)
            ctx.default_map, ctx.meta[META] = divided(values, self.get_params(ctx), source)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs it. Errors name what the file says by its keys, and keys that flags gave by
        flags."""
        read, keys = ctx.meta.get(META), dict[str, str]()
        if read is not None and read.block is not None:
            from edgespec.compat.speculative_config import keys_as_written

            keys = keys_as_written()
        for param in self.get_params(ctx):
            source, key = ctx.get_parameter_source(param.name or ""), flag_name(param)
            if source is ParameterSource.DEFAULT_MAP:
                keys[key] = key
            elif source is ParameterSource.COMMANDLINE:
                keys.pop(key, None)
        try:
            with in_terms_of(keys):
                return super().invoke(ctx)
        except click.UsageError as error:
            message = spelled(error.format_message(), keys)
            raise click.UsageError(message, error.ctx) from error


HELP = (
    "YAML with speculative_config, as TensorRT-LLM has it, and with flags of this command;"
    " key=value overrides a key."
)


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--config and key=value, for a command of the class ConfigCommand, which alone reads them."""
    option = click.option("--config", type=FILE, help=HELP, expose_value=False)
    argument = click.argument(
        "key_values", metavar="[KEY=VALUE]...", nargs=-1, required=False, expose_value=False
    )
    return argument(option(command))


def divided(
    values: Mapping[str, Any], params: Iterable[click.Parameter], source: str
) -> tuple[dict[str, Any], Read]:
    """The values of flags by the names of their parameters, and what else a file says.

    Raises RequestError for a key that is neither a flag of the command nor the block, and for one
    of another program that would be missed.
    """
    flags = {flag_name(param): param for param in params if is_of_files(param)}
    defaults: dict[str, Any] = {}
    notes = [] if values else [f"{source} has no keys, so it changes nothing"]
    block = values.get(BLOCK)
    if block is not None and not isinstance(block, dict):
        raise RequestError(f"{source}: {BLOCK} is {shown(block)}", "Write keys and values.")
    for key, value in values.items():
        name = kebab(f"--{key}").removeprefix("--").replace("-", "_")
        name = str(key) if str(key) in FOREIGN else ALSO_CALLED.get(name, name)
        if name == BLOCK:
            continue
        if name in flags:
            param = flags[name]
            assert param.name is not None
            if param.name in defaults:
                raise RequestError(f"{source}: {name} is given twice", f"Remove {key}.")
            if value is not None:
                defaults[param.name] = of_flag(value, param, f"{source}: {key}")
        elif name in FOREIGN:
            notes += foreign(name, value, source)
        else:
            remedy = f"{nearest(name, [*flags, BLOCK])}Known keys: {', '.join([BLOCK, *flags])}."
            if is_of_block(name):
                remedy = f"Write it below {BLOCK}:, indented with the block's other keys."
            raise RequestError(f"{source}: {shown(key)} is not a known key", remedy)
    return defaults, Read(block, f"{source}: {BLOCK}", tuple(notes))


def is_of_block(name: str) -> bool:
    """Whether a key is one of a speculative_config."""
    from edgespec.compat.speculative_config import keys_as_written

    return name in keys_as_written()


def is_of_files(param: click.Parameter) -> bool:
    """Whether a file may give a flag: all that --help lists, but those that say how to draft, for
    which there is the block."""
    hidden = isinstance(param, click.Option) and param.hidden
    not_of_files = {*OWN, *SIZES, *TREE_NAMES, *KEY_NAMES}
    return not hidden and not {param.name, flag_name(param)} & not_of_files


def flag_name(param: click.Parameter) -> str:
    """A flag as a file has it: --max-kv-cache-capacity is max_kv_cache_capacity."""
    return max(param.opts, key=len).removeprefix("--").replace("-", "_")


def foreign(name: str, value: object, source: str) -> Iterator[str]:
    """A note on a key of another program. RequestError where its value would be missed."""
    row = FOREIGN[name]
    if row.neutral is None:
        yield f"{source}: {name} means nothing here: {row.why}"
    elif not any(value == known and type(value) is type(known) for known in row.neutral):
        raise RequestError(f"{source}: {name} is not supported: {row.why}", f"Remove {name}.")


def of_flag(value: object, param: click.Parameter, where: str) -> Any:
    """A value as click takes it. Raises RequestError for one of another kind."""
    if isinstance(param, click.Option) and param.is_flag:
        if not isinstance(value, bool):
            raise RequestError(f"{where} is {shown(value)}", "Write true or false.")
        return value
    if param.multiple or param.nargs != 1:
        items = value if isinstance(value, list) else [value]
        return tuple(one_value(item, param, where) for item in items)
    return one_value(value, param, where)


def one_value(value: object, param: click.Parameter, where: str) -> Any:
    """One value of a flag. Raises RequestError for a list, a mapping, half a character, or no
    number where one is wanted."""
    if isinstance(value, dict | list | bool) or value is None:
        raise RequestError(f"{where} is {shown(value)}", "Write one value.")
    if isinstance(param.type, click.types.IntParamType) and type(value) is not int:
        raise RequestError(f"{where} is {shown(value)}", "Write an integer.")
    if isinstance(param.type, click.types.FloatParamType):
        from edgespec.prompts.checks import is_finite

        if not isinstance(value, int | float) or not is_finite(value):
            raise RequestError(f"{where} is {shown(value)}", "Write a number.")
        return value
    if isinstance(param.type, click.types.IntParamType):
        return value
    text = str(value)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise RequestError(f"{where} has half a surrogate pair", "Write the character itself.")
    return text


# ---- speculative_config, for the commands


def configured(ctx: click.Context) -> tuple[DecodingConfig | None, tuple[str, ...]]:
    """The speculative_config of a command line, None where there is none, and notes for its user
    that the engine does not have. Raises OptionError that names the file and the key."""
    read = ctx.meta.get(META)
    if read is None:
        return None, ()
    if read.block is None:
        return None, read.notes
    from edgespec.compat.speculative_config import read_config as read_block

    config, notes = read_block(read.block, read.where)
    assert config is not None
    of_engine = tuple(config.notes())
    return config, (*read.notes, *(note for note in notes if note not in of_engine))


# ---- a JSON schema for editors


def schema(commands: Iterable[click.Command]) -> dict[str, Any]:
    """The JSON schema of a file for any of these commands."""
    from edgespec.compat.speculative_config import schema as of_block

    flags: dict[str, dict[str, Any]] = {}
    for command in commands:
        for param in command.get_params(click.Context(command)):
            if isinstance(param, click.Option) and is_of_files(param):
                flags.setdefault(flag_name(param), schema_of_flag(param))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "edgespec --config",
        "type": "object",
        "properties": {
            BLOCK: of_block(),
            **flags,
            **{name: schema_of_foreign(row) for name, row in FOREIGN.items() if name not in flags},
        },
        "additionalProperties": False,
    }


def schema_of_flag(param: click.Option) -> dict[str, Any]:
    """The schema of a flag's value."""
    kinds = {click.types.IntParamType: "integer", click.types.FloatParamType: "number"}
    one: dict[str, Any] = {
        "type": next((k for t, k in kinds.items() if isinstance(param.type, t)), "string")
    }
    if (kinds_of_own := getattr(param.type, "schema", None)) is not None:
        one["type"] = [*kinds_of_own]
    if isinstance(param.type, click.Choice):
        one["enum"] = [*param.type.choices]
    if param.is_flag:
        one = {"type": "boolean"}
    schema = {"type": "array", "items": one} if param.multiple else one
    return {**schema, "description": " ".join((param.help or "").split())}


def schema_of_foreign(row: Foreign) -> dict[str, Any]:
    """The schema of a key of TensorRT-LLM that means nothing here."""
    schema: dict[str, Any] = {
        "description": f"It means nothing here: {row.why}.",
        "deprecated": True,
    }
    return schema if row.neutral is None else schema | {"enum": [*row.neutral]}
