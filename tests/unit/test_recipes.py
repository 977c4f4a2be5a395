"""Every recipe is read as its command reads it, and there is one for each decoding type."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from edgespec.cli import eval as evaluation
from edgespec.cli import infer, run
from edgespec.cli.chat import command as chat
from edgespec.cli.config_file import BLOCK, divided, flag_name, is_of_files
from edgespec.compat.config_keys import FOREIGN
from edgespec.compat.speculative_config import class_of, config_classes
from edgespec.compat.speculative_config import read_config as read_block
from edgespec.pipeline.recipe import read, read_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
COMMANDS = {
    "infer": infer.command,
    "chat": chat.command,
    "run": run.command,
    "eval summarize": evaluation.summarize,
}


def commands_in(path: Path) -> Iterator[list[str]]:
    """The commands of a recipe's head."""
    for line in read(path).splitlines():
        words = line.removeprefix("#").strip()
        if words.startswith("edgespec "):
            yield shlex.split(words)[1:]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_is_read_without_a_note(path: Path) -> None:
    values = read_config(path)
    for command in COMMANDS.values():
        defaults, found = divided(values, command.get_params(click.Context(command)), path.name)
        assert (defaults, found.notes) == ({}, ())
        config, notes = read_block(found.block)
        assert config is not None
        assert notes == ()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_command_of_a_recipe_can_be_typed(path: Path) -> None:
    """It names the recipe, and its arguments are taken."""
    assert read(path).startswith("# yaml-language-server: $schema=../docs/config.schema.json\n# ")
    found = [*commands_in(path)]
    assert found
    for name, *arguments in found:
        assert f"recipes/{path.name}" in arguments
        given = [word.replace(f"recipes/{path.name}", str(path)) for word in arguments]
        with COMMANDS[name].make_context(name, given) as context:
            assert context.params


def test_every_decoding_type_has_a_recipe() -> None:
    named = {read_config(path)[BLOCK]["decoding_type"] for path in RECIPES}
    assert {class_of(name, "")[0] for name in named} >= {*config_classes().values()}


# ---- the pages that are made of the same tables


def test_pages_are_as_the_tables_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import config_page  # type: ignore[import-not-found]

    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == config_page.render()
    schema = (ROOT / "docs" / "config.schema.json").read_text(encoding="utf-8")
    assert schema == config_page.schema()


SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "config.schema.json").read_text("utf-8"))


def test_schema_has_every_flag_and_every_key_without_a_meaning() -> None:
    flags = {
        flag_name(param)
        for command in COMMANDS.values()
        for param in command.get_params(click.Context(command))
        if isinstance(param, click.Option) and is_of_files(param)
    }
    assert SCHEMA["properties"].keys() == {BLOCK, *flags, *FOREIGN}
    assert not SCHEMA["additionalProperties"]


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema, by the few words of JSON Schema that ours has."""
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "null": type(None),
    }
    if "oneOf" in schema:
        return sum(fits(value, one) for one in schema["oneOf"]) == 1
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    names = schema.get("type", [])
    number = isinstance(value, int | float) and not isinstance(value, bool)
    for name in [names] if isinstance(names, str) else names:
        if name in ("integer", "number"):
            if number and (name == "number" or isinstance(value, int)):
                low, high = schema.get("minimum", value), schema.get("maximum", value)
                return bool(low <= value <= high)
        elif isinstance(value, kinds[name]):
            break
    else:
        return not names
    if isinstance(value, dict):
        known = schema.get("properties", {})
        more = schema.get("additionalProperties", {})
        if any(key not in value for key in schema.get("required", ())):
            return False
        return all(
            fits(item, known[key]) if key in known else more is not False and fits(item, more)
            for key, item in value.items()
        )
    return not isinstance(value, list) or all(fits(i, schema.get("items", {})) for i in value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_recipe_fits_the_schema(path: Path) -> None:
    values = json.loads(json.dumps(read_config(path)))
    assert fits(values, SCHEMA)
    values[BLOCK]["max_draft_lens"] = 3
    assert not fits(values, SCHEMA)
    assert not fits({"speculative": {}}, SCHEMA)
